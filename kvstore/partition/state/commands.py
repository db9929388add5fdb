"""Operations on a partition and their results: plain tuples, so that thousands cost little and a batch packs in one
call.

An operation is `(code, key, ...)` with the fields that its constructor here names; every front door (RESP, gRPC, peer
links) builds these, and `Partition.submit` takes them; traits.py says what holds of each code. A result is a plain
value (documented per operation) or a StoreError instance.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, IntEnum, IntFlag, auto
from typing import Any, NamedTuple, Protocol

from kvstore.errors import StoreError


class Code(IntEnum):
    """DO NOT CHANGE: these numbers travel between servers."""

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
    """Stands where a record would: the read has to be submitted."""

    NOT_NOW = auto()


NOT_NOW = NotNow.NOT_NOW


class Level(IntEnum):
    """How fresh a read must be."""

    LINEARIZABLE = 0
    STRICT = 1
    SESSION = 2
    STALE = 3


class Flag(IntFlag):
    """Flags of a mutation."""

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
    """The four conditions of Redis's EXPIRE NX XX GT LT."""
    INDEPENDENT = 1024
    """Of a batch: a failed operation does not keep the others from being applied (MULTI/EXEC), unless it is a CHECK.
    Otherwise all or nothing."""
    KEYS_ONLY = 2048
    """Of a scan: the values are left out (empty)."""
    REVERSE = 4096
    """Of a range: from its last key down."""
    BARE = 8192
    """Of a range: keys without records."""
    COUNT_ONLY = 16384
    """Of a range: how many keys, in place of them."""


class Record(NamedTuple):
    """A record as a read finds it. On peer links a plain tuple of the same order."""

    value: bytes
    version: int
    """The sequence of the mutation that last wrote the key."""
    created: int
    """The sequence of the mutation that created it."""
    written_ms: int
    expires_ms: int
    """0: never."""


class RequestId(NamedTuple):
    """Recognises a retried mutation."""

    client: bytes
    """16 random bytes."""
    sequence: int
    first_unacked: int
    """The client has had answers to everything below."""
    seen_ms: int
    """The largest leader time that the client had seen when it first sent the request (a partition's record time, which
    answers carry). 0, if none, is older than every window and refused: a new client first asks for the time."""


Op = tuple[Any, ...]
Result = Any

# ── constructors: they document the fields, hot paths write the tuples out ────────────────────────────────────────────


def get(key: bytes, level: Level = Level.LINEARIZABLE, seq: int = 0) -> Op:
    """Record, or None if absent. `seq`: for SESSION the least sequence applied; for other levels the highest the client
    has seen."""
    return (Code.GET, key, level, seq)


def meta(key: bytes, level: Level = Level.LINEARIZABLE, seq: int = 0) -> Op:
    """(value length, version, created, written_ms, expires_ms), or None if absent."""
    return (Code.META, key, level, seq)


def put(
    key: bytes, value: bytes, expires_ms: int = 0, flags: int = 0, version: int = 0, request: RequestId | None = None
) -> Op:
    """The new version; with RETURN_OLD (applied, version, old Record or None). ConditionFailed if not applied and
    RETURN_OLD is not set."""
    return (Code.PUT, key, value, expires_ms, flags, version, request)


def delete(key: bytes, flags: int = 0, version: int = 0, request: RequestId | None = None) -> Op:
    """The sequence of the delete, 0 if the key was absent; with RETURN_OLD (sequence, old Record or None).
    ConditionFailed."""
    return (Code.DELETE, key, flags, version, request)


def increment(key: bytes, delta: int, request: RequestId | None = None) -> Op:
    """(new value as a 64-bit integer, version). InvalidRequest if the value is not one, or would overflow. Keeps the
    TTL."""
    return (Code.INCREMENT, key, delta, request)


def append(key: bytes, suffix: bytes, request: RequestId | None = None) -> Op:
    """(new length, version). Keeps the TTL."""
    return (Code.APPEND, key, suffix, request)


def expire(key: bytes, expires_ms: int, flags: int = 0, request: RequestId | None = None) -> Op:
    """True if the key's expiry was changed. `expires_ms` 0 removes it; at or before the record's time it deletes the
    key."""
    return (Code.EXPIRE, key, expires_ms, flags, request)


def batch(key: bytes, ops: tuple[Op, ...], flags: int = 0, request: RequestId | None = None) -> Op:
    """A list of results, atomically; `key` is any key of the batch, for routing. The operations carry no request ids of
    their own."""
    return (Code.BATCH, key, ops, flags, request)


def delete_range(start: bytes, end: bytes, request: RequestId | None = None) -> Op:
    """How many keys were deleted of those in [start, end) that this partition holds; `end` empty: no upper end."""
    return (Code.DELETE_RANGE, start, end, request)


def scan(start: bytes, end: bytes, limit: int, flags: int = 0, level: Level = Level.LINEARIZABLE, seq: int = 0) -> Op:
    """(list of (key, Record), next start or None): this partition's keys in [start, end) in key order; bounded by
    `limit` and 1 MiB."""
    return (Code.SCAN, start, end, limit, flags, level, seq)


def range_(start: bytes, end: bytes, limit: int, flags: int = 0, level: Level = Level.LINEARIZABLE, seq: int = 0) -> Op:
    """The same as a scan, with KEYS_ONLY and REVERSE; with BARE (list of keys, next), with COUNT_ONLY (how many, next).
    With REVERSE `next` is the end to go on with. A code of its own: a server that does not know these flags would
    answer a scan as if there were none."""
    return (Code.RANGE, start, end, limit, flags, level, seq)


def scan_tokens(token: int, limit: int, level: Level = Level.LINEARIZABLE, flags: int = 0) -> Op:
    """(list of (key, Record), next token or None): this partition's keys in token order from `token` on, all keys of a
    token together."""
    return (Code.SCAN_TOKENS, token, limit, level, flags)


def count(level: Level = Level.LINEARIZABLE) -> Op:
    """How many live keys the partition has (expired ones count until their delete is logged)."""
    return (Code.COUNT, b"", level)


def check(key: bytes, flags: int, version: int = 0, request: RequestId | None = None) -> Op:
    """The key's version, 0 if it is absent. ConditionFailed unless it is as IF_ABSENT, IF_PRESENT or IF_VERSION says;
    that undoes the whole of the batch that it stands in, INDEPENDENT or not."""
    return (Code.CHECK, key, flags, version, request)


class Sink(Protocol):
    """Takes the results of operations. One object per connection or caller; a `token` names the request to it."""

    @property
    def line(self) -> object:
        """Name the caller: of the reads of one line none is done before an earlier one."""
        return self

    @property
    def is_gone(self) -> bool:
        """Whether nobody waits for its results any more: reads that have not begun need not be done. Once it is, it
        stays so. What was submitted is completed all the same."""
        return False

    def complete(self, token: int, result: Result | StoreError) -> None:
        """Called exactly once per submitted operation, on the event loop, never from inside `submit`."""
        ...

    def complete_all(self, tokens: Sequence[int], results: Sequence[Result | StoreError]) -> None:
        """The same for several, in this order."""
        for token, result in zip(tokens, results, strict=True):
            self.complete(token, result)

    def flush(self) -> None:
        """Called once after a group of `complete` calls: send what has gathered."""
        ...


Reply = tuple[Sink, int, Result]
"""Sink, token, result."""
