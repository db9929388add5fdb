"""Queues whose items are handed out one by one, each to one session at a time. Decides only.

An item is a key that ends with its ticket, from a counter: who has put before another one begins to put stands before
him. To take one is to write a claim beside it, a key of the session, if there is none. An item that is done goes with
its claim; the claim of a session that ends goes alone, and the item is handed out again: at least once, and to one at a
time (docs/protocol.md, Q6).
"""

from __future__ import annotations

from typing import NamedTuple

from kvstore.client.coordination.lease import SessionLease
from kvstore.client.coordination.steps import AwaitStep, FindStep, Found, Recipe, SessionEnded, WriteStep, is_news
from kvstore.client.core import operations
from kvstore.client.core.values import Level
from kvstore.client.core.watching import Change
from kvstore.errors import ConditionFailed, Refused

LOOKED_AT_FIRST, LOOKED_AT = 32, 1000
"""The first keys of a queue, claims before items: so many claims are there at most while items can be found. Who finds
nothing among few looks at more."""
CLAIM, ITEM, TICKETS, TIMES = b"claim-", b"item-", b"tickets", b"times-"
"""In the order of keys."""


class Taken(NamedTuple):
    """An item that was taken."""

    name: bytes
    """Its ticket, as the keys have it."""
    value: bytes
    token: int
    """The version of the claim. Who takes the item later has a higher one."""
    times: int = 1
    """How often it was taken, this time included: an item that nobody can finish is one with many."""


def put(prefix: bytes, value: bytes) -> Recipe[None]:
    """Put an item at the end. If the outcome is unknown it may be there."""
    counter = prefix + TICKETS
    # A counter that a namespace lets expire would begin again, and write over items that wait.
    ticket, _ = yield WriteStep(more=(operations.increment(counter), operations.expire(counter, None)))
    yield WriteStep(more=(operations.put(prefix + ITEM + b"%016x" % ticket, value),))


def free_ones(found: Found, prefix: bytes) -> list[bytes]:
    """The names of items that nobody has claimed, first things first."""
    claimed = {key.removeprefix(prefix + CLAIM) for key in found}
    items = (key.removeprefix(prefix + ITEM) for key in found if key.startswith(prefix + ITEM))
    return [name for name in items if name not in claimed]


def take(prefix: bytes) -> Recipe[Taken]:
    """Claim the first item that nobody has, waiting for one. A claim of unknown outcome is not taken back, since it may
    be another one's by then: it goes with its time to live."""
    while True:
        for name in (yield from _some_free(prefix)):
            item, claim, times = prefix + ITEM + name, prefix + CLAIM + name, prefix + TIMES + name
            conditions = operations.condition(claim, present=False), operations.condition(item, present=True)
            reads = operations.get(item, Level.LINEARIZABLE), operations.increment(times)
            try:
                *_, got, taken, token = yield WriteStep(more=(*conditions, *reads), puts={claim: b""})
            except ConditionFailed:
                continue  # another one was first
            return Taken(name, got.value, token, taken)


def _some_free(prefix: bytes) -> Recipe[list[bytes]]:
    """Names of items that nobody has, waiting for one."""
    looked_at = LOOKED_AT_FIRST
    while looked_at < LOOKED_AT:
        found: Found = yield FindStep(prefix, looked_at, keys_only=True)
        if free := free_ones(found, prefix):
            return free
        if len(found) < looked_at:
            break
        looked_at *= 4
    whole = FindStep(prefix, LOOKED_AT, keys_only=True)
    found = yield AwaitStep(whole, lambda found: bool(free_ones(found, prefix)), wakes=FreedItems(prefix).wakes)
    return free_ones(found, prefix)


# docs/protocol.md Q6
class FreedItems:
    """Tells the changes that make an item free from those by which one is taken or done, as one who waits hears of them
    in order: many may wait, and each that is woken reads the queue."""

    def __init__(self, prefix: bytes) -> None:
        self._item, self._claim = prefix + ITEM, prefix + CLAIM
        self._done = b""
        """The item that went last: its claim goes right behind it."""

    def wakes(self, find: FindStep, found: Found, change: Change) -> bool:
        """Whether an item was put, or a claim has gone whose item is there still."""
        is_gone = change.item is None
        if is_gone and change.key.startswith(self._item):
            self._done = change.key.removeprefix(self._item)
        elif change.key == self._item + self._done:
            self._done = b""  # tickets begin again where a queue was emptied
        if len(found) >= find.limit:  # there may be items behind what was seen
            return is_news(find, found, change)
        if change.key.startswith(self._item):
            return not is_gone and is_news(find, found, change)
        return is_gone and change.key.startswith(self._claim) and change.key.removeprefix(self._claim) != self._done


def done(lease: SessionLease, prefix: bytes, taken: Taken) -> Recipe[None]:
    """Take the item out of the queue. Raises SessionEnded if it may have been handed out again."""
    claim = prefix + CLAIM + taken.name
    if claim not in lease.keys:
        raise SessionEnded(f"{claim!r} has ended with its session, or was given back")
    gone = operations.delete(prefix + ITEM + taken.name), operations.delete(prefix + TIMES + taken.name)
    yield from _let_go(lease, claim, WriteStep(more=gone, drops=(claim,)))


def give_back(lease: SessionLease, prefix: bytes, taken: Taken) -> Recipe[None]:
    """Let another one have it. Nothing is to be done if it was lost meanwhile."""
    claim = prefix + CLAIM + taken.name
    if claim in lease.keys:
        yield from _let_go(lease, claim, WriteStep(drops=(claim,)))


# docs/protocol.md Q6
def _let_go(lease: SessionLease, claim: bytes, write: WriteStep) -> Recipe[None]:
    """Delete a claim. If the outcome is unknown, the key may be another session's from now on: it is neither kept nor
    deleted, and goes with its time to live if it is still there."""
    try:
        yield write
    except Refused:
        raise  # nothing was done
    except BaseException:
        lease.forget(claim)
        raise
