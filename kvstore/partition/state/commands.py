"""Operations on a partition and their results. Both are plain tuples, because thousands of them are in flight at once,
and because a whole batch is then encoded in one call.

An operation is `(code, key, ...)` with the fields of its constructor below. Every endpoint (RESP, gRPC, HTTP, peer
links) builds operations and passes them to `Partition.submit`; traits.py describes each code. A result is a plain
value, documented with each constructor, or a StoreError instance.
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
    """The type of NOT_NOW, which a fast read returns when the read has to be submitted instead."""

    NOT_NOW = auto()


NOT_NOW = NotNow.NOT_NOW


class Level(IntEnum):
    """How fresh the result of a read must be."""

    LINEARIZABLE = 0
    STRICT = 1
    SESSION = 2
    STALE = 3


class Flag(IntFlag):
    """Options of an operation. Each operation supports only some of them; see traits.py."""

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
    """A record as a read returns it. On peer links it is a plain tuple with the same order of fields."""

    value: bytes
    version: int
    """The sequence of the mutation that last wrote the key."""
    created: int
    """The sequence of the mutation that created the key."""
    written_ms: int
    expires_ms: int
    """Expiry in ms since 1970; 0 means never."""


class RequestId(NamedTuple):
    """The identity of a mutation, by which the partition recognizes a retry and returns the first attempt's result."""

    client: bytes
    """16 random bytes that identify the client."""
    sequence: int
    first_unacked: int
    """The lowest sequence whose answer the client has not received yet."""
    seen_ms: int
    """The largest leader time that the client had seen when it first sent the request. Answers carry this time as the
    partition's record time. A request with 0, from a client that has seen no leader time, is older than every retry
    window and is refused, so a new client first asks for the time."""


Op = tuple[Any, ...]
Result = Any

# ── constructors: they document the fields; hot paths write the tuples out ───────────────────────────────────────────


def get(key: bytes, level: Level = Level.LINEARIZABLE, seq: int = 0) -> Op:
    """Read a key. The result is a Record, or None if the key is absent. For SESSION, `seq` is the sequence that the
    replica must have applied. For other levels, `seq` is the highest sequence that the client has seen."""
    return (Code.GET, key, level, seq)


def meta(key: bytes, level: Level = Level.LINEARIZABLE, seq: int = 0) -> Op:
    """Read a key's metadata. The result is (value length, version, created, written_ms, expires_ms), or None if the key
    is absent. `seq` is as in `get`."""
    return (Code.META, key, level, seq)


def put(
    key: bytes, value: bytes, expires_ms: int = 0, flags: int = 0, version: int = 0, request: RequestId | None = None
) -> Op:
    """Write a key. The result is the new version; with RETURN_OLD it is (applied, version, old Record or None). Without
    RETURN_OLD, the operation fails with ConditionFailed if its condition is not met."""
    return (Code.PUT, key, value, expires_ms, flags, version, request)


def delete(key: bytes, flags: int = 0, version: int = 0, request: RequestId | None = None) -> Op:
    """Delete a key. The result is the sequence of the delete, or 0 if the key was absent; with RETURN_OLD it is
    (sequence, old Record or None). The operation fails with ConditionFailed if its condition is not met."""
    return (Code.DELETE, key, flags, version, request)


def increment(key: bytes, delta: int, request: RequestId | None = None) -> Op:
    """Add `delta` to the integer at a key. The result is (new value as a 64-bit integer, version). The key keeps its
    TTL. The operation fails with InvalidRequest if the value is not an integer or would overflow."""
    return (Code.INCREMENT, key, delta, request)


def append(key: bytes, suffix: bytes, request: RequestId | None = None) -> Op:
    """Append `suffix` to the value of a key. The result is (new length in bytes, version). The key keeps its TTL."""
    return (Code.APPEND, key, suffix, request)


def expire(key: bytes, expires_ms: int, flags: int = 0, request: RequestId | None = None) -> Op:
    """Change the expiry of a key. The result is True if the expiry was changed. An `expires_ms` of 0 removes the
    expiry. A time at or before the record's time deletes the key."""
    return (Code.EXPIRE, key, expires_ms, flags, request)


def batch(key: bytes, ops: tuple[Op, ...], flags: int = 0, request: RequestId | None = None) -> Op:
    """Carry out several operations atomically. The result is the list of their results. `key` is any key of the batch
    and determines the partition. The operations in `ops` have no request ids of their own."""
    return (Code.BATCH, key, ops, flags, request)


def delete_range(start: bytes, end: bytes, request: RequestId | None = None) -> Op:
    """Delete this partition's keys in [start, end). The result is the number of keys deleted. An empty `end` means up
    to the last key. The deletes are not atomic."""
    return (Code.DELETE_RANGE, start, end, request)


def scan(start: bytes, end: bytes, limit: int, flags: int = 0, level: Level = Level.LINEARIZABLE, seq: int = 0) -> Op:
    """Read this partition's keys in [start, end) in key order. The result is (list of (key, Record), next start or
    None). One result holds at most `limit` keys and about 1 MiB."""
    return (Code.SCAN, start, end, limit, flags, level, seq)


def range_(start: bytes, end: bytes, limit: int, flags: int = 0, level: Level = Level.LINEARIZABLE, seq: int = 0) -> Op:
    """Like a scan, but also supports KEYS_ONLY and REVERSE. With BARE, the result is (list of keys, next). With
    COUNT_ONLY, it is (number of keys, next). With REVERSE, `next` is the end at which to continue. RANGE has a code of
    its own because a server that does not know these flags would ignore them in a scan."""
    return (Code.RANGE, start, end, limit, flags, level, seq)


def scan_tokens(token: int, limit: int, level: Level = Level.LINEARIZABLE, flags: int = 0) -> Op:
    """Read this partition's keys in token order, from `token` on. The result is (list of (key, Record), next token or
    None). All keys with the same token are in one result."""
    return (Code.SCAN_TOKENS, token, limit, level, flags)


def count(level: Level = Level.LINEARIZABLE) -> Op:
    """Count the live keys of this partition. The result is their number. Expired keys count until their deletes are
    logged."""
    return (Code.COUNT, b"", level)


def check(key: bytes, flags: int, version: int = 0, request: RequestId | None = None) -> Op:
    """Check a condition on a key. The result is the key's version, or 0 if the key is absent. The operation fails with
    ConditionFailed unless IF_ABSENT, IF_PRESENT or IF_VERSION is met. A failed check undoes its whole batch, even an
    INDEPENDENT one."""
    return (Code.CHECK, key, flags, version, request)


class Sink(Protocol):
    """The receiver of results. Each connection or caller has one sink; `token` identifies the request."""

    @property
    def line(self) -> object:
        """The caller on whose behalf reads are made. Reads with equal lines are answered in the order of their
        arrival."""
        return self

    @property
    def is_gone(self) -> bool:
        """True if no caller waits for the results anymore. Reads that have not begun may then be dropped; operations
        that were submitted are still completed. Once True, the attribute stays True."""
        return False

    def complete(self, token: int, result: Result | StoreError) -> None:
        """Take one result. Called on the event loop exactly once for each submitted operation, and never from inside
        `submit`."""
        ...

    def complete_all(self, tokens: Sequence[int], results: Sequence[Result | StoreError]) -> None:
        """Take several results, in the order of `tokens`."""
        for token, result in zip(tokens, results, strict=True):
            self.complete(token, result)

    def flush(self) -> None:
        """Send the results received so far. Called once after each group of results."""
        ...


Reply = tuple[Sink, int, Result]
"""Sink, token, result."""
