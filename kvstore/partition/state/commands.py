"""Operations on a partition and their results.

An operation is an instance of one of the classes below. Thousands of them are in flight at once, so they are structs
that the cycle collector need not visit. On peer links an operation is the array of its code and its fields, in the
order of the class: new fields come last and have a default. A server refuses an operation that has more fields than it
knows.

Every endpoint (RESP, gRPC, HTTP, peer links) builds operations and passes them to `Partition.submit`; traits.py
describes each code. A result is a plain value, documented with each class, or a StoreError instance.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, IntEnum, IntFlag, auto
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol, get_args

import msgspec

from kvstore.errors import StoreError
from kvstore.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from kvstore.partition.state.internal import Attempt
from kvstore.partition.state.tokens import Tokens


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
    TRANSACT = 15
    PREPARE = 16
    RESOLVE = 17
    INQUIRE = 18


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


Result = Any

_Key = Annotated[bytes, msgspec.Meta(min_length=1, max_length=KEY_BYTES_MAX)]
_Start = Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES_MAX + 1)]
"""A range may begin one byte beyond the longest key."""
_Value = Annotated[bytes, msgspec.Meta(max_length=VALUE_BYTES_MAX)]
_Level = Annotated[int, msgspec.Meta(ge=0, le=3)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class Operation(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """The base class of operations. An operation must not be changed once it has been submitted."""

    code: ClassVar[int]
    assigned: ClassVar[Tokens | None] = None
    """The tokens to which a keyless operation is limited (scope.py). Not sent."""
    ops: ClassVar[tuple[Op, ...]] = ()
    """The operations that a batch or a transaction consists of; empty for every other operation."""
    end: ClassVar[bytes] = b""
    """The end of the range of an operation on a range; empty for every other operation."""


class ReadOp(Operation):
    """An operation that changes nothing. It may be retried on another replica, whatever happened to the first
    attempt."""

    request: ClassVar[RequestId | None] = None


class WriteOp(Operation):
    """An operation that the leader carries out once, in order."""

    level: ClassVar[int] = int(Level.LINEARIZABLE)
    seq: ClassVar[int] = 0


class Get(ReadOp, tag=int(Code.GET)):
    """Read a key. The result is a Record, or None if the key is absent."""

    key: _Key
    level: _Level = Level.LINEARIZABLE
    seq: int = 0
    """For SESSION the sequence that the replica must have applied. For other levels the highest sequence that the
    client has seen."""


class Meta(ReadOp, tag=int(Code.META)):
    """Read a key's metadata. The result is (value length, version, created, written_ms, expires_ms), or None if the key
    is absent. `seq` is as in Get."""

    key: _Key
    level: _Level = Level.LINEARIZABLE
    seq: int = 0


class Put(WriteOp, tag=int(Code.PUT)):
    """Write a key. The result is the new version; with RETURN_OLD it is (applied, version, old Record or None). Without
    RETURN_OLD, the operation fails with ConditionFailed if its condition is not met."""

    key: _Key
    value: _Value
    expires_ms: int = 0
    flags: int = 0
    version: int = 0
    request: RequestId | None = None


class Delete(WriteOp, tag=int(Code.DELETE)):
    """Delete a key. The result is the sequence of the delete, or 0 if the key was absent; with RETURN_OLD it is
    (sequence, old Record or None). The operation fails with ConditionFailed if its condition is not met."""

    key: _Key
    flags: int = 0
    version: int = 0
    request: RequestId | None = None


class Increment(WriteOp, tag=int(Code.INCREMENT)):
    """Add `delta` to the integer at a key. The result is (new value as a 64-bit integer, version). The key keeps its
    TTL. The operation fails with InvalidRequest if the value is not an integer or would overflow."""

    key: _Key
    delta: int
    request: RequestId | None = None


class Append(WriteOp, tag=int(Code.APPEND)):
    """Append `value` to the value of a key. The result is (new length in bytes, version). The key keeps its TTL."""

    key: _Key
    value: _Value
    request: RequestId | None = None


class Expire(WriteOp, tag=int(Code.EXPIRE)):
    """Change the expiry of a key. The result is True if the expiry was changed. An `expires_ms` of 0 removes the
    expiry. A time at or before the record's time deletes the key."""

    key: _Key
    expires_ms: int
    flags: int = 0
    request: RequestId | None = None


class Batch(WriteOp, tag=int(Code.BATCH)):
    """Carry out several operations atomically. The result is the list of their results. `key` is any key of the batch
    and determines the partition. The operations in `ops` have no request ids of their own."""

    key: _Key
    ops: tuple[Op, ...]  # type: ignore[misc]  # empty in every other class
    flags: int = 0
    request: RequestId | None = None


class Transact(WriteOp, tag=int(Code.TRANSACT)):
    """Carry out several operations atomically, on keys that may belong to several partitions. The result is (list of
    their results, list of (partition, sequence)): the second list has one element per partition, and a session read at
    that sequence sees the transaction. `key` is the first key that the transaction writes; its owner is the
    transaction's home, which decides (docs/protocol.md Tx2). A transaction that writes nothing has the key of its first
    operation. The operations in `ops` have no request ids of their own. Fails with ConditionFailed if a CHECK fails and
    with Conflict if another transaction holds one of the keys; nothing was done then."""

    key: _Key
    ops: tuple[Op, ...]  # type: ignore[misc]  # empty in every other class
    flags: int = 0
    request: RequestId | None = None


class DeleteRange(WriteOp, gc=True, dict=True, tag=int(Code.DELETE_RANGE)):
    """Delete this partition's keys in [key, end). The result is the number of keys deleted. An empty `end` means up to
    the last key. The deletes are not atomic."""

    key: Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES_MAX)]
    end: _Value  # type: ignore[misc]  # empty in every other class
    request: RequestId | None = None


class Scan(ReadOp, gc=True, dict=True, tag=int(Code.SCAN)):
    """Read this partition's keys in [key, end) in key order. The result is (list of (key, Record), next start or None).
    One result holds at most `limit` keys and about 1 MiB."""

    key: _Start
    end: _Value  # type: ignore[misc]  # empty in every other class
    limit: int
    flags: int = 0
    level: _Level = Level.LINEARIZABLE
    seq: int = 0


class ScanTokens(ReadOp, gc=True, dict=True, tag=int(Code.SCAN_TOKENS)):
    """Read this partition's keys in token order, from `token` on. The result is (list of (key, Record), next token or
    None). All keys with the same token are in one result."""

    key: ClassVar[bytes] = b""
    seq: ClassVar[int] = 0
    token: int
    limit: int
    level: _Level = Level.LINEARIZABLE
    flags: int = 0


class Count(ReadOp, gc=True, dict=True, tag=int(Code.COUNT)):
    """Count the live keys of this partition. The result is their number. Expired keys count until their deletes are
    logged."""

    seq: ClassVar[int] = 0
    key: _Start = b""
    level: _Level = Level.LINEARIZABLE


class Check(WriteOp, tag=int(Code.CHECK)):
    """Check a condition on a key. The result is the key's version, or 0 if the key is absent. The operation fails with
    ConditionFailed unless IF_ABSENT, IF_PRESENT or IF_VERSION is met. A failed check undoes its whole batch, even an
    INDEPENDENT one."""

    key: _Key
    flags: int
    version: int = 0
    request: RequestId | None = None


class Range(ReadOp, gc=True, dict=True, tag=int(Code.RANGE)):
    """Like a scan, but also supports KEYS_ONLY and REVERSE. With BARE, the result is (list of keys, next). With
    COUNT_ONLY, it is (number of keys, next). With REVERSE, `next` is the end at which to continue. RANGE has a code of
    its own because a server that does not know these flags would ignore them in a scan."""

    key: _Start
    end: _Value  # type: ignore[misc]  # empty in every other class
    limit: int
    flags: int = 0
    level: _Level = Level.LINEARIZABLE
    seq: int = 0


class InternalOp(WriteOp):
    """An operation with which leaders carry out a transaction over several partitions. Only servers send it to each
    other; clients cannot. `mark` is the number of the sender's last pin (docs/protocol.md Tx13)."""

    request: ClassVar[RequestId | None] = None


class Prepare(InternalOp, tag=int(Code.PREPARE)):
    """Lock the keys of `ops` for an attempt: decide the operations and log an intent for each key (docs/protocol.md
    Tx4). `key` is any of the keys and determines the partition; `home` is the transaction's home key, and `parts` is
    the number of keys that the transaction writes in all partitions. The result is (partition, list of (key, sequence
    of its intent), list of results, mark). Fails like the operations, and with Conflict if another transaction holds
    one of the keys and `waits` is False. With `waits` the operation waits for that transaction (docs/protocol.md
    Tx16)."""

    key: _Key
    home: _Key
    attempt: Attempt
    ops: tuple[Op, ...]  # type: ignore[misc]  # empty in every other class
    flags: int = 0
    parts: _Number = 0
    mark: _Number = 0
    waits: bool = False
    begun_ms: _Number = 0
    """Record time of home when the attempt began. It orders attempts for fairness, and nothing else depends on it."""


class Resolve(InternalOp, tag=int(Code.RESOLVE)):
    """Remove the intent of an attempt on a key, with its effect if `commit` (docs/protocol.md Tx7). `intent_seq` is the
    sequence of the intent. The result is the partition's mark, also if the intent has been resolved before."""

    key: _Key
    attempt: Attempt
    intent_seq: _Number
    commit: bool
    mark: _Number = 0


class Inquire(InternalOp, tag=int(Code.INQUIRE)):
    """Ask the owner of a home key for the outcome of an attempt (docs/protocol.md Tx6). `intent_key` and `intent_seq`
    name the intent whose fate is asked. The result is (is_committed, mark): False if the attempt is aborted. Fails with
    Unavailable if the attempt is under way."""

    key: _Key
    attempt: Attempt
    intent_key: _Key
    intent_seq: _Number
    mark: _Number = 0


Op = (
    Get
    | Meta
    | Put
    | Delete
    | Increment
    | Append
    | Expire
    | Batch
    | DeleteRange
    | Scan
    | ScanTokens
    | Count
    | Check
    | Range
    | Transact
    | Prepare
    | Resolve
    | Inquire
)
"""Every operation. Bounds in the fields' types are checked when an operation is decoded, not when it is created."""

TYPES: dict[int, type[Op]] = {each.__struct_config__.tag: each for each in get_args(Op)}
"""The classes of operations by code."""
for _code, _type in TYPES.items():
    _type.code = _code


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


class WrappedSink(Sink):
    """Passes results to the sink of a caller. Subclasses change how or when."""

    __slots__ = ("_sink",)

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    @property
    def line(self) -> object:
        return self._sink.line

    @property
    def is_gone(self) -> bool:
        return self._sink.is_gone

    def complete(self, token: int, result: Result | StoreError) -> None:
        self._sink.complete(token, result)

    def flush(self) -> None:
        self._sink.flush()


Reply = tuple[Sink, int, Result]
"""Sink, token, result."""
