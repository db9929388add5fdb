"""Operations on a partition and their results. Both are plain tuples, because thousands of them are in flight and a
batch packs in one call.

An operation is `(code, key, ...)` with the fields of its constructor below. Every endpoint (RESP, gRPC, HTTP, peer
links) builds operations and passes them to `Partition.submit`; traits.py describes each code. A result is a plain
value, documented per operation, or a StoreError instance.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, IntEnum, IntFlag, auto
from typing import Any, NamedTuple, Protocol

from kvstore.errors import StoreError


class Code(IntEnum):
    """Operation codes. DO NOT CHANGE: these numbers travel between servers."""

    GET = 1
    META = 2
    PUT = 3
    DELETE = 4
    INCREMENT = 5
    APPEND = 6
    EXPIRE = 7
    BATCH = 8
    DELETE_RANGE = 9
    SCAN = 10
    SCAN_TOKENS = 11
    COUNT = 12
    CHECK = 13
    RANGE = 14


class NotNow(Enum):
    """Returned in place of a record if the read has to be submitted."""

    NOT_NOW = auto()


NOT_NOW = NotNow.NOT_NOW


class Level(IntEnum):
    """The freshness that a read requires."""

    LINEARIZABLE = 0
    STRICT = 1
    SESSION = 2
    STALE = 3


class Flag(IntFlag):
    """Flags of an operation."""

    NONE = 0
    IF_ABSENT = 1
    IF_PRESENT = 2
    IF_VERSION = 4
    KEEP_TTL = 8
    RETURN_OLD = 16
    RELATIVE_TTL = 32
    """`expires_ms` counts from the record's time, not from 1970."""
    IF_NO_TTL = 64
    IF_TTL = 128
    IF_LONGER = 256
    IF_SHORTER = 512
    """The four conditions of Redis's EXPIRE: NX, XX, GT, LT."""
    INDEPENDENT = 1024
    """For a batch: a failed operation does not keep the others from being applied (MULTI/EXEC), unless it is a CHECK.
    Without this flag a batch is applied completely or not at all."""
    KEYS_ONLY = 2048
    """For a scan: leave the values empty."""
    REVERSE = 4096
    """For a range: from the last key to the first."""
    BARE = 8192
    """For a range: return keys without records."""
    COUNT_ONLY = 16384
    """For a range: return the number of keys instead of the keys."""


class Record(NamedTuple):
    """A record as a read finds it. On peer links it is a plain tuple with the same order of fields."""

    value: bytes
    version: int
    """The sequence of the mutation that last wrote the key."""
    created: int
    """The sequence of the mutation that created the key."""
    written_ms: int
    expires_ms: int
    """0: never."""


class RequestId(NamedTuple):
    """Identifies a mutation, so that a retry is recognised."""

    client: bytes
    """16 random bytes."""
    sequence: int
    first_unacked: int
    """The client has received answers to all lower sequences."""
    seen_ms: int
    """The largest leader time that the client had seen when it first sent the request; answers carry it as the
    partition's record time. 0, for a client that has seen none, is older than every window and refused, so a new client
    asks for the time first."""


Op = tuple[Any, ...]
Result = Any

# ── constructors: they document the fields; hot paths write the tuples out ───────────────────────────────────────────


def get(key: bytes, level: Level = Level.LINEARIZABLE, seq: int = 0) -> Op:
    """Return a Record, or None if the key is absent. For SESSION, `seq` is the sequence that the replica must have
    applied; for other levels it is the highest sequence that the client has seen."""
    return (Code.GET, key, level, seq)


def meta(key: bytes, level: Level = Level.LINEARIZABLE, seq: int = 0) -> Op:
    """Return (value length, version, created, written_ms, expires_ms), or None if the key is absent."""
    return (Code.META, key, level, seq)


def put(
    key: bytes, value: bytes, expires_ms: int = 0, flags: int = 0, version: int = 0, request: RequestId | None = None
) -> Op:
    """Return the new version; with RETURN_OLD (applied, version, old Record or None). Raises ConditionFailed if not
    applied and RETURN_OLD is not set."""
    return (Code.PUT, key, value, expires_ms, flags, version, request)


def delete(key: bytes, flags: int = 0, version: int = 0, request: RequestId | None = None) -> Op:
    """Return the sequence of the delete, 0 if the key was absent; with RETURN_OLD (sequence, old Record or None).
    Raises ConditionFailed."""
    return (Code.DELETE, key, flags, version, request)


def increment(key: bytes, delta: int, request: RequestId | None = None) -> Op:
    """Return (new value as a 64-bit integer, version). Keeps the TTL. Raises InvalidRequest if the value is not an
    integer or would overflow."""
    return (Code.INCREMENT, key, delta, request)


def append(key: bytes, suffix: bytes, request: RequestId | None = None) -> Op:
    """Return (new length, version). Keeps the TTL."""
    return (Code.APPEND, key, suffix, request)


def expire(key: bytes, expires_ms: int, flags: int = 0, request: RequestId | None = None) -> Op:
    """Return True if the key's expiry was changed. `expires_ms` 0 removes the expiry; a time at or before the record's
    time deletes the key."""
    return (Code.EXPIRE, key, expires_ms, flags, request)


def batch(key: bytes, ops: tuple[Op, ...], flags: int = 0, request: RequestId | None = None) -> Op:
    """Return a list of results, atomically. `key` is any key of the batch and serves for routing. The operations carry
    no request ids of their own."""
    return (Code.BATCH, key, ops, flags, request)


def delete_range(start: bytes, end: bytes, request: RequestId | None = None) -> Op:
    """Return how many of this partition's keys in [start, end) were deleted. An empty `end` means no upper end."""
    return (Code.DELETE_RANGE, start, end, request)


def scan(start: bytes, end: bytes, limit: int, flags: int = 0, level: Level = Level.LINEARIZABLE, seq: int = 0) -> Op:
    """Return (list of (key, Record), next start or None): this partition's keys in [start, end) in key order, bounded
    by `limit` and 1 MiB."""
    return (Code.SCAN, start, end, limit, flags, level, seq)


def range_(start: bytes, end: bytes, limit: int, flags: int = 0, level: Level = Level.LINEARIZABLE, seq: int = 0) -> Op:
    """Like a scan, with KEYS_ONLY and REVERSE. With BARE, return (list of keys, next); with COUNT_ONLY, (number of
    keys, next). With REVERSE, `next` is the end at which to continue. This is a code of its own because a server that
    does not know these flags would answer a scan as if there were none."""
    return (Code.RANGE, start, end, limit, flags, level, seq)


def scan_tokens(token: int, limit: int, level: Level = Level.LINEARIZABLE, flags: int = 0) -> Op:
    """Return (list of (key, Record), next token or None): this partition's keys in token order from `token` on, all
    keys of a token in one page."""
    return (Code.SCAN_TOKENS, token, limit, level, flags)


def count(level: Level = Level.LINEARIZABLE) -> Op:
    """Return how many live keys the partition has. Expired keys count until their delete is logged."""
    return (Code.COUNT, b"", level)


def check(key: bytes, flags: int, version: int = 0, request: RequestId | None = None) -> Op:
    """Return the key's version, 0 if it is absent. Raises ConditionFailed unless IF_ABSENT, IF_PRESENT or IF_VERSION is
    met; that undoes the whole batch of the check, INDEPENDENT or not."""
    return (Code.CHECK, key, flags, version, request)


class Sink(Protocol):
    """Receives the results of operations. There is one sink per connection or caller; a `token` names the request."""

    @property
    def line(self) -> object:
        """The caller. Reads with equal lines are answered in the order of their arrival."""
        return self

    @property
    def is_gone(self) -> bool:
        """True if no caller waits for the results any more. Reads that have not begun may be dropped then; operations
        that were submitted are still completed. Once True, it stays True."""
        return False

    def complete(self, token: int, result: Result | StoreError) -> None:
        """Take one result. Called exactly once per submitted operation, on the event loop, never from inside
        `submit`."""
        ...

    def complete_all(self, tokens: Sequence[int], results: Sequence[Result | StoreError]) -> None:
        """Take several results, in this order."""
        for token, result in zip(tokens, results, strict=True):
            self.complete(token, result)

    def flush(self) -> None:
        """Send the results received. Called once after each group of `complete` calls."""
        ...


Reply = tuple[Sink, int, Result]
"""Sink, token, result."""
