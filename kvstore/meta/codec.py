"""The encoding of our own documents in the metadata store: frozen dataclasses as JSON with a format number.

    {"format": 1, "epoch": 7, "ledgers": [...]}

Bytes become base64, and enums become their values. A reader ignores fields that it does not know. A change that old
readers must not overlook gets a new format number, and readers refuse unknown numbers.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import msgspec

from kvstore.errors import UndecodableNode

T = TypeVar("T")


_MALFORMED = (msgspec.MsgspecError, RecursionError)
"""Errors that malformed documents cause. Thousands of nested brackets cause RecursionError."""


class _FormatOnly(msgspec.Struct):
    format: int


def encode(document: object, *, format: int = 1) -> bytes:
    """Encode a dataclass as JSON, with `format` in front of its fields."""
    fields = msgspec.to_builtins(document)
    if not isinstance(fields, dict) or "format" in fields:
        raise TypeError(f"expected a dataclass without a field named format, got {document!r}")
    return msgspec.json.encode({"format": format, **cast("dict[str, Any]", fields)})


def format_of(data: bytes, *, what: str) -> int:
    """Return the format number of a document. `what` names the document in errors. Raises UndecodableNode."""
    try:
        return msgspec.json.decode(data, type=_FormatOnly).format
    except _MALFORMED as error:
        raise UndecodableNode(f"{what} has no format number: {error}") from error


def decode(kind: type[T], data: bytes, *, what: str, format: int = 1) -> T:
    """Decode a document into the dataclass `kind`. `what` names the document in errors. Raises UndecodableNode if
    the document is malformed or has another format number."""
    try:
        found = msgspec.json.decode(data, type=_FormatOnly).format
        if found != format:
            raise UndecodableNode(f"{what} has format {found}; this build reads {format}")
    except _MALFORMED as error:
        raise UndecodableNode(f"{what} is not a {kind.__name__}: {error}") from error
    return decode_plain(kind, data, what=what)


def decode_plain(kind: type[T], data: bytes, *, what: str) -> T:
    """Decode a document without a format number: a JSON object with the fields and types of `kind`. `what` names it
    in errors. Raises UndecodableNode."""
    try:
        return msgspec.json.decode(data, type=kind)
    except _MALFORMED as error:
        raise UndecodableNode(f"{what} is not a {kind.__name__}: {error}") from error
