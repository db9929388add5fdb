"""Queues whose items are delivered one by one, each to one session at a time. Decides only.

The key of an item ends with its ticket, which comes from a counter: a put that ends before another one begins is in
front of it. Taking an item writes a claim beside it, a key of the session, if there is none. A finished item is deleted
with its claim. If a session ends, its claims are deleted and the items are delivered again: at least once, and to one
session at a time (docs/protocol.md, Q6).
"""

from __future__ import annotations

from typing import NamedTuple

from kvstore.client.coordination.lease import SessionLease
from kvstore.client.coordination.steps import AwaitStep, FindStep, Found, Recipe, SessionEnded, WriteStep, is_news
from kvstore.client.core import operations
from kvstore.client.core.values import Level
from kvstore.client.core.watching import Change
from kvstore.errors import ConditionFailed, Refused

CANDIDATES_FIRST, CANDIDATES_MAX = 32, 1000
"""Number of first keys of a queue that are read, claims before items, so that items are found unless there are as many
claims. A reader that finds no item reads more."""
CLAIM, ITEM, TICKETS, TIMES = b"claim-", b"item-", b"tickets", b"times-"
"""Names of keys, in key order."""


class Taken(NamedTuple):
    """An item that this session has taken from the queue, with the token of its claim."""

    name: bytes
    """Ticket of the item, as in its key."""
    value: bytes
    token: int
    """Version of the claim. Every later taker of the item has a higher one."""
    times: int = 1
    """How often the item was taken, this time included. A high count marks an item that nobody can finish."""


def put(prefix: bytes, value: bytes) -> Recipe[None]:
    """Append an item. If the outcome is unknown, the item may have been added."""
    counter = prefix + TICKETS
    # A counter that expires by the namespace's default would start again and overwrite waiting items.
    ticket, _ = yield WriteStep(more=(operations.increment(counter), operations.expire(counter, None)))
    yield WriteStep(more=(operations.put(prefix + ITEM + b"%016x" % ticket, value),))


def free_ones(found: Found, prefix: bytes) -> list[bytes]:
    """Return the names of items without a claim, the first ones first."""
    claimed = {key.removeprefix(prefix + CLAIM) for key in found}
    items = (key.removeprefix(prefix + ITEM) for key in found if key.startswith(prefix + ITEM))
    return [name for name in items if name not in claimed]


def take(prefix: bytes) -> Recipe[Taken]:
    """Claim the first free item, and wait for one if there is none. A claim of unknown outcome is not deleted, because
    it may belong to another session by then: it expires."""
    while True:
        for name in (yield from _some_free(prefix)):
            item, claim, times = prefix + ITEM + name, prefix + CLAIM + name, prefix + TIMES + name
            conditions = operations.condition(claim, present=False), operations.condition(item, present=True)
            reads = operations.get(item, Level.LINEARIZABLE), operations.increment(times)
            try:
                write = WriteStep(more=(*conditions, *reads), puts={claim: b""}, needs_receipt=True)
                *_, got, taken, token = yield write
            except ConditionFailed:
                continue  # another session was first
            return Taken(name, got.value, token, taken)


def _some_free(prefix: bytes) -> Recipe[list[bytes]]:
    """Return names of free items, and wait for one if there is none."""
    wanted = CANDIDATES_FIRST
    while wanted < CANDIDATES_MAX:
        found: Found = yield FindStep(prefix, wanted, keys_only=True)
        if free := free_ones(found, prefix):
            return free
        if len(found) < wanted:
            break
        wanted *= 4
    whole = FindStep(prefix, CANDIDATES_MAX, keys_only=True)
    found = yield AwaitStep(whole, lambda found: bool(free_ones(found, prefix)), wakes=FreedItems(prefix).wakes)
    return free_ones(found, prefix)


# docs/protocol.md Q6
class FreedItems:
    """Distinguishes changes that make an item free from changes by which an item is taken or finished. Changes come in
    order. Many sessions may wait, and each one that wakes reads the queue."""

    def __init__(self, prefix: bytes) -> None:
        self._item, self._claim = prefix + ITEM, prefix + CLAIM
        self._done = b""
        """Item that was deleted last: the deletion of its claim follows."""

    def wakes(self, find: FindStep, found: Found, change: Change) -> bool:
        """Return True if an item was added, or a claim was deleted whose item still exists."""
        is_gone = change.item is None
        if is_gone and change.key.startswith(self._item):
            self._done = change.key.removeprefix(self._item)
        elif change.key == self._item + self._done:
            self._done = b""  # tickets start again in a queue that was emptied
        if len(found) >= find.limit:  # there may be items behind the ones that were read
            return is_news(find, found, change)
        if change.key.startswith(self._item):
            return not is_gone and is_news(find, found, change)
        return is_gone and change.key.startswith(self._claim) and change.key.removeprefix(self._claim) != self._done


def done(lease: SessionLease, prefix: bytes, taken: Taken) -> Recipe[None]:
    """Remove the item from the queue. Raises SessionEnded if the item may have been delivered again."""
    claim = prefix + CLAIM + taken.name
    if claim not in lease.keys:
        raise SessionEnded(f"{claim!r} has ended with its session, or was given back")
    gone = operations.delete(prefix + ITEM + taken.name), operations.delete(prefix + TIMES + taken.name)
    yield from _delete_claim(lease, claim, WriteStep(more=gone, drops=(claim,)))


def give_back(lease: SessionLease, prefix: bytes, taken: Taken) -> Recipe[None]:
    """Return the item to the queue. Does nothing if it was lost meanwhile."""
    claim = prefix + CLAIM + taken.name
    if claim in lease.keys:
        yield from _delete_claim(lease, claim, WriteStep(drops=(claim,)))


# docs/protocol.md Q6
def _delete_claim(lease: SessionLease, claim: bytes, write: WriteStep) -> Recipe[None]:
    """Delete a claim. If the outcome is unknown, the key may belong to another session from now on: it is neither kept
    nor deleted, and expires if it still exists."""
    try:
        yield write
    except Refused:
        raise  # nothing was done
    except BaseException:
        lease.forget(claim)
        raise
