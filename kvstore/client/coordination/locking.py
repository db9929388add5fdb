"""Locks, read/write locks and elections, as lines of waiting keys. Decides only.

Each session that wants a lock writes a key of its own below the lock's prefix. The version with which the store creates
the key is its place in the line, and later its *fencing token*: versions of one tag rise, also over failovers and moves
(docs/protocol.md, M9). So every later holder has a higher token, and the protected resource refuses lower tokens than
it has seen. The session with no key in front of its own holds the lock. Each other session watches the one key directly
in front of it, so the end of a holder wakes one waiter (Q4). The watched key may have belonged to a waiter; therefore
the line is read again, unless the holder has left a release note beside the line.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

from kvstore.client.coordination.lease import SessionLease
from kvstore.client.coordination.steps import AwaitStep, FindStep, Found, Recipe, SessionEnded, WriteStep
from kvstore.client.core import operations
from kvstore.coordination_keys import TURN
from kvstore.errors import ConditionFailed

EXCLUSIVE, SHARED = b"w", b"r"


class LockKey(NamedTuple):
    """The key by which a session holds a lock, at the head of the line."""

    key: bytes
    token: int
    """Version with which the key was created."""


def in_front(line: Found, key: bytes, mode: bytes) -> bytes | None:
    """Return the last key in front of `key` that it must wait for, or None if it holds the lock. SHARED waits for
    EXCLUSIVE only. Raises SessionEnded if `key` is not in the line."""
    mine = line.get(key)
    if mine is None:
        raise SessionEnded(f"{key!r} is no longer in the line")
    before = {
        item.created: other
        for other, item in line.items()
        if item.created < mine.created and (mode == EXCLUSIVE or item.value[:1] == EXCLUSIVE)
    }
    return before[max(before)] if before else None


def release_note_of(prefix: bytes) -> bytes:
    """Return the key beside the line in which the last exclusive holder notes its release."""
    tag, _, line = prefix.partition(b"}/")
    return tag + b"}/" + TURN + b"/" + line


def has_released(turn: Found, token: int) -> bool:
    """Return True if the release note is of the holder with this token. Then nobody was in front of it."""
    return any(item.value == b"%d" % token for item in turn.values())


def acquire(lease: SessionLease, prefix: bytes, mode: bytes, value: bytes) -> Recipe[LockKey]:
    """Wait in the line below `prefix` for the lock. On NotInTime, SessionEnded or an error of the store, the place in
    the line is given up."""
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
    """Release the lock. Returns True if it was held until now. An exclusive holder leaves a note, so that the next one
    need not read the line; beside a shared holder others may hold the lock."""
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
    """Return the key at the head of the line."""
    if not line:
        return None
    key = min(line, key=lambda each: line[each].created)
    return LockKey(key, line[key].created)


def leader(prefix: bytes) -> Recipe[tuple[bytes, int] | None]:
    """Return the value and the token of the head of the line, or None if the line is empty."""
    line: Found = yield FindStep(prefix)
    return _leader_of(line)


def next_leader(prefix: bytes, known: int) -> Recipe[tuple[bytes, int] | None]:
    """Wait until the head of the line has another token than `known` (0: nobody), and return its value and token."""
    line: Found = yield AwaitStep(FindStep(prefix), lambda found: _token(found) != known)
    return _leader_of(line)


def _leader_of(line: Found) -> tuple[bytes, int] | None:
    first = first_of(line)
    return None if first is None else (line[first.key].value[1:], first.token)


def _token(line: Found) -> int:
    first = first_of(line)
    return first.token if first else 0
