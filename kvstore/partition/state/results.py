"""Encodes results that are remembered for a client's retries. Decides only.

result := integer | bool | nil | bytes | [tag, item …]       as MessagePack; tag 0 list, 1 tuple, 2 Record, 3 error
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvstore import errors
from kvstore.errors import Corrupted, InvalidRequest, StoreError
from kvstore.partition.state.commands import (
    Append,
    Batch,
    Check,
    Delete,
    DeleteRange,
    Expire,
    Flag,
    Get,
    Increment,
    Meta,
    Op,
    Put,
    Record,
    RequestId,
    Result,
    Transact,
)

_LIST, _TUPLE, _RECORD, _ERROR = range(4)


def encode_result(result: Result | StoreError) -> bytes:
    """Encode the result as it is stored in the log; never empty."""
    return msgspec.msgpack.encode(_plain(result))


def decode_result(encoded: bytes) -> Result | StoreError:
    """Decode a result. Raises Corrupted."""
    try:
        return _value(msgspec.msgpack.decode(encoded))
    except (msgspec.DecodeError, LookupError, TypeError) as error:
        raise Corrupted(f"cannot read remembered result {encoded[:32].hex()}: {error}") from error


def fits(op: Op, result: Result | StoreError) -> bool:
    """Return True if `result` can be the result of `op`. If it cannot, the request id was used for another
    operation."""
    match op:
        case Put() if op.flags & Flag.RETURN_OLD:
            return _is_tuple(result, bool, int, Record | None)
        case Delete() if op.flags & Flag.RETURN_OLD:
            return _is_tuple(result, int, Record | None)
        case Put() | Delete() | DeleteRange() | Check():
            return type(result) is int
        case Increment() | Append():
            return _is_tuple(result, int, int)
        case Expire():
            return type(result) is bool
        case Get():
            return isinstance(result, Record | None)
        case Meta():
            return result is None or _is_tuple(result, int, int, int, int, int)
        case Batch():
            return _fit_all(op.ops, result)
        case Transact():
            return _is_tuple(result, list, list) and _fit_all(op.ops, result[0])  # type: ignore[index]
    return False


def _fit_all(ops: tuple[Op, ...], results: Result) -> bool:
    return (
        isinstance(results, list)
        and len(results) == len(ops)
        and all(isinstance(each, StoreError) or fits(op, each) for op, each in zip(ops, results, strict=True))
    )


def misused(request: RequestId) -> InvalidRequest:
    """Return the error for a request id that was used for another operation."""
    return InvalidRequest(f"request {request[1]} was used for another operation on this key; use a new request id")


def _is_tuple(result: Result, *kinds: Any) -> bool:
    return (
        isinstance(result, tuple)
        and not isinstance(result, Record)
        and len(result) == len(kinds)
        and all(isinstance(each, kind) for each, kind in zip(result, kinds, strict=True))
    )


def _plain(value: Any) -> Any:
    match value:
        case None | bool() | int() | bytes():
            return value
        case Record():
            return [_RECORD, *value]
        case tuple():
            return [_TUPLE, *map(_plain, value)]
        case list():
            return [_LIST, *(each if each.__class__ is int else _plain(each) for each in value)]
        case StoreError():
            return [_ERROR, type(value).__name__, *map(_plain, value.args)]
        case str():
            return value
    raise AssertionError(f"unexpected result of type {type(value).__name__}")


def _value(plain: Any) -> Any:
    if not isinstance(plain, list):
        return plain
    tag, *items = plain
    match tag:
        case 0:
            return list(map(_value, items))
        case 1:
            return tuple(map(_value, items))
        case 2:
            return Record(*items)
        case 3:
            name, *arguments = items
            kind: type[StoreError] = getattr(errors, name)
            return kind(*map(_value, arguments))
    raise LookupError(f"tag {tag}")
