"""A data frame is written by its columns: their names, their types, and the values that the store would refuse."""

import datetime
import hashlib
import pickle
from collections.abc import Callable

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructType, TimestampNTZType, TimestampType

from kvstore.client.bulk import Row
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.spark import columns
from kvstore.spark.columns import ColumnPlan
from kvstore.spark.options import Types, types_of, write_options


def plan(schema: StructType, **options: str) -> ColumnPlan:
    return columns.plan(schema, write_options(options))


def pairs() -> StructType:
    """The smallest valid data frame."""
    return StructType().add("key", StringType()).add("value", BinaryType())


def batch(**given: list[object]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(given)


def test_keys_and_values_may_be_text_or_bytes() -> None:
    found = plan(pairs()).rows(batch(key=["ä", "b"], value=[b"\xff", b""]))
    assert list(found) == [Row("ä".encode(), b"\xff"), Row(b"b", b"")]


def test_columns_can_have_other_names_and_any_order() -> None:
    schema = StructType().add("v", BinaryType()).add("k", BinaryType())
    found = plan(schema, keyColumn="k", valueColumn="v").rows(batch(v=[b"1"], k=[b"2"]))
    assert list(found) == [Row(b"2", b"1")]


def test_times_become_expiries_in_milliseconds() -> None:
    schema = pairs().add("expires_at", TimestampType())
    at = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)
    found = list(plan(schema).rows(batch(key=[b"a", b"b"], value=[b"", b""], expires_at=[at, None])))
    assert [expires_ms for _, _, expires_ms in found] == [1_893_456_000_000, 0]


def test_rows_read_from_a_store_can_be_written() -> None:
    schema = StructType()
    for name, kind in columns.COLUMNS.items():
        types = {"STRING": StringType(), "BINARY": BinaryType(), "BIGINT": LongType(), "TIMESTAMP": TimestampType()}
        schema.add(name, types[kind.split()[0]])
    assert plan(schema).expires == "expires_at"


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            StructType().add("key", StringType()),
            "expected column 'value' .* with type binary or string, got key string",
        ),
        (
            StructType().add("key", IntegerType()).add("value", BinaryType()),
            "expected column 'key' .option keyColumn. with type binary or string",
        ),
        (pairs().add("n", LongType()), "column 'n' would be lost; select only key"),
        (StructType(), "got no columns"),
        (pairs().add("key", StringType()), "expected each column once, got key, value, key"),
    ],
)
def test_data_frame_that_does_not_fit_is_refused(schema: StructType, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(schema)


def test_column_of_expiries_holds_times() -> None:
    schema = StructType().add("key", StringType()).add("value", BinaryType()).add("ttl", IntegerType())
    with pytest.raises(ConfigError, match=r"expected column 'ttl' .* with type timestamp, got"):
        plan(schema, expiresColumn="ttl")
    with pytest.raises(ConfigError, match="has no time zone; cast it to timestamp"):
        plan(pairs().add("expires_at", TimestampNTZType()))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (None, b"v", "expected keys of 1 to 4096 bytes, got no key"),
        (b"", b"v", "expected keys of 1 to 4096 bytes, got the key of 0 bytes"),
        (bytes(4097), b"v", "expected keys of 1 to 4096 bytes"),
        (b"k", bytes((1 << 20) + 1), "expected values of at most 1048576 bytes, got 1048577 for the key of 1 b"),
        (b"k", None, "of 1 bytes for which .* has no value; set onNull to delete"),
    ],
)
def test_row_that_the_store_would_not_take_is_named(key: bytes, value: bytes, message: str) -> None:
    rows = pa.RecordBatch.from_arrays(
        [pa.array([key], pa.binary()), pa.array([value], pa.binary())], names=["key", "value"]
    )
    with pytest.raises(InvalidRequest, match=message):
        plan(pairs()).rows(rows)


def test_row_without_a_value_deletes_if_that_is_wanted() -> None:
    rows = batch(key=[b"k"], value=[None])
    assert list(plan(pairs(), onNull="delete").rows(rows)) == [Row(b"k", None)]


def read_as(values: list[bytes | None], **options: str) -> list[object]:
    found = pa.RecordBatch.from_arrays(
        [pa.array([b"k%d" % number for number in range(len(values))], pa.binary()), pa.array(values, pa.binary())],
        names=["key", "value"],
    )
    return columns.typed(found, types_of(options)).column("value").to_pylist()


def test_values_are_read_by_the_type_of_their_bytes() -> None:
    """As Redis' counters are stored, and text; null stays null."""
    assert read_as([b"17", b"-3", None], valueType="long") == [17, -3, None]
    assert read_as([None], valueType="long") == [None]
    assert read_as([b"1.5", b"2"], valueType="double") == [1.5, 2.0]
    assert read_as(["ä".encode(), b""], valueType="string") == ["ä", ""]
    assert read_as([b"\xff"]) == [b"\xff"]
    wanted = types_of({"keyType": "string", "valueType": "long"})
    found = columns.schema_of(("key", "value", "version"), wanted)
    assert found.simpleString() == "struct<key:string,value:bigint,version:bigint>"
    assert [each.nullable for each in found] == [False, True, False]
    assert columns.schema_of(("key", "value")).simpleString() == "struct<key:binary,value:binary>"


@pytest.mark.parametrize(
    ("value", "kind"),
    [(b"x", "long"), (b"", "long"), (b"1.5", "long"), (b"0x10", "long"), (b"9" * 20, "long"), (b"\xff", "string")],
)
def test_value_that_is_none_is_named_by_the_checksum_of_its_key(value: bytes, kind: str) -> None:
    good = b"1"
    with pytest.raises(InvalidRequest) as raised:
        read_as([good, value, good], valueType=kind)
    assert str(raised.value) == (
        f"valueType {kind}: expected a value that is a {kind}, got {len(value)} other bytes for the key of 2 bytes "
        f"for which sha2(key, 256) begins with {hashlib.sha256(b'k1').hexdigest()[:16]}; read it as binary, or exclude "
        "such keys"
    )
    assert raised.value.__suppress_context__, "pyarrow's error has the value in it"


def test_key_that_is_no_text_is_named_by_its_checksum() -> None:
    keys = pa.RecordBatch.from_arrays([pa.array([b"\xff"], pa.binary())], names=["key"])
    digits = hashlib.sha256(b"\xff").hexdigest()[:16]
    with pytest.raises(
        InvalidRequest, match=f"keyType string: expected a key that is a string, got 1 .* with {digits}"
    ):
        columns.typed(keys, types_of({"keyType": "string"}))


@pytest.mark.parametrize("column", ["key", "value"])
def test_errors_about_rows_show_neither_keys_nor_values(column: str) -> None:
    """They are written into job logs."""
    secret = b"secret-word"
    rows = {
        "key": batch(key=[secret * 400], value=[secret]),
        "value": batch(key=[secret], value=[secret * (1 << 17)]),
    }[column]
    for each in (rows, batch(key=[secret], value=[None])):
        with pytest.raises(InvalidRequest, match=r"for which sha2\(key, 256\) begins with") as raised:
            list(plan(pairs()).rows(each))
        assert "secret" not in str(raised.value)


@pytest.mark.parametrize("options", [{"keyType": "long"}, {"valueType": "xml"}])
def test_types_that_there_are_not_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="Type: expected binary or string"):
        types_of(options)


# ── values by a schema ──

FIELDS = "id BIGINT, `full name` STRING, price double, paid BOOLEAN, at TIMESTAMP"
ORDER = {"id": 7, "full name": "Ana", "price": 1.5, "paid": True, "at": "2026-11-30T00:00:00Z", "later": [1]}
AS_ROW = {
    "id": 7,
    "full name": "Ana",
    "price": 1.5,
    "paid": True,
    "at": datetime.datetime(2026, 11, 30, tzinfo=datetime.UTC),
}


def by_schema(kind: str, fields: str = FIELDS) -> Types:
    return types_of({"valueType": kind, "valueSchema": fields})


@pytest.mark.parametrize(("kind", "encode"), [("json", msgspec.json.encode), ("msgpack", msgspec.msgpack.encode)])
def test_values_become_the_fields_of_their_schema(kind: str, encode: Callable[[object], bytes]) -> None:
    """Fields that the schema does not name are ignored; absent fields and deleted keys are null."""
    values = [encode(ORDER), encode({"id": None}), None]
    read = columns.typed(batch(key=[b"a", b"b", b"c"], value=values), by_schema(kind))
    nothing = dict.fromkeys(AS_ROW)
    assert read["value"].to_pylist() == [AS_ROW, nothing, None]
    again = pickle.loads(pickle.dumps(by_schema(kind)))
    assert columns.typed(batch(value=values[:1]), again)["value"].to_pylist() == [AS_ROW]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json", b"{"),
        ("json", b"[]"),
        ("json", b'{"id": "7"}'),
        ("json", b'{"id": 1.5}'),
        ("json", b'{"id": 9223372036854775808}'),
        ("json", b'{"paid": 1}'),
        ("json", b'{"at": "2026-11-30T00:00:00"}'),
        ("json", b'{"id": 7} x'),
        ("json", b"[" * 100_000),
        ("json", b"\xff"),
        ("msgpack", b""),
        ("msgpack", msgspec.msgpack.encode({"price": "1"})),
    ],
)
def test_value_that_does_not_match_names_its_row_without_content(kind: str, value: bytes) -> None:
    good = msgspec.json.encode({"id": 1}) if kind == "json" else msgspec.msgpack.encode({"id": 1})
    with pytest.raises(InvalidRequest) as raised:
        columns.typed(batch(key=[b"fine", b"secret key"], value=[good, value]), by_schema(kind))
    assert f"valueType {kind}: expected a value that matches the schema" in str(raised.value)
    assert hashlib.sha256(b"secret key").hexdigest()[:16] in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"valueType": "json"}, "valueType json: expected valueSchema, got none"),
        ({"valueSchema": "id BIGINT"}, "valueType binary: expected no schema, got valueSchema"),
        ({"valueType": "avro"}, "valueType avro: expected valueSchemaFile, got none"),
        (
            {"valueType": "protobuf", "valueSchemaFile": "x"},
            "valueType protobuf: expected valueSchemaFile and valueMessage, got valueSchemaFile",
        ),
        (
            {"valueType": "avro", "valueSchema": "id BIGINT", "valueSchemaFile": "x"},
            "valueType avro: expected valueSchemaFile, got valueSchema and valueSchemaFile",
        ),
        ({"valueType": "avro", "valueSchemaFile": "/nowhere.avsc"}, "valueSchemaFile: [Errno 2] No such file"),
        ({"valueType": "avro", "valueSchemaFile": "s3://bucket/x.avsc"}, "does not read or write s3: URLs"),
        (
            {"valueType": "json", "valueSchema": "id BIGINT", "valuePrefix": "0"},
            "valuePrefix: expected hexadecimal digits, got '0'",
        ),
        ({"valuePrefix": "00"}, "valuePrefix: expected it together with valueType json, msgpack, avro, protobuf"),
        ({"valueType": "json", "valueSchema": "id INT"}, "valueSchema: expected NAME TYPE, ... with the types BIGINT"),
        ({"valueType": "json", "valueSchema": "id BIGINT, id STRING"}, "valueSchema: expected each field once"),
        ({"valueType": "json", "valueSchema": ","}, "valueSchema: expected NAME TYPE"),
    ],
)
def test_wrong_schema_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        types_of(options)
    assert message in str(raised.value)


def test_schema_of_values_is_the_type_of_the_column() -> None:
    types = by_schema("json", "id BIGINT, name STRING")
    assert columns.table_options(columns.schema_of(("key", "value"), types)) is None
    table = columns.schema_of(("key", "value"), types, {"prefix": "p"})
    assert table["value"].dataType.simpleString() == "struct<id:bigint,name:string>"
    assert columns.table_options(table) == {"prefix": "p"}


def test_prefix_of_values_is_skipped_and_another_prefix_is_an_error() -> None:
    """As Confluent's serializers write it: a zero byte and the number of the schema in its registry."""
    types = types_of({"valueType": "json", "valueSchema": "id BIGINT", "valuePrefix": "0000000011"})
    assert columns.typed(batch(value=[b'\0\0\0\0\x11{"id": 7}']), types)["value"].to_pylist() == [{"id": 7}]
    for other in (b'\0\0\0\0\x12{"id": 7}', b'{"id": 7}', b""):
        with pytest.raises(InvalidRequest, match="expected a value that matches the schema"):
            columns.typed(batch(value=[other]), types)
