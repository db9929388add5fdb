"""Decodes values in Avro, by a schema file (`.avsc`). Decides only.

A value is one record in Avro's binary encoding, without the header of an Avro file. It does not name its schema, so the
file must have the schema of the writer: with another schema, bytes can decode to other values without an error. Bytes
left over are an error, because they show another schema in most cases.
"""

from __future__ import annotations

import json
from decimal import Context, Decimal
from io import BytesIO
from typing import Any, cast

from kvstore.errors import ConfigError
from kvstore.extras import install_hint
from kvstore.spark.value_decoder import Decoder

EXACT = Context(prec=100)
"""Precision for decimals; a column has at most 38 digits."""
_DECIMAL = "kvstore-decimal"
"""Our logical type for decimals, because fastavro's rounds numbers with too many digits."""


def avro_decoder(definition: bytes) -> Decoder:
    """Return the decoder of a schema file. Raises ConfigError."""
    try:
        from fastavro import parse_schema, read, schemaless_reader
        from fastavro.schema import SchemaParseException
    except ImportError:
        raise ConfigError(f"fastavro is not installed: {install_hint('spark', 'avro')}") from None
    read.LOGICAL_READERS.update({f"bytes-{_DECIMAL}": _decimal, f"fixed-{_DECIMAL}": _decimal})
    try:
        schema = parse_schema(_with_our_types(json.loads(definition)))
        kind = _Types().of(schema)
    except (SchemaParseException, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(f"valueSchemaFile: expected a schema of Avro as JSON, got {error!r}") from None
    import pyarrow as pa

    if not pa.types.is_struct(kind):
        raise ConfigError("valueSchemaFile: expected a record, got another type of Avro")

    def decode(value: bytes) -> dict[str, Any]:
        stream = BytesIO(value)
        found = cast("dict[str, Any]", schemaless_reader(stream, schema, None))
        if stream.tell() != len(value):
            raise ValueError("bytes follow the record")
        return found

    return Decoder(kind, decode)


def _logical_types() -> dict[tuple[str, str], Any]:
    """Return the columns' types of the logical types that columns can have."""
    import pyarrow as pa

    return {
        ("int", "date"): pa.date32(),
        ("long", "timestamp-millis"): pa.timestamp("us", tz="UTC"),
        ("long", "timestamp-micros"): pa.timestamp("us", tz="UTC"),
        ("long", "local-timestamp-millis"): pa.timestamp("us"),
        ("long", "local-timestamp-micros"): pa.timestamp("us"),
    }


def _with_our_types(schema: Any) -> Any:
    """Return the schema with our decimals, and without the logical types that no column has. Their values then stay
    numbers, texts or bytes, as they are stored."""
    if isinstance(schema, list):
        return [_with_our_types(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _with_our_types(each) for name, each in schema.items()}
    kind, logical = found.get("type"), found.pop("logicalType", None)
    if logical == "decimal" and kind in ("bytes", "fixed"):
        found["logicalType"] = _DECIMAL
    elif isinstance(kind, str) and (kind, logical) in _logical_types():
        found["logicalType"] = logical
    return found


def _decimal(data: bytes, schema: Any = None, _: Any = None) -> Decimal:
    return Decimal(int.from_bytes(data, "big", signed=True)).scaleb(-schema.get("scale", 0), EXACT)


class _Types:
    """The columns' types of one schema."""

    def __init__(self) -> None:
        import pyarrow as pa

        self._named: dict[str, Any] = {
            "boolean": pa.bool_(),
            "int": pa.int32(),
            "long": pa.int64(),
            "float": pa.float32(),
            "double": pa.float64(),
            "bytes": pa.binary(),
            "string": pa.string(),
        }
        """The types by their names, complete ones only."""

    def of(self, schema: Any) -> Any:
        """Return the pyarrow.DataType of a parsed schema. Raises ConfigError."""
        if isinstance(schema, list):
            branches = [each for each in schema if each != "null"]
            if len(branches) != 1:
                raise ConfigError(f"valueSchemaFile: expected unions of null and one type, got {schema}")
            return self.of(branches[0])
        if isinstance(schema, str):
            if schema not in self._named:
                raise ConfigError(f"valueSchemaFile: no column has the type {schema}, because it is null or recursive")
            return self._named[schema]
        found = self._of_definition(schema)
        if "name" in schema:
            self._named[schema["name"]] = found
        return found

    def _of_definition(self, schema: dict[str, Any]) -> Any:
        import pyarrow as pa

        kind, logical = schema["type"], schema.get("logicalType")
        if logical == _DECIMAL:
            return pa.decimal128(schema["precision"], schema.get("scale", 0))
        if logical is not None:
            return _logical_types()[kind, logical]
        match kind:
            case "record" if schema["fields"]:
                return pa.struct([pa.field(each["name"], self.of(each["type"])) for each in schema["fields"]])
            case "record":
                raise ConfigError(f"valueSchemaFile: expected records with fields, got {schema['name']} without any")
            case "array":
                return pa.list_(self.of(schema["items"]))
            case "map":
                return pa.map_(pa.string(), self.of(schema["values"]))
            case "enum":
                return pa.string()
            case "fixed":
                return pa.binary()
            case _:
                return self.of(kind)
