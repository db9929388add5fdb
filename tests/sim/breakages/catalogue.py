"""Deliberate breakages of the store, and how to find out if a simulated cluster notices them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.sim.breakages import mutants_wal
from tests.sim.breakages.fit import notice_of
from tests.sim.run import run
from tests.sim.stories.scenarios import Story, play
from tests.sim.stories.scenarios import knobs as stage_knobs
from tests.sim.strikes.knobs import hinted
from tests.sim.transacting import swarm
from tests.sim.transacting.swarm import Plan

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A breakage, and the story or the knobs under which it shows."""

    patch: Patch
    faults: tuple[str, ...]
    story: Story | None
    hints: dict[str, Any] = field(default_factory=dict)
    """Knobs by name; `log.x` and `partition.x` for the log and the partition, `load.x` for the load."""
    found_by: int = 0
    """The seed that last noticed the breakage; it is played first."""
    transactions: Plan | None = None
    """The plan of a run of transactions (tests/sim/transacting/swarm.py). There is no story then."""

    def play(self, seed: int) -> None:
        """Play one run that should notice the breakage."""
        if self.transactions is not None:
            swarm.run(seed, hinted(seed, self.faults, self.hints), self.transactions)
        elif self.story is None:
            run(seed, hinted(seed, self.faults, self.hints))
        else:
            play(self.story, stage_knobs(**self.hints), seed)


@dataclass(frozen=True, slots=True)
class Notice:
    """How a breakage was noticed first."""

    seed: int
    error: str

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.error}"


MUTANTS: dict[str, Mutant] = {}


def mutant(
    name: str,
    *faults: str,
    story: Story | None = None,
    found_by: int = 0,
    transactions: Plan | None = None,
    **hints: Any,
) -> Callable[[Patch], Patch]:
    """Add a breakage to the catalogue. Dots in hints are written as two underscores."""

    def register(patch: Patch) -> Patch:
        named = {key.replace("__", "."): value for key, value in hints.items()}
        MUTANTS[name] = Mutant(patch, faults, story, named, found_by, transactions)
        return patch

    return register


def from_wal(name: str, *faults: str, story: Story | None = None, found_by: int = 0, **hints: Any) -> None:
    """Take over a breakage of the ledger client."""
    mutant(name, *faults, story=story, found_by=found_by, **hints)(mutants_wal.MUTANTS[name])


@contextmanager
def broken(name: str) -> Iterator[None]:
    """Apply the breakage to the code in the block."""
    with pytest.MonkeyPatch.context() as patch:
        MUTANTS[name].patch(patch)
        yield


def noticed(name: str, seeds: range) -> Notice | None:
    """Return the first seed that fails with the breakage, and its failure, or None. Raises AssertionError if the
    breakage does not fit the code any more, because every test would notice that."""
    found_by = MUTANTS[name].found_by
    for seed in (found_by, *(seed for seed in seeds if seed != found_by)):
        error = _error_of(name, seed)
        if error is None:
            continue
        return Notice(seed, notice_of(name, error))
    return None


def _error_of(name: str, seed: int) -> Exception | None:
    with broken(name):
        try:
            MUTANTS[name].play(seed)
        except Exception as error:  # noqa: BLE001 - however it is noticed
            return error
    return None
