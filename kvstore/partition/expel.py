"""Which of the operations that wait at a leader belong to another partition by now. Decides only."""

from __future__ import annotations

from kvstore.errors import Moved
from kvstore.partition.commands import Code, Op
from kvstore.partition.custody import Custody
from kvstore.partition.evaluate import REAP, Item
from kvstore.partition.queue import Queue, Shelf
from kvstore.partition.rows import data_key

_KEYLESS = frozenset({REAP, int(Code.DELETE_RANGE)})


def expelled(queue: Queue, frozen: Shelf, custody: Custody, now: float) -> list[tuple[Item, Moved]]:
    """Take what is not owned out of both, in order. What is left waits in the queue."""
    gone: list[tuple[Item, Moved]] = []
    left: list[Item] = []
    for item in [*frozen.take_all(), *queue.take_all()]:
        moved = _moved(item[0], custody)
        if moved is None:
            left.append(item)
        else:
            gone.append((item, moved))
    queue.put_all_back(left, now)
    return gone


def _moved(op: Op, custody: Custody) -> Moved | None:
    """Why nobody here does the operation, if that is so already."""
    if op[0] in _KEYLESS:
        return None
    try:
        keys = [data_key(op[1])] if op[0] != Code.BATCH else [data_key(each[1]) for each in op[2]]
    except (TypeError, LookupError):
        return None  # malformed: refused when it is decided on
    return next((custody.moved(key) for key in keys if not custody.may_read(key)), None)
