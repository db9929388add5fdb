"""Tables of Spark's catalog, with a real Spark. It passes a table's options to the source only while it creates the
table without a list of columns; the schema keeps them for the table's reads. All else is refused with the
alternative."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstore.client import Client
from tests.cluster.harness import Cluster
from tests.spark.test_protobuf_values import SHOP, described, message_at

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.cluster]

NOBODY = "servers '127.0.0.1:1', timeout '100ms'"
ADVICE = "use CREATE TABLE name USING kvstore OPTIONS (...) or CREATE TEMPORARY VIEW"


@pytest.fixture
def folder(spark: SparkSession, tmp_path: Path) -> Iterator[str]:
    """A database with tables that Spark does not keep in the working directory."""
    spark.sql(f"create database cat location '{tmp_path}'")
    yield "cat"
    spark.sql("drop database cat cascade")


def where(cluster: Cluster) -> str:
    return f"dataDir '{cluster.local.data_dir}'"


def test_table_is_read_with_its_options(spark: SparkSession, folder: str, shared_cluster: Cluster) -> None:
    with Client(shared_cluster.url) as client:
        client.put_many({b"table-1": b"10", b"table-2": b"20", b"other": b"x"})
    options = f"{where(shared_cluster)}, prefix 'table-', keyType 'string', valueType 'long', columns 'key,value'"
    spark.sql(f"create table {folder}.t using kvstore options ({options})")
    assert spark.table(f"{folder}.t").dtypes == [("key", "string"), ("value", "bigint")]
    assert spark.sql(f"select sum(value) as total from {folder}.t").collect()[0].total == 30
    one = spark.sql(f"select value from {folder}.t with (prefix = 'table-2') where key > 'a'").collect()
    assert [row.value for row in one] == [20]
    with Client(shared_cluster.url) as client:
        client.put(b"table-3", b"30")
    assert spark.table(f"{folder}.t").count() == 3, "each query reads the store as of its own moment"
    with pytest.raises(Exception, match="a query cannot change the columns of its table"):
        spark.sql(f"select * from {folder}.t with (valueType = 'string')").collect()


def test_table_of_protobuf_values_has_nested_columns(
    spark: SparkSession, folder: str, shared_cluster: Cluster, tmp_path: Path
) -> None:
    """Tasks decode with the schema that the driver read."""
    shop = described(tmp_path, SHOP, "--include_imports")
    order = message_at(shop)(id=7, big=2**64 - 1, state="PAID", lines=[{"count": 2}], by_name={"a": {"count": 3}})
    with Client(shared_cluster.url) as client:
        client.put(b"proto-1", order.SerializeToString())
    schema = f"valueType 'protobuf', valueSchemaFile '{shop}', valueMessage 'shop.Order'"
    spark.sql(f"create table {folder}.o using kvstore options ({where(shared_cluster)}, prefix 'proto-', {schema})")
    fields = "value.id, value.big, value.state, value.at, value.lines[0].count, value.by_name['a'].count"
    assert [tuple(each) for each in spark.sql(f"select {fields} from {folder}.o").collect()] == [
        (7, Decimal(2**64 - 1), "PAID", None, 2, 3)
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (NOBODY, "no server of the cluster answers"),
        ("servers '127.0.0.1:1', prefx 'p'", "unknown option 'prefx'"),
        ("servers '127.0.0.1:1', pin 'x'", "expected no pin in a table's options"),
        ("prefix 'p'", "no cluster given"),
    ],
)
def test_table_with_wrong_options_is_not_made(spark: SparkSession, folder: str, options: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        spark.sql(f"create table {folder}.t using kvstore options ({options})")
    assert not spark.catalog.tableExists(f"{folder}.t")


def test_write_that_could_reach_another_table_is_refused(
    spark: SparkSession, folder: str, shared_cluster: Cluster
) -> None:
    """Spark passes either no options, or the columns of the table that is read instead of the one that is written."""
    options = f"{where(shared_cluster)}, prefix 'from-', columns 'key,value'"
    spark.sql(f"create table {folder}.t using kvstore options ({options})")
    with pytest.raises(Exception, match="ConfigError") as raised:
        spark.sql(f"insert into {folder}.t values (cast('k' as binary), cast('v' as binary))")
    assert ADVICE in str(raised.value)
    copy = spark.table(f"{folder}.t").writeTo(f"{folder}.copy").using("kvstore").option("servers", "127.0.0.1:1")
    with pytest.raises(Exception, match="a new table with them would read the old table's cluster"):
        copy.create()
    assert not spark.catalog.tableExists(f"{folder}.copy")


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
