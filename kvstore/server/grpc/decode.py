"""Checks the operations in gRPC messages and converts them to operations of the partition. Decides only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat

from kvstore.errors import InvalidRequest, StoreError
from kvstore.limits import BATCH_BYTES_MAX, BATCH_OPS_MAX, CLIENT_BYTES, KEY_BYTES_MAX, VALUE_BYTES_MAX
from kvstore.partition.state.commands import (
    Append,
    Batch,
    Check,
    Code,
    Count,
    Delete,
    DeleteRange,
    Expire,
    Get,
    Increment,
    Level,
    Meta,
    Op,
    Put,
    Range,
    RequestId,
    Scan,
    ScanTokens,
    Transact,
)
from kvstore.partition.state.operations import size_of
from kvstore.partition.state.traits import APPLIES_NOTHING, IN_BATCH, KEYLESS, check_options, home_key
from kvstore.proto import compact, kv_pb2
from kvstore.ring.hashing import TOKENS

OPERATIONS_MAX = 8_192
"""Maximum number of operations in one lane."""
NUMBER_MAX = (1 << 62) - 1
"""Maximum of every count and time. The sum of two such numbers can still be stored."""
SCAN_KEYS_MAX = 10_000
"""Maximum and default number of keys in one page."""
TOKEN_MAX = TOKENS - 1

_GET, _PUT, _DELETE = int(Code.GET), int(Code.PUT), int(Code.DELETE)
_RANGES = frozenset((int(Code.SCAN), int(Code.RANGE)))
_NO_OPTIONS = kv_pb2.Options()
_LEVELS = frozenset(int(level) for level in Level)


def ops_of(lane: kv_pb2.Lane | compact.CompactLane) -> list[Op | StoreError]:
    """Return the operations of a lane. In place of a malformed operation, the list contains its error. Raises
    InvalidRequest if the columns of the lane have different lengths."""
    codes, keys = list(lane.codes), list(lane.keys)
    count = len(codes)
    values: Sequence[bytes] = list(lane.values) or [b""] * count
    sequences: Sequence[int] = list(lane.sequences) or [0] * count
    if not len(keys) == len(values) == len(sequences) == count:
        found = f"{count} codes, {len(keys)} keys, {len(values)} values, {len(sequences)} sequences"
        raise InvalidRequest(f"expected columns of equal length, got {found}")
    check_level(lane.level)
    client, level, token = lane.client, lane.level, lane.token
    first, seen = lane.first_unacknowledged, lane.seen_ms
    check_numbers(first, seen, token, *sequences)
    if any(sequences) and len(client) != CLIENT_BYTES:
        raise InvalidRequest(f"expected a client id of {CLIENT_BYTES} bytes, got {len(client)}")
    options = {each.index: each for each in lane.options}
    if not options and _are_small(keys, values):
        if codes.count(_PUT) == count and all(sequences):
            ids = map(tuple.__new__, repeat(RequestId), zip(repeat(client), sequences, repeat(first), repeat(seen)))
            return list(map(Put, keys, values, repeat(0), repeat(0), repeat(0), ids))
        return [
            Put(key, value, 0, 0, 0, RequestId(client, sequence, first, seen) if sequence else None)
            if code == _PUT
            else Get(key, level, token)
            if code == _GET
            else Delete(key, 0, 0, RequestId(client, sequence, first, seen) if sequence else None)
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
    """Return True if every key and value of a lane is within its limit. This takes three fast passes."""
    sizes = list(map(len, keys))
    return bool(sizes) and min(sizes) > 0 and max(sizes) <= KEY_BYTES_MAX and max(map(len, values)) <= VALUE_BYTES_MAX


def _request(client: bytes, sequence: int, first: int, seen: int) -> RequestId | None:
    return RequestId(client, sequence, first, seen) if sequence else None


def request_id(message: kv_pb2.RequestId) -> RequestId | None:
    """Return the request id of a unary request, or None if it has none. Raises InvalidRequest."""
    if not message.sequence:
        return None
    if len(message.client) != CLIENT_BYTES:
        raise InvalidRequest(f"expected a client id of {CLIENT_BYTES} bytes, got {len(message.client)}")
    check_numbers(message.sequence, message.first_unacknowledged, message.seen_ms)
    return RequestId(message.client, message.sequence, message.first_unacknowledged, message.seen_ms)


def check_numbers(*numbers: int) -> None:
    """Raise InvalidRequest if a number exceeds NUMBER_MAX."""
    if max(numbers) > NUMBER_MAX:
        raise InvalidRequest(f"expected numbers of at most {NUMBER_MAX}, got {max(numbers)}")


def check_level(level: int) -> None:
    """Raise InvalidRequest if the consistency level is unknown."""
    if level not in _LEVELS:
        raise InvalidRequest(f"expected a level from 0 to {max(_LEVELS)}, got {level}")


def op_or_error(
    code: int, key: bytes, value: bytes, options: kv_pb2.Options, request: RequestId | None, level: int, token: int
) -> Op | StoreError:
    """Return one operation, or the error if it is malformed."""
    try:
        check_operation_sizes(code, key, value)
        return _op(code, key, value, options, request, level, token)
    except InvalidRequest as error:
        return error


def check_operation_sizes(code: int, key: bytes, value: bytes) -> None:
    """Raise InvalidRequest if the key or the value has an invalid size."""
    if not key and code not in KEYLESS:
        raise InvalidRequest("expected a key of at least 1 byte, got an empty key")
    # a scan that continues after a key starts at that key and a zero byte
    if len(key) > KEY_BYTES_MAX + (code in _RANGES):
        raise InvalidRequest(f"expected a key of at most {KEY_BYTES_MAX} bytes, got {len(key)}")
    if len(value) > VALUE_BYTES_MAX:
        raise InvalidRequest(f"expected a value of at most {VALUE_BYTES_MAX} bytes, got {len(value)}")


def check_batch_count(count: int) -> None:
    """Raise InvalidRequest if a batch has an invalid number of operations. Call this before any operation is
    decoded."""
    if not 0 < count <= BATCH_OPS_MAX:
        raise InvalidRequest(f"expected 1 to {BATCH_OPS_MAX} operations in a batch, got {count}")


def batch_op(operations: Sequence[kv_pb2.Operation], flags: int, request: RequestId | None) -> Batch:
    """Return an atomic batch. The request id is dropped if no operation of the batch can change anything. Raises
    InvalidRequest."""
    ops, request = _parts(operations, request)
    return Batch(ops[0].key, ops, check_options(Code.BATCH, flags), request)


def transact_op(operations: Sequence[kv_pb2.Operation], flags: int, request: RequestId | None) -> Transact:
    """Return a transaction. Its key is the first one that it writes (docs/protocol.md Tx2). Raises InvalidRequest."""
    ops, request = _parts(operations, request)
    return Transact(home_key(ops), ops, check_options(Code.TRANSACT, flags), request)


def _parts(
    operations: Sequence[kv_pb2.Operation], request: RequestId | None
) -> tuple[tuple[Op, ...], RequestId | None]:
    """Return the operations of a batch or a transaction, and its request id."""
    check_batch_count(len(operations))
    ops = tuple(map(_op_in_batch, operations))
    size = sum(map(size_of, ops))
    if size > BATCH_BYTES_MAX:
        raise InvalidRequest(
            f"expected at most {BATCH_BYTES_MAX} bytes of keys and values in a batch, got {size}; split the batch"
        )
    # A request id is logged with its results, and a user with only the right to read these keys must not cause that.
    if request is not None and all(each.code in APPLIES_NOTHING for each in ops):
        request = None
    return ops, request


def _op_in_batch(part: kv_pb2.Operation) -> Op:
    code, key, value = part.code, part.key, part.value
    check_operation_sizes(code, key, value)
    if code not in IN_BATCH:
        raise InvalidRequest(f"expected operations that are allowed in a batch, got {_name(code)}")
    if part.HasField("options"):
        return _op(code, key, value, part.options, None, 0, 0)
    if code == _PUT:
        return Put(key, value, 0, 0, 0, None)
    return _op(code, key, value, _NO_OPTIONS, None, 0, 0)


def _op(
    code: int, key: bytes, value: bytes, options: kv_pb2.Options, request: RequestId | None, level: int, token: int
) -> Op:
    build = _BUILD.get(code)
    if build is None:
        raise InvalidRequest(f"expected an operation code from 1 to {max(_BUILD)}, got {code}")
    if options is not _NO_OPTIONS:
        check_numbers(options.expires_ms, options.version)
        if options.token > TOKEN_MAX:
            raise InvalidRequest(f"expected a token of at most {TOKEN_MAX}, got {options.token}")
        check_options(code, options.flags, options.expires_ms, options.version)
    return build(key, value, options, request, level, token)


def _limit(options: kv_pb2.Options) -> int:
    return min(options.limit or SCAN_KEYS_MAX, SCAN_KEYS_MAX)


def _batch(key: bytes, value: bytes, o: kv_pb2.Options, request: RequestId | None, level: int, token: int) -> Op:
    return batch_op(o.operations, o.flags, request)


def _transact(key: bytes, value: bytes, o: kv_pb2.Options, request: RequestId | None, level: int, token: int) -> Op:
    return transact_op(o.operations, o.flags, request)


def _increment(key: bytes, value: bytes, o: kv_pb2.Options, request: RequestId | None, level: int, token: int) -> Op:
    return Increment(key, o.delta, request)


_Build = Callable[[bytes, bytes, kv_pb2.Options, RequestId | None, int, int], Op]
_BUILD: dict[int, _Build] = {
    Code.GET: lambda key, value, o, request, level, token: Get(key, level, token),
    Code.META: lambda key, value, o, request, level, token: Meta(key, level, token),
    Code.PUT: lambda key, value, o, request, level, token: Put(key, value, o.expires_ms, o.flags, o.version, request),
    Code.DELETE: lambda key, value, o, request, level, token: Delete(key, o.flags, o.version, request),
    Code.INCREMENT: _increment,
    Code.APPEND: lambda key, value, o, request, level, token: Append(key, value, request),
    Code.EXPIRE: lambda key, value, o, request, level, token: Expire(key, o.expires_ms, o.flags, request),
    # without its request id, like a batch that can change nothing
    Code.CHECK: lambda key, value, o, request, level, token: Check(key, o.flags, o.version),
    Code.BATCH: _batch,
    Code.TRANSACT: _transact,
    Code.DELETE_RANGE: lambda key, value, o, request, level, token: DeleteRange(key, value, request),
    Code.SCAN: lambda key, value, o, request, level, token: Scan(key, value, _limit(o), o.flags, level, token),
    Code.RANGE: lambda key, value, o, request, level, token: Range(key, value, _limit(o), o.flags, level, token),
    Code.SCAN_TOKENS: lambda key, value, o, request, level, token: ScanTokens(o.token, _limit(o), level),
    Code.COUNT: lambda key, value, o, request, level, token: Count(level=level),
}


def _name(code: int) -> str:
    return Code(code).name if code in _BUILD else str(code)
