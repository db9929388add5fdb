"""Results ↔ bytes, for those that are remembered for a client's retries. Decides only.

result := integer | bool | nil | bytes | [tag, item …]       as MessagePack; tag 0 list, 1 tuple, 2 Record, 3 error
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvstore import errors
from kvstore.errors import Corrupted, StoreError
from kvstore.partition.commands import Record, Result

_LIST, _TUPLE, _RECORD, _ERROR = range(4)


def encode_result(result: Result | StoreError) -> bytes:
    """The result as it stands in the log; never empty."""
    return msgspec.msgpack.encode(_plain(result))


def decode_result(encoded: bytes) -> Result | StoreError:
    """Raises Corrupted."""
    try:
        return _value(msgspec.msgpack.decode(encoded))
    except (msgspec.DecodeError, LookupError, TypeError) as error:
        raise Corrupted(f"remembered result {encoded[:32].hex()} cannot be read: {error}") from error


def _plain(value: Any) -> Any:
    match value:
        case None | bool() | int() | bytes():
            return value
        case Record():
            return [_RECORD, *value]
        case tuple():
            return [_TUPLE, *map(_plain, value)]
        case list():
            return [_LIST, *map(_plain, value)]
        case StoreError():
            return [_ERROR, type(value).__name__, *map(_plain, value.args)]
        case str():
            return value
    raise AssertionError(f"a result of type {type(value).__name__}")


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
