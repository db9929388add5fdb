"""An operator marks missing parts of a ledger as lost (docs/protocol.md, A14). The rest gets its copies, and no
process searches for the lost parts any more."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Any

import pytest

from kvstore.autorecovery.abandon import LedgerAbandonment, Loss
from kvstore.autorecovery.repairer import LedgerRepairer, RepairOutcome
from kvstore.errors import BookieError, InvalidRequest, NodeExists, NoSuchEntry, Unavailable
from kvstore.meta import paths
from kvstore.meta.lost import lost_entries
from kvstore.meta.memory import MemoryStore
from kvstore.meta.store import ensure_path
from kvstore.proto.bookkeeper import Status
from kvstore.types import BookieId, EntryId, LedgerId, LedgerState
from kvstore.wal.connection import AnsweredError
from kvstore.wal.copies.copier import Copier
from kvstore.wal.copies.pace import CopyPace
from kvstore.wal.ensembles import in_recovery
from kvstore.wal.ports import ReadAnswer
from tests.sim.ledgers_and_logs.bench import B1, B2, B3, B4, B5, LEDGER, Appended, Bench, P, appended, run
from tests.sim.ledgers_and_logs.logs import Writer, numbers, opened
from tests.sim.recovering.cases import COUNT, closed, of_a_log, recorded, until_unmarked

pytestmark = pytest.mark.sim


def abandonment(bench: Bench) -> LedgerAbandonment:
    store = MemoryStore(bench.tree)
    repairer = LedgerRepairer(bench.ports_on(store), store, bench.env.nursery, CopyPace(bench.env.clock, 1 << 20))
    return LedgerAbandonment(repairer, bench.marks, worker="operator")


async def given_up(bench: Bench, ledger: LedgerId = LEDGER) -> tuple[Loss, RepairOutcome]:
    """Mark everything missing at this moment as lost."""
    return await abandonment(bench).abandon(ledger, 1, await abandonment(bench).find_loss(ledger))


def test_closed_ledger_keeps_every_entry_that_any_bookie_has() -> None:
    async def case(bench: Bench) -> None:
        await closed(bench)
        for bookie in (B1, B2):
            bench.bookies.at[bookie].entries[LEDGER, EntryId(5)] = b"?" * 60
            del bench.bookies.at[bookie].entries[LEDGER, EntryId(6)]
        bench.bookies.stop(B3)
        await bench.mark(B3)
        found = await abandonment(bench).find_loss(LEDGER)
        assert (found.text, found.away) == ("5-6", (B3,))
        assert await recorded(bench) == (B1, B2, B3), "showing the loss changes nothing"
        loss, mended = await given_up(bench)
        assert loss.text == "5-6"
        assert mended.is_complete
        assert await recorded(bench) == (B1, B2, B4)
        assert bench.bookies.at[B4].of(LEDGER) == [each for each in range(COUNT) if each not in (5, 6)]
        assert lost_entries(await bench.recorded()) == [range(5, 7)]
        await bench.mark(B2)
        bench.worker()
        await until_unmarked(bench)

    run(case, bookies=4)


def test_leader_does_not_miss_entries_marked_as_lost() -> None:
    """Otherwise its ledger would be marked and repaired forever."""

    async def case(bench: Bench) -> None:
        await closed(bench)
        for bookie in (B1, B2, B3):
            del bench.bookies.at[bookie].entries[LEDGER, EntryId(5)]
        marked: list[Collection[BookieId]] = []

        async def mark(_: LedgerId, bookies: Collection[BookieId]) -> None:
            marked.append(bookies)

        pace = CopyPace(bench.env.clock, 1 << 20)
        leaders = Copier(bench.ports, bench.env.nursery, lambda: [(LEDGER, None)], mark=mark, pace=pace)
        leaders.start()
        await bench.pass_time(5)
        assert marked == [{B1, B2, B3}]
        loss, mended = await given_up(bench)
        assert (loss.text, mended.is_complete) == ("5", True)
        await bench.pass_time(60)
        assert (len(marked), leaders.lacking) == (1, {})

    run(case, bookies=4)


def test_ledger_with_unknowable_end_is_closed_after_last_remaining_entry() -> None:
    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        await appended(bench, handle, COUNT)
        bench.bookies.stop(B2, B3)
        assert (await abandonment(bench).find_loss(LEDGER)).lost == ()
        assert not bench.bookies.at[B1].fenced
        loss, mended = await given_up(bench)
        assert (loss.last, loss.lost, mended.is_complete) == (COUNT - 1, (), True)
        found = await bench.recorded()
        assert (found.state, found.last_entry) == (LedgerState.CLOSED, COUNT - 1)
        assert set(found.fragments[0].ensemble) == {B1, B4, B5}
        for bookie in (B4, B5):
            assert bench.bookies.at[bookie].of(LEDGER) == list(range(COUNT))
        bench.bookies.start(B2, B3)
        entries = Appended()
        handle.append(b"too late", entries.done)
        await bench.pass_time(10)
        assert not bench.bookies.at[B1].entries.get((LEDGER, EntryId(COUNT)))

    run(case, bookies=5)


def test_entries_known_to_be_confirmed_are_marked_as_lost_not_truncated() -> None:
    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        await appended(bench, handle, COUNT)
        for entry in (COUNT - 1, 3):
            del bench.bookies.at[B1].entries[LEDGER, EntryId(entry)]
        bench.bookies.stop(B2, B3)
        loss, _ = await given_up(bench)
        assert (loss.last, loss.text) == (COUNT - 1, f"3,{COUNT - 1}")

    run(case, bookies=5)


def test_log_is_opened_again_although_its_last_entry_is_lost() -> None:
    async def case(bench: Bench) -> None:
        log = await opened(bench.logs())
        await Writer(log).append(3)
        log.close_for_good()
        ledger = log.handle.ledger
        for bookie in (B1, B2, B3):
            del bench.bookies.at[bookie].entries[ledger, EntryId(2)]
        loss, _ = await given_up(bench, ledger)
        assert (loss.last, loss.text) == (2, "2")
        log = await opened(bench.logs())
        assert log.recovered_end == (ledger, 2)
        assert log.waited, "the lost entry need not have been a release record"

    run(case)


def test_tail_reports_lost_entry_as_such_and_does_not_wait_for_it() -> None:
    async def case(bench: Bench) -> None:
        log = await opened(bench.logs())
        await Writer(log).append(5)
        log.close_for_good()
        ledger = log.handle.ledger
        for bookie in (B1, B2, B3):
            del bench.bookies.at[bookie].entries[ledger, EntryId(2)]
        reader = bench.logs().reader(P, None)
        assert [entry.payload for entry in await reader.read(1000)] == numbers(1, 2)
        with pytest.raises(BookieError):
            await reader.read(1000)
        await given_up(bench, ledger)
        with pytest.raises(NoSuchEntry, match=f"entry 2 of ledger {ledger} is marked as lost"):
            await reader.read(1000)
        await reader.close()

    run(case)


def test_ledger_of_log_with_leader_is_not_abandoned() -> None:
    async def case(bench: Bench) -> None:
        await of_a_log(bench, 500)
        leader = MemoryStore(bench.tree)
        await ensure_path(leader, paths.partition(P))
        await leader.create(paths.partition_leader(P), ephemeral=True)
        with pytest.raises(InvalidRequest, match="has a leader"):
            await given_up(bench)
        assert (await bench.recorded()).state is LedgerState.OPEN

    run(case, bookies=4)


@pytest.mark.parametrize("status", [Status.TOO_MANY_REQUESTS, Status.IO_ERROR], ids=str)
def test_transient_refusal_is_not_a_loss(status: Status) -> None:
    async def case(bench: Bench) -> None:
        await closed(bench)
        bench.bookies.stop(B2, B3)
        read = bench.bookies.read

        async def refuse(bookie: BookieId, ledger: LedgerId, entry: EntryId, **how: Any) -> ReadAnswer:
            if entry == 5:
                raise AnsweredError(f"{bookie}: answered {status}", status)
            return await read(bookie, ledger, entry, **how)

        bench.bookies.read = refuse  # type: ignore[assignment, method-assign]
        if status is Status.IO_ERROR:
            assert (await abandonment(bench).find_loss(LEDGER)).text == "5"
        else:
            with pytest.raises(Unavailable):
                await abandonment(bench).find_loss(LEDGER)

    run(case, bookies=4)


# docs/protocol.md A14
def test_ledger_is_not_closed_by_answers_of_bookie_that_cannot_be_fenced() -> None:
    """The disk has no space for the fence itself: each fencing read ends in an I/O error, whatever the bookie has."""

    async def case(bench: Bench) -> None:
        await appended(bench, bench.handle(await bench.ledger()), COUNT)
        bench.bookies.stop(B2, B3)
        bench.bookies.at[B1].lacs[LEDGER] = EntryId(2)
        read = bench.bookies.read

        async def full(
            bookie: BookieId, ledger: LedgerId, entry: EntryId, *, fence_key: bytes | None = None, priority: int = 0
        ) -> ReadAnswer:
            if fence_key is not None:
                raise AnsweredError(f"{bookie}: I/O error", Status.IO_ERROR)
            return await read(bookie, ledger, entry, priority=priority)

        bench.bookies.read = full  # type: ignore[assignment, method-assign]
        with pytest.raises(Unavailable, match=f"bookie {B1} cannot fence the ledger"):
            await given_up(bench)
        assert (await bench.recorded()).state is LedgerState.IN_RECOVERY
        bench.bookies.read = read  # type: ignore[method-assign]
        loss, _ = await given_up(bench)
        assert (loss.last, loss.lost) == (COUNT - 1, ())

    run(case, bookies=5)


# docs/protocol.md A14
def test_ledger_is_not_closed_below_what_was_read_before_its_fence() -> None:
    """The reads of a disk fail from then on."""

    async def case(bench: Bench) -> None:
        await appended(bench, bench.handle(await bench.ledger()), COUNT)
        bench.bookies.stop(B2, B3)
        bench.bookies.at[B1].lacs[LEDGER] = EntryId(2)
        read, fenced = bench.bookies.read, bench.bookies.at[B1].fenced

        async def failing(bookie: BookieId, ledger: LedgerId, entry: EntryId, **how: Any) -> ReadAnswer:
            answer = await read(bookie, ledger, entry, **how)
            if fenced:
                raise AnsweredError(f"{bookie}: unknown state", Status.UNKNOWN_LEDGER_STATE)
            return answer

        bench.bookies.read = failing  # type: ignore[assignment, method-assign]
        with pytest.raises(
            Unavailable, match=f"expected ledger {LEDGER} to reach entry {COUNT - 1} as before, got last entry 2"
        ):
            await given_up(bench)
        assert (await bench.recorded()).state is LedgerState.IN_RECOVERY
        assert (await abandonment(bench).find_loss(LEDGER)).unsure == (B1,)

    run(case, bookies=5)


# docs/protocol.md A14
@pytest.mark.parametrize("is_closed", [False, True])
def test_nothing_is_marked_as_lost_when_returned_bookie_may_have_it(is_closed: bool) -> None:
    """The bookie registers while the others are read, and the abandoning process does not know of that yet."""

    async def case(bench: Bench) -> None:
        if is_closed:
            await closed(bench)
        else:
            await appended(bench, bench.handle(await bench.ledger()), COUNT)
        for bookie in (B1, B2):
            del bench.bookies.at[bookie].entries[LEDGER, EntryId(5)]
        bench.bookies.stop(B3)
        node = MemoryStore(bench.tree)
        await ensure_path(node, paths.AVAILABLE)
        read = bench.bookies.read

        async def meanwhile(bookie: BookieId, ledger: LedgerId, entry: EntryId, **how: Any) -> ReadAnswer:
            if entry == 3:
                with suppress(NodeExists):
                    await node.create(paths.available(B3), ephemeral=True)
            return await read(bookie, ledger, entry, **how)

        before = await bench.recorded()
        bench.bookies.read = meanwhile  # type: ignore[assignment, method-assign]
        with pytest.raises(Unavailable, match=f"bookie {B3} is back"):
            await given_up(bench)
        found = await bench.recorded()
        assert (found.state, found.fragments) == (in_recovery(before).state, before.fragments)
        assert lost_entries(found) == []
        bench.bookies.start(B3)
        loss, mended = await given_up(bench)
        assert (loss.last, loss.lost, mended.is_complete) == (COUNT - 1, (), True)

    run(case, bookies=4)


# docs/protocol.md A14
@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.parametrize("others", [(B2, B3), ()], ids=["the others are away", "only it goes"])
def test_nothing_is_marked_as_lost_when_its_only_bookie_left_meanwhile(
    is_closed: bool, others: tuple[BookieId, ...]
) -> None:
    """Its node restarts while the operator considers the report."""

    async def case(bench: Bench) -> None:
        if is_closed:
            await closed(bench)
        else:
            await appended(bench, bench.handle(await bench.ledger()), COUNT)
        del bench.bookies.at[B1].entries[LEDGER, EntryId(5)]
        for bookie in (B2, B3):
            bench.bookies.at[bookie].entries.clear()
        bench.bookies.stop(*others)
        before = await bench.recorded()
        shown = await abandonment(bench).find_loss(LEDGER)
        assert (shown.text, set(shown.away)) == ("5", set(others))
        bench.bookies.stop(B1)
        with pytest.raises(Unavailable, match=f"bookie {B1} was registered and has gone away"):
            await abandonment(bench).abandon(LEDGER, 1, shown)
        assert (await bench.recorded(), await bench.is_marked()) == (before, False)
        bench.bookies.start(B1)
        loss, _ = await abandonment(bench).abandon(LEDGER, 1, shown)
        assert (loss.last, loss.text) == (COUNT - 1, "5")

    run(case, bookies=6)


# docs/protocol.md A14
def test_nothing_is_marked_as_lost_that_was_readable_when_loss_was_shown() -> None:
    async def case(bench: Bench) -> None:
        await closed(bench)
        bench.bookies.stop(B2, B3)
        del bench.bookies.at[B1].entries[LEDGER, EntryId(5)]
        shown = await abandonment(bench).find_loss(LEDGER)
        for entry in (3, 7, 8):
            del bench.bookies.at[B1].entries[LEDGER, EntryId(entry)]
        with pytest.raises(Unavailable, match=f"entries 3,7-8 of ledger {LEDGER} have become unreadable"):
            await abandonment(bench).abandon(LEDGER, 1, shown)
        assert lost_entries(await bench.recorded()) == []
        assert not await bench.is_marked()

    run(case, bookies=6)


# docs/protocol.md A14
@pytest.mark.parametrize("is_closed", [False, True])
def test_nothing_is_marked_as_lost_when_its_only_bookie_leaves_halfway(is_closed: bool) -> None:
    """It leaves after the last read before a write: the read of its registration."""

    async def case(bench: Bench) -> None:
        if is_closed:
            await closed(bench)
        else:
            await appended(bench, bench.handle(await bench.ledger()), COUNT)
        bench.bookies.stop(B2, B3)
        del bench.bookies.at[B1].entries[LEDGER, EntryId(5)]
        shown = await abandonment(bench).find_loss(LEDGER)
        again = abandonment(bench)
        look = again.find_loss

        async def leaves(ledger: LedgerId) -> Loss:
            seen = await look(ledger)
            bench.bookies.stop(B1)
            return seen

        again.find_loss = leaves  # type: ignore[method-assign]
        with pytest.raises(Unavailable, match=f"bookie {B1} was registered and has gone away"):
            await again.abandon(LEDGER, 1, shown)
        found = await bench.recorded()
        assert found.state is (LedgerState.CLOSED if is_closed else LedgerState.IN_RECOVERY)
        assert lost_entries(found) == []

    run(case, bookies=6)


def test_present_bookie_that_does_not_answer_is_waited_for() -> None:
    async def case(bench: Bench) -> None:
        await closed(bench)
        bench.bookies.at[B1].is_silent = True
        with pytest.raises(Unavailable, match="does not answer"):
            await given_up(bench)
        assert not await bench.is_marked()

    run(case, bookies=4)


def test_confirmed_entries_are_kept_when_their_bookie_is_briefly_silent() -> None:
    """It can no longer read its last entries, but knows that they are confirmed."""

    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        await appended(bench, handle, COUNT)
        bench.bookies.stop(B2, B3)
        for entry in (COUNT - 2, COUNT - 1):
            del bench.bookies.at[B1].entries[LEDGER, EntryId(entry)]
        read_lac = bench.bookies.read_lac

        async def silent(bookie: BookieId, *_: Any) -> EntryId:
            raise BookieError(f"{bookie}: no answer in time")

        bench.bookies.read_lac = silent  # type: ignore[method-assign]
        with pytest.raises(Unavailable, match="does not answer"):
            await given_up(bench)
        assert (await bench.recorded()).state is LedgerState.OPEN
        bench.bookies.read_lac = read_lac  # type: ignore[method-assign]
        loss, _ = await given_up(bench)
        assert (loss.last, loss.text) == (COUNT - 1, f"{COUNT - 2}-{COUNT - 1}")

    run(case, bookies=5)


def test_bookie_with_damage_in_confirmed_entries_does_not_block_closing() -> None:
    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        await appended(bench, handle, COUNT)
        bench.bookies.stop(B2, B3)

        async def damaged(bookie: BookieId, *_: Any) -> EntryId:
            raise AnsweredError(f"{bookie}: answered IO_ERROR", Status.IO_ERROR)

        bench.bookies.read_lac = damaged  # type: ignore[method-assign]
        loss, mended = await given_up(bench)
        assert (loss.last, loss.lost, mended.is_complete) == (COUNT - 1, (), True)

    run(case, bookies=5)
