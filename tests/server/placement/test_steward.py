"""Placement in the whole cluster: replicas of lost servers, newcomers that catch up, and retired partitions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.meta import paths
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.store import ensure_path
from kvstore.ring import Pace, PartitionState, Ring, plan, steps
from kvstore.ring.replicas import begin_replacing, drain
from kvstore.server.cluster.topology import Member
from kvstore.server.placement import steward as module
from kvstore.server.placement.newcomers import STUCK_S
from kvstore.server.placement.retirement import drop_kept, partitions_kept
from kvstore.server.placement.steward import CHECK_KEPT_S, CLOSE_BEHIND
from kvstore.types import BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, PartitionId, Position, Quorum, Seq
from kvstore.wal.creator import OWNER_KEY
from kvstore.wal.lists import LedgerLists, ReadersLists
from kvstore.wal.pins import Pins
from tests.ring.rings import advance, new_ring
from tests.server.placement.stewards import N1, N2, N3, N4, N5, P1, P2, P3, World, looks, remove_log
from tests.waiting import wait_until


async def test_replicas_are_recreated_only_after_long_absence(world: World) -> None:
    steward = world.steward()
    await looks(steward)
    del world.up[N2]
    await looks(steward)
    world.clock.at += 59
    await looks(steward)
    assert world.ring.version == 1
    world.clock.at += 2
    await looks(steward)
    assert {member.replacing for member in world.ring.partitions.values()} == {((N4, N2),)}


async def test_server_that_returned_restarts_its_absence(world: World) -> None:
    steward = world.steward()
    away = world.up.pop(N2)
    await looks(steward)
    world.clock.at += 59
    world.up[N2] = away
    await looks(steward)
    del world.up[N2]
    await looks(steward)
    world.clock.at += 59
    await looks(steward)
    assert world.ring.version == 1


async def test_drained_server_is_forgotten_and_not_missing(
    world: World,
) -> None:
    world.ring = drain(world.ring, N4)
    steward = world.steward()
    del world.up[N4]
    await looks(steward)
    assert world.ring.draining == (N4,)
    assert steward.statistics()["servers_missing"] == 0
    world.clock.at += 61
    await looks(steward)
    assert world.ring.draining == ()


async def test_no_server_counts_as_lost_while_metadata_store_is_down(world: World) -> None:
    steward = world.steward()
    del world.up[N2]
    await looks(steward)
    world.store.suspend()
    world.clock.at += 1_000

    async def has_forgotten() -> bool:
        return not steward.statistics()["servers_missing"]

    await wait_until(has_forgotten, what="the steward knows that it cannot tell")
    world.store.resume()
    await looks(steward)
    assert world.ring.version == 1


async def test_newcomer_replaces_only_when_close_behind(world: World) -> None:
    world.ring = begin_replacing(world.ring, P1, N4, N1)
    await world.publish(P1, N1, 10_000)
    await world.publish(P1, N2, 9_000)
    await world.publish(P1, N4, 10_000 - CLOSE_BEHIND - 1)
    steward = world.steward()
    await looks(steward)
    assert N1 in world.ring.partitions[P1].replicas
    await world.store.delete(paths.partition_replica(P1, N4), -1)
    await looks(steward)
    assert N1 in world.ring.partitions[P1].replicas, "a newcomer that is not up has not caught up"
    await world.publish(P1, N4, 10_000 - CLOSE_BEHIND)
    await looks(steward)
    assert set(world.ring.partitions[P1].replicas) == {N2, N3, N4}


# docs/protocol.md P34
async def test_undecodable_newcomer_blocks_nothing_else(world: World) -> None:
    """No replica of this partition has ever started: its znodes do not exist."""
    world.ring = begin_replacing(begin_replacing(world.ring, P1, N4, N1), P2, N4, N1)
    await world.publish(P2, N2, 9_000)
    await world.publish(P2, N4, 9_000)
    await looks(world.steward())
    assert N1 in world.ring.partitions[P1].replicas
    assert set(world.ring.partitions[P2].replicas) == {N2, N3, N4}


# docs/protocol.md H6
async def test_blocked_newcomer_gives_way_to_another_server(world: World) -> None:
    world.up[N5] = Member(id=N5, resp=f"{N5}:1")
    world.ring = begin_replacing(drain(world.ring, N1), P1, N4, N1)
    await world.publish(P1, N2, 10_000)
    await world.publish(P1, N4, 0)
    steward = world.steward()
    await looks(steward)
    world.clock.at += STUCK_S - 1
    await world.publish(P1, N4, 0, taken=(0, 1))
    await looks(steward)
    world.clock.at += STUCK_S - 1
    await looks(steward)
    assert world.ring.partitions[P1].replacing == ((N4, N1),), "it still takes in another's state"
    world.clock.at += 2
    await looks(steward)
    assert world.ring.partitions[P1].replacing == ((N5, N1),)


async def test_newcomer_of_old_release_is_not_stuck(world: World) -> None:
    world.up[N5] = Member(id=N5, resp=f"{N5}:1")
    world.ring = begin_replacing(drain(world.ring, N1), P1, N4, N1)
    await world.publish(P1, N2, 10_000)
    await world.publish(P1, N4, 0, taken=None)
    steward = world.steward()
    await looks(steward)
    world.clock.at += 2 * STUCK_S
    await looks(steward)
    assert world.ring.partitions[P1].replacing == ((N4, N1),)


async def test_newcomer_following_an_unreadable_log_is_not_stuck(world: World) -> None:
    world.up[N5] = Member(id=N5, resp=f"{N5}:1")
    world.ring = begin_replacing(drain(world.ring, N1), P1, N4, N1)
    await world.publish(P1, N2, 10_000, taken=(4, 700))
    await world.publish(P1, N4, 5_000, taken=(4, 300))
    steward = world.steward()
    for _ in range(4):
        await looks(steward)
        world.clock.at += STUCK_S / 2
    assert world.ring.partitions[P1].replacing == ((N4, N1),)


async def test_newcomer_that_is_down_or_without_source_is_not_stuck(world: World) -> None:
    world.up[N5] = Member(id=N5, resp=f"{N5}:1")
    world.ring = begin_replacing(begin_replacing(drain(world.ring, N1), P1, N4, N1), P2, N5, N1)
    await world.publish(P1, N2, 10_000)
    await world.publish(P2, N5, 0)
    away = world.up.pop(N4)
    steward = world.steward(repair_after_s=0)
    await looks(steward)
    world.clock.at += 2 * STUCK_S
    await looks(steward)
    world.up[N4] = away
    await looks(steward)
    assert [world.ring.partitions[each].replacing for each in (P1, P2)] == [((N4, N1),), ((N5, N1),)]


async def test_single_newcomer_cannot_be_judged(world: World) -> None:
    world.ring = begin_replacing(world.ring, P1, N4, N1)
    await world.publish(P1, N4, 5)
    await looks(world.steward())
    assert N1 in world.ring.partitions[P1].replicas


async def test_one_steward_acts_and_the_next_takes_over(world: World) -> None:
    second = world.steward(N2)
    del world.up[N3]
    await looks(second)
    world.clock.at += 61
    await looks(second)
    assert world.ring.version == 1, "n1 acts"
    del world.up[N1]
    await looks(second)
    assert world.ring.version > 1


async def retire(world: World, *partitions: PartitionId) -> None:
    """Retire P1, or the given partitions."""
    leaving = partitions or (P1,)
    world.ring = plan.leave(world.ring, leaving)
    while world.ring.moves:
        world.ring = advance(world.ring, min(world.ring.moves))
    assert all(world.ring.partitions[each].state is PartitionState.RETIRED for each in leaving)
    await world.store_ring()


async def log_of(
    world: World, partition: PartitionId, ledger: int, *, listed: bool = True, closed_end: Position | None = None
) -> None:
    fragments = (Fragment(EntryId(0), (BookieId("b1"), BookieId("b2"), BookieId("b3"))),)
    owner = ((OWNER_KEY, partition.encode()),)
    metadata = LedgerMetadata(LedgerId(ledger), Quorum(3, 3, 2), fragments, custom=owner, token=7)
    await LedgerStore(world.store).create(metadata)
    if listed:
        lists = LedgerLists(world.store)
        found, version = await lists.make(partition)
        made = found.with_ledger(LedgerId(ledger), Seq(1), epoch=1, lease_ms=500, closed_end=closed_end)
        await lists.write(partition, made, version)


async def test_retired_partition_leaves_nothing_behind(world: World) -> None:
    await log_of(world, P1, 1)
    await log_of(world, P1, 2, listed=False)
    await log_of(world, P2, 3)
    await retire(world)
    steward = world.steward()
    await looks(steward)
    assert set(world.ring.partitions) == {P2}
    assert world.ring.retired == (P1,)
    world.clock.at += CHECK_KEPT_S
    await looks(steward)
    assert await LedgerStore(world.store).list_ids() == [3]
    assert await world.store.children(paths.PARTITIONS) == ["p2"]


async def test_retired_partition_stays_while_in_use(world: World) -> None:
    await log_of(world, P1, 1)
    await retire(world)
    await world.publish(P1, N1, 5)
    steward = world.steward()
    await looks(steward)
    assert P1 in world.ring.partitions
    pins = Pins(world.store, LedgerLists(world.store))
    await pins.hold(P1, "reader", LedgerId(1))
    await world.store.delete(paths.partition_replica(P1, N1), -1)
    await looks(steward)
    assert P1 in world.ring.partitions
    assert not await remove_log(world.store, P1, now_ms=0)
    await pins.release(P1, "reader")
    await looks(steward)
    assert P1 not in world.ring.partitions


async def test_log_of_retired_partition_is_kept_for_feeds(world: World) -> None:
    await log_of(world, P1, 1)
    await log_of(world, P1, 2, listed=False)
    await retire(world)
    assert await remove_log(world.store, P1, now_ms=0)
    assert await LedgerStore(world.store).list_ids() == [1], "what the list did not name can be read by nobody"
    assert await world.store.children(paths.PARTITIONS) == []
    leaders, readers = LedgerLists(world.store), ReadersLists(world.store)
    assert (await leaders.read(P1))[0].ledgers == (), "who would lead it finds nothing"
    assert [each.id for each in (await readers.read(P1))[0].ledgers] == [1]
    assert await remove_log(world.store, P1, now_ms=0), "again, after a crash"
    assert await LedgerStore(world.store).list_ids() == [1]
    _, stat = await world.store.get(paths.kept_log(P1))
    assert await drop_kept(world.store, now_ms=stat.modified_ms + 1_000, keep_ms=1_000) == 0, "still in the ring"
    await world.change(lambda ring: steps.forget(ring, P1))
    assert await drop_kept(world.store, now_ms=stat.modified_ms + 999, keep_ms=1_000) == 0
    assert await drop_kept(world.store, now_ms=stat.modified_ms + 1_000, keep_ms=1_000) == 1
    assert await LedgerStore(world.store).list_ids() == []
    assert await partitions_kept(world.store) == []


async def test_ledger_listed_during_retirement_is_kept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await log_of(world, P1, 1)
    await retire(world)
    read = LedgerLists.read

    async def and_another_lists_one(lists: LedgerLists, partition: PartitionId, *, latest: bool = False) -> Any:
        found = await read(lists, partition, latest=latest)
        monkeypatch.undo()
        await log_of(world, P1, 2)
        return found

    monkeypatch.setattr(LedgerLists, "read", and_another_lists_one)
    assert not await remove_log(world.store, P1, now_ms=0), "somebody leads it"
    assert await remove_log(world.store, P1, now_ms=0)
    assert await LedgerStore(world.store).list_ids() == [1, 2]
    await log_of(world, P1, 4)  # written by the leader of the emptied list
    assert await remove_log(world.store, P1, now_ms=0)
    assert await LedgerStore(world.store).list_ids() == [1, 2, 4]
    assert [each.id for each in (await ReadersLists(world.store).read(P1))[0].ledgers] == [1, 2, 4]


# docs/protocol.md G25, H5
async def test_reader_of_a_log_that_was_retired_twice_skips_nothing(world: World) -> None:
    """The end before the last two ledgers is not the same any more when ledgers are added."""
    for number in (1, 2, 3):
        await log_of(world, P1, number, closed_end=Position(LedgerId(number - 2), EntryId(7)))
    await retire(world)
    assert await remove_log(world.store, P1, now_ms=0)
    await log_of(world, P1, 4)  # written by the leader of the emptied list
    assert await remove_log(world.store, P1, now_ms=0)
    kept, _ = await ReadersLists(world.store).read(P1)
    assert [each.id for each in kept.ledgers] == [1, 2, 3, 4]
    assert kept.closed_before(Position(LedgerId(2), EntryId(0))) is None, "more entries of ledger 2 may follow"


async def test_log_is_not_retired_when_ring_has_changed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The partition may have been forgotten and its log dropped: an empty log would then be kept for good."""
    await log_of(world, P1, 1)
    await retire(world)
    read = LedgerLists.read

    async def and_another_changes_the_ring(lists: LedgerLists, partition: PartitionId, *, latest: bool = False) -> Any:
        found = await read(lists, partition, latest=latest)
        await world.change(lambda ring: steps.set_pace(ring, Pace(paused=True)))
        return found

    monkeypatch.setattr(LedgerLists, "read", and_another_changes_the_ring)
    assert not await remove_log(world.store, P1, now_ms=0)
    assert await partitions_kept(world.store) == []


async def test_ledger_listed_and_kept_is_kept_once(world: World) -> None:
    """A crash of an older version can leave them."""
    await log_of(world, P1, 1)
    await retire(world)
    data, _ = await world.store.get(paths.partition_log(P1))
    await ensure_path(world.store, paths.KEPT)
    await world.store.create(paths.kept_log(P1), data)
    await log_of(world, P1, 2)
    assert await remove_log(world.store, P1, now_ms=0)
    assert [each.id for each in (await ReadersLists(world.store).read(P1))[0].ledgers] == [1, 2]


async def test_partition_without_log_is_remembered(world: World) -> None:
    """It was added and cancelled at once. Treated as a partition whose log is gone, it would end every stream."""
    await log_of(world, P2, 3)
    await LedgerLists(world.store).make(P1)
    await retire(world)
    assert await remove_log(world.store, P1, now_ms=0)
    await world.change(lambda ring: steps.forget(ring, P1))
    _, stat = await world.store.get(paths.kept_log(P1))
    assert await drop_kept(world.store, now_ms=stat.modified_ms + 1_000, keep_ms=1_000) == 0
    assert await partitions_kept(world.store) == [P1]


async def test_paused_steward_keeps_no_list_of_removed_log(world: World) -> None:
    """Readers would take the log for one that never existed, and would not learn that they missed changes."""
    await log_of(world, P1, 1)
    await log_of(world, P2, 3)
    await retire(world)
    assert await remove_log(world.store, P1, now_ms=0)
    await world.change(lambda ring: steps.forget(ring, P1))
    _, stat = await world.store.get(paths.kept_log(P1))
    assert await drop_kept(world.store, now_ms=stat.modified_ms, keep_ms=0) == 1
    assert not await remove_log(world.store, P1, now_ms=0)
    assert await partitions_kept(world.store) == []


# docs/protocol.md P34
async def test_undecodable_node_does_not_block_other_retirements(world: World) -> None:
    """The undecodable nodes are another ledger, and the list of a partition that is about to leave."""
    world.ring = new_ring([P1, P2, P3], dict.fromkeys((N1, N2, N3), ""), 3)
    await log_of(world, P2, 3)
    await log_of(world, P3, 4)
    await world.store.create(paths.ledger(LedgerId(5)), b"no ledger")
    await retire(world, P1, P2)
    await LedgerLists(world.store).make(P1)
    await world.store.set(paths.partition_log(P1), b"no list", -1)
    steward = world.steward()
    await looks(steward)
    assert set(world.ring.partitions) == {P1, P3}
    world.clock.at += CHECK_KEPT_S
    await looks(steward)
    assert await LedgerStore(world.store).list_ids() == [4, 5]


# docs/protocol.md P34
async def test_undecodable_kept_list_does_not_block_other_logs(world: World) -> None:
    await log_of(world, P1, 1)
    await retire(world)
    assert await remove_log(world.store, P1, now_ms=0)
    await world.change(lambda ring: steps.forget(ring, P1))
    await world.store.create(paths.kept_log(PartitionId("p0")), b"no list")
    _, stat = await world.store.get(paths.kept_log(P1))
    assert await drop_kept(world.store, now_ms=stat.modified_ms + 1_000, keep_ms=1_000) == 1
    assert await partitions_kept(world.store) == ["p0"]


async def test_refused_change_does_not_block_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Ring) -> Ring:
        raise ValueError("never")

    wanted = (refuse, lambda ring: steps.set_pace(ring, Pace(paused=True)))
    monkeypatch.setattr(module, "decide", lambda *_: [SimpleNamespace(step=each) for each in wanted])
    await looks(world.steward())
    assert world.ring.pace.paused
