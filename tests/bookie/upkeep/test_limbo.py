"""A bookie's doubt of a ledger ends exactly when nothing of the ledger can be missing any more."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest

from kvstore.bookie.journal.record import RecordKind
from kvstore.bookie.journal.reserve import JournalFull, Use
from kvstore.bookie.upkeep.limbo import is_complete, settle
from kvstore.bookie.upkeep.reclaim import Reclaimer
from kvstore.meta.lost import LOST_KEY, with_lost
from kvstore.proto.bookkeeper import Status
from kvstore.types import EntryId, Fragment, LedgerId, LedgerMetadata, LedgerState, Quorum
from tests.bookie.support import ME, OTHERS, Metadata, Shelf, crash, in_world, metadata, run, tiny
from tests.sim.world.env import SimWorld
from tests.sim.world.pause import pause

L = LedgerId(7)
LAST = 4


async def doubting(world: SimWorld, meta: Metadata, *entries: int) -> Shelf:
    """Return a bookie that has these entries of L and doubts the ledger."""
    shelf = await Shelf(world.env("b1"), tiny(), meta).start()
    for entry in entries:
        assert await shelf.add(L, entry) is Status.OK
    shelf.storage.facts.set_limbo(shelf.storage.inventory.ledgers[L], True)
    await shelf.storage.synced()
    return shelf


def knowing(state: LedgerState = LedgerState.OPEN, *, last_entry: int = -1) -> Metadata:
    meta = Metadata()
    meta.known = {L: metadata(L, state=state, last_entry=last_entry)}
    return meta


def test_complete_closed_ledger_leaves_limbo_even_after_a_crash(world: SimWorld) -> None:
    meta = knowing()

    async def repair() -> None:
        shelf = await doubting(world, meta, 0, 1, 3, 4)
        meta.known[L] = metadata(L, state=LedgerState.CLOSED, last_entry=LAST)
        assert await settle(shelf.storage, meta) == [], "entry 2 is missing"
        assert await shelf.status(L, 2) is Status.UNKNOWN_LEDGER_STATE
        assert (await shelf.entries(L)) == (Status.OK, [(0, 2), (3, 2)])
        assert await shelf.add(L, 2, recovery=True) is Status.OK
        assert await settle(shelf.storage, meta) == [L]
        assert await shelf.status(L, 5) is Status.NO_ENTRY
        assert shelf.storage.refresh_statistics().limbo_ledgers == 0

    async def again() -> None:
        shelf = await Shelf(world.env("b1"), tiny(), meta).start()
        assert await shelf.status(L, 5) is Status.NO_ENTRY
        assert await shelf.status(L, 2) is Status.OK

    run(world, repair())
    for power in (True, False):
        crash(world, power=power)
        run(world, again())


def test_ledger_whose_first_fact_found_no_space_is_unknown_after_a_crash(world: SimWorld) -> None:
    """The fence fails on a full disk. A copy that comes later must not end the doubt, also after a restart."""

    async def scenario() -> None:
        shelf = Shelf(world.env("b1"), tiny())
        await shelf.storage.start(["the directory is a copy"])
        disk = world.node("b1").disk
        disk.set_capacity(1)
        with suppress(JournalFull):
            while True:
                shelf.storage.journal.append(RecordKind.LAC, 0, 99, 0, b"", use=Use.FACT)
        await shelf.storage.synced()
        assert await shelf.status(L, fence=True) is Status.IO_ERROR
        disk.mend()
        await pause(5)
        assert await shelf.add(L, 3, recovery=True) is Status.OK
        assert await shelf.status(L, 0) is Status.UNKNOWN_LEDGER_STATE
        await pause(1)

    async def again() -> None:
        shelf = await Shelf(world.env("b1"), tiny()).start()
        assert await shelf.status(L, 0) is Status.UNKNOWN_LEDGER_STATE

    run(world, scenario())
    crash(world)
    run(world, again())


@pytest.mark.parametrize("state", [LedgerState.OPEN, LedgerState.IN_RECOVERY])
@in_world
async def test_ledger_that_is_not_closed_stays_in_limbo(world: SimWorld, state: LedgerState) -> None:
    meta = knowing()
    shelf = await doubting(world, meta, 0, 1, 2)
    meta.known[L] = metadata(L, state=state, last_entry=2)
    assert await settle(shelf.storage, meta) == []
    assert await shelf.status(L, 3) is Status.UNKNOWN_LEDGER_STATE


@in_world
async def test_writer_of_a_formerly_doubted_ledger_is_judged_by_metadata(world: SimWorld) -> None:
    meta = knowing()
    shelf = await doubting(world, meta, 0, 1, 2, 3, 4)
    meta.known[L] = metadata(L, state=LedgerState.CLOSED, last_entry=LAST)
    assert await settle(shelf.storage, meta) == [L]
    assert await shelf.add(L, 5) is Status.FENCED


@in_world
async def test_deleted_ledger_is_dropped_with_its_doubt(world: SimWorld) -> None:
    meta = knowing()
    shelf = await doubting(world, meta, 0, 1)
    meta.known[L] = None
    assert await settle(shelf.storage, meta) == []
    reclaimer = Reclaimer(shelf.env, tiny(), shelf.storage, meta)
    assert await reclaimer.drop_deleted() == [L]
    assert shelf.storage.refresh_statistics().limbo_ledgers == 0
    assert await shelf.status(L, 0) is Status.NO_LEDGER


@in_world
async def test_limbo_does_not_end_while_metadata_is_unreadable(world: SimWorld) -> None:
    meta = knowing()
    shelf = await doubting(world, meta, 0)
    meta.is_away = True
    with pytest.raises(Exception, match="not connected"):
        await settle(shelf.storage, meta)
    assert await shelf.status(L, 1) is Status.UNKNOWN_LEDGER_STATE


B2, B3 = OTHERS


PAIRS = Quorum(2, 2, 2)


def closed(last: int, *fragments: Fragment, quorum: Quorum = PAIRS) -> LedgerMetadata:
    return LedgerMetadata(L, quorum, fragments, state=LedgerState.CLOSED, last_entry=EntryId(last))


def test_completeness_counts_only_entries_that_name_the_bookie() -> None:
    changed = closed(9, Fragment(EntryId(0), (ME, B2)), Fragment(EntryId(3), (B2, B3)), Fragment(EntryId(7), (ME, B3)))
    assert is_complete(changed, ME, [(0, 3), (7, 3)])
    assert is_complete(changed, ME, [(0, 10)])
    assert not is_complete(changed, ME, [(0, 2), (7, 3)])
    assert not is_complete(changed, ME, [(0, 3), (7, 2)])
    assert not is_complete(changed, ME, [(0, 3), (8, 2)])
    assert not is_complete(changed, ME, [])
    assert is_complete(closed(9, Fragment(EntryId(0), (B2, B3))), ME, [])
    assert is_complete(closed(-1, Fragment(EntryId(0), (ME, B2))), ME, [])


def test_abandoned_entries_leave_no_doubt() -> None:
    """Nobody has them: the ledger would be in doubt, and marked at each scrub, forever."""
    given_up = with_lost(closed(9, Fragment(EntryId(0), (ME, B2))), [EntryId(4), EntryId(5)])
    assert is_complete(given_up, ME, [(0, 4), (6, 4)])
    assert not is_complete(given_up, ME, [(0, 3), (6, 4)])
    assert not is_complete(given_up, ME, [(0, 4), (7, 3)])


def test_very_many_abandoned_entries_are_skipped_at_once() -> None:
    """All ledgers in doubt are checked every ten seconds, on the event loop."""
    many = 1 << 40
    ledger = closed(many + 9, Fragment(EntryId(0), (ME, B2)))
    given_up = replace(ledger, custom=((LOST_KEY, f"4-{many}".encode()),))
    assert is_complete(given_up, ME, [(0, 6), (many + 1, 9)])
    assert not is_complete(given_up, ME, [(0, 6), (many + 2, 8)])


def test_striped_ledger_is_complete_with_every_entry_of_its_write_sets() -> None:
    striped = closed(5, Fragment(EntryId(0), (ME, B2, B3)), quorum=Quorum(3, 2, 2))
    mine = [entry for entry in range(6) if ME in striped.write_set(EntryId(entry))]
    assert mine == [0, 2, 3, 5]
    assert is_complete(striped, ME, [(0, 1), (2, 2), (5, 1)])
    assert not is_complete(striped, ME, [(0, 1), (2, 1), (5, 1)])
