"""What waits at a leader and is another partition's goes there before anything that comes later."""

from __future__ import annotations

from kvstore.partition import commands
from kvstore.partition.commands import Op
from kvstore.partition.config import PartitionConfig
from kvstore.partition.custody import Custody
from kvstore.partition.engine_memory import MemoryEngine
from kvstore.partition.expel import expelled
from kvstore.partition.queue import Queue, Shelf
from kvstore.partition.state import State
from kvstore.partition.tokens import EVERYTHING, Span
from kvstore.ring.hashing import token_of
from kvstore.types import PartitionId

CONFIG = PartitionConfig()
GONE, KEPT = b"gone", b"kept"


def custody() -> Custody:
    """Owns all but GONE."""
    found = Custody(State(PartitionId("p1"), MemoryEngine(), CONFIG))
    found.readable = EVERYTHING.without(Span(token_of(GONE), token_of(GONE)))
    return found


def expel(queued: list[Op], frozen: list[Op]) -> tuple[list[int], list[int]]:
    """Which leave, and which stay, by their numbers: first the frozen ones."""
    queue, shelf = Queue(CONFIG), Shelf(CONFIG)
    for number, op in enumerate(frozen):
        shelf.offer((op, None, number), 0.0)
    for number, op in enumerate(queued, len(frozen)):
        queue.offer((op, None, number))
    queue.stamp(0.0)
    gone = [item[2] for item, _ in expelled(queue, shelf, custody(), 1.0)]
    assert len(shelf) == 0
    return gone, [item[2] for item in queue.take_all()]


def test_what_is_not_owned_leaves_in_order_and_the_rest_stays_in_order() -> None:
    queued = [commands.put(KEPT, b"1"), commands.put(GONE, b"2"), commands.delete(KEPT), commands.delete(GONE)]
    frozen = [commands.put(GONE, b"0"), commands.put(KEPT, b"0")]
    assert expel(queued, frozen) == ([0, 3, 5], [1, 2, 4])


def test_a_batch_leaves_when_one_of_its_keys_is_not_owned() -> None:
    batch = commands.batch(KEPT, (commands.put(KEPT, b"1"), commands.put(GONE, b"1")))
    assert expel([batch, commands.batch(KEPT, (commands.put(KEPT, b"1"),))], []) == ([0], [1])


def test_what_names_no_key_and_what_is_malformed_is_decided_on_as_ever() -> None:
    assert expel([commands.delete_range(b"a", b"z"), (3, 7), (8, b"k", b"no operations")], []) == ([], [0, 1, 2])
