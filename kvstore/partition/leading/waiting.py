"""Holds the writes that wait at a leader: for their entry, or for a range of tokens that takes no writes at the moment.
Decides only."""

from __future__ import annotations

from kvstore.errors import Moved
from kvstore.partition.config import PartitionConfig
from kvstore.partition.leading.evaluate import Item
from kvstore.partition.leading.queue import Arrived, FrozenWrites, WriteQueue
from kvstore.partition.leading.serving_ranges import ServingRanges
from kvstore.partition.state.commands import Op, Prepare, Transact
from kvstore.partition.state.rows import data_key
from kvstore.partition.state.traits import KEYLESS
from kvstore.partition.transactions.attempts import Decide, End


class WaitingWrites:
    """The writes that wait at one leader: `queue` for the next entry, `frozen` for a range, `locked` for the end of a
    transaction, `awaiting_mark` for a pin."""

    def __init__(self, config: PartitionConfig) -> None:
        self.queue = WriteQueue(config)
        self.frozen = FrozenWrites(config)
        self.locked = FrozenWrites(config)
        self.awaiting_mark = FrozenWrites(config)

    def __bool__(self) -> bool:
        return bool(self.queue or self.frozen or self.locked or self.awaiting_mark)

    def put_aside(self, arrived: list[Arrived]) -> list[Item]:
        """Let operations wait until their range accepts writes. Returns the operations for which there is no
        capacity."""
        return [each[1] for each in arrived if not self.frozen.offer(each)]

    # docs/protocol.md Tx9
    def lock(self, arrived: list[Arrived]) -> list[Item]:
        """Let operations wait until a transaction has ended. Returns the operations for which there is no capacity."""
        return [each[1] for each in arrived if not self.locked.offer(each)]

    def unlock(self, before: float) -> list[Item]:
        """Move the operations that wait for a transaction to the front of the queue. Those that wait for a range follow
        behind them, because on keys that both write they have arrived later (docs/protocol.md M15). Removes and returns
        the PREPAREs that arrived before `before`: their homes have dropped the attempts."""
        if not self.locked:
            return []
        self.unfreeze()
        waiting = self.locked.take_all()
        self.queue.put_back([each for each in waiting if not _is_late(each, before)])
        return [each[1] for each in waiting if _is_late(each, before)]

    # docs/protocol.md Tx13
    def await_mark(self, arrived: list[Arrived]) -> list[Item]:
        """Let records of transactions wait for a pin. Returns those for which there is no capacity."""
        return [each[1] for each in arrived if not self.awaiting_mark.offer(each)]

    def requeue_awaiting_mark(self) -> None:
        """Move the operations that wait for a pin to the front of the queue."""
        self.queue.put_back(self.awaiting_mark.take_all())

    def unfreeze(self) -> None:
        """Move the operations that wait for a range to the front of the queue, because the set of writable ranges has
        changed."""
        self.queue.put_back(self.frozen.take_all())

    def redirect_moved(self, serving_ranges: ServingRanges, now: float) -> list[tuple[Item, Moved]]:
        """Remove and return, in order, the operations whose keys now belong to another partition. All other operations
        wait in the queue."""
        gone: list[tuple[Item, Moved]] = []
        left: list[Arrived] = []
        waiting = (self.awaiting_mark, self.locked, self.frozen)  # on one key, the locked ones have arrived first
        for arrived in [*(each for held in waiting for each in held.take_all()), *self.queue.take_all(now)]:
            moved = _moved(arrived[1][0], serving_ranges)
            if moved is None:
                left.append(arrived)
            else:
                gone.append((arrived[1], moved))
        self.queue.put_back(left)
        return gone

    def take_all(self) -> list[Item]:
        """Remove and return all operations."""
        found = self.queue.take_all(0.0)
        for waiting in (self.frozen, self.locked, self.awaiting_mark):
            found += waiting.take_all()
        return [item for _, item in found]

    def take_older(self, before: float) -> list[Item]:
        """Remove and return the operations that have waited since before `before`, in the queue, for a range or for a
        pin."""
        return [*self.queue.take_older(before), *self.frozen.take_older(before), *self.awaiting_mark.take_older(before)]


def _is_late(arrived: Arrived, before: float) -> bool:
    at, (op, _, _) = arrived
    return at < before and isinstance(op, Prepare)


def _moved(op: Op, serving_ranges: ServingRanges) -> Moved | None:
    """Return the error that names the owner of the operation's key, or None if this partition owns the key."""
    if op.code in KEYLESS or isinstance(op, Decide | End):
        return None
    hash = serving_ranges.hash
    try:
        is_complete = op.ops and not isinstance(op, Transact | Prepare)  # these go where their first key is
        keys = [data_key(hash, each.key) for each in op.ops] if is_complete else [data_key(hash, op.key)]
    except (TypeError, AttributeError):
        return None  # malformed: refused when it is evaluated
    return next((serving_ranges.moved(key) for key in keys if not serving_ranges.may_read(key)), None)
