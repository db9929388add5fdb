"""Known accidents of fencing and recovery, one by one, in virtual time. Docstrings name BookKeeper's own tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvstore.errors import (
    BookieError,
    LedgerError,
    NotRecoverable,
    OutcomeUnknown,
    StoreError,
)
from kvstore.proto.digest import PAYLOAD_AT, EntryDigest
from kvstore.types import NO_ENTRY, BookieId, EntryId, LedgerId, LedgerState
from kvstore.wal.recovery import READ_AHEAD
from tests.sim.ledgers_and_logs.bench import B1, B2, B3, B4, B5, LEDGER, Appended, Bench, appended, holders, run

pytestmark = pytest.mark.sim


def test_first_writer_cannot_commit_write_after_second_has_closed() -> None:
    """testFirstWriterCannotCommitWriteAfter2ndWriterCloses: only reads that also fence make a negative answer final."""

    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        await appended(bench, handle, 3)
        entries = Appended()
        bench.bookies.at[B2].holds_adds = bench.bookies.at[B3].holds_adds = True
        handle.append(b"entry 3", entries.done)  # b1 has it; in flight to b2 and b3
        await bench.pass_time()
        reads = bench.bookies.read
        fencing_b3 = asyncio.Event()

        async def read(bookie, ledger, entry, **how):  # type: ignore[no-untyped-def]
            """The fencing read of b3's last entry is lost, and so are the fencing reads of b1's entries."""
            if (bookie == B3 and entry == NO_ENTRY) or (bookie == B1 and entry != NO_ENTRY):
                await fencing_b3.wait()
            return await reads(bookie, ledger, entry, **how)

        bench.bookies.read = read  # type: ignore[method-assign]
        closed = await bench.recover()
        assert closed.last_entry == 2  # b2 and b3 report that they do not have entry 3
        bench.bookies.release_adds(B3)
        bench.bookies.release_adds(B2)
        await bench.pass_time()
        assert entries.confirmed == []
        assert isinstance(entries.errors[0], OutcomeUnknown)

    run(case)


def test_recovery_of_empty_second_ensemble_ends_where_first_did() -> None:
    """testRecoveryWhenSecondEnsembleReturnsLacMinusOne."""

    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        await appended(bench, handle, 3)
        others = bench.ports_on(type(bench.store)(bench.tree)).ledgers
        await others.update(LEDGER, lambda recorded: recorded.with_ensemble(EntryId(3), (B4, B5, B3)))
        bench.bookies.at[B3].lacs.clear()
        bench.bookies.at[B3].entries.clear()
        closed = await bench.recover()
        assert (closed.last_entry, closed.length) == (2, len(b"entry 0") * 3)

    run(case, bookies=5)


def test_recovery_ends_at_gap() -> None:
    """testRecoveryOnEntryGap."""

    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        entries = Appended()
        for bookie in (B2, B3):
            bench.bookies.at[bookie].holds_adds = True
        for number in range(4):
            handle.append(b"entry %d" % number, entries.done)
        await bench.pass_time()
        del bench.bookies.at[B1].entries[LEDGER, EntryId(1)]
        closed = await bench.recover()
        assert closed.last_entry == 0
        assert holders(bench, 0) == [B1, B2, B3]
        for bookie in (B2, B3):
            bench.bookies.release_adds(bookie)
        await bench.pass_time()
        assert entries.confirmed == []

    run(case)


def test_one_copy_of_entry_is_written_back_to_all() -> None:
    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        await appended(bench, handle, 2)
        bench.bookies.at[B2].holds_adds = bench.bookies.at[B3].holds_adds = True
        handle.append(b"entry 2", Appended().done)
        await bench.pass_time()
        bench.bookies.stop(B2)
        closed = await bench.recover()  # of B1 and B3, one has it
        assert closed.last_entry == 2
        assert holders(bench, 2) == [B1, B3]

    run(case)


def test_recovery_without_covering_set_fails_and_truncates_nothing() -> None:
    """LedgerRecovery2Test: all down."""

    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        await appended(bench, handle, 3)
        bench.bookies.stop(B2, B3)
        with pytest.raises(NotRecoverable):
            await bench.recover()
        assert (await bench.recorded()).state is LedgerState.IN_RECOVERY
        bench.bookies.start(B2)
        assert (await bench.recover()).last_entry == 2

    run(case)


def test_bookies_silent_after_fence_do_not_end_ledger() -> None:
    """A timeout, an I/O error or a damaged copy is never a negative answer, in whatever number."""

    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        await appended(bench, handle, 2)
        bench.bookies.at[B3].holds_adds = True
        handle.append(b"entry 2", Appended().done)  # confirmed, on B1 and B2
        await bench.pass_time()
        reads = bench.bookies.read

        async def read(bookie, ledger, entry, **how):  # type: ignore[no-untyped-def]
            if bookie in (B1, B2) and entry != NO_ENTRY:
                raise BookieError(f"{bookie} fell silent")
            return await reads(bookie, ledger, entry, **how)

        bench.bookies.read = read  # type: ignore[method-assign]
        with pytest.raises(NotRecoverable):
            await bench.recover()
        bench.bookies.read = reads  # type: ignore[method-assign]
        assert (await bench.recover()).last_entry == 2

    run(case)


@pytest.mark.parametrize("ensemble", [(B1, B2), (B1, B2, B3)])
def test_recovery_continues_with_one_bookie_lost(ensemble: tuple[str, ...]) -> None:
    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger(*ensemble))  # type: ignore[arg-type]
        await appended(bench, handle, 3)
        bench.bookies.stop(B2)
        closed = await bench.recover()
        assert closed.last_entry == 2

    run(case, bookies=4)


def test_hung_bookie_does_not_delay_recovery() -> None:
    """testFencingWithHungBookie."""

    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        await appended(bench, handle, 3)
        bench.bookies.at[B2].is_silent = True
        began = bench.env.clock.now()
        assert (await bench.recover()).last_entry == 2
        assert bench.env.clock.now() - began < 0.5

    run(case)


def test_recovery_that_can_read_but_not_write_leaves_ledger_in_recovery() -> None:
    """LedgerRecovery2Test: LAC readable but cannot write."""

    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        await appended(bench, handle, 3)
        store = bench.bookies._store
        bench.bookies._store = lambda *what: LedgerError("the disk is gone")  # type: ignore[method-assign,assignment]
        with pytest.raises(NotRecoverable):
            await bench.recover()
        bench.bookies._store = store  # type: ignore[method-assign]
        assert (await bench.recorded()).state is LedgerState.IN_RECOVERY
        assert (await bench.recover()).last_entry == 2

    run(case)


# docs/protocol.md R6
def test_recovery_adopts_end_of_recovery_that_was_first() -> None:
    """testMetadataClosedDuringRecovery."""

    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        await appended(bench, handle, 2)
        bench.bookies.at[B2].holds_adds = bench.bookies.at[B3].holds_adds = True
        handle.append(b"entry 2", Appended().done)
        await bench.pass_time()
        bench.bookies.stop(B1)  # the bookie that has it
        slow = bench.takeover()
        await slow.take_over()  # finds nothing after entry 1
        bench.bookies.start(B1)
        bench.bookies.stop(B3)
        other = await bench.recover()  # finds entry 2
        assert other.last_entry == 2
        assert (await slow.close()).last_entry == 2

    run(case)


# docs/protocol.md R5
def test_ensemble_change_of_recovery_is_hidden_until_end() -> None:
    """testNewEnsembleAddedDuringRecovery: if it were published early, the second recovery would look for entry 2 on
    a new bookie."""

    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        await appended(bench, handle, 2)
        bench.bookies.at[B2].holds_adds = bench.bookies.at[B3].holds_adds = True
        handle.append(b"entry 2", Appended().done)
        await bench.pass_time()
        store = bench.bookies._store

        def refuse_at_b2(bookie, ledger, entry, packet, recovery):  # type: ignore[no-untyped-def]
            return LedgerError("b2 takes no adds") if bookie == B2 else store(bookie, ledger, entry, packet, recovery)

        bench.bookies._store = refuse_at_b2  # type: ignore[method-assign]
        first = bench.takeover()
        await first.take_over()
        recorded = await bench.recorded()
        assert recorded.fragments[-1].ensemble == (B1, B2, B3)
        bench.bookies._store = store  # type: ignore[method-assign]
        second = await bench.recover()
        assert second.last_entry == 2
        assert (await first.close()) == second

    run(case, bookies=4)


def test_ensemble_change_of_recovery_is_published_with_end() -> None:
    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        await appended(bench, handle, 2)
        bench.bookies.at[B2].holds_adds = bench.bookies.at[B3].holds_adds = True
        handle.append(b"entry 2", Appended().done)
        await bench.pass_time()
        bench.bookies.stop(B2)
        closed = await bench.recover()
        assert [(f.first, f.ensemble) for f in closed.fragments] == [(0, (B1, B2, B3)), (2, (B1, B4, B3))]
        assert holders(bench, 2) == [B1, B3, B4]

    run(case, bookies=4)


def test_recovery_of_ledger_on_two_bookies_replaces_silent_one() -> None:
    """The process of the silent bookie is stopped, so its add fails last, after all others are answered. The live
    bookie and the spare are enough."""

    async def case(bench: Bench) -> None:
        await appended(bench, bench.handle(await bench.ledger(B1, B2)), 1)
        bench.bookies.at[B2].is_silent = True
        add = bench.bookies.add

        def add_or_time_out(
            bookie: BookieId,
            ledger: LedgerId,
            entry: EntryId,
            packet: bytes,
            key: bytes,
            recovery: bool,
            done: Callable[[StoreError | None], None],
        ) -> None:
            if bookie == B2:
                asyncio.get_running_loop().call_later(2.0, done, BookieError("no add was answered for 2.0 s"))
            else:
                add(bookie, ledger, entry, packet, key, recovery, done)

        bench.bookies.add = add_or_time_out  # type: ignore[method-assign]
        recorded = await bench.recover()
        assert (recorded.state, recorded.last_entry) == (LedgerState.CLOSED, 0)
        assert B3 in recorded.fragments[-1].ensemble

    run(case)


# docs/protocol.md B36
def test_recovery_does_not_choose_between_two_payloads_of_an_entry() -> None:
    async def case(bench: Bench) -> None:
        metadata = await bench.ledger()
        await appended(bench, bench.handle(metadata), 3)
        digest, last = EntryDigest(metadata.digest, metadata.password), EntryId(2)
        other = digest.packet(LEDGER, last, EntryId(1), 3 * len(b"entry 0"), b"ENTRY 2")
        bench.bookies.at[B3].entries[LEDGER, last] = other
        for each in (B1, B2, B3):
            bench.bookies.at[each].lacs.clear()
        with pytest.raises(NotRecoverable, match="another payload"):
            await bench.recover()
        recorded, _ = await bench.ledgers.read(LEDGER)
        assert recorded.state is LedgerState.IN_RECOVERY
        payloads = [bench.bookies.at[each].entries[LEDGER, last][PAYLOAD_AT:] for each in (B1, B2, B3)]
        assert payloads == [b"entry 2", b"entry 2", b"ENTRY 2"]

    run(case)


def test_concurrent_recoveries_agree() -> None:
    """testConcurrentRecovery1 to 4: each bookie in turn is lost to one of the recoveries."""

    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        await appended(bench, handle, 5)
        bench.bookies.at[B2].holds_adds = bench.bookies.at[B3].holds_adds = True
        handle.append(b"entry 5", Appended().done)
        await bench.pass_time()
        one, two = bench.takeover(), bench.takeover(bench.ports_on(type(bench.store)(bench.tree)))
        first = bench.env.nursery.spawn(one.take_over(), name="one")
        second = bench.env.nursery.spawn(two.take_over(), name="two")
        await first
        await second
        assert (await one.close()) == (await two.close())

    run(case)


# docs/protocol.md R7
@pytest.mark.parametrize("moment", [0.0, 0.0006, 0.0012, 0.0018, 0.0024, 0.003, 0.004, 0.006])
def test_recovery_that_dies_anywhere_is_finished_by_next(moment: float) -> None:
    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        entries = await appended(bench, handle, 3)
        bench.bookies.at[B2].holds_adds = True
        for number in range(3, 6):
            handle.append(b"entry %d" % number, entries.done)
        dying = bench.env.nursery.spawn(bench.takeover().take_over(), name="dies")
        await bench.pass_time(moment)
        dying.cancel()
        closed = await bench.recover()
        assert closed.last_entry >= len(entries.confirmed) - 1
        for entry in range(closed.last_entry + 1):
            assert len(holders(bench, entry)) >= 2

    run(case)


# docs/protocol.md R4
def test_recovery_shows_readers_nothing_that_another_may_drop() -> None:
    """The last-add-confirmed of the write-back does not advance: the recovery that found entry 3 may lose to one
    that did not."""

    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        await appended(bench, handle, 2)
        bench.bookies.at[B2].holds_adds = bench.bookies.at[B3].holds_adds = True
        for number in range(2, 2 + 3 * READ_AHEAD):  # so many that the first are safe again when the last are found
            handle.append(b"entry %d" % number, Appended().done)
        await bench.pass_time()
        bench.bookies.at[B2].entries.update(bench.bookies.at[B1].entries)
        for model in bench.bookies.at.values():
            model.batch_max = 1  # otherwise all would be found before the first is safe again
        await bench.takeover().take_over()
        assert len(holders(bench, 1 + 3 * READ_AHEAD)) == 3
        assert max(model.lacs.get(LEDGER, NO_ENTRY) for model in bench.bookies.at.values()) <= 1

    run(case)


def test_ledger_of_one_entry_keeps_it() -> None:
    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        handle.append(b"only", Appended().done)
        await bench.pass_time(0.0015)
        assert (await bench.recover()).last_entry == 0

    run(case)


# docs/protocol.md G7
def test_empty_ledger_closes_with_no_entry() -> None:
    async def case(bench: Bench) -> None:
        await bench.ledger()
        closed = await bench.recover()
        assert (closed.state, closed.last_entry, closed.length) == (LedgerState.CLOSED, NO_ENTRY, 0)

    run(case)
