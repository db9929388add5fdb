"""Operations of the gRPC messages → the partition's operations, checked. Decides only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.errors import InvalidRequest, StoreError
from kvstore.partition.commands import (
    BATCH_BYTES_MAX,
    KEY_BYTES_MAX,
    VALUE_BYTES_MAX,
    Code,
    Flag,
    Level,
    Op,
    RequestId,
)
from kvstore.proto import kv_pb2
from kvstore.types import PartitionId

OPERATIONS_MAX = 8_192
"""Of one frame."""
CLIENT_BYTES = 16

_GET, _PUT, _DELETE = int(Code.GET), int(Code.PUT), int(Code.DELETE)
_NO_OPTIONS = kv_pb2.Options()
_LEVELS = frozenset(int(level) for level in Level)
_FLAGS = sum(Flag)
_KEYLESS = frozenset({int(Code.SCAN), int(Code.SCAN_TOKENS), int(Code.COUNT), int(Code.DELETE_RANGE)})
"""What may come without a key: it goes to the partition that its lane names."""


def ops_of(lane: kv_pb2.Lane) -> list[Op | StoreError]:
    """The lane's operations, or why one cannot be done. Raises InvalidRequest if the columns do not fit each other."""
    codes, keys = list(lane.codes), list(lane.keys)
    count = len(codes)
    values: Sequence[bytes] = list(lane.values) or [b""] * count
    sequences: Sequence[int] = list(lane.sequences) or [0] * count
    if not len(keys) == len(values) == len(sequences) == count:
        found = f"{count} codes, {len(keys)} keys, {len(values)} values, {len(sequences)} sequences"
        raise InvalidRequest(f"want columns of one length, got {found}")
    if lane.level not in _LEVELS:
        raise InvalidRequest(f"want a level from 0 to 3, got {lane.level}")
    client, level, token = lane.client, lane.level, lane.token
    first, seen = lane.first_unacknowledged, lane.seen_ms
    if any(sequences) and len(client) != CLIENT_BYTES:
        raise InvalidRequest(f"want a client id of {CLIENT_BYTES} bytes, got {len(client)}")
    options = {each.index: each for each in lane.options}
    if not options and _are_small(keys, values):
        return [
            (_PUT, key, value, 0, 0, 0, RequestId(client, sequence, first, seen) if sequence else None)
            if code == _PUT
            else (_GET, key, level, token)
            if code == _GET
            else (_DELETE, key, 0, 0, RequestId(client, sequence, first, seen) if sequence else None)
            if code == _DELETE
            else _op(code, key, value, _NO_OPTIONS, _request(client, sequence, first, seen), level, token)
            for code, key, value, sequence in zip(codes, keys, values, sequences, strict=True)
        ]
    return [
        op_or_error(
            code, key, value, options.get(index, _NO_OPTIONS), _request(client, sequence, first, seen), level, token
        )
        for index, code, key, value, sequence in zip(range(count), codes, keys, values, sequences, strict=True)
    ]


def _are_small(keys: Sequence[bytes], values: Sequence[bytes]) -> bool:
    """Whether every key and value of a lane is within its bounds: three passes in C."""
    sizes = list(map(len, keys))
    return bool(sizes) and min(sizes) > 0 and max(sizes) <= KEY_BYTES_MAX and max(map(len, values)) <= VALUE_BYTES_MAX


def _request(client: bytes, sequence: int, first: int, seen: int) -> RequestId | None:
    return RequestId(client, sequence, first, seen) if sequence else None


def request_id(message: kv_pb2.RequestId) -> RequestId | None:
    """The id of a unary request; None if it has none. Raises InvalidRequest."""
    if not message.sequence:
        return None
    if len(message.client) != CLIENT_BYTES:
        raise InvalidRequest(f"want a client id of {CLIENT_BYTES} bytes, got {len(message.client)}")
    return RequestId(message.client, message.sequence, message.first_unacknowledged, message.seen_ms)


def op_or_error(
    code: int, key: bytes, value: bytes, options: kv_pb2.Options, request: RequestId | None, level: int, token: int
) -> Op | StoreError:
    """One operation, or why it cannot be done."""
    try:
        check_sizes(code, key, value)
        return _op(code, key, value, options, request, level, token)
    except InvalidRequest as error:
        return error


def check_sizes(code: int, key: bytes, value: bytes) -> None:
    """Raises InvalidRequest."""
    if not key and code not in _KEYLESS:
        raise InvalidRequest("want a key of at least one byte")
    if len(key) > KEY_BYTES_MAX:
        raise InvalidRequest(f"want a key of at most {KEY_BYTES_MAX} bytes, got {len(key)}")
    if len(value) > VALUE_BYTES_MAX:
        raise InvalidRequest(f"want a value of at most {VALUE_BYTES_MAX} bytes, got {len(value)}")


def batch_op(operations: Sequence[kv_pb2.Operation], flags: int, request: RequestId | None) -> Op:
    """An atomic batch. Raises InvalidRequest."""
    if not operations:
        raise InvalidRequest("want at least one operation in a batch")
    size = sum(len(each.key) + len(each.value) for each in operations)
    if size > BATCH_BYTES_MAX:
        raise InvalidRequest(f"want at most {BATCH_BYTES_MAX} bytes of keys and values in a batch, got {size}")
    for each in operations:
        check_sizes(each.code, each.key, each.value)
        if each.code not in _IN_BATCH:
            raise InvalidRequest(f"operation {_name(each.code)} cannot stand in a batch")
    ops = tuple(_op(each.code, each.key, each.value, each.options, None, 0, 0) for each in operations)
    return (Code.BATCH, operations[0].key, ops, _flags(flags), request)


def check_one_partition(op: Op, partition_of: Callable[[bytes], PartitionId]) -> None:
    """Raises InvalidRequest for a batch over two partitions, and names both."""
    owners = sorted({partition_of(each[1]) for each in op[2]})
    if len(owners) > 1:
        raise InvalidRequest(f"want all keys of a batch in one partition, got keys of {' and '.join(owners)}")


def _op(
    code: int, key: bytes, value: bytes, options: kv_pb2.Options, request: RequestId | None, level: int, token: int
) -> Op:
    build = _BUILD.get(code)
    if build is None:
        raise InvalidRequest(f"want an operation code from 1 to {max(Code)}, got {code}")
    return build(key, value, options, request, level, token)


def _flags(flags: int) -> int:
    if flags & ~_FLAGS:
        raise InvalidRequest(f"unknown flags {flags & ~_FLAGS:#x}")
    return flags


def _batch(key: bytes, value: bytes, o: kv_pb2.Options, request: RequestId | None, level: int, token: int) -> Op:
    return batch_op(o.operations, o.flags, request)


def _increment(key: bytes, value: bytes, o: kv_pb2.Options, request: RequestId | None, level: int, token: int) -> Op:
    return (Code.INCREMENT, key, o.delta, request)


_Build = Callable[[bytes, bytes, kv_pb2.Options, RequestId | None, int, int], Op]
_BUILD: dict[int, _Build] = {
    Code.GET: lambda key, value, o, request, level, token: (Code.GET, key, level, token),
    Code.META: lambda key, value, o, request, level, token: (Code.META, key, level, token),
    Code.PUT: lambda key, value, o, request, level, token: (
        (Code.PUT, key, value, o.expires_ms, _flags(o.flags), o.version, request)
    ),
    Code.DELETE: lambda key, value, o, request, level, token: ((Code.DELETE, key, _flags(o.flags), o.version, request)),
    Code.INCREMENT: _increment,
    Code.APPEND: lambda key, value, o, request, level, token: (Code.APPEND, key, value, request),
    Code.EXPIRE: lambda key, value, o, request, level, token: (
        (Code.EXPIRE, key, o.expires_ms, _flags(o.flags), request)
    ),
    Code.BATCH: _batch,
    Code.DELETE_RANGE: lambda key, value, o, request, level, token: (Code.DELETE_RANGE, key, value, request),
    Code.SCAN: lambda key, value, o, request, level, token: (
        (Code.SCAN, key, value, o.limit, _flags(o.flags), level, token)
    ),
    Code.SCAN_TOKENS: lambda key, value, o, request, level, token: (Code.SCAN_TOKENS, o.token, o.limit, level),
    Code.COUNT: lambda key, value, o, request, level, token: (Code.COUNT, b"", level),
}
_IN_BATCH: frozenset[int] = frozenset(
    {Code.GET, Code.META, Code.PUT, Code.DELETE, Code.INCREMENT, Code.APPEND, Code.EXPIRE}
)


def _name(code: int) -> str:
    return Code(code).name if code in _BUILD else str(code)
