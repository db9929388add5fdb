"""Waiting in line: locks, read/write locks and elections. Decides only.

Each who wants a lock writes a key of its session below the lock's prefix. The version with which the store creates it
is its place in the line, and later its *fencing token*: versions of one tag rise, also over failovers and moves
(docs/protocol.md, M9), so whoever holds the lock later has a higher one, and what is protected refuses lower ones than
it has seen. Whoever has nobody in front of it holds the lock; the others watch the one key directly in front of them,
so the end of a holder wakes one (Q4). It may have been a waiter that has ended: so the line is read again, unless the
holder has said beside the line that it has released.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

from kvstore.client.coordination.lease import SessionLease
from kvstore.client.coordination.steps import AwaitStep, FindStep, Found, Recipe, SessionEnded, WriteStep
from kvstore.client.core import operations
from kvstore.errors import ConditionFailed

EXCLUSIVE, SHARED = b"w", b"r"


class LockKey(NamedTuple):
    """A place at the head of the line."""

    key: bytes
    token: int
    """The version with which the key was created."""


def in_front(line: Found, key: bytes, mode: bytes) -> bytes | None:
    """The last in front of `key` that it has to wait for; None: it holds the lock. SHARED waits for EXCLUSIVE only.
    Raises SessionEnded if `key` is not in the line."""
    mine = line.get(key)
    if mine is None:
        raise SessionEnded(f"{key!r} is not in the line any more")
    before = {
        item.created: other
        for other, item in line.items()
        if item.created < mine.created and (mode == EXCLUSIVE or item.value[:1] == EXCLUSIVE)
    }
    return before[max(before)] if before else None


def release_note_of(prefix: bytes) -> bytes:
    """The key beside the line below `prefix` in which the last holder who wanted to write says that it has released."""
    tag, _, line = prefix.partition(b"}/")
    return tag + b"}/turn/" + line


def has_released(turn: Found, token: int) -> bool:
    """Whether the holder with this token says so: then nobody was in front of it."""
    return any(item.value == b"%d" % token for item in turn.values())


def acquire(lease: SessionLease, prefix: bytes, mode: bytes, value: bytes) -> Recipe[LockKey]:
    """Stand in line below `prefix` until one's turn has come. Raises NotInTime, SessionEnded, or what the store
    answers; then the place in the line is given up."""
    key = prefix + lease.new_name()
    is_mine = False
    try:
        yield WriteStep(puts={key: mode + value}, is_given_up=True)
        while True:
            line: Found = yield FindStep(prefix)
            first = in_front(line, key, mode)
            if first is None:
                is_mine = True
                return LockKey(key, line[key].created)
            yield AwaitStep(FindStep(first, keys_only=True), operator.not_, is_key=True)
            turn: Found = yield FindStep(release_note_of(prefix))
            if has_released(turn, line[first].created):
                mine: Found = yield FindStep(key, keys_only=True)
                if key in mine:
                    is_mine = True
                    return LockKey(key, mine[key].created)
    finally:
        if not is_mine:
            lease.discard(key)


def release(lease: SessionLease, prefix: bytes, place: LockKey, mode: bytes) -> Recipe[bool]:
    """Give the place up. True if it was held until now. A holder who wanted to write says so beside the line, so that
    the next one need not read it; others may have held a reading side with the one who gives it up."""
    if place.key not in lease.keys:
        return False
    is_there = operations.condition(place.key, present=True)
    note = operations.put(release_note_of(prefix), b"%d" % place.token, ttl_s=lease.ttl_s + lease.grace_s)
    try:
        yield WriteStep(more=(is_there, note) if mode == EXCLUSIVE else (is_there,), drops=(place.key,))
    except (SessionEnded, ConditionFailed):
        return False
    finally:
        if place.key in lease.keys:
            lease.discard(place.key)
    return True


def first_of(line: Found) -> LockKey | None:
    """The place at the head."""
    if not line:
        return None
    key = min(line, key=lambda each: line[each].created)
    return LockKey(key, line[key].created)


def leader(prefix: bytes) -> Recipe[tuple[bytes, int] | None]:
    """The value and the token of the first in line; None if there is none."""
    line: Found = yield FindStep(prefix)
    return _leader_of(line)


def next_leader(prefix: bytes, known: int) -> Recipe[tuple[bytes, int] | None]:
    """The same, once it is another one than that of the token `known` (0: nobody)."""
    line: Found = yield AwaitStep(FindStep(prefix), lambda found: _token(found) != known)
    return _leader_of(line)


def _leader_of(line: Found) -> tuple[bytes, int] | None:
    first = first_of(line)
    return None if first is None else (line[first.key].value[1:], first.token)


def _token(line: Found) -> int:
    first = first_of(line)
    return first.token if first else 0
