"""Auto-recovery's data in the metadata store, on every driver: marks, locks, switches, the auditor's election."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.errors import ConfigError, MetadataUnavailable, UndecodableNode
from kvstore.meta import marks, paths
from kvstore.meta.auditor_votes import AuditorVotes, auditor_or_none
from kvstore.meta.layout import LayoutStore
from kvstore.meta.memory import MemoryStore
from kvstore.meta.recovery_settings import CheckKind, RecoverySettings
from kvstore.meta.store import MetadataStore, Stat
from kvstore.meta.underreplication import Underreplication
from kvstore.types import BookieId, LedgerId
from tests.meta.drivers import ClosedStore, Driver, FaultyStore, Hint, LaggingStore

B1, B2, B3 = BookieId("b1-1"), BookieId("b2-1"), BookieId("b3-1")
SEVEN = LedgerId(7)


async def marked(store: MetadataStore) -> dict[LedgerId, tuple[BookieId, ...]]:
    return {mark.ledger: mark.replicas async for mark in Underreplication(store).marked()}


async def nodes_below(store: MetadataStore, path: str) -> list[str]:
    await store.sync(path)
    return await store.children(path)


# docs/protocol.md A1
async def test_marks_of_one_ledger_are_merged(store: MetadataStore, other: MetadataStore) -> None:
    await LayoutStore(store).ensure("id")
    mine, theirs = Underreplication(store), Underreplication(other)
    await asyncio.gather(mine.mark(SEVEN, [B1], 5), theirs.mark(SEVEN, [B2], 5), mine.mark(SEVEN, [B3, B1], 5))
    found = await marked(store)
    assert set(found) == {7}
    assert sorted(found[SEVEN]) == [B1, B2, B3]
    assert not await mine.mark(SEVEN, [B2], 6), "it is named already"
    await theirs.mark(LedgerId(2**40), [B1], 6)
    await theirs.mark(LedgerId(8), [B1], 6)
    assert list(await marked(store)) == [7, 8, 2**40], "rising"


async def test_marked_ledgers_are_listed_many_per_request(store: MetadataStore) -> None:
    repair = Underreplication(store)
    ledgers = [LedgerId(each) for each in (3, *range(1_000, 1_040), 2**40, 2**63 - 1)]
    for ledger in reversed(ledgers):
        await repair.mark(ledger, [B1], 5)
    await store.create(f"{paths.MARKS}/0000/0000/0000/other")
    asked: list[str] = []

    async def children(path: str) -> list[str]:
        asked.append(path)
        return await Underreplication._children(repair, path)

    repair._children = children  # type: ignore[method-assign]
    assert [ledger async for ledger in repair.marked_ledgers()] == ledgers
    assert len(asked) < len(ledgers) / 2


async def test_remains_of_a_dead_workers_mark_are_removed_by_the_next_lock(store: MetadataStore) -> None:
    repair = Underreplication(store)
    await repair.mark(SEVEN, [B1], 5)
    await repair.mark(LedgerId(8), [B1], 5)
    await store.delete(paths.mark(SEVEN), -1)
    assert [ledger async for ledger in repair.marked_ledgers()] == [7, 8], "it cannot be told from a mark"
    assert await repair.lock(SEVEN, "w1") is None
    assert [ledger async for ledger in repair.marked_ledgers()] == [8]
    assert await nodes_below(store, paths.MARK_LOCKS) == []


# docs/protocol.md A1
async def test_newly_found_damage_rewrites_a_mark(store: MetadataStore) -> None:
    repair = Underreplication(store)
    await repair.ensure()
    await repair.mark(SEVEN, [B1], 5)
    before = await repair.get(SEVEN)
    assert await repair.mark(SEVEN, [B1], 4, rewrite=True), "also where a clock went back"
    after = await repair.get(SEVEN)
    assert before is not None
    assert after is not None
    assert (after.replicas, after.version) == ((B1,), before.version + 1)


# docs/protocol.md A1
async def test_unreadable_mark_is_rewritten(store: MetadataStore) -> None:
    repair = Underreplication(store)
    await repair.mark(SEVEN, [B1], 5)
    await store.set(paths.mark(SEVEN), b"\xff", 0)
    assert await marked(store) == {SEVEN: ()}
    await repair.mark(SEVEN, [B2], 6)
    assert await marked(store) == {SEVEN: (B2,)}


# docs/protocol.md A2
async def test_one_worker_holds_the_lock_of_a_marked_ledger(store: MetadataStore, other: MetadataStore) -> None:
    mine, theirs = Underreplication(store), Underreplication(other)
    await mine.ensure()
    assert await mine.lock(SEVEN, "n1") is None, "nothing is marked"
    assert await nodes_below(store, paths.MARK_LOCKS) == []
    await mine.mark(SEVEN, [B1], 5)
    await other.sync("/")
    lock = await mine.lock(SEVEN, "n1")
    assert lock is not None
    assert lock.mark.replicas == (B1,)
    assert lock.is_held
    await other.sync("/")
    assert await theirs.lock(SEVEN, "n2") is None
    assert await mine.lock(SEVEN, "n1-second") is None
    assert await theirs.holder_or_none(SEVEN) == "n1"
    await lock.release()
    await lock.release()
    await other.sync("/")
    assert await theirs.holder_or_none(SEVEN) is None
    assert await theirs.lock(SEVEN, "n2") is not None


# docs/protocol.md A2
async def test_lock_ends_with_its_session_and_then_releases_no_other_lock(
    driver: Driver, store: MetadataStore, other: MetadataStore
) -> None:
    mine, theirs = Underreplication(store), Underreplication(other)
    await mine.mark(SEVEN, [B1], 5)
    lock = await mine.lock(SEVEN, "n1")
    assert lock is not None
    await driver.expire(store)
    assert not lock.is_held
    await other.sync("/")
    assert await theirs.lock(SEVEN, "n2") is not None
    await lock.release()
    assert await theirs.holder_or_none(SEVEN) == "n2"


# docs/protocol.md A3
async def test_mark_of_a_repaired_ledger_is_removed_with_its_parents(store: MetadataStore) -> None:
    repair = Underreplication(store)
    await repair.ensure()
    for ledger in (SEVEN, LedgerId(8)):
        await repair.mark(ledger, [B1], 5)
    for ledger, left in ((LedgerId(8), {SEVEN: (B1,)}), (SEVEN, {})):
        lock = await repair.lock(ledger, "n1")
        assert lock is not None
        assert await repair.mark_replicated(lock, lock.mark.version)
        assert await marked(store) == left
    assert await nodes_below(store, paths.MARKS) == []
    assert await nodes_below(store, paths.MARK_LOCKS) == []


# docs/protocol.md A3
async def test_mark_that_grew_during_the_repair_stays(store: MetadataStore, other: MetadataStore) -> None:
    repair = Underreplication(store)
    await repair.mark(SEVEN, [B1], 5)
    lock = await repair.lock(SEVEN, "n1")
    assert lock is not None
    await Underreplication(other).mark(SEVEN, [B2], 6)
    assert not await repair.mark_replicated(lock, lock.mark.version)
    assert await marked(store) == {SEVEN: (B1, B2)}
    assert await repair.lock(SEVEN, "n1") is not None, "released all the same"


async def test_switch_delay_and_times_are_seen_by_all(store: MetadataStore, other: MetadataStore) -> None:
    mine, theirs = RecoverySettings(store), RecoverySettings(other)
    turned, set_to = Hint(), Hint()
    watches = [theirs.watch_enabled(turned), theirs.watch_lost_bookie_delay(set_to)]
    assert await theirs.is_enabled()
    for _ in range(2):
        await mine.disable()
    await turned.wait()
    assert not await theirs.is_enabled()
    for _ in range(2):
        await mine.enable()
    assert await theirs.is_enabled()
    assert await theirs.lost_bookie_delay_s() is None
    await mine.initialise_lost_bookie_delay_s(60)
    await mine.initialise_lost_bookie_delay_s(90)
    await set_to.wait()
    assert await theirs.lost_bookie_delay_s() == 60
    await mine.set_lost_bookie_delay_s(5)
    assert await theirs.lost_bookie_delay_s() == 5
    assert await theirs.checked_ms(CheckKind.ENTRIES) is None
    for at_ms in (5, 6):
        await mine.set_checked(CheckKind.ENTRIES, at_ms)
    assert (await theirs.checked_ms(CheckKind.ENTRIES), await theirs.checked_ms(CheckKind.PLACEMENT)) == (6, None)
    for watch in watches:
        watch.close()


async def test_unreadable_node_is_named(store: MetadataStore) -> None:
    repair = Underreplication(store)
    await repair.ensure()
    await store.create(paths.LOST_BOOKIE_DELAY, b"soon")
    with pytest.raises(UndecodableNode, match="lostBookieRecoveryDelay"):
        await RecoverySettings(store).lost_bookie_delay_s()
    for layout in (b'type: "BASIC"\nversion: 2\n', b"?"):
        _, stat = await store.get(paths.MARKS_LAYOUT)
        await store.set(paths.MARKS_LAYOUT, layout, stat.version)
        with pytest.raises(ConfigError, match="LAYOUT"):
            await repair.ensure()


# docs/protocol.md A4
async def test_first_candidate_is_the_auditor_until_its_session_ends(
    driver: Driver, store: MetadataStore, other: MetadataStore
) -> None:
    await LayoutStore(store).ensure("id")
    assert await auditor_or_none(store) is None
    first, second = AuditorVotes(store, "n1"), AuditorVotes(other, "n2")
    assert await first.stand()
    assert not await second.stand()
    assert await first.stand(), "one vote"
    assert len(await nodes_below(store, paths.AUDITOR_VOTES)) == 2
    assert (await store.get(paths.AUDITOR_VOTES))[0] == marks.encode_vote("n1")
    changed = Hint()
    watch = second.watch(changed)
    await driver.expire(store)
    assert not first.is_auditor
    while not await second.stand():
        await changed.wait()
    watch.close()
    assert await auditor_or_none(store) == "n2"
    assert not await first.stand()
    await second.withdraw()
    assert not second.is_auditor
    assert await first.stand()


# docs/protocol.md P34
async def test_vote_of_another_user_keeps_no_candidate_from_voting() -> None:
    store = ClosedStore()
    await LayoutStore(store).ensure("id")
    other = MemoryStore(store.tree)
    assert await AuditorVotes(other, "n1").stand()
    (vote,) = await store.children(paths.AUDITOR_VOTES)
    store.closed = frozenset({paths.join(paths.AUDITOR_VOTES, vote)})
    votes = AuditorVotes(store, "n2")
    assert not await votes.stand()
    assert await auditor_or_none(store) == vote, "its name is unknown"
    other.expire()
    assert await votes.stand()


# docs/protocol.md P34
async def test_mark_below_a_directory_of_another_user_is_refused_by_its_name() -> None:
    store = ClosedStore()
    await LayoutStore(store).ensure("id")
    await Underreplication(MemoryStore(store.tree)).mark(SEVEN, [B1], 5)
    page = paths.parent(paths.parent(paths.mark(SEVEN)))
    store.closed = frozenset({page})
    repair = Underreplication(store)
    with pytest.raises(UndecodableNode, match=page):
        await repair.mark(LedgerId(70), [B1], 5)
    with pytest.raises(UndecodableNode, match=page):
        assert [each async for each in repair.marked_ledgers()]
    found = []
    assert [each async for each in repair.marked_ledgers(lambda path, _: found.append(path))] == []
    assert found == [page]


# docs/protocol.md A4
async def test_nobody_is_auditor_without_a_connection() -> None:
    store = FaultyStore()
    await LayoutStore(store).ensure("id")
    votes = AuditorVotes(store, "n1")
    assert await votes.stand()
    store.suspend()
    assert not votes.is_auditor
    store.resume()
    assert votes.is_auditor


@pytest.mark.parametrize("kind", ["lost", "done"])
async def test_calls_of_unknown_outcome_are_recognised(kind: str) -> None:
    store = FaultyStore()
    await LayoutStore(store).ensure("id")
    repair, votes = Underreplication(store), AuditorVotes(store, "n1")
    store.faults = [("create", kind)]
    assert await votes.stand()
    assert len(await store.children(paths.AUDITOR_VOTES)) == 1
    await repair.mark(SEVEN, [B1], 5)
    store.faults = [("create", kind)]
    lock = await repair.lock(SEVEN, "n1")
    assert lock is not None
    store.faults = [("delete", kind)]
    assert await repair.mark_replicated(lock, lock.mark.version)
    assert await marked(store) == {}
    assert await store.children(paths.MARK_LOCKS) == []


# docs/protocol.md A3
async def test_removal_whose_answer_was_lost_does_not_remove_the_next_mark() -> None:
    class Remarking(FaultyStore):
        """Another auditor marks the ledger between the removal and its repetition."""

        async def delete(self, path: str, version: int) -> None:
            is_lost = path == paths.mark(SEVEN) and bool(self.faults)
            try:
                await super().delete(path, version)
            finally:
                if is_lost:
                    await Underreplication(FaultyStore(self.tree)).mark(SEVEN, [B2], 6)

    store = Remarking()
    repair = Underreplication(store)
    await repair.mark(SEVEN, [B1], 5)
    lock = await repair.lock(SEVEN, "n1")
    assert lock is not None
    store.faults = [("delete", "done")]
    assert not await repair.mark_replicated(lock, lock.mark.version)
    assert await marked(store) == {SEVEN: (B2,)}


async def test_lock_whose_mark_cannot_be_read_is_released() -> None:
    class Forgetful(FaultyStore):
        """Fails to read a mark once its lock exists."""

        async def get(self, path: str) -> tuple[bytes, Stat]:
            if path == paths.mark(SEVEN) and await self.children(paths.MARK_LOCKS):
                raise MetadataUnavailable(path)
            return await super().get(path)

    store = Forgetful()
    await LayoutStore(store).ensure("id")
    repair = Underreplication(store)
    await repair.mark(SEVEN, [B1], 5)
    with pytest.raises(MetadataUnavailable):
        await repair.lock(SEVEN, "n1")
    assert await store.children(paths.MARK_LOCKS) == []


async def test_setting_is_written_if_only_a_lagging_server_shows_it() -> None:
    store = LaggingStore()
    await LayoutStore(store).ensure("id")
    mine, theirs = RecoverySettings(store), RecoverySettings(MemoryStore(store.tree))
    await mine.disable()
    await mine.set_lost_bookie_delay_s(60)
    store.lag()
    await theirs.enable()
    await mine.disable()
    assert not await theirs.is_enabled()
    store.lag()
    await theirs.set_lost_bookie_delay_s(5)
    await mine.set_lost_bookie_delay_s(60)
    assert await theirs.lost_bookie_delay_s() == 60
