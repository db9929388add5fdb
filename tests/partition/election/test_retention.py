"""How far the log may be trimmed."""

import pytest

from kvstore.errors import VersionConflict
from kvstore.meta import paths
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.partition.election.absences import SAVE_S, ReplicaAbsences
from kvstore.partition.election.retention import FORGET_S, Away, LogRetention
from kvstore.types import PartitionId, Seq, ServerId

A, B, C = ServerId("a"), ServerId("b"), ServerId("c")
ALL = (A, B, C)
P = PartitionId("p1")
LOOK_S = 10.0


def said(**durable: int) -> dict[ServerId, Seq]:
    return {ServerId(name): Seq(seq) for name, seq in durable.items()}


def seen(**durable: int) -> LogRetention:
    retention = LogRetention({})
    retention.look(ALL, said(**durable), 0)
    return retention


def test_slowest_replica_holds_the_log() -> None:
    assert seen(a=9, b=5, c=7).floor(ALL, 2) == 5


def test_replica_never_seen_holds_the_whole_log() -> None:
    assert seen(a=9, b=5).floor(ALL, 2) == 0


def test_absent_replica_counts_with_its_last_sequence() -> None:
    retention = seen(a=9, b=5, c=7)
    retention.look(ALL, said(a=20, b=20), 100)
    assert retention.floor(ALL, 2) == 7


def test_absent_replica_is_forgotten_after_a_day_if_two_others_are_ahead() -> None:
    retention = seen(a=9, b=5, c=7)
    retention.look(ALL, said(a=20, b=30), FORGET_S + 1)
    assert retention.floor(ALL, 2) == 20


def test_absent_replica_still_counts_if_only_one_other_is_ahead() -> None:
    retention = seen(a=9, b=5, c=5)
    retention.look(ALL, said(a=20), FORGET_S + 1)
    assert retention.floor(ALL, 2) == 5


def test_wiped_replica_holds_the_log_from_the_start() -> None:
    retention = seen(a=9, b=5, c=7)
    retention.look(ALL, said(a=9, b=0, c=7), 1)
    assert retention.floor(ALL, 2) == 0


def test_returning_replica_counts_at_once_and_its_absence_restarts() -> None:
    retention = seen(a=9, b=9, c=7)
    retention.look(ALL, said(a=20, b=20), FORGET_S + 1)
    retention.look(ALL, said(a=20, b=20, c=8), 10)
    assert retention.floor(ALL, 2) == 8
    retention.look(ALL, said(a=20, b=20), FORGET_S)
    assert retention.floor(ALL, 2) == 8


def test_whole_log_is_held_with_fewer_replicas_than_copies() -> None:
    assert seen(a=9).floor((A,), 2) == 0
    assert seen(a=9).floor((A,), 1) == 9


async def lead(store: MemoryStore, looks: int, durable: dict[ServerId, Seq]) -> LogRetention:
    """What one leader sees, who is replaced after so many looks."""
    absences = ReplicaAbsences(store, P)
    retention = await absences.load()
    for look in range(looks):
        retention.look(ALL, durable, LOOK_S if look else 0.0)
        await absences.save(retention.away)
    return retention


async def made() -> MemoryStore:
    store = MemoryStore(MemoryTree(lambda: 0))
    for path in (paths.PARTITIONS, paths.partition(P)):
        await store.create(path)
    return store


async def test_dead_replica_is_forgotten_despite_changes_of_leader() -> None:
    """docs/protocol.md, G20: its day began again with each leader, and the log was never trimmed."""
    store = await made()
    await lead(store, 10, said(a=9, b=9, c=7))
    looks = 2 * int(SAVE_S / LOOK_S)
    leads = 0
    while (await lead(store, looks, said(a=20, b=20))).floor(ALL, 2) == 0:
        leads += 1
        assert leads * looks * LOOK_S < 2.5 * FORGET_S
    assert leads * looks * LOOK_S > FORGET_S
    assert (await lead(store, 2, said(a=20, b=20, c=7))).floor(ALL, 2) == 7
    assert (await ReplicaAbsences(store, P).load()).away == {}


async def test_former_leader_does_not_overwrite_the_count() -> None:
    store = await made()
    former = ReplicaAbsences(store, P)
    retention = await former.load()
    retention.look(ALL, said(a=20, b=20), FORGET_S)
    await lead(store, 20, said(a=20, b=20))
    try:
        await former.save(retention.away)
    except VersionConflict:
        assert (await former.load()).away[C] == Away(Seq(0), 180.0)
    else:
        raise AssertionError("it was taken")


async def test_unreadable_count_restarts_from_zero() -> None:
    store = await made()
    await store.create(paths.partition_away(P), b"nonsense")
    assert (await lead(store, 20, said(a=20, b=20))).away[C].away_s == 19 * LOOK_S
    assert (await ReplicaAbsences(store, P).load()).away[C].away_s > 0


async def test_deleted_count_restarts_from_zero() -> None:
    store = await made()
    absences = ReplicaAbsences(store, P)
    retention = await absences.load()
    for _ in range(3):
        retention.look(ALL, said(a=20, b=20), SAVE_S)
        await absences.save(retention.away)
    await store.delete(paths.partition_away(P), -1)
    retention.look(ALL, said(a=20, b=20), SAVE_S)
    with pytest.raises(VersionConflict):
        await absences.save(retention.away)
    retention = await absences.load()
    retention.look(ALL, said(a=20, b=20), SAVE_S)
    await absences.save(retention.away)
    assert (await ReplicaAbsences(store, P).load()).away[C].away_s == SAVE_S


# docs/protocol.md V4
def test_stopped_replica_counts_as_away_with_its_last_sequence() -> None:
    """It says every second how far it is, and would hold the log for ever."""
    for retention in (seen(a=9, b=5, c=7), LogRetention({})):
        retention.look(ALL, said(a=20, b=30), 0, said(c=7))
        retention.look(ALL, said(a=20, b=30), FORGET_S - 1, said(c=7))
        assert retention.floor(ALL, 2) == 7
        retention.look(ALL, said(a=20, b=30), 2, said(c=7))
        assert retention.floor(ALL, 2) == 20
