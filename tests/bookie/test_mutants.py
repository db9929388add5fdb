"""The ways to break the bookie fit the code that they break."""

from __future__ import annotations

import pytest

from kvstore.bookie.adds import Adds
from tests.bookie.breakages.registry import broken
from tests.bookie.mutants import MUTANTS


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_each_breakage_finds_what_it_breaks(name: str) -> None:
    with broken(name):
        pass


def test_breakage_for_the_whole_run_stays() -> None:
    """tests/bookie/mutants.py breaks something before these tests; later tests must notice it."""
    sound = Adds._store
    with broken("acks before the sync"):
        outer = Adds._store
        with broken("does not record the fence"), broken("acks before the sync"):
            assert Adds._store is not outer
        assert Adds._store is outer is not sound
    assert Adds._store is sound
