"""Holds the writes that wait at a leader: for their entry, or for a range of tokens that takes no writes at the moment.
Decides only."""

from __future__ import annotations

from kvstore.errors import Moved
from kvstore.partition.config import PartitionConfig
from kvstore.partition.leading.evaluate import REAP, Item
from kvstore.partition.leading.queue import Arrived, FrozenWrites, WriteQueue
from kvstore.partition.leading.serving_ranges import ServingRanges
from kvstore.partition.state.commands import Code, Op
from kvstore.partition.state.rows import data_key
from kvstore.partition.state.traits import KEYLESS

_KEYLESS = KEYLESS | {REAP}


class WaitingWrites:
    """The writes that wait at one leader: `queue` for the next entry, `frozen` for a range."""

    def __init__(self, config: PartitionConfig) -> None:
        self.queue = WriteQueue(config)
        self.frozen = FrozenWrites(config)

    def __bool__(self) -> bool:
        return bool(self.queue or self.frozen)

    def put_aside(self, arrived: list[Arrived]) -> list[Item]:
        """Let operations wait until their range accepts writes. Returns the operations for which there is no
        capacity."""
        return [each[1] for each in arrived if not self.frozen.offer(each)]

    def unfreeze(self) -> None:
        """Move the operations that wait for a range to the front of the queue, because the set of writable ranges has
        changed."""
        self.queue.put_back(self.frozen.take_all())

    def redirect_moved(self, serving_ranges: ServingRanges, now: float) -> list[tuple[Item, Moved]]:
        """Remove and return, in order, the operations whose keys now belong to another partition. All other operations
        wait in the queue."""
        gone: list[tuple[Item, Moved]] = []
        left: list[Arrived] = []
        for arrived in [*self.frozen.take_all(), *self.queue.take_all(now)]:
            moved = _moved(arrived[1][0], serving_ranges)
            if moved is None:
                left.append(arrived)
            else:
                gone.append((arrived[1], moved))
        self.queue.put_back(left)
        return gone

    def take_all(self) -> list[Item]:
        """Remove and return all operations."""
        return [item for _, item in (*self.queue.take_all(0.0), *self.frozen.take_all())]

    def take_older(self, before: float) -> list[Item]:
        """Remove and return the operations that have waited since before `before`, in the queue or for a range."""
        return [*self.queue.take_older(before), *self.frozen.take_older(before)]


def _moved(op: Op, serving_ranges: ServingRanges) -> Moved | None:
    """Return the error that names the owner of the operation's key, or None if this partition owns the key."""
    if op[0] in _KEYLESS:
        return None
    try:
        keys = [data_key(op[1])] if op[0] != Code.BATCH else [data_key(each[1]) for each in op[2]]
    except (TypeError, LookupError):
        return None  # malformed: refused when it is evaluated
    return next((serving_ranges.moved(key) for key in keys if not serving_ranges.may_read(key)), None)
