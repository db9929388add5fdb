"""Documents of our own in the metadata store: frozen dataclasses ↔ JSON with a format number.

    {"format": 1, "epoch": 7, "ledgers": [...]}

Bytes become base64, enums their values. Fields that a reader does not know are ignored; a change that old readers must
not overlook takes a new format number, and an unknown number is refused.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import msgspec

from kvstore.errors import UndecodableNode

T = TypeVar("T")


_MALFORMED = (msgspec.MsgspecError, RecursionError)
"""Brackets in brackets by the thousand are a document of nobody's."""


class _FormatOnly(msgspec.Struct):
    format: int


def encode(document: object, *, format: int = 1) -> bytes:
    """The bytes of a dataclass, with `format` in front of its own fields."""
    fields = msgspec.to_builtins(document)
    if not isinstance(fields, dict) or "format" in fields:
        raise TypeError(f"want a dataclass without a field named format, got {document!r}")
    return msgspec.json.encode({"format": format, **cast("dict[str, Any]", fields)})


def format_of(data: bytes, *, what: str) -> int:
    """The format number of a document. Raises UndecodableNode."""
    try:
        return msgspec.json.decode(data, type=_FormatOnly).format
    except _MALFORMED as error:
        raise UndecodableNode(f"{what} has no format number: {error}") from error


def decode(kind: type[T], data: bytes, *, what: str, format: int = 1) -> T:
    """The document in `data`. `what` names it in errors. Raises UndecodableNode, also for another format
    number."""
    try:
        found = msgspec.json.decode(data, type=_FormatOnly).format
        if found != format:
            raise UndecodableNode(f"{what} has format {found}; this build reads {format}")
    except _MALFORMED as error:
        raise UndecodableNode(f"{what} is not a {kind.__name__}: {error}") from error
    return decode_plain(kind, data, what=what)


def decode_plain(kind: type[T], data: bytes, *, what: str) -> T:
    """The same of a document without a format number: an object with the fields of `kind`, of their types. Raises
    UndecodableNode."""
    try:
        return msgspec.json.decode(data, type=kind)
    except _MALFORMED as error:
        raise UndecodableNode(f"{what} is not a {kind.__name__}: {error}") from error
