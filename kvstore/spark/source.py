"""The data source `kvstore`: what Spark asks first, on the driver. Options and errors are docs/spark.md's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from kvstore.errors import ConfigError
from kvstore.spark import columns
from kvstore.spark.cluster import find
from kvstore.spark.options import write_options
from kvstore.spark.writer import BulkWriter, StreamWriter

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class KvstoreSource(DataSource):
    """`spark.read|readStream|write|writeStream.format("kvstore")`."""

    @classmethod
    def name(cls) -> str:
        return "kvstore"

    def writer(self, schema: StructType, overwrite: bool) -> BulkWriter:
        if overwrite:
            raise ConfigError('want mode("append"): rows replace those of the same key, nothing else is removed')
        options = write_options(self.options)
        plan = columns.plan(schema, options)
        return BulkWriter(find(self.options), plan, options)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        if overwrite:
            raise ConfigError('want outputMode("append"): rows replace those of the same key, nothing else is removed')
        options = write_options(self.options)
        plan = columns.plan(schema, options)
        return StreamWriter(find(self.options), plan, options)
