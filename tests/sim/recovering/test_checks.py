"""The auditor's periodic checks of entries and of zones (docs/protocol.md, A7, A8)."""

from __future__ import annotations

import pytest

from kvstore.autorecovery.config import AutorecoveryConfig
from kvstore.errors import BookieError
from kvstore.meta import paths
from kvstore.meta.lost import with_lost
from kvstore.meta.recovery_settings import CheckKind
from kvstore.proto.availability import HeldEntries
from kvstore.types import BookieId, EntryId, LedgerId
from tests.sim.ledgers_and_logs.bench import B1, B2, B3, B4
from tests.sim.recovering.audits import AuditBench, later, run

pytestmark = pytest.mark.sim

CHECKING = AutorecoveryConfig(check_interval_s=1_000, placement_interval_s=0)
PLACING = AutorecoveryConfig(check_interval_s=0, placement_interval_s=1_000)


def test_next_check_marks_ledger_with_copy_missing_in_its_middle() -> None:
    async def case(bench: AuditBench) -> None:
        await bench.ledger(7, B1, B2, B3, entries=50)
        await bench.ledger(8, B1, B2, B3, entries=50)
        candidate = bench.candidate("n1", CHECKING)
        await later(60)
        assert await bench.marked() == {}
        assert await bench.settings.checked_ms(CheckKind.ENTRIES) is not None
        del bench.bookies.at[B2].entries[LedgerId(8), EntryId(20)]
        await later(800)
        assert await bench.marked() == {}, "a check runs when it is due"
        await later(300)
        assert await bench.marked() == {8: [B2]}
        assert candidate.numbers["marked_entries_total"] == 1

    run(case)


# docs/protocol.md P34
def test_check_runs_once_per_interval_when_another_user_closed_its_time() -> None:
    async def case(bench: AuditBench) -> None:
        await bench.ledger(7, B1, B2, B3, entries=50)
        await bench.settings.set_checked(CheckKind.ENTRIES, 1)
        candidate = bench.candidate("n1", CHECKING)
        candidate.store.closed = frozenset({paths.join(paths.UNDERREPLICATION, CheckKind.ENTRIES)})
        await later(900)
        assert candidate.numbers["checked_ledgers_total"] == 1
        await later(1_000)
        assert candidate.numbers["checked_ledgers_total"] == 2

    run(case)


# docs/protocol.md A14
def test_check_ignores_entries_marked_as_lost() -> None:
    async def case(bench: AuditBench) -> None:
        metadata = await bench.ledger(7, B1, B2, B3, entries=50)
        closed, version = await bench.ledgers.read(metadata.ledger)
        await bench.ledgers.write(with_lost(closed, [EntryId(20)]), version)
        for bookie in (B1, B2, B3):
            del bench.bookies.at[bookie].entries[LedgerId(7), EntryId(20)]
        candidate = bench.candidate("n1", CHECKING)
        await later(60)
        assert candidate.numbers["checked_ledgers_total"] == 1
        assert await bench.marked() == {}

    run(case)


def test_check_ignores_entries_that_writer_may_have_in_flight() -> None:
    async def case(bench: AuditBench) -> None:
        metadata = await bench.ledger(7, B1, B2, B3)
        bench.bookies.at[B1].entries[metadata.ledger, EntryId(0)] = b""
        bench.candidate("n1", CHECKING)
        await later(60)
        assert await bench.marked() == {}
        changed = metadata.with_ensemble(EntryId(1), (B1, B2, B4))
        await bench.ledgers.write(changed, 0)
        await later(1_100)
        assert await bench.marked() == {7: [B2, B3]}, "the remaining entries are marked"

    run(case)


def test_check_does_not_count_unreachable_bookie_as_loss() -> None:
    async def case(bench: AuditBench) -> None:
        await bench.ledger(7, B1, B2, B3, entries=50)
        await bench.stop(B2)
        bench.bookies.at[B1].entries.clear()
        ask = bench.bookies.entries

        async def entries(bookie: BookieId, ledger: LedgerId) -> HeldEntries:
            if bookie == B3:
                raise BookieError(f"{bookie} does not answer")
            return await ask(bookie, ledger)

        bench.bookies.entries = entries  # type: ignore[method-assign]
        candidate = bench.candidate("n1", AutorecoveryConfig(check_interval_s=100, placement_interval_s=0))
        await later(50)
        assert await bench.marked() == {7: [B1]}
        assert candidate.numbers["check_unanswered_total"] == 1

    run(case)


def test_check_keeps_to_its_rate() -> None:
    async def case(bench: AuditBench) -> None:
        for number in range(100):
            await bench.ledger(number, B1, B2, B3, entries=1)
        slow = AutorecoveryConfig(check_interval_s=10_000, placement_interval_s=0, check_ledgers_per_s=2)
        candidate = bench.candidate("n1", slow)
        await later(35)
        assert 30 <= candidate.numbers["checked_ledgers_total"] <= 42, "checks begin after 15 s"
        await later(50)
        assert candidate.numbers["checked_ledgers_total"] == 100

    run(case)


def test_copies_in_one_zone_are_marked_when_another_zone_can_take_one() -> None:
    async def case(bench: AuditBench) -> None:
        for bookie, zone in ((B1, "a"), (B2, "b"), (B3, "b"), (B4, "c")):
            bench.bookies.at[bookie].zone = zone
        await bench.ledger(7, B1, B2, B3, entries=5)
        await bench.ledger(8, B1, B2, B4, entries=5)
        await bench.ledger(9, B1, B2, B3)
        candidate = bench.candidate("n1", PLACING)
        await later(60)
        marked = await bench.marked()
        assert list(marked) == [7], "an open ledger belongs to its writer"
        assert marked[7] in ([B2], [B3])
        assert candidate.numbers["marked_placement_total"] == 1
        assert await bench.settings.checked_ms(CheckKind.PLACEMENT) is not None

    run(case)


def test_nothing_is_checked_while_checks_are_off() -> None:
    async def case(bench: AuditBench) -> None:
        await bench.ledger(7, B1, B2, B3, entries=5)
        bench.bookies.at[B2].entries.clear()
        await bench.settings.disable()
        bench.candidate("n1", CHECKING)
        await later(100)
        assert await bench.marked() == {}
        await bench.settings.enable()
        await later(60)
        assert await bench.marked() == {7: [B2]}

    run(case)
