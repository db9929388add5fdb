"""The columns of the data source, and the conversion of a data frame's rows to rows of the store. Decides only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigError, InvalidRequest
from kvstore.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from kvstore.spark.options import SCHEMA_NEEDS, OnNull, Types, WriteOptions

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

COLUMNS = {
    "partition": "STRING NOT NULL",
    "key": "BINARY NOT NULL",
    "value": "BINARY",
    "version": "BIGINT NOT NULL",
    "created_version": "BIGINT NOT NULL",
    "written_at": "TIMESTAMP NOT NULL",
    "expires_at": "TIMESTAMP",
}
"""The columns of a batch read, with their types as DDL."""
CHANGES = COLUMNS | {"kind": "STRING NOT NULL"}
"""The columns of a stream, with their types as DDL. `kind` is created, overwritten, deleted or expired."""
READ_ONLY = ("partition", "version", "created_version", "written_at", "kind")
"""Columns that the store sets itself. A write ignores them if the data frame has them."""
AS_BYTES = Types()
DIGITS = r"^-?[0-9]+$"
"""Pattern of a value that can be read as a long."""


TABLE_OPTIONS = "kvstore.options"
"""The key of the columns' metadata under which Spark's catalog keeps a table's options. Spark passes these options to
the source only while it creates the table, but passes the schema to every read."""


def schema_of(columns: tuple[str, ...], types: Types = AS_BYTES, table: Mapping[str, str] | None = None) -> StructType:
    """Return the schema of these columns, names in CHANGES. `types` are the types of keys and values; `table` are the
    options of a catalog table, whose reads use them."""
    from pyspark.sql import types as spark
    from pyspark.sql.pandas.types import from_arrow_type

    kinds = {
        "STRING": spark.StringType(),
        "BINARY": spark.BinaryType(),
        "BIGINT": spark.LongType(),
        "TIMESTAMP": spark.TimestampType(),
    }
    metadata = {TABLE_OPTIONS: json.dumps(dict(table))} if table is not None else None
    fields = []
    for column in columns:
        kind, *not_null = CHANGES[column].split(" ", 1)
        wanted = _wanted(column, types)
        of_kind = kinds[kind] if wanted is None else from_arrow_type(wanted, prefer_timestamp_ntz=True)
        fields.append(spark.StructField(column, of_kind, nullable=not not_null, metadata=metadata))
    return spark.StructType(fields)


def table_options(schema: StructType) -> dict[str, str] | None:
    """Return the options of the catalog table to which the schema belongs, or None if there are none."""
    for field in schema.fields:
        if TABLE_OPTIONS in (field.metadata or {}):
            return dict(json.loads(field.metadata[TABLE_OPTIONS]))
    return None


def typed(batch: Any, types: Types) -> Any:
    """Convert the keys and values of a pyarrow.RecordBatch from bytes to these types. Raises InvalidRequest with the
    first row that cannot be converted."""
    import pyarrow as pa

    for name, kind in (("key", types.key), ("value", types.value)):
        at, wanted = batch.schema.get_field_index(name), _wanted(name, types)
        if wanted is None or at < 0:
            continue
        read: Callable[[Any], Any] = partial(_read_as, wanted=wanted)
        if name == "value" and types.schema is not None:
            read = types.schema.decode
        field = pa.field(name, wanted, nullable=name == "value")
        try:
            column = read(batch.column(at))
        except pa.ArrowInvalid:
            raise InvalidRequest(_misread(batch, name, kind, read)) from None
        batch = batch.set_column(at, field, column)
    return batch


def _wanted(column: str, types: Types) -> Any:
    """Return the pyarrow.DataType to which a column is converted, or None if it is read as it is stored."""
    import pyarrow as pa

    if column == "value" and types.schema is not None:
        return types.schema.arrow
    kind = {"key": types.key, "value": types.value}.get(column, "binary")
    return {"string": pa.string(), "long": pa.int64(), "double": pa.float64()}.get(kind)


def _read_as(column: Any, wanted: Any) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    text = column.cast(pa.string())
    if wanted == pa.int64() and not pc.all(pc.match_substring_regex(text, DIGITS), min_count=0).as_py():
        raise pa.ArrowInvalid("a cast also accepts hexadecimal digits after 0x")
    return text.cast(wanted)


def _misread(batch: Any, name: str, kind: str, read: Callable[[Any], Any]) -> str:
    import pyarrow as pa

    column, keys = batch.column(name), batch.column("key") if "key" in batch.schema.names else None
    for row in range(batch.num_rows):
        try:
            read(column.slice(row, 1))
        except pa.ArrowInvalid:
            which = _named(_bytes(keys[row].as_py())) if keys is not None else "a key that is not read"
            size = len(column[row].as_py())
            what = "matches the schema" if kind in SCHEMA_NEEDS else f"is a {kind}"
            return (
                f"{name}Type {kind}: expected a {name} that {what}, got {size} other bytes for {which}; read it as "
                "binary, or exclude such keys"
            )
    raise AssertionError("some row could not be read")


def _bytes(key: bytes | str) -> bytes:
    return key.encode() if isinstance(key, str) else key


@dataclass(frozen=True, slots=True)
class ColumnPlan:
    """The mapping from the columns of a data frame to the fields of the store's rows. Made by `plan`."""

    key: str
    value: str
    expires: str
    """The column with the expiry time; empty if rows never expire."""
    on_null: OnNull

    def rows(self, batch: Any) -> Iterable[tuple[bytes, bytes | None, int]]:
        """Return each row of a pyarrow.RecordBatch as (key, value or None, expiry in milliseconds), the form of the
        client's Row. Raises InvalidRequest with the first row that the store would refuse."""
        import pyarrow as pa

        key_column, value_column = (batch.column(name).cast(pa.binary()) for name in (self.key, self.value))
        keys, values = key_column.to_pylist(), value_column.to_pylist()
        expiries = _milliseconds(batch.column(self.expires)) if self.expires else [0] * len(keys)
        may_delete = self.on_null is OnNull.delete
        if not (
            _fits(key_column, 1, KEY_BYTES_MAX) and _fits(value_column, 0, VALUE_BYTES_MAX, may_be_null=may_delete)
        ):
            self._check(keys, values)
        return zip(keys, values, expiries, strict=True)

    def _check(self, keys: list[bytes | None], values: list[bytes | None]) -> None:
        for key, value in zip(keys, values, strict=True):
            if key is None or not 0 < len(key) <= KEY_BYTES_MAX:
                raise InvalidRequest(
                    f"column {self.key}: expected keys of 1 to {KEY_BYTES_MAX} bytes, got {_named(key)}"
                )
            if value is None and self.on_null is OnNull.error:
                raise InvalidRequest(
                    f"column {self.value}: {_named(key)} has no value; set onNull to delete to remove such keys"
                )
            if value is not None and len(value) > VALUE_BYTES_MAX:
                raise InvalidRequest(
                    f"column {self.value}: expected values of at most {VALUE_BYTES_MAX} bytes, got {len(value)} "
                    f"for {_named(key)}"
                )


def plan(schema: StructType, options: WriteOptions) -> ColumnPlan:
    """Return the plan for writing a data frame with this schema. Raises ConfigError if a column is missing or has a
    type that cannot be written with these options."""
    types = {field.name: field.dataType.typeName() for field in schema.fields}
    if len(types) < len(schema.fields):
        raise ConfigError(f"expected each column once, got {', '.join(field.name for field in schema.fields)}")
    for option, name in (("keyColumn", options.key_column), ("valueColumn", options.value_column)):
        if types.get(name) not in ("binary", "string"):
            raise ConfigError(
                f"expected column {name!r} (option {option}) with type binary or string, got {_listed(types)}"
            )
    expires = options.expires_column or ("expires_at" if "expires_at" in types else "")
    if expires and types.get(expires) == "timestamp_ntz":
        raise ConfigError(f"column {expires!r} is a timestamp_ntz, which has no time zone; cast it to timestamp")
    if expires and types.get(expires) != "timestamp":
        raise ConfigError(
            f"expected column {expires!r} (option expiresColumn) with type timestamp, got {_listed(types)}"
        )
    used = {options.key_column, options.value_column, expires, *READ_ONLY}
    left = sorted(name for name in types if name not in used)
    if left:
        raise ConfigError(
            f"column {left[0]!r} would be lost; select only {options.key_column}, {options.value_column} and, if keys "
            "should expire, expires_at"
        )
    return ColumnPlan(options.key_column, options.value_column, expires, options.on_null)


def _fits(column: Any, least: int, most: int, *, may_be_null: bool = False) -> bool:
    """Return True if every item of a column has `least` to `most` bytes. Nulls fail the check unless `may_be_null`."""
    import pyarrow.compute as pc

    found = pc.min_max(pc.binary_length(column)).as_py()
    return (may_be_null or not column.null_count) and (
        found["min"] is None or (least <= found["min"] and found["max"] <= most)
    )


def _milliseconds(column: Any) -> list[int]:
    import pyarrow as pa

    micros = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64()).to_pylist()
    return [0 if each is None else max(1, each // 1000) for each in micros]


def _listed(types: dict[str, str]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in types.items()) or "no columns"


def _named(key: bytes | None) -> str:
    """Return a name for a row in error messages: a checksum of its key, because job logs must not contain keys or
    values."""
    if key is None:
        return "no key"
    return f"the key of {len(key)} bytes for which sha2(key, 256) begins with {hashlib.sha256(key).hexdigest()[:16]}"
