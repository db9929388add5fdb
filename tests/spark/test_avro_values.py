"""Values in Avro become the fields of their schema file."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, time
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest

from kvstore.errors import ConfigError, InvalidRequest
from kvstore.spark import columns
from kvstore.spark.avro_values import avro_decoder
from kvstore.spark.options import types_of

FIXED = {"type": "fixed", "name": "Size", "size": 2, "logicalType": "decimal", "precision": 4, "scale": 1}
LINE = {"type": "record", "name": "Line", "fields": [{"name": "count", "type": "int"}]}
ORDER = {
    "type": "record",
    "name": "shop.Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "name", "type": ["null", "string"]},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "here", "type": {"type": "long", "logicalType": "local-timestamp-micros"}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "hour", "type": {"type": "int", "logicalType": "time-millis"}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}},
        {"name": "size", "type": FIXED},
        {"name": "other_size", "type": "Size"},
        {"name": "state", "type": {"type": "enum", "name": "State", "symbols": ["OPEN", "PAID"]}},
        {"name": "was", "type": ["State", "null"]},
        {"name": "lines", "type": {"type": "array", "items": LINE}},
        {"name": "tags", "type": {"type": "map", "values": "float"}},
        {"name": "raw", "type": "bytes"},
    ],
}
WRITTEN = {
    "id": 7,
    "name": None,
    "at": datetime(2026, 11, 30, tzinfo=UTC),
    "here": datetime(2026, 11, 30, 2),  # noqa: DTZ001 - a local timestamp has no zone
    "day": date(2026, 11, 30),
    "hour": time(0, 0, 5),
    "price": Decimal("12.34"),
    "size": Decimal("-1.5"),
    "other_size": Decimal("2.5"),
    "state": "OPEN",
    "was": "PAID",
    "lines": [{"count": 2}],
    "tags": {"a": 0.5},
    "raw": b"\xff",
}


def encoded(schema: Any, value: Any) -> bytes:
    stream = BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(json.loads(json.dumps(schema))), value)
    return stream.getvalue()


def read(folder: Path, schema: Any, *values: bytes | None) -> list[Any]:
    path = folder / "schema.avsc"
    path.write_text(json.dumps(schema))
    types = types_of({"valueType": "avro", "valueSchemaFile": str(path)})
    keys = [b"k%d" % number for number in range(len(values))]
    rows = pa.RecordBatch.from_pydict({"key": keys, "value": pa.array(values, pa.binary())})
    found: list[Any] = columns.typed(rows, types)["value"].to_pylist()
    return found


def record(*types: Any) -> dict[str, Any]:
    return {
        "type": "record",
        "name": "R",
        "fields": [{"name": f"f{at}", "type": kind} for at, kind in enumerate(types)],
    }


def test_record_becomes_typed_columns(tmp_path: Path) -> None:
    """Logical types that no column has stay as they are stored: milliseconds of a day, here."""
    assert read(tmp_path, ORDER, encoded(ORDER, WRITTEN), None) == [
        WRITTEN | {"hour": 5000, "tags": [("a", 0.5)]},
        None,
    ]


@pytest.mark.parametrize(
    ("value", "kinds"),
    [
        (b"", ["long"]),
        (b"\x02\x02", ["long"]),  # more bytes than the record has: another schema wrote it
        (b"\xff" * 10, ["long"]),
        (b"\x04", [["null", "long"]]),
        (b"\x04\xff\xff", ["string"]),
        (b"\xfe\xff\xff\xff\x7f", [{"type": "array", "items": "string"}]),
        (b"\x04\x27\x10", [{"type": "bytes", "logicalType": "decimal", "precision": 3, "scale": 0}]),
        (b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01", [{"type": "long", "logicalType": "timestamp-millis"}]),
    ],
)
def test_value_that_does_not_match_is_refused(tmp_path: Path, value: bytes, kinds: list[Any]) -> None:
    with pytest.raises(InvalidRequest, match="valueType avro: expected a value that matches the schema"):
        read(tmp_path, record(*kinds), value)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("long", "expected a record"),
        (record(["string", "long"]), "expected unions of null and one type"),
        (record("null"), "no column has the type null"),
        (record("R"), "no column has the type R, because it is null or recursive"),
        (record("Unknown"), "expected a schema of Avro as JSON"),
        (record({"type": "record", "name": "E", "fields": []}), "expected records with fields, got E"),
        (record({"type": "bytes", "logicalType": "decimal", "precision": 50}), "expected a schema of Avro"),
        (record({"type": "bytes", "logicalType": "decimal"}), "expected a schema of Avro"),
        ({"type": "record"}, "expected a schema of Avro"),
        (7, "expected a schema of Avro"),
    ],
)
def test_schema_without_columns_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        avro_decoder(json.dumps(schema).encode())
    assert message in str(raised.value)


def test_file_that_is_no_json_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a schema of Avro as JSON"):
        avro_decoder(b"\xff{")
