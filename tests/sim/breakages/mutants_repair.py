"""Ways to break the repair of marked ledgers. Its cases must notice each; `make mutants` tries them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any

import pytest

from kvstore.autorecovery import repair_machine, repairer
from kvstore.autorecovery.repair_machine import RepairMachine
from kvstore.meta import marks
from kvstore.meta.recovery_settings import RecoverySettings
from kvstore.meta.underreplication import MarkLock, Underreplication
from kvstore.types import NO_ENTRY
from kvstore.wal.ledger_list import LedgerList
from kvstore.wal.repair import bookies_of
from tests.sim.breakages.fit import notice_of
from tests.sim.recovering import test_open_ledgers, test_worker_cases

CASES = (test_worker_cases, test_open_ledgers)
Patch = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, Patch] = {}


def mutant(name: str) -> Callable[[Patch], Patch]:
    def register(patch: Patch) -> Patch:
        MUTANTS[name] = patch
        return patch

    return register


@contextmanager
def broken(name: str) -> Iterator[None]:
    """Apply the breakage to the code in the block."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        MUTANTS[name](monkeypatch)
        yield


@mutant("a bookie that is back loses its place")
def _marked_is_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RepairMachine, "_lost", lambda self, found: self._marked & frozenset(bookies_of(found.metadata)))


@mutant("a bookie that is away and not marked loses its place")
def _away_is_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        RepairMachine, "_lost", lambda _, found: frozenset(bookies_of(found.metadata)) - frozenset(found.standing.there)
    )


@mutant("a newcomer is named for entries that it does not have")
def _named_without(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(repair_machine, "_kept_where", lambda _metadata, wanted, _unreadable: wanted)


@mutant("a newcomer is named before it has its copies")
def _named_early(patch: pytest.MonkeyPatch) -> None:
    original = repairer._Attempt._fill

    async def fill(self: Any, fill: Any) -> Any:
        if fill.wanted != fill.metadata:
            await self._ports.ledgers.update(self._ledger, lambda _: fill.wanted)
        return await original(self, fill)

    patch.setattr(repairer._Attempt, "_fill", fill)


@mutant("a bookie that changes its place in an ensemble is taken to have what that place has")
def _places_are_alike(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        repair_machine, "newcomers_of", lambda metadata, wanted: {*bookies_of(wanted)}.difference(bookies_of(metadata))
    )


@mutant("what a foreign bookie lists is believed")
def _lists_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(repair_machine, "is_incarnation", lambda _: True)


@mutant("a ledger is recovered although its log has a leader")
def _usurped(patch: pytest.MonkeyPatch) -> None:
    async def is_led(_self: Any, _partition: Any) -> bool:
        return False

    patch.setattr(repairer.LedgerRepairer, "is_led", is_led)


@mutant("a ledger is recovered although its log's leader has it in its list")
def _taken_for_unlisted(patch: pytest.MonkeyPatch) -> None:
    async def is_listed(_self: Any, _partition: Any) -> bool:
        return False

    patch.setattr(repairer._Attempt, "_is_listed", is_listed)


@mutant("a ledger is recovered although its writer writes")
def _interrupted(patch: pytest.MonkeyPatch) -> None:
    original = repairer._Attempt._ask

    async def ask(self: Any, metadata: Any, there: Any) -> Any:
        return replace(await original(self, metadata, there), lac=NO_ENTRY)

    patch.setattr(repairer._Attempt, "_ask", ask)


@mutant("what an empty disk does not have ends a ledger")
def _empty_disks(patch: pytest.MonkeyPatch) -> None:
    async def doubtful(_self: Any, _bookies: Any) -> list[Any]:
        return []

    patch.setattr(repairer._Attempt, "_doubtful", doubtful)


@mutant("a recovery is begun that cannot be decided")
def _in_vain(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(repair_machine, "is_covered", lambda _definite, _quorum: True)


@mutant("what was recovered is shown under the former leader's lease")
def _shown_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LedgerList, "lease_wait_s", lambda _: 0.0)


@mutant("a mark that has grown is taken away")
def _grown_is_gone(patch: pytest.MonkeyPatch) -> None:
    original = Underreplication._remove_mark

    async def remove(self: Any, path: str, created: int, _version: int) -> None:
        await original(self, path, created, -1)

    patch.setattr(Underreplication, "_remove_mark", remove)


@mutant("who has lost the lock changes the metadata")
def _lock_is_forever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MarkLock, "is_held", True)


@mutant("a lock keeps nobody out")
def _no_lock(patch: pytest.MonkeyPatch) -> None:
    async def lock(self: Any, ledger: Any, _worker: str) -> MarkLock | None:
        mark: marks.LedgerMark | None = await self.get(ledger)
        return None if mark is None else MarkLock(self._store, mark, self._store.session)

    patch.setattr(Underreplication, "lock", lock)


@mutant("ledgers are repaired while that is switched off")
def _always_on(patch: pytest.MonkeyPatch) -> None:
    async def is_enabled(_self: Any) -> bool:
        return True

    patch.setattr(RecoverySettings, "is_enabled", is_enabled)


FIRST = {
    "a newcomer is named for entries that it does not have": (
        "test_unreadable_fragment_keeps_mark_and_others_are_copied_once"
    ),
    "a ledger is recovered although its log has a leader": (
        "test_partition_ledger_belongs_to_its_leader_while_there_is_one"
    ),
    "a ledger is recovered although its writer writes": "test_ledger_in_use_is_never_fenced",
    "what an empty disk does not have ends a ledger": (
        "test_idle_writer_loses_nothing_when_ensemble_returns_with_empty_disks"
    ),
    "a recovery is begun that cannot be decided": "test_ledger_with_unknown_end_is_left_unchanged",
    "what was recovered is shown under the former leader's lease": (
        "test_recovered_entries_are_hidden_until_lease_of_former_leader_ends"
    ),
    "ledgers are repaired while that is switched off": "test_switching_repair_off_stops_copying",
}
"""The case that last noticed a breakage for which much is played otherwise. It is played first."""


def caught_by(name: str) -> str | None:
    """Return the first case that fails with the breakage, and its failure, or None. Raises AssertionError if the
    breakage does not fit the code."""
    with broken(name):
        for each, case in sorted(_cases(), key=lambda case: case[0] != FIRST.get(name)):
            try:
                case()
            except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - however it is noticed
                return f"{each}: {notice_of(name, error)}"
    return None


def _cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the cases without arguments."""
    for module in CASES:
        for name, case in sorted(vars(module).items()):
            if name.startswith("test_") and not signature(case).parameters:
                yield name, case
