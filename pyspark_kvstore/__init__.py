"""Registers the data source `kvstore`: Spark looks into every installed module whose name begins with `pyspark_`."""

from kvstore.spark.source import KvstoreSource as DefaultSource

__all__ = ["DefaultSource"]
