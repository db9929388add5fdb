"""Decodes MessagePack arrays into named tuples, where a newer release may have written more fields. Decides only.

Fields behind those that the reader knows are ignored, at any depth (docs/protocol.md V5): new fields come last.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
from msgspec import inspect

T = TypeVar("T")


class ArrayDecoder(Generic[T]):
    """Decodes arrays into a type of named tuples."""

    def __init__(self, wanted: type[T]) -> None:
        self._wanted = wanted
        self._decoder = msgspec.msgpack.Decoder(wanted)

    # docs/protocol.md V5
    def decode(self, data: bytes) -> T:
        """Decode an array of the known fields, perhaps with more behind them. Raises msgspec.DecodeError."""
        try:
            return self._decoder.decode(data)
        except msgspec.ValidationError:
            known = _known(msgspec.msgpack.decode(data), inspect.type_info(self._wanted))
            return msgspec.convert(known, self._wanted)


def _known(found: Any, wanted: inspect.Type) -> Any:
    """Remove unknown fields."""
    if not isinstance(found, list):
        return found
    match wanted:
        case inspect.NamedTupleType(fields=fields):
            return [_known(each, field.type) for each, field in zip(found, fields, strict=False)]
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            return [_known(each, item) for each in found]
        case inspect.UnionType(types=types):
            return next((_known(found, each) for each in types if isinstance(each, inspect.NamedTupleType)), found)
        case _:
            return found
