"""Values as an application has them, and the bytes that the store keeps: JSON, msgspec's types, or a codec of one's
own. Decides only.

There is none for pickle, and none should be written: whoever may write a key could run code in whoever reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum, StrEnum
from math import isfinite
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec
import orjson

from kvstore.client.core.values import Item
from kvstore.errors import Corrupted, InvalidRequest

T = TypeVar("T")
REFUSALS = (ValueError, TypeError, OverflowError, RecursionError, msgspec.MsgspecError)
"""Raised by codecs for what they do not know. Of older releases msgspec's errors are no ValueErrors."""


class Codec(Protocol[T]):
    """Both ways between a value and its bytes. Each raises one of REFUSALS for what it does not know."""

    def encode(self, value: T) -> bytes: ...

    def decode(self, data: bytes) -> T: ...


class Layout(StrEnum):
    """The bytes that values of msgspec's types become."""

    JSON = "json"
    MSGPACK = "msgpack"
    """Shorter, and faster to read; nothing for people."""


@dataclass(frozen=True, slots=True)
class _Functions(Generic[T]):
    """A codec of two functions."""

    encode: Callable[[T], bytes]
    decode: Callable[[bytes], T]


def bytes_codec() -> Codec[bytes]:
    """Bytes as they are.

    >>> bytes_codec().decode(bytes_codec().encode(b"as they are"))
    b'as they are'
    """
    return _Functions(_bytes, bytes)


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"want bytes, got {value!r:.100}")
    return value


def json_codec() -> Codec[Any]:
    """JSON by orjson: None, bool, int, float, str, lists and dicts; it writes dates, UUIDs and dataclasses too, and
    reads them back as text and dicts. A NaN or an infinity is refused: JSON has none.

    >>> json_codec().encode({"name": "Ann", "visits": 3})
    b'{"name":"Ann","visits":3}'
    >>> json_codec().decode(b'[1,2.5,null]')
    [1, 2.5, None]
    """
    return _Functions(_json, orjson.loads)


def _json(value: Any) -> bytes:
    data = orjson.dumps(value)
    if b"null" in data:
        _check_finite(value)
    return data


def _check_finite(value: object) -> None:
    """Raises ValueError for a number that JSON does not have: encoders write `null` for it, and it would be lost."""
    left = [value]
    while left:
        match each := left.pop():
            case float() if not isfinite(each):
                raise ValueError(f"want numbers that JSON has, got {each}")
            case dict():
                left.extend(each.values())
            case list() | tuple():
                left.extend(each)
            case Enum():
                left.append(each.value)
            case _ if is_dataclass(each):
                left.extend(getattr(each, field.name) for field in fields(each))


def typed_codec(type: type[T], layout: Layout = Layout.JSON) -> Codec[T]:
    """Values of one type that msgspec knows: its Structs, dataclasses, TypedDicts and what is built of them. What is
    read is checked: bytes of another form raise Corrupted.

    >>> class Visit(msgspec.Struct):
    ...     page: str
    ...     seconds: int = 0
    >>> codec = typed_codec(Visit)
    >>> codec.encode(Visit("home", 7))
    b'{"page":"home","seconds":7}'
    >>> codec.decode(b'{"page":"home"}')
    Visit(page='home', seconds=0)
    >>> typed_codec(Visit, Layout.MSGPACK).decode(typed_codec(Visit, Layout.MSGPACK).encode(Visit("home")))
    Visit(page='home', seconds=0)
    """
    if layout is Layout.JSON:
        return _Functions(_typed_json, msgspec.json.Decoder(type).decode)
    return _Functions(msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(type).decode)


def _typed_json(value: object) -> bytes:
    data = msgspec.json.encode(value)
    if b"null" in data:
        _check_finite(msgspec.to_builtins(value))
    return data


class TypedItem(NamedTuple, Generic[T]):
    """A key that was found, with its value decoded; otherwise as `Item`."""

    value: T
    version: int
    created: int
    written_ms: int
    expires_ms: int


class TypedReplaced(NamedTuple, Generic[T]):
    """The result of `replace`, with the old value decoded; otherwise as `Replaced`."""

    applied: bool
    version: int
    old: TypedItem[T] | None


@dataclass(frozen=True, slots=True)
class Coding(Generic[T]):
    """A codec, with its errors as those of the store."""

    codec: Codec[T]

    def encode(self, key: bytes, value: T) -> bytes:
        """Raises InvalidRequest for what the codec does not know: nothing was sent."""
        try:
            return self.codec.encode(value)
        except REFUSALS as error:
            raise InvalidRequest(f"the value for {key!r}: want one that the codec knows: {error}") from error

    def decode(self, key: bytes, item: Item) -> TypedItem[T]:
        """Raises Corrupted for bytes that the codec does not read: somebody else's, or an older form's."""
        try:
            return TypedItem(self.codec.decode(item.value), *item[1:])
        except REFUSALS as error:
            where = f"the value of {key!r}, version {item.version}"
            raise Corrupted(f"{where}: want what the codec reads: {error}") from error

    def decode_or_none(self, key: bytes, item: Item | None) -> TypedItem[T] | None:
        return None if item is None else self.decode(key, item)
