"""Decodes values in JSON or MessagePack into typed columns, by a schema that the user gives. Decides only.

A schema is a list of fields like that of a table: `id BIGINT, name STRING, price DOUBLE, paid BOOLEAN, at TIMESTAMP,
raw BINARY`. Values must be objects. Fields that the schema does not name are ignored, and fields that a value lacks are
null, so that values may gain fields. A field of another type is an error, because a guess would be a wrong figure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Annotated, Any

import msgspec

from kvstore.errors import ConfigError

FIELDS_MAX = 500
"""Maximum number of fields of a schema."""
_FIELD = re.compile(r"\s*(?:`([^`]+)`|([A-Za-z_]\w*))\s+([A-Za-z]+)\s*")
_TYPES: dict[str, Any] = {
    "BIGINT": int,
    "STRING": str,
    "DOUBLE": float,
    "BOOLEAN": bool,
    "TIMESTAMP": Annotated[datetime, msgspec.Meta(tz=True)],  # without a zone it would be a guess
    "BINARY": bytes,
}
_SAME = {"LONG": "BIGINT", "TEXT": "STRING"}
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "json": lambda kind: msgspec.json.Decoder(kind),
    "msgpack": lambda kind: msgspec.msgpack.Decoder(kind),
}
FORMATS = tuple(_DECODERS)


@dataclass(frozen=True)
class ValueSchema:
    """The format of values, and the fields that readers want of them."""

    format: str
    """json or msgpack."""
    fields: tuple[tuple[str, str], ...]
    """The name and the type of each field, a key of _TYPES."""

    @property
    def ddl(self) -> str:
        """The type of the column, as DDL."""
        return f"STRUCT<{', '.join(f'`{name}`: {kind}' for name, kind in self.fields)}>"

    @cached_property
    def arrow(self) -> Any:
        """The type of the column as a pyarrow.DataType."""
        import pyarrow as pa

        kinds = {
            "BIGINT": pa.int64(),
            "STRING": pa.string(),
            "DOUBLE": pa.float64(),
            "BOOLEAN": pa.bool_(),
            "TIMESTAMP": pa.timestamp("us", tz="UTC"),
            "BINARY": pa.binary(),
        }
        return pa.struct([pa.field(name, kinds[kind]) for name, kind in self.fields])

    def decode(self, values: Any) -> Any:
        """Return a column of values, a pyarrow binary array, as a struct array. Null stays null. Raises
        pyarrow.ArrowInvalid if a value is not an object of this format, or a field has another type."""
        import pyarrow as pa

        decode, names = self._decoder.decode, [name for name, _ in self.fields]
        try:
            rows = [None if each is None else decode(each) for each in values.to_pylist()]
            items = [
                None if row is None else dict(zip(names, msgspec.structs.astuple(row), strict=True)) for row in rows
            ]
            return pa.array(items, self.arrow)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, pa.ArrowException):
            raise pa.ArrowInvalid("a value does not match the schema") from None

    @cached_property
    def _decoder(self) -> Any:
        """A decoder whose attributes are numbered, because the fields' names may be no names of Python."""
        fields = [(f"f{at}", _TYPES[kind] | None, None) for at, (_, kind) in enumerate(self.fields)]
        rename = {f"f{at}": name for at, (name, _) in enumerate(self.fields)}
        return _DECODERS[self.format](msgspec.defstruct("Value", fields, rename=rename))

    def __getstate__(self) -> dict[str, Any]:
        """Spark sends the schema to tasks, which make their own decoder."""
        return {"format": self.format, "fields": self.fields}


def value_schema(format: str, text: str) -> ValueSchema:
    """Parse a schema. Raises ConfigError."""
    fields: list[tuple[str, str]] = []
    for each in text.split(","):
        found = _FIELD.fullmatch(each)
        kind = _SAME.get(found[3].upper(), found[3].upper()) if found else ""
        if found is None or kind not in _TYPES:
            raise ConfigError(
                f"valueSchema: expected NAME TYPE, ... with the types {', '.join(_TYPES)}, got {each.strip()!r}"
            )
        fields.append((found[1] or found[2], kind))
    names = [name for name, _ in fields]
    if len(set(names)) < len(names):
        raise ConfigError(f"valueSchema: expected each field once, got {', '.join(names)}")
    if len(names) > FIELDS_MAX:
        raise ConfigError(f"valueSchema: expected at most {FIELDS_MAX} fields, got {len(names)}")
    return ValueSchema(format, tuple(fields))
