"""Codecs between an application's values and the bytes that the store keeps: JSON, msgspec types, or the application's
own. Decides only.

There is no codec for pickle, and none should be written: anyone who can write a key could run code in its readers.
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
"""Errors that codecs raise for values they do not support. In older releases msgspec's errors are not ValueErrors."""


class Codec(Protocol[T]):
    """Encodes values to bytes and decodes them. Raises one of REFUSALS for what it does not support."""

    def encode(self, value: T) -> bytes: ...

    def decode(self, data: bytes) -> T: ...


class Layout(StrEnum):
    """The byte format of msgspec types."""

    JSON = "json"
    MSGPACK = "msgpack"
    """Shorter than JSON and faster to read, but not readable for people."""


@dataclass(frozen=True, slots=True)
class _Functions(Generic[T]):
    """A codec made of two functions."""

    encode: Callable[[T], bytes]
    decode: Callable[[bytes], T]


def bytes_codec() -> Codec[bytes]:
    """Return a codec that leaves bytes as they are.

    Examples:
        >>> bytes_codec().decode(bytes_codec().encode(b"as they are"))
        b'as they are'
    """
    return _Functions(_bytes, bytes)


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"expected bytes, got {value!r:.100}")
    return value


def json_codec() -> Codec[Any]:
    """Return a codec for JSON, by orjson: None, bool, int, float, str, lists and dicts.

    Dates, UUIDs and dataclasses can be written; they are read back as text and dicts. NaN and infinity are refused,
    because JSON does not have them.

    Examples:
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
    """Raise ValueError for a number that JSON does not have. Encoders would write `null` and lose it."""
    left = [value]
    while left:
        match each := left.pop():
            case float() if not isfinite(each):
                raise ValueError(f"expected numbers that JSON has, got {each}")
            case dict():
                left.extend(each.values())
            case list() | tuple():
                left.extend(each)
            case Enum():
                left.append(each.value)
            case _ if is_dataclass(each):
                left.extend(getattr(each, field.name) for field in fields(each))


def typed_codec(type: type[T], layout: Layout = Layout.JSON) -> Codec[T]:
    """Return a codec for one type that msgspec knows: Structs, dataclasses, TypedDicts, and types built from them.

    Decoding checks the type, so bytes of another form raise Corrupted.

    Args:
        type: The type of all values.
        layout: The byte format, JSON or MessagePack.

    Examples:
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
    """A key that is present, with its value decoded. The other fields are those of `Item`."""

    value: T
    version: int
    created: int
    written_ms: int
    expires_ms: int


class TypedReplaced(NamedTuple, Generic[T]):
    """The result of `replace`, with the old value decoded. The other fields are those of `Replaced`."""

    applied: bool
    version: int
    old: TypedItem[T] | None


@dataclass(frozen=True, slots=True)
class Coding(Generic[T]):
    """A codec whose errors are errors of the store."""

    codec: Codec[T]

    def encode(self, key: bytes, value: T) -> bytes:
        """Return the bytes of a value. Raises InvalidRequest if the codec does not support the value."""
        try:
            return self.codec.encode(value)
        except REFUSALS as error:
            raise InvalidRequest(f"value of {key!r}: expected one that the codec can encode: {error}") from error

    def decode(self, key: bytes, item: Item) -> TypedItem[T]:
        """Return an item with its value decoded. Raises Corrupted if the codec cannot decode the bytes."""
        try:
            return TypedItem(self.codec.decode(item.value), *item[1:])
        except REFUSALS as error:
            where = f"the value of {key!r}, version {item.version}"
            raise Corrupted(f"{where}: expected bytes that the codec can decode: {error}") from error

    def decode_or_none(self, key: bytes, item: Item | None) -> TypedItem[T] | None:
        return None if item is None else self.decode(key, item)
