"""Named tuples ↔ MessagePack arrays, of which a newer release may have written more fields. Decides only.

Fields behind those that a reader knows are passed over, at any depth (docs/protocol.md V5): new ones come last.
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
        """Decode an array of the fields that are known, perhaps with more behind them. Raises msgspec.DecodeError."""
        try:
            return self._decoder.decode(data)
        except msgspec.ValidationError:
            known = _known(msgspec.msgpack.decode(data), inspect.type_info(self._wanted))
            return msgspec.convert(known, self._wanted)


def _known(found: Any, wanted: inspect.Type) -> Any:
    """Leave out of what was found the fields that are not known."""
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
