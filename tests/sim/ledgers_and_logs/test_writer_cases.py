"""Known accidents of a ledger's writer, one by one, in virtual time. Docstrings name BookKeeper's own tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from kvstore.errors import (
    BookieError,
    LedgerClosed,
    LedgerFenced,
    MetadataUnknown,
    OutcomeUnknown,
    StoreError,
)
from kvstore.types import NO_ENTRY, BookieId, EntryId, LedgerState
from kvstore.wal import writer
from kvstore.wal.choice import URGENT_QUARANTINE_S
from tests.sim.ledgers_and_logs.bench import B1, B2, B3, B4, B5, LEDGER, Appended, Bench, appended, holders, run
from tests.sim.ledgers_and_logs.logs import Writer, opened

pytestmark = pytest.mark.sim


def test_failed_bookie_is_replaced_by_one_metadata_write() -> None:
    """HandleFailuresTest: one metadata write per failure."""

    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        await appended(bench, handle, 2)
        bench.bookies.stop(B3)
        await appended(bench, handle, 2)
        before, after = (await bench.recorded()).fragments
        assert (before.ensemble, after.ensemble) == ((B1, B2, B3), (B1, B2, B4))
        assert len(bench.store.writes) == 1
        assert holders(bench, 3) == [B1, B2, B4]

    run(case, bookies=4)


def test_bookies_that_fail_together_are_replaced_by_one_metadata_write() -> None:
    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        bench.bookies.stop(B2, B3)
        await appended(bench, handle, 3)
        assert len(bench.store.writes) == 1
        assert set((await bench.recorded()).fragments[-1].ensemble) == {B1, B4, B5}

    run(case, bookies=5)


def test_bookie_that_fails_during_a_replacement_is_replaced_after_it() -> None:
    """HandleFailuresTest: second failure while the first is handled."""

    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        entries = Appended()
        bench.store.freeze()
        bench.bookies.stop(B3)
        handle.append(b"a", entries.done)
        await bench.pass_time(0.02)
        bench.bookies.stop(B2)
        handle.append(b"b", entries.done)
        await bench.pass_time(0.02)
        bench.store.thaw()
        await bench.pass_time()
        assert len(entries.confirmed) == 2
        assert set((await bench.recorded()).fragments[-1].ensemble) == {B1, B4, B5}

    run(case, bookies=5)


def test_nothing_is_confirmed_while_metadata_store_stalls_ensemble_change() -> None:
    """testNoAddsAreCompletedWhileFailureHandlingInProgress, with all bookies failing in turn."""

    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        entries = Appended()
        bench.store.freeze()
        for bookie in (B1, B2, B3):  # while adds are sent: the first failed add begins the change
            bench.bookies.stop(bookie)
            for _ in range(3):
                handle.append(b"a", entries.done)
            await bench.pass_time(0.5)
        assert entries.confirmed == []
        bench.store.thaw()
        await bench.pass_time(0.5)
        assert len(entries.confirmed) == 9
        recorded = await bench.recorded()
        for entry in map(EntryId, range(9)):
            assert len(set(holders(bench, entry)).intersection(recorded.write_set(entry))) >= 2

    run(case, bookies=6)


def test_copy_on_replaced_bookie_does_not_count() -> None:
    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        at = bench.bookies.at
        at[B1].holds_adds = at[B2].holds_adds = at[B4].holds_adds = True
        entries = Appended()
        handle.append(b"a", entries.done)
        await bench.pass_time()  # B3 has it
        bench.store.freeze()
        bench.bookies.stop(B3)
        handle.append(b"b", entries.done)
        await bench.pass_time()
        bench.bookies.release_adds(B1)
        await bench.pass_time()
        bench.store.thaw()
        await bench.pass_time()
        assert (await bench.recorded()).fragments[-1].ensemble == (B1, B2, B4)
        assert entries.confirmed == []
        bench.bookies.release_adds(B4)
        await bench.pass_time()
        assert len(entries.confirmed) == 2

    run(case, bookies=4)


def test_entry_age_counts_from_first_send_however_late_it_is_confirmed() -> None:
    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        entries = Appended()
        for bookie in (B2, B3):
            bench.bookies.at[bookie].holds_adds = True
        sent_at = bench.env.clock.now()
        handle.append(b"a", entries.done)
        await bench.pass_time(1)
        bench.bookies.stop(B3)
        handle.append(b"b", entries.done)
        bench.bookies.release_adds(B3)
        await bench.pass_time(1)  # sent again to B4
        bench.bookies.release_adds(B2)
        await bench.pass_time()
        assert entries.sent_at == [sent_at, pytest.approx(sent_at + 1, abs=0.01)]

    run(case, bookies=4)


def test_change_of_unknown_outcome_is_found_done() -> None:
    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        bench.store.fail_next = [MetadataUnknown("the connection broke")]
        bench.bookies.stop(B3)
        await appended(bench, handle, 3)
        assert len(bench.store.writes) == 1
        assert (await bench.recorded()).fragments[-1].ensemble == (B1, B2, B4)

    run(case, bookies=4)


def test_writer_stops_when_ledger_is_in_recovery_while_replacing_bookie() -> None:
    """testMetadataSetToInRecoveryDuringFailureHandler."""

    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        entries = Appended()
        bench.store.freeze()
        bench.bookies.stop(B3)
        handle.append(b"a", entries.done)
        await bench.pass_time()
        confirmed = len(entries.confirmed)
        handle.append(b"b", entries.done)
        others = bench.ports_on(type(bench.store)(bench.tree)).ledgers
        await others.update(LEDGER, lambda recorded: recorded.recovering())
        bench.store.thaw()
        await bench.pass_time(0.5)
        assert len(entries.confirmed) == confirmed
        assert isinstance(entries.errors[0], OutcomeUnknown)
        assert isinstance(bench.halted[0], LedgerFenced)

    run(case, bookies=4)


def test_writer_stops_when_ledger_was_closed_while_replacing_bookie() -> None:
    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        entries = Appended()
        others = bench.ports_on(type(bench.store)(bench.tree)).ledgers
        await others.update(LEDGER, lambda recorded: recorded.closed(NO_ENTRY, 0))
        bench.bookies.stop(B3)
        handle.append(b"a", entries.done)
        await bench.pass_time(0.5)
        assert isinstance(bench.halted[0], LedgerClosed)

    run(case, bookies=4)


def test_ensemble_stays_and_writing_continues_without_spare() -> None:
    """TestDelayEnsembleChange."""

    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        bench.bookies.stop(B3)
        await appended(bench, handle, 5)
        assert bench.store.writes == []
        assert handle.writer.failed == {B3}

    run(case)


def test_ensemble_stays_and_writing_continues_without_metadata_store() -> None:
    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        bench.store.suspend()
        await bench.pass_time(0.01)
        bench.bookies.stop(B3)
        await appended(bench, handle, 5)
        assert (await bench.recorded()).fragments[-1].ensemble == (B1, B2, B3)
        bench.store.resume()
        await bench.pass_time(0.5)
        assert (await bench.recorded()).fragments[-1].ensemble == (B1, B2, B4)

    run(case, bookies=4)


def test_returned_bookie_takes_adds_again() -> None:
    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        bench.bookies.stop(B3)
        await appended(bench, handle, 5)
        bench.bookies.start(B3)
        await bench.pass_time(6)
        assert bench.returned == [B3]
        handle.append(b"more", Appended().done)
        await bench.pass_time()
        assert holders(bench, 5) == [B1, B2, B3]

    run(case)


def test_recently_failed_bookie_is_used_only_if_needed_for_ack_quorum() -> None:
    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        bench.ports.choice.failed(B4)
        await bench.pass_time(URGENT_QUARANTINE_S)
        bench.bookies.stop(B3)
        await appended(bench, handle, 2)
        assert (await bench.recorded()).fragments[-1].ensemble == (B1, B2, B3)
        bench.bookies.stop(B2)
        entries = Appended()
        handle.append(b"a", entries.done)
        await bench.pass_time()
        assert len(entries.confirmed) == 1
        assert B4 in (await bench.recorded()).fragments[-1].ensemble

    run(case, bookies=4)


def test_entries_wait_for_ack_quorum_and_are_confirmed_when_it_is_back() -> None:
    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        entries = Appended()
        bench.bookies.stop(B2, B3)
        for _ in range(3):
            handle.append(b"a", entries.done)
        await bench.pass_time(1)
        assert entries.confirmed == []
        bench.bookies.start(B2)
        await bench.pass_time(6)
        assert len(entries.confirmed) == 3

    run(case)


def test_slow_bookie_does_not_stop_writing() -> None:
    """SlowBookieTest."""

    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        bench.bookies.at[B2].holds_adds = True
        await appended(bench, handle, 20)
        bench.bookies.release_adds(B2)
        await bench.pass_time()
        assert holders(bench, 19) == [B1, B2, B3]

    run(case)


# docs/protocol.md W2, W8
def test_overloaded_bookie_takes_adds_again_once_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "OUTSTANDING_ENTRIES_MAX", 3)

    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        bench.bookies.at[B3].holds_adds = True
        await appended(bench, handle, 5)
        await appended(bench, handle, 1)
        await bench.pass_time(10)
        assert handle.writer.failed == {B3}
        assert bench.returned == []  # it answers reads and stores nothing
        bench.bookies.release_adds(B3)
        await bench.pass_time(1)
        assert bench.returned == [B3]
        handle.append(b"more", Appended().done)
        await bench.pass_time()
        assert holders(bench, 6) == [B1, B2, B3]

    run(case)


# docs/protocol.md W2
def test_overloaded_bookie_is_no_spare_for_another_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "OUTSTANDING_ENTRIES_MAX", 3)

    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        bench.bookies.at[B3].holds_adds = True
        await appended(bench, handle, 5)
        await appended(bench, handle, 1)
        assert B3 not in bench.ports.choice.spares()

    run(case)


# docs/protocol.md W2
def test_bookie_with_healthy_connection_and_hanging_disk_is_replaced() -> None:
    """Covers the node's own bookie, which has no connection, and one of several directories of a bookie."""

    async def case(bench: Bench) -> None:
        log = await opened(bench.logs())
        lead = Writer(log)
        await lead.append(3)
        hung = log.handle.writer.metadata.fragments[-1].ensemble[0]
        bench.bookies.at[hung].holds_adds = True
        (spare,) = set(bench.bookies.at) - set(log.handle.writer.metadata.fragments[-1].ensemble)
        await lead.append(60, gap_s=0.1)
        assert set(log.handle.writer.metadata.fragments[-1].ensemble) == set(bench.bookies.at) - {hung}
        assert (log.handle.ledger, EntryId(62)) in bench.bookies.at[spare].entries
        assert len(lead.entries.confirmed) == 63

    run(case, bookies=4)


# docs/protocol.md W2, W8
def test_bookie_with_hanging_disk_and_no_spare_returns_when_disk_recovers() -> None:
    async def case(bench: Bench) -> None:
        log = await opened(bench.logs())
        lead = Writer(log)
        bench.bookies.at[B3].holds_adds = True
        await lead.append(60, gap_s=0.1)
        assert log.handle.writer.failed == {B3}
        await bench.pass_time(10)
        assert log.handle.writer.failed == {B3}
        bench.bookies.release_adds(B3)
        await bench.pass_time(0.5)
        await lead.append(1)
        assert log.handle.writer.failed == set()
        await bench.pass_time(5)
        assert bench.bookies.at[B3].of(log.handle.ledger) == list(range(61))  # the rest is copied

    run(case)


def test_single_entry_is_shown_by_explicit_lac() -> None:
    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        entries = Appended()
        handle.append(b"a", entries.done)
        await bench.pass_time(0.005)
        assert [bench.bookies.at[b].lacs.get(LEDGER) for b in (B1, B2, B3)] == [NO_ENTRY] * 3
        await bench.pass_time(0.007)
        assert [bench.bookies.at[b].lacs.get(LEDGER) for b in (B1, B2, B3)] == [0, 0, 0]

    run(case)


def test_only_last_of_consecutive_entries_is_shown_by_explicit_lac() -> None:
    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        entries = Appended()

        def shown() -> list[int]:
            return [bench.bookies.at[b].lacs.get(LEDGER, NO_ENTRY) for b in (B1, B2, B3)]

        handle.append(b"first", entries.done)
        await bench.pass_time(0.012)
        for number in range(1, 20):
            handle.append(b"%d" % number, entries.done)
            await bench.pass_time(0.009)
            assert shown() == [number - 1] * 3, "each entry confirms the one before it"
        await bench.pass_time(0.007)
        assert shown() == [19, 19, 19], "10 ms after it was confirmed (docs/protocol.md W7)"
        await bench.pass_time(0.1)
        handle.append(b"lone", entries.done)
        await bench.pass_time(0.012)
        assert shown() == [20, 20, 20]

    run(case)


def test_closing_twice_succeeds_also_after_recovery_that_agrees() -> None:
    """LedgerClose2Test."""

    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        await appended(bench, handle, 3)
        closed = await bench.recover()
        await handle.close()
        await handle.close()
        assert (await bench.recorded()) == closed
        assert closed.last_entry == 2

    run(case)


# docs/protocol.md W9
def test_writer_cannot_close_ledger_in_recovery() -> None:
    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        await appended(bench, handle, 3)
        await bench.takeover().take_over()
        with pytest.raises(LedgerFenced):
            await handle.close()
        assert (await bench.recorded()).state is LedgerState.IN_RECOVERY

    run(case)


# docs/protocol.md W9
def test_bookie_silent_during_close_is_not_replaced() -> None:
    """The change raced with the recording of the end, and the loser took the winner for another writer."""

    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        bench.bookies.at[B3].holds_adds = True
        await appended(bench, handle, 3)
        bench.store.freeze()
        end = bench.env.nursery.spawn(handle.close(), name="close")
        await bench.pass_time(0.01)
        handle.fail_silent(B3, "no add of the ledger was answered")
        await bench.pass_time(0.01)
        bench.store.thaw()
        await end
        await bench.pass_time()
        recorded = await bench.recorded()
        assert (recorded.state, recorded.last_entry, len(recorded.fragments)) == (LedgerState.CLOSED, 2, 1)
        assert bench.halted == []

    run(case, bookies=4)


def test_bookie_that_answers_before_its_call_returns_changes_no_order() -> None:
    """The node's own bookie does that. Actions caused by its answers come after the current action."""

    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        asked: dict[tuple[BookieId, int], Callable[[StoreError | None], None]] = {}
        told: list[tuple[int, EntryId]] = []

        def add_to_all(bookies: Sequence[BookieId], _: object, entry: EntryId, *others: Any) -> None:
            for bookie in bookies:
                done = partial(others[-1], entry, bookie)
                if bookie in (B1, B2, B3):
                    asked[bookie, entry] = done
                else:
                    done(None)

        handle._add_to_all = add_to_all
        for number in range(2):
            handle.append(b"entry", lambda position, *_, number=number: told.append((number, position.entry)))
        asked[B1, 0](None)
        asked[B1, 1](None)
        asked[B3, 0](BookieError("it is gone"))
        asked[B2, 0](None)  # entry 0 has an ack quorum, and is confirmed with the ensemble change
        await bench.pass_time()
        assert B3 not in handle.writer.metadata.fragments[-1].ensemble
        assert told == [(0, 0), (1, 1)]

    run(case, bookies=4)
