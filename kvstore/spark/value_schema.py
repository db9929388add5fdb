"""Decodes values in JSON, MessagePack, Avro or Protobuf into typed columns, by a schema that the user gives. Decides
only.

In JSON and MessagePack a schema is a list of fields like that of a table: `id BIGINT, name STRING, price DOUBLE,
paid BOOLEAN, at TIMESTAMP, raw BINARY`. Values must be objects. Fields that the schema does not name are ignored, and
fields that a value lacks are null, so that values may gain fields. A field of another type is an error, because a guess
would be a wrong figure. In Avro and Protobuf a schema is a file: `avro_values.py`, `protobuf_values.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from datetime import datetime
from functools import cached_property
from typing import Annotated, Any

import msgspec

from kvstore.errors import ConfigError
from kvstore.spark.avro_values import avro_decoder
from kvstore.spark.protobuf_values import protobuf_decoder
from kvstore.spark.value_decoder import NO_MATCH, Decoder

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


@dataclass(frozen=True)
class ValueSchema:
    """The format of values, and the schema that readers use for them."""

    format: str
    """json, msgpack, avro or protobuf."""
    definition: bytes
    """The option valueSchema, or the content of the file in the option valueSchemaFile."""
    message: str = ""
    """The full name of the Protobuf message."""
    prefix: bytes = b""
    """The bytes with which every value begins, and which are not part of the object."""

    @property
    def arrow(self) -> Any:
        """The type of the column as a pyarrow.StructType. Raises ConfigError if the schema cannot be used."""
        return self._decoder.type

    def decode(self, values: Any) -> Any:
        """Return a column of values, a pyarrow binary array, as a struct array. Null stays null. Raises
        pyarrow.ArrowInvalid if a value does not match the schema."""
        import pyarrow as pa

        try:
            return pa.array([None if each is None else self._object(each) for each in values.to_pylist()], self.arrow)
        except NO_MATCH:
            raise pa.ArrowInvalid("a value does not match the schema") from None

    def _object(self, value: bytes) -> dict[str, Any]:
        if not value.startswith(self.prefix):
            raise ValueError("the value begins with other bytes")
        return self._decoder.decode(value[len(self.prefix) :])

    @cached_property
    def _decoder(self) -> Decoder:
        match self.format:
            case "avro":
                return avro_decoder(self.definition)
            case "protobuf":
                return protobuf_decoder(self.definition, self.message)
            case _:
                return _fields_decoder(self.format, self.definition.decode())

    def __getstate__(self) -> dict[str, Any]:
        """Spark sends the schema to tasks, which make their own decoder."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


def _fields_decoder(format: str, text: str) -> Decoder:
    """Return the decoder of JSON or MessagePack. Its attributes are numbered, because the fields' names may be no names
    of Python."""
    import pyarrow as pa

    kinds = {
        "BIGINT": pa.int64(),
        "STRING": pa.string(),
        "DOUBLE": pa.float64(),
        "BOOLEAN": pa.bool_(),
        "TIMESTAMP": pa.timestamp("us", tz="UTC"),
        "BINARY": pa.binary(),
    }
    found = _parsed(text)
    names = [name for name, _ in found]
    rename = {f"f{at}": name for at, name in enumerate(names)}
    kind = msgspec.defstruct(
        "Value", [(f"f{at}", _TYPES[kind] | None, None) for at, (_, kind) in enumerate(found)], rename=rename
    )
    decode = (msgspec.json if format == "json" else msgspec.msgpack).Decoder(kind).decode
    return Decoder(
        pa.struct([pa.field(name, kinds[kind]) for name, kind in found]),
        lambda value: dict(zip(names, msgspec.structs.astuple(decode(value)), strict=True)),
    )


def _parsed(text: str) -> list[tuple[str, str]]:
    """Return the name and the type of each field, a key of _TYPES. Raises ConfigError."""
    found: list[tuple[str, str]] = []
    for each in text.split(","):
        match = _FIELD.fullmatch(each)
        kind = _SAME.get(match[3].upper(), match[3].upper()) if match else ""
        if match is None or kind not in _TYPES:
            raise ConfigError(
                f"valueSchema: expected NAME TYPE, ... with the types {', '.join(_TYPES)}, got {each.strip()!r}"
            )
        found.append((match[1] or match[2], kind))
    names = [name for name, _ in found]
    if len(set(names)) < len(names):
        raise ConfigError(f"valueSchema: expected each field once, got {', '.join(names)}")
    if len(names) > FIELDS_MAX:
        raise ConfigError(f"valueSchema: expected at most {FIELDS_MAX} fields, got {len(names)}")
    return found
