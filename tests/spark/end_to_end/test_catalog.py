"""Tables of Spark's catalog, with a real Spark: it passes a table's options neither to its reads nor to its writes, so
each of them is refused with the alternative."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstore.client import Client
from tests.cluster.harness import Cluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.cluster]

NOBODY = "servers '127.0.0.1:1', timeout '100ms'"
ADVICE = "use CREATE TEMPORARY VIEW name USING kvstore OPTIONS"


@pytest.fixture
def folder(spark: SparkSession, tmp_path: Path) -> Iterator[str]:
    """A database with tables that Spark does not keep in the working directory."""
    spark.sql(f"create database cat location '{tmp_path}'")
    yield "cat"
    spark.sql("drop database cat cascade")


def test_table_without_columns_is_refused_before_it_is_made(spark: SparkSession, folder: str) -> None:
    with pytest.raises(Exception, match="USING kvstore: kvstore has no tables in Spark's") as raised:
        spark.sql(f"create table {folder}.t using kvstore options ({NOBODY}, prefix 'p')")
    assert ADVICE in str(raised.value)
    assert not spark.catalog.tableExists(f"{folder}.t")


@pytest.mark.parametrize(
    "use",
    [
        lambda spark, table: spark.sql(f"select * from {table}").collect(),
        lambda spark, table: spark.sql(f"select * from {table} with (servers = '127.0.0.1:1')").collect(),
        lambda spark, table: spark.read.table(table).count(),
        lambda spark, table: spark.sql(f"insert into {table} values ('k', 'v')"),
        lambda spark, table: spark.sql(f"insert overwrite {table} values ('k', 'v')"),
        lambda spark, table: spark.table(table).writeTo(table).append(),
    ],
)
def test_table_with_columns_names_the_alternative(
    spark: SparkSession, folder: str, use: Callable[[SparkSession, str], object]
) -> None:
    spark.sql(f"create table {folder}.t (key string, value string) using kvstore options ({NOBODY})")
    with pytest.raises(Exception, match="ConfigError") as raised:
        use(spark, f"{folder}.t")
    assert ADVICE in str(raised.value)


def test_overwrite_reports_that_spark_dropped_the_table(spark: SparkSession, folder: str) -> None:
    frame = spark.sql("select 'k' as key, 'v' as value")
    spark.sql(f"create table {folder}.t (key string, value string) using kvstore")
    with pytest.raises(Exception, match="Spark dropped the former table before it called kvstore"):
        frame.write.format("kvstore").option("servers", "127.0.0.1:1").mode("overwrite").saveAsTable(f"{folder}.t")


def test_temporary_view_can_be_read_and_a_saved_table_cannot(
    spark: SparkSession, folder: str, shared_cluster: Cluster
) -> None:
    """`saveAsTable` writes the rows: kvstore receives the same request as for `save()`."""
    where = f"dataDir '{shared_cluster.local.data_dir}'"
    frame = spark.sql("select 'view-1' as key, 'v' as value")
    frame.write.format("kvstore").option("dataDir", str(shared_cluster.local.data_dir)).saveAsTable(f"{folder}.saved")
    with Client(shared_cluster.url) as client:
        item = client.get(b"view-1")
        assert item is not None
        assert item.value == b"v"
    with pytest.raises(Exception, match="ConfigError") as raised:
        spark.table(f"{folder}.saved").collect()
    assert ADVICE in str(raised.value)
    spark.sql(f"create temporary view v using kvstore options ({where}, prefix 'view-', keyType 'string')")
    try:
        assert [row["key"] for row in spark.sql("select key from v").collect()] == ["view-1"]
    finally:
        spark.catalog.dropTempView("v")
