"""A lost bookie's copies are made elsewhere: first the copies, then the metadata. A scrub finds bad copies."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvstore.autorecovery.repair_machine import NO_SPARE
from kvstore.autorecovery.rereplicate import STILL_OPEN, Rereplicator, open_rereplicator
from kvstore.errors import MetadataUnknown, Unavailable
from kvstore.meta import paths
from kvstore.meta.cookie_store import CookieStore
from kvstore.meta.cookies import Cookie
from kvstore.meta.lost import with_lost
from kvstore.meta.memory import MemoryStore
from kvstore.meta.service_info import encode_service_info
from kvstore.meta.store import Change, ensure_path
from kvstore.types import BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, LedgerState, Quorum, Seq
from kvstore.wal.creator import OWNER_KEY
from kvstore.wal.lists import LedgerLists
from tests.sim.ledgers_and_logs.bench import B1, B2, B3, B4, LEDGER, Bench, P, appended, holders, run

COUNT = 12


def recopier(bench: Bench) -> Rereplicator:
    return Rereplicator(bench.env, bench.store, bench.bookies.view, bench.bookies, lambda *_: None)


async def closed(bench: Bench, *ensemble: BookieId, write: int = 0) -> None:
    """A closed ledger of COUNT entries."""
    handle = bench.handle(await bench.ledger(*ensemble, write=write))
    await appended(bench, handle, COUNT)
    await handle.close()


def test_rereplicate_copies_before_it_names_the_copies() -> None:
    async def case(bench: Bench) -> None:
        await closed(bench)
        bench.bookies.stop(B3)
        bench.store.freeze()
        bench.env.nursery.spawn(recopier(bench).replace(B3), name="replace")
        await bench.pass_time(1)
        assert (await bench.recorded()).fragments[0].ensemble == (B1, B2, B3), "not yet"
        assert bench.bookies.at[B4].of(LEDGER) == list(range(COUNT)), "everything is there before it is named"
        bench.store.thaw()
        await bench.pass_time()
        found = await bench.recorded()
        assert found.fragments[0].ensemble == (B1, B2, B4)
        assert (found.state, found.last_entry) == (LedgerState.CLOSED, COUNT - 1)

    run(case, bookies=4)


def test_rereplicate_gives_a_striped_ledger_only_the_lost_bookies_entries() -> None:
    async def case(bench: Bench) -> None:
        await closed(bench, B1, B2, B3, write=2)
        lost = bench.bookies.at[B3].of(LEDGER)
        assert 0 < len(lost) < COUNT
        bench.bookies.stop(B3)
        moved = await recopier(bench).replace(B3)
        assert [(each.copied, each.blocked) for each in moved] == [(len(lost), "")]
        assert bench.bookies.at[B4].of(LEDGER) == lost

    run(case, bookies=4)


def test_rereplicate_never_copies_a_damaged_copy() -> None:
    async def case(bench: Bench) -> None:
        await closed(bench)
        bench.bookies.stop(B3)
        for entry in range(COUNT):
            damaged = bytearray(bench.bookies.at[B1].entries[LEDGER, EntryId(entry)])
            damaged[-1] ^= 1
            bench.bookies.at[B1].entries[LEDGER, EntryId(entry)] = bytes(damaged)
        await recopier(bench).replace(B3)
        assert bench.bookies.at[B4].entries == bench.bookies.at[B2].entries

    run(case, bookies=4)


def test_rereplicate_keeps_the_old_name_of_what_cannot_be_copied() -> None:
    async def case(bench: Bench) -> None:
        await closed(bench)
        bench.bookies.stop(B1, B2, B3)
        (moved,) = await recopier(bench).replace(B3)
        assert moved.blocked
        assert (await bench.recorded()).fragments[0].ensemble == (B1, B2, B3)

    run(case, bookies=6)


def test_rereplicate_reports_that_there_is_no_spare_bookie() -> None:
    async def case(bench: Bench) -> None:
        await closed(bench)
        bench.bookies.stop(B3)
        assert [each.blocked for each in await recopier(bench).replace(B3)] == [NO_SPARE]

    run(case, bookies=3)


async def with_cookie(bench: Bench, bookie: BookieId) -> CookieStore:
    """The cookies, including one of that bookie, which has never started."""
    store = MemoryStore(bench.tree)
    await ensure_path(store, paths.AVAILABLE)
    cookies = CookieStore(store)
    where = {"journal_dirs": ("/j",), "ledger_dirs": ("/j",), "index_dirs": ("/i",)}
    await cookies.write(Cookie(bookie=bookie, instance_id="c", **where), None)
    return cookies


# docs/protocol.md A10
def test_rereplicate_keeps_places_and_id_of_a_bookie_that_returns() -> None:
    """Ledgers are created on it from then on. If its cookie were deleted or its directories emptied, they would be
    under-replicated."""

    async def case(bench: Bench) -> None:
        await closed(bench)
        cookies = await with_cookie(bench, B3)
        bench.bookies.stop(B3)
        operator = recopier(bench)
        assert [each.blocked for each in await operator.replace(B3)] == [""]
        node = MemoryStore(bench.tree)
        await node.create(paths.available(B3), ephemeral=True)
        with pytest.raises(Unavailable, match=f"bookie {B3} is back"):
            await operator.forget(B3)
        fragment = Fragment(EntryId(0), (B1, B2, B3))
        await bench.ledgers.create(LedgerMetadata(LedgerId(7), Quorum(3, 3, 2), (fragment,), token=2))
        await node.delete(paths.available(B3), -1)
        with pytest.raises(Unavailable, match=r"may be named by ledgers \[7\]"):
            await operator.forget(B3)
        assert await cookies.bookies() == [B3]
        await bench.ledgers.remove(LedgerId(7), 0)
        await operator.forget(B3)
        assert await cookies.bookies() == []

    run(case, bookies=4)


# docs/protocol.md A10
def test_rereplicator_follows_bookies_until_it_is_closed() -> None:
    async def case(bench: Bench) -> None:
        store, node = MemoryStore(bench.tree), MemoryStore(bench.tree)
        await ensure_path(node, paths.READONLY)
        async with open_rereplicator(bench.env, store) as recopying_now:
            assert not recopying_now.is_up(B3)
            await node.create(paths.available(B3), encode_service_info("b3:3181"), ephemeral=True)
            await bench.pass_time(1)
            assert recopying_now.is_up(B3)

    run(case)


# docs/protocol.md A10
@pytest.mark.parametrize("registers", [False, True])
def test_rereplicate_keeps_the_id_of_a_bookie_that_starts_last_moment(registers: bool) -> None:
    """The start raises the version of the cookie; or it did so long before, and the bookie registers between the last
    check and the delete."""

    async def case(bench: Bench) -> None:
        cookies = await with_cookie(bench, B3)
        found, version = await cookies.read(B3)
        delete, node = CookieStore.delete, MemoryStore(bench.tree)

        async def late(self: CookieStore, bookie: BookieId, at: int) -> None:
            if registers:
                await node.create(paths.available(B3), ephemeral=True)
            else:
                await cookies.write(found, version)
            await delete(self, bookie, at)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CookieStore, "delete", late)
            with pytest.raises(Unavailable, match=f"bookie {B3} (is back|has just been started)"):
                await recopier(bench).forget(B3)
        assert (await cookies.read(B3))[0] == found

    run(case, bookies=4)


# docs/protocol.md A10
def test_id_of_a_bookie_that_returns_stays_when_the_answer_is_lost() -> None:
    """The cookie is deleted although the connection breaks. The bookie has registered and seen its cookie before that,
    so it serves, and without a cookie its next start would fail."""

    async def case(bench: Bench) -> None:
        cookies = await with_cookie(bench, B3)
        found, _ = await cookies.read(B3)
        multi, node = MemoryStore.multi, MemoryStore(bench.tree)

        async def lose_one_answer(self: MemoryStore, changes: Sequence[Change]) -> None:
            patch.undo()
            await node.create(paths.available(B3), ephemeral=True)
            await multi(self, changes)
            raise MetadataUnknown("the connection broke")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MemoryStore, "multi", lose_one_answer)
            with pytest.raises(Unavailable, match=f"bookie {B3} is back"):
                await recopier(bench).forget(B3)
        assert (await cookies.read(B3))[0] == found

    run(case, bookies=4)


def test_rereplicate_leaves_an_open_ledger_to_its_writer() -> None:
    async def case(bench: Bench) -> None:
        await appended(bench, bench.handle(await bench.ledger()), COUNT)
        bench.bookies.stop(B3)
        assert [each.blocked for each in await recopier(bench).replace(B3)] == [STILL_OPEN]
        assert holders(bench, 0) == [B1, B2, B3]

    run(case, bookies=4)


@pytest.mark.parametrize(
    ("listed", "blocked"),
    [((3,), STILL_OPEN), ((3, 4), STILL_OPEN), ((4, 5), STILL_OPEN), ((5,), ""), ((), STILL_OPEN)],
    ids=str,
)
def test_rereplicate_ignores_an_open_ledger_that_its_log_passed_over(listed: tuple[int, ...], blocked: str) -> None:
    """The log may still reach a ledger after the last one in its list."""
    four = LedgerId(4)

    async def case(bench: Bench) -> None:
        metadata = LedgerMetadata(
            four, Quorum(3, 3, 2), (Fragment(EntryId(0), (B1, B2, B3)),), custom=((OWNER_KEY, P.encode()),), token=7
        )
        await bench.ledgers.create(metadata)
        lists = LedgerLists(bench.store)
        log, version = await lists.make(P)
        for number in listed:
            log = log.with_ledger(LedgerId(number), Seq(1), epoch=1, lease_ms=500)
        await lists.write(P, log, version)
        bench.bookies.stop(B3)
        (moved,) = await recopier(bench).replace(B3)
        assert moved.blocked == blocked

    run(case, bookies=4)


def test_rereplicate_waits_for_a_worker_that_was_faster() -> None:
    async def case(bench: Bench) -> None:
        await closed(bench)
        bench.bookies.stop(B3)
        await bench.mark(B3)
        lock = await bench.marks.lock(LEDGER, "another")
        assert lock is not None
        moving = bench.env.nursery.spawn(recopier(bench).replace(B3), name="replace")
        await bench.pass_time(10)
        assert bench.bookies.at[B4].of(LEDGER) == []
        await lock.release()
        assert [(each.copied, each.blocked) for each in await moving] == [(COUNT, "")]

    run(case, bookies=4)


def test_ledger_that_is_deleted_meanwhile_does_not_come_back() -> None:
    async def case(bench: Bench) -> None:
        await closed(bench)
        bench.bookies.stop(B3)
        bench.store.freeze()
        bench.env.nursery.spawn(recopier(bench).replace(B3), name="replace")
        await bench.pass_time(1)
        await bench.ports_on(bench.store).ledgers.remove(LEDGER, -1)
        bench.store.thaw()
        await bench.pass_time()
        assert await bench.ledgers.list_ids() == []

    run(case, bookies=4)


def test_scrub_finds_bad_copies_and_repairs_them_on_request() -> None:
    async def case(bench: Bench) -> None:
        await closed(bench)
        bookie = bench.bookies.at[B2]
        del bookie.entries[LEDGER, EntryId(3)]
        bookie.entries[LEDGER, EntryId(5)] = bookie.entries[LEDGER, EntryId(5)][:-1] + b"?"
        found = await recopier(bench).scrub(B2, repair=False)
        assert found == [(LEDGER, 3, "missing"), (LEDGER, 5, "damaged")]
        repaired = await recopier(bench).scrub(B2, repair=True)
        assert [fault.rpartition("; ")[2] for _, _, fault in repaired] == ["copied there again"] * 2
        assert await recopier(bench).scrub(B2, repair=False) == []
        assert await recopier(bench).scrub(B1, repair=False) == []
        assert bookie.entries == bench.bookies.at[B1].entries

    run(case, bookies=3)


# docs/protocol.md A14
@pytest.mark.parametrize("repair", [False, True])
def test_scrub_ignores_abandoned_entries(*, repair: bool) -> None:
    async def case(bench: Bench) -> None:
        await closed(bench)
        for bookie in (B1, B2, B3):
            del bench.bookies.at[bookie].entries[LEDGER, EntryId(3)]
        assert [entry for _, entry, _ in await recopier(bench).scrub(B2, repair=repair)] == [3]
        await bench.ledgers.update(LEDGER, lambda metadata: with_lost(metadata, [EntryId(3)]))
        del bench.bookies.at[B2].entries[LEDGER, EntryId(5)]
        assert [entry for _, entry, _ in await recopier(bench).scrub(B2, repair=repair)] == [5]

    run(case, bookies=3)
