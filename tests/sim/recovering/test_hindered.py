"""Obstacles to a repair, and how long they last: registered but useless bookies, entries that no bookie has, locks
whose release was lost (docs/protocol.md, A10)."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from kvstore.autorecovery.abandon import LedgerAbandonment, Loss
from kvstore.autorecovery.repair_machine import PATIENCE
from kvstore.autorecovery.repairer import LedgerRepairer, RepairOutcome
from kvstore.errors import BookieError, MetadataUnavailable
from kvstore.meta import paths
from kvstore.meta.lost import lost_entries
from kvstore.meta.memory import MemoryStore
from kvstore.proto.availability import HeldEntries
from kvstore.types import BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, Quorum
from kvstore.wal.copies import copying
from kvstore.wal.copies.copier import Copier
from kvstore.wal.copies.pace import CopyPace
from tests.meta.drivers import ClosedStore
from tests.sim.ledgers_and_logs.bench import B1, B2, B3, B4, B5, LEDGER, Bench, FrozenStore, appended, run
from tests.sim.recovering.cases import COUNT, Copies, closed, locks, recorded, until, until_unmarked

pytestmark = pytest.mark.sim


def dumb(bench: Bench, *bookies: BookieId) -> set[BookieId]:
    """Return registered bookies that do not report their entries until they are removed from the set."""
    list_of, found = bench.bookies.entries, set(bookies)

    async def entries(bookie: BookieId, ledger: LedgerId) -> HeldEntries:
        if bookie in found:
            raise BookieError(f"{bookie} does not say what it has")
        return await list_of(bookie, ledger)

    bench.bookies.entries = entries  # type: ignore[method-assign]
    return found


# docs/protocol.md P34
def test_closed_directory_of_marks_keeps_no_worker_from_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    far = LedgerId(2**40)
    page = paths.parent(paths.parent(paths.mark(far)))

    async def case(bench: Bench) -> None:
        await bench.store.create(paths.LAYOUT)
        for ledger in (LEDGER, far):
            await closed(bench, ledger)
            await bench.mark(B3, ledger=ledger)
        bench.bookies.stop(B3)
        store = ClosedStore(bench.tree)
        store.closed = frozenset({page})
        bench.worker(store=store)
        await until_unmarked(bench)
        await bench.pass_time(30)
        assert await bench.is_marked(far)
        assert [each.args[0] for each in caplog.records if "not repaired" in each.msg and each.args] == [page]
        store.closed = frozenset()
        await until_unmarked(bench, far)

    run(case, bookies=4)


def test_switch_closed_by_another_user_counts_as_off() -> None:
    async def case(bench: Bench) -> None:
        await bench.store.create(paths.LAYOUT)
        await bench.settings.disable()
        store = ClosedStore(bench.tree)
        store.closed = frozenset({paths.RECOVERY_DISABLED})
        worker = bench.worker(store=store)
        await bench.pass_time(30)
        assert not worker.statistics()["enabled"]

    run(case, bookies=4)


def test_lost_bookie_is_replaced_when_damaged_one_does_not_answer() -> None:
    """Only one good copy of each entry is left: its repair must not wait for a hanging disk."""

    async def case(bench: Bench) -> None:
        await closed(bench)
        bench.bookies.at[B2].entries.clear()
        bench.bookies.stop(B3)
        await bench.mark(B2, B3)
        hanging = dumb(bench, B2)
        bench.worker()
        await bench.pass_time(10)
        assert await recorded(bench) == (B1, B2, B4)
        assert bench.bookies.at[B4].of(LEDGER) == list(range(COUNT))
        assert await bench.is_marked(), "B2 still lacks copies"
        hanging.clear()
        await until_unmarked(bench)
        assert bench.bookies.at[B2].of(LEDGER) == list(range(COUNT))

    run(case, bookies=4)


@pytest.mark.parametrize("is_marked", [True, False])
def test_lost_bookie_is_replaced_when_another_takes_no_copies(is_marked: bool) -> None:
    async def case(bench: Bench) -> None:
        await closed(bench)
        for entry in (0, 7):
            del bench.bookies.at[B2].entries[LEDGER, EntryId(entry)]
        bench.bookies.stop(B3)
        copies = Copies(bench)
        copies.refusing.add(B2)
        await bench.mark(B3, *([B2] if is_marked else []))
        bench.worker()
        await bench.pass_time(10)
        assert await recorded(bench) == (B1, B2, B4)
        assert bench.bookies.at[B4].of(LEDGER) == list(range(COUNT))
        assert await bench.is_marked(), "B2 still lacks copies"
        copies.refusing.clear()
        await until_unmarked(bench)
        assert bench.bookies.at[B2].of(LEDGER) == list(range(COUNT))
        assert set(copies.made.values()) == {1}

    run(case, bookies=4)


def test_lost_bookie_is_replaced_when_apache_bookie_copies_are_unreadable() -> None:
    """The copies of such a bookie are read, because it also lists entries that it cannot read."""

    async def case(bench: Bench) -> None:
        await closed(bench)
        bench.bookies.stop(B3)
        await bench.mark(B2, B3)
        bench.bookies.at[B2].is_silent = True
        bench.worker()
        await bench.pass_time(60)
        assert await recorded(bench) == (B1, B2, B4)
        assert await bench.is_marked()
        bench.bookies.at[B2].is_silent = False
        await until_unmarked(bench)

    run(case, bookies=4)


def test_new_bookie_that_does_not_report_its_entries_is_finally_skipped() -> None:
    """Each attempt draws the same bookie, so that existing copies are found again."""

    async def case(bench: Bench) -> None:
        await closed(bench)
        bench.bookies.stop(B3)
        asked: list[BookieId] = []
        list_of = bench.bookies.entries

        async def entries(bookie: BookieId, ledger: LedgerId) -> HeldEntries:
            asked.append(bookie)
            if bookie == next(each for each in asked if each in (B4, B5)):
                raise BookieError(f"{bookie} does not say what it has")
            return await list_of(bookie, ledger)

        bench.bookies.entries = entries  # type: ignore[method-assign]
        await bench.mark(B3)
        bench.worker()
        await until_unmarked(bench, within_s=5.0 * 2**PATIENCE)
        (useless,) = {each for each in asked if each in (B4, B5)} - set(await recorded(bench))
        assert asked.count(useless) == PATIENCE

    run(case, bookies=5)


async def in_two_fragments(bench: Bench, count: int) -> tuple[Fragment, ...]:
    """Create a closed ledger in which B3 died in the middle of its entries."""
    metadata = LedgerMetadata(LEDGER, Quorum(3, 3, 2), (Fragment(EntryId(0), (B1, B2, B3)),), token=1)
    await bench.ledgers.create(metadata)
    handle = bench.handle(metadata)
    await appended(bench, handle, count // 2)
    bench.bookies.stop(B3)
    await appended(bench, handle, count // 2)
    await handle.close()
    return (await bench.recorded()).fragments


def forget(bench: Bench, entries: range) -> None:
    """Remove these entries from all bookies."""
    for model in bench.bookies.at.values():
        for entry in entries:
            model.entries.pop((LEDGER, EntryId(entry)), None)


def test_lost_fragment_does_not_stop_others_from_being_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for any number of its entries."""

    async def case(bench: Bench) -> None:
        monkeypatch.setattr(copying, "UNREADABLE_MAX", 10)
        _, second = await in_two_fragments(bench, 80)
        (newcomer,) = {B4, B5}.intersection(second.ensemble)
        (spare,) = {B4, B5} - {newcomer}
        forget(bench, range(second.first))
        bench.bookies.stop(newcomer)
        await bench.mark(B3, newcomer)
        bench.worker()
        await until(lambda: bench.bookies.at[spare].of(LEDGER) == list(range(second.first, 80)))
        await bench.pass_time(1)
        before, after = (await bench.recorded()).fragments
        assert before.ensemble == (B1, B2, B3), "no bookie is named that lacks copies"
        assert set(after.ensemble) == {B1, B2, spare}
        assert await bench.is_marked()

    run(case, bookies=5)


async def given_up(repairer: LedgerRepairer, bench: Bench) -> tuple[Loss, RepairOutcome]:
    """Mark everything missing at this moment as lost."""
    abandonment = LedgerAbandonment(repairer, bench.marks, worker="operator")
    return await abandonment.abandon(LEDGER, 1, await abandonment.find_loss(LEDGER))


def test_remaining_fragments_are_copied_however_many_are_marked_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def case(bench: Bench) -> None:
        monkeypatch.setattr(copying, "UNREADABLE_MAX", 10)
        await closed(bench, count=80)
        forget(bench, range(60))
        bench.bookies.stop(B3)
        await bench.mark(B3)
        store = MemoryStore(bench.tree)
        repairer = LedgerRepairer(bench.ports_on(store), store, bench.env.nursery, CopyPace(bench.env.clock, 1 << 20))
        loss, mended = await given_up(repairer, bench)
        assert (loss.text, mended.is_complete, mended.reason) == ("0-59", True, "")
        (newcomer,) = {B4, B5}.intersection(await recorded(bench))
        assert bench.bookies.at[newcomer].of(LEDGER) == list(range(60, 80))
        assert lost_entries(await bench.recorded()) == [range(60)]
        assert not await bench.is_marked()
        bench.bookies.stop(B2)
        await bench.mark(B2)
        bench.worker()
        await until_unmarked(bench, within_s=10.0)

    run(case, bookies=5)


def test_fragments_marked_as_lost_need_no_space_on_full_disk() -> None:
    async def case(bench: Bench) -> None:
        await closed(bench)
        forget(bench, range(3, 4))
        bench.bookies.at[B2].is_readonly = True
        store = MemoryStore(bench.tree)
        repairer = LedgerRepairer(bench.ports_on(store), store, bench.env.nursery, CopyPace(bench.env.clock, 1 << 20))
        loss, mended = await given_up(repairer, bench)
        assert (loss.text, mended.is_complete, mended.reason) == ("3", True, "")

    run(case, bookies=4)


class NoReleases(FrozenStore):
    """A session whose locks cannot be released until it `heals`."""

    heals = False

    async def delete(self, path: str, version: int) -> None:
        if not self.heals and path.startswith(f"{paths.MARK_LOCKS}/"):
            raise MetadataUnavailable("no connection just now")
        await super().delete(path, version)


def test_lock_that_could_not_be_released_is_not_kept_for_a_whole_round() -> None:
    """At a low rate a round takes hours, in which no other worker could have the ledger."""

    async def case(bench: Bench) -> None:
        ledgers = [LedgerId(LEDGER + number) for number in range(20)]
        for ledger in ledgers:
            await closed(bench, ledger)
        bench.bookies.stop(B3)
        for ledger in ledgers:
            await bench.mark(B3, ledger=ledger)
        store = NoReleases(bench.tree)
        worker = bench.worker(store=store, bytes_per_s=200)
        left = set(ledgers)
        while len(left) > 19:
            await bench.pass_time(0.1)
            left = {each for each in ledgers if await bench.is_marked(each)}
        (done,) = set(ledgers) - left
        assert paths.mark_lock(done) in locks(bench)
        store.heals = True
        await until(lambda: paths.mark_lock(done) not in locks(bench), within_s=20.0)
        assert len([each for each in ledgers if await bench.is_marked(each)]) > 10, "it is still the same round"
        await until_unmarked(bench, *ledgers)
        await bench.pass_time(5)
        assert (locks(bench), worker.statistics()["ledgers_repaired"] >= 19) == ([], True)

    run(case, bookies=4)


def test_spreading_copies_over_zones_does_not_replace_restarting_bookie() -> None:
    """The leader names the bookies whose copies are to be spread: a mark without a bookie would mean all absent
    bookies."""

    async def case(bench: Bench) -> None:
        for bookie, zone in zip((B1, B2, B3, B4, B5), "aabcd", strict=True):
            bench.bookies.at[bookie].zone = zone
        await closed(bench)
        marked: list[frozenset[BookieId]] = []

        async def mark(ledger: LedgerId, bookies: Collection[BookieId]) -> None:
            marked.append(frozenset(bookies))
            await bench.mark(*bookies)

        pace = CopyPace(bench.env.clock, 1 << 20)
        Copier(bench.ports, bench.env.nursery, lambda: [(LEDGER, None)], mark=mark, pace=pace).start()
        await until(lambda: bool(marked))
        (leaving,) = marked[0]
        assert leaving in (B1, B2)
        bench.bookies.stop(B3)
        bench.worker()
        await until_unmarked(bench)
        assert B3 in await recorded(bench), "the bookie was only restarted"
        assert leaving not in await recorded(bench)

    run(case, bookies=5)


# docs/protocol.md W8
@pytest.mark.parametrize("is_open", [True, False])
def test_leader_finds_missing_copies_of_one_bookie_while_another_hangs(is_open: bool) -> None:
    """Only the leader knows what is missing in the ledger that it writes."""

    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        await appended(bench, handle, COUNT)
        if not is_open:
            await handle.close()
        for entry in (2, 3, 7):
            del bench.bookies.at[B3].entries[LEDGER, EntryId(entry)]
        hanging = dumb(bench, B2)
        marked: list[frozenset[BookieId]] = []

        async def mark(ledger: LedgerId, bookies: Collection[BookieId]) -> None:
            marked.append(frozenset(bookies))

        last, pace = EntryId(COUNT - 1) if is_open else None, CopyPace(bench.env.clock, 1 << 20)
        leaders = Copier(bench.ports, bench.env.nursery, lambda: [(LEDGER, last)], mark=mark, pace=pace)
        leaders.start()
        if is_open:
            await until(lambda: bench.bookies.at[B3].of(LEDGER) == list(range(COUNT)))
        else:
            await until(lambda: marked[:1] == [frozenset({B3})])
        await bench.pass_time(60)
        assert LEDGER in leaders.lacking, "it is unknown if the other bookie lacks copies"
        hanging.clear()
        if is_open:
            await until(lambda: not leaders.lacking)

    run(case, bookies=3)


# docs/protocol.md W8
def test_leader_keeps_copying_to_one_bookie_while_another_takes_nothing() -> None:
    async def case(bench: Bench) -> None:
        await appended(bench, bench.handle(await bench.ledger()), COUNT)
        for bookie in (B2, B3):
            for entry in (2, 3, 7):
                del bench.bookies.at[bookie].entries[LEDGER, EntryId(entry)]
        copies, pace = Copies(bench), CopyPace(bench.env.clock, 1 << 20)
        copies.refusing.add(B2)

        async def mark(ledger: LedgerId, bookies: Collection[BookieId]) -> None:
            raise AssertionError("it is open")

        last = EntryId(COUNT - 1)
        leaders = Copier(bench.ports, bench.env.nursery, lambda: [(LEDGER, last)], mark=mark, pace=pace)
        leaders.start()
        await until(lambda: bench.bookies.at[B3].of(LEDGER) == list(range(COUNT)))
        await bench.pass_time(60)
        assert B2 in leaders.lacking[LEDGER]
        copies.refusing.clear()
        await until(lambda: not leaders.lacking)
        assert bench.bookies.at[B2].of(LEDGER) == list(range(COUNT))

    run(case, bookies=3)
