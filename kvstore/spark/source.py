"""The Spark data source `kvstore`: the entry point that Spark calls on the driver. docs/reference/spark.md lists all
options and errors."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pyspark.sql.datasource import CaseInsensitiveDict, DataSource

from kvstore.client.core.config import ClientConfig
from kvstore.client.pinned.pins import PinnedStore
from kvstore.errors import ConfigError, Overloaded, StoreError
from kvstore.spark import columns, pins
from kvstore.spark.cluster import find
from kvstore.spark.failed_reader import FailedReader, too_old
from kvstore.spark.options import (
    TABLES,
    columns_of,
    is_for_a_stream,
    read_options,
    stream_options,
    table_options_or_none,
    types_of,
    write_options,
)
from kvstore.spark.reader import PinnedReader
from kvstore.spark.splits import decode
from kvstore.spark.writer import BulkWriter

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceStreamReader, DataSourceStreamWriter
    from pyspark.sql.types import StructType

KNOWN, CHANGES = tuple(columns.COLUMNS), tuple(columns.CHANGES)
OWN_SCHEMA = (
    "expected no schema; choose columns with the option columns, then cast them. If this is a table or a stream of "
    f"one: {TABLES}"
)
OVERWRITE = (
    'expected mode("append"), got overwrite; rows replace rows with the same key, and nothing else is removed. If this '
    f"was saveAsTable() or createOrReplace(), Spark dropped the former table before it called kvstore; {TABLES}"
)


OF_A_TABLE = (
    "expected columns without a table's options, got columns of a kvstore table of Spark's catalog: a new table with "
    'them would read the old table\'s cluster; read the rows with format("kvstore") and load() instead'
)


class KvstoreSource(DataSource):
    """The data source behind `spark.read|readStream|write|writeStream.format("kvstore")`.

    Register it once per session, then read a data frame:

        spark.dataSource.register(KvstoreSource)
        frame = spark.read.format("kvstore").option("servers", "127.0.0.1:7401").load()

    `load()` pins the state of the store. Every action on the data frame reads that state, until no action has used the
    data frame for the time of the option `pinTtl`. Wrong options raise ConfigError; an unreachable cluster raises
    Unavailable.
    """

    _config: ClientConfig | None = None
    _store: PinnedStore | None = None
    _failure: StoreError | None = None
    _pinned_at = 0.0

    @classmethod
    def name(cls) -> str:
        return "kvstore"

    def schema(self) -> StructType:
        """Return the schema, after connecting to the cluster and pinning the store.

        Spark calls this method once, in `load()`, so all actions of the data frame read the state of the store at that
        moment. Spark also calls it for a stream, which needs no pin: `streamReader` releases the pin, or `schema` makes
        none if the options can only be for a stream. Spark also calls it for CREATE TABLE; then the schema keeps the
        options for the table's reads. Raises ConfigError, and Unavailable if no server answers.
        """
        if (table := table_options_or_none(self.options, KNOWN)) is not None:
            find(table)
            return columns.schema_of(read_options(table, KNOWN).columns, types_of(table), table)
        wanted = columns_of(self.options, CHANGES, KNOWN)
        self._config = find(self.options)
        if is_for_a_stream(self.options):
            stream_options(self.options, CHANGES, KNOWN)
        else:
            self._pin(self._config)
        return columns.schema_of(wanted, types_of(self.options))

    def _pin(self, config: ClientConfig) -> None:
        self._pinned_at = time.time()
        try:
            options = read_options(self.options, KNOWN)
            if options.pin:
                self._store = decode(options.pin, config.tls)
            else:
                self._store = pins.pin(config, ttl_s=options.pin_ttl_s, split_bytes=options.split_bytes)
        except Overloaded as error:
            self._failure = Overloaded(
                f"{error}. Each load() pins the store for the time pinTtl ({options.pin_ttl_s:g}s); lower it, or let "
                "data "
                "frames share one pin (kvstore.spark.pins.hold)"
            )
        except StoreError as error:
            self._failure = error

    def reader(self, schema: StructType) -> PinnedReader:
        if self._config is None and (table := columns.table_options(schema)) is not None:
            self._open_table(schema, table)
        options = read_options(self.options, KNOWN)
        if self._failure is not None:
            raise self._failure
        if self._config is None or self._store is None:
            raise ConfigError(OWN_SCHEMA)
        return PinnedReader(self._config, self._store, options, pinned_at=self._pinned_at)

    def _open_table(self, schema: StructType, table: dict[str, str]) -> None:
        """Pin the store for one query of a catalog table, whose options the query may complete or replace."""
        self.options = CaseInsensitiveDict({**CaseInsensitiveDict(table), **self.options})
        options = read_options(self.options, KNOWN)
        wanted = columns.schema_of(options.columns, options.types)
        if [(each.name, each.dataType) for each in wanted] != [(each.name, each.dataType) for each in schema]:
            raise ConfigError("columns, keyType, valueType: a query cannot change the columns of its table")
        self._config = find(self.options)
        self._pin(self._config)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        if self._store is not None and self._config is not None and not self.options.get("pin"):
            pins.release(self._config, self._store.id)
            self._store = None
        try:
            options = stream_options(self.options, CHANGES, KNOWN)
            if self._config is None:
                raise ConfigError(OWN_SCHEMA)
        except ConfigError as error:
            return FailedReader(error)
        try:
            from kvstore.spark.stream import ChangeReader
        except ImportError:  # batch reads must still work
            return FailedReader(too_old("readStream", "4.2"))
        return ChangeReader(self._config, options)

    def writer(self, schema: StructType, overwrite: bool) -> BulkWriter:
        if overwrite:
            raise ConfigError(OVERWRITE)
        if not self.options:
            raise ConfigError(f"INSERT INTO a table: {TABLES}")
        if columns.table_options(schema) is not None:
            raise ConfigError(OF_A_TABLE)
        options = write_options(self.options)
        plan = columns.plan(schema, options)
        return BulkWriter(find(self.options), plan, options)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        if overwrite:
            raise ConfigError(
                'expected outputMode("append"); rows replace rows with the same key, and nothing else is removed'
            )
        try:
            from kvstore.spark.stream_writer import StreamWriter
        except ImportError:
            raise too_old("writeStream", "4.1") from None
        options = write_options(self.options)
        plan = columns.plan(schema, options)
        return StreamWriter(find(self.options), plan, options)
