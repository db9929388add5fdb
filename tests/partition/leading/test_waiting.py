"""Operations that wait at a leader and belong to another partition go there before later ones."""

from __future__ import annotations

from kvstore.partition.config import PartitionConfig
from kvstore.partition.leading.serving_ranges import ServingRanges
from kvstore.partition.leading.waiting import WaitingWrites
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Op
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.tokens import EVERYTHING, TokenSpan
from kvstore.types import PartitionId
from tests.partition.state.engine_memory import MemoryEngine
from tests.ring import rings

CONFIG = PartitionConfig()
GONE, KEPT = b"gone", b"kept"


def serving_ranges() -> ServingRanges:
    """Own everything except GONE."""
    found = ServingRanges(ReplicaState(PartitionId("p1"), MemoryEngine(), CONFIG, rings.key_hash))
    found.readable = EVERYTHING.without(TokenSpan(rings.key_hash.token_of(GONE), rings.key_hash.token_of(GONE)))
    return found


def redirect_moved(queued: list[Op], frozen: list[Op]) -> tuple[list[int], list[int]]:
    """Return which operations leave and which stay, by number, the frozen ones first."""
    waiting = waiting_of(queued, frozen)
    gone = [item[2] for item, _ in waiting.redirect_moved(serving_ranges(), 1.0)]
    assert len(waiting.frozen) == 0
    return gone, [item[2] for _, item in waiting.queue.take_all(1.0)]


def waiting_of(queued: list[Op], frozen: list[Op]) -> WaitingWrites:
    """Make operations that have waited since time 0, numbered, the frozen ones first."""
    waiting = WaitingWrites(CONFIG)
    assert waiting.put_aside([(0.0, (op, None, number)) for number, op in enumerate(frozen)]) == []
    for number, op in enumerate(queued, len(frozen)):
        waiting.queue.offer((op, None, number))
    waiting.queue.stamp(0.0)
    return waiting


def test_keys_not_owned_leave_in_order_and_the_others_stay_in_order() -> None:
    queued = [commands.Put(KEPT, b"1"), commands.Put(GONE, b"2"), commands.Delete(KEPT), commands.Delete(GONE)]
    frozen = [commands.Put(GONE, b"0"), commands.Put(KEPT, b"0")]
    assert redirect_moved(queued, frozen) == ([0, 3, 5], [1, 2, 4])


def test_batch_leaves_when_one_of_its_keys_is_not_owned() -> None:
    batch = commands.Batch(KEPT, (commands.Put(KEPT, b"1"), commands.Put(GONE, b"1")))
    assert redirect_moved([batch, commands.Batch(KEPT, (commands.Put(KEPT, b"1"),))], []) == ([0], [1])


def test_keyless_and_malformed_operations_stay() -> None:
    assert redirect_moved(
        [commands.DeleteRange(b"a", b"z"), commands.Put(7, b""), commands.Batch(b"k", b"no operations")], []
    ) == (
        [],
        [0, 1, 2],
    )


def test_unfrozen_operations_are_evaluated_before_queued_ones() -> None:
    waiting = waiting_of([commands.Put(KEPT, b"2")], [commands.Put(KEPT, b"0"), commands.Put(KEPT, b"1")])
    waiting.unfreeze()
    assert [item[2] for item in waiting.queue.take(1.0).items] == [0, 1, 2]
    assert not waiting


def test_overdue_operations_are_removed_from_queue_and_range() -> None:
    waiting = waiting_of([commands.Put(KEPT, b"1")], [commands.Put(KEPT, b"0")])
    assert waiting.take_older(0.0) == []
    assert [item[2] for item in waiting.take_older(0.1)] == [1, 0]
    assert not waiting


def test_refrozen_operation_keeps_its_arrival_time() -> None:
    waiting = waiting_of([commands.Put(KEPT, b"2")], [commands.Put(KEPT, b"0"), commands.Put(KEPT, b"1")])
    waiting.queue.offer((commands.Put(KEPT, b"3"), None, 3))
    waiting.queue.stamp(4.0)
    for _ in range(3):
        waiting.unfreeze()
        taken = waiting.queue.take(5.0)
        assert waiting.put_aside(taken.arrived(taken.items[:2], 5.0)) == []
        waiting.queue.put_back(taken.arrived(taken.items[2:], 5.0))
        assert waiting.redirect_moved(serving_ranges(), 6.0) == []
    assert [item[2] for item in waiting.take_older(0.1)] == [0, 1, 2]
    assert [item[2] for item in waiting.take_older(4.1)] == [3]


def test_newer_operation_in_front_does_not_protect_older_ones() -> None:
    """The deletes of expired keys come first, and each is new."""
    waiting = waiting_of([commands.Put(KEPT, b"0")], [])
    waiting.queue.put_back([(9.0, (commands.Put(KEPT, b"1"), None, 1))])
    waiting.queue.offer((commands.Put(KEPT, b"2"), None, 2))
    assert [item[2] for item in waiting.take_older(5.0)] == [0]
    assert [item[2] for item in waiting.queue.take(10.0).items] == [1, 2]


def test_continuation_starts_its_own_wait() -> None:
    """The rest of a range delete has not waited: a part of it is done."""
    waiting = waiting_of([commands.DeleteRange(b"a", b"z"), commands.Put(KEPT, b"1")], [])
    taken = waiting.queue.take(4.0)
    waiting.queue.put_back(taken.arrived([(commands.DeleteRange(b"k", b"z"), None, 0), taken.items[1]], 4.0))
    assert [item[2] for item in waiting.take_older(1.0)] == [1]
    assert len(waiting.queue) == 1


def test_part_of_a_group_keeps_its_arrival_time() -> None:
    waiting = WaitingWrites(CONFIG)
    for number in range(1500):
        waiting.queue.offer((commands.Put(KEPT, b"1"), None, number))
    first = waiting.queue.take(3.0)
    assert len(first.items) == 1000
    waiting.queue.put_back(first.arrived(first.items[990:], 4.0))
    assert waiting.take_older(3.0) == []
    assert [item[2] for item in waiting.take_older(3.1)] == list(range(990, 1500))
    assert not waiting
    assert waiting.queue.bytes == 0
