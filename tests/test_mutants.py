"""`make mutants` finds every mutant, and skips no name."""

from __future__ import annotations

import pytest

from tests import mutants
from tests.sim.breakages import catalogue, mutants_repair, mutants_wal

APPLIED_BY = {
    "whole clusters": catalogue.broken,
    "ledgers and logs": mutants_wal.broken,
    "repair of ledgers": mutants_repair.broken,
}


def test_every_layer_has_breakages() -> None:
    found = {layer.title: names for layer, names in mutants.chosen([])}
    assert found.keys() == {"whole clusters", "ledgers and logs", "repair of ledgers", "bookies", "leaders and models"}
    assert all(len(names) > 10 for names in found.values())
    assert len({name for names in found.values() for name in names}) > 100
    by_pytest = found["leaders and models"]
    assert [suite for suite in mutants.BY_PYTEST if not any(name.startswith(suite) for name in by_pytest)] == []


def test_unknown_breakage_name_is_an_error() -> None:
    with pytest.raises(LookupError, match="no breakage has 'acks befor the sync'"):
        mutants.chosen(["acks befor the sync", "ack before sync"])
    assert mutants.main(["acks befor the sync"]) == 2


@pytest.mark.parametrize(
    ("title", "name"),
    [(layer.title, name) for layer in mutants.LAYERS if layer.title in APPLIED_BY for name in layer.names()],
)
def test_breakage_replaces_something_that_exists(title: str, name: str) -> None:
    with APPLIED_BY[title](name):
        pass
