"""The simulated cluster notices each of the eleven breakages, and reports nothing without a breakage."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.sim.breakages import catalogue, mutants_answers, mutants_transactions
from tests.sim.breakages.catalogue import MUTANTS, broken, noticed
from tests.sim.breakages.mutants import ELEVEN

SEEDS = range(20)
ANSWERS = ("columns follow the engine alone", "lost writes are told as refused", "RETURN_OLD answers nothing")
"""Breakages of answers that `make test` plays: of a fast path, a refusal and a result."""
OF_MACHINES = (
    "two processes of a machine get copies of an entry",
    "two processes of a machine get replicas of a partition",
    "the balancer moves two replicas to a machine",
)
pytestmark = [pytest.mark.sim]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("kvstore")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(before)


@pytest.mark.parametrize("name", [*ELEVEN, *ANSWERS, *OF_MACHINES])
def test_breakage_is_noticed_and_nothing_else(name: str) -> None:
    found = noticed(name, SEEDS)
    assert found is not None, f"none of {len(SEEDS)} seeds noticed"
    MUTANTS[name].play(found.seed)


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_each_breakage_finds_what_it_breaks(name: str) -> None:
    assert mutants_answers.BUSY  # the imports have filled the catalogue
    assert mutants_transactions.BUSY
    with broken(name):
        pass


def test_breakage_that_does_not_fit_the_code_is_not_counted_as_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def play_with_a_wrong_signature(_: int) -> None:
        raise TypeError("short_sighted() takes 3 positional arguments but 4 were given")

    class Misfit:
        found_by = 0
        patch = staticmethod(lambda _: None)
        play = staticmethod(play_with_a_wrong_signature)

    monkeypatch.setitem(catalogue.MUTANTS, "misfit", Misfit())  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="does not fit the code"):
        noticed("misfit", SEEDS)
