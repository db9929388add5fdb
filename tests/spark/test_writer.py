"""`df.write.format("kvstore")` with a real Spark and a real cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Client
from tests.cluster.harness import Cluster
from tests.spark.jobs import die, interrupted, killer, leader_of
from tests.waiting import wait_until_blocking

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.cluster]


@pytest.fixture(scope="module")
def cluster(shared_cluster: Cluster) -> Cluster:
    return shared_cluster


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.url + "?timeout=20s") as connected:
        yield connected


def write(frame: DataFrame, cluster: Cluster, **options: Any) -> None:
    where = {"dataDir": str(cluster.local.data_dir), **options}
    frame.write.format("kvstore").mode("append").options(**where).save()


def numbered(spark: SparkSession, prefix: str, count: int, value: str = "v") -> DataFrame:
    """`count` rows in four partitions."""
    return spark.range(0, count, 1, 4).selectExpr(f"concat('{prefix}', id) as key", f"concat('{value}', id) as value")


def stored(client: Client, prefix: str) -> dict[bytes, bytes]:
    return {key: item.value for key, item in client.scan(prefix=prefix.encode())}


def expected(prefix: str, count: int, value: str = "v") -> dict[bytes, bytes]:
    return {f"{prefix}{number}".encode(): f"{value}{number}".encode() for number in range(count)}


def test_every_row_is_written(spark: SparkSession, cluster: Cluster, client: Client) -> None:
    write(numbered(spark, "all-", 5000), cluster, batchRows=300)
    assert stored(client, "all-") == expected("all-", 5000)


def test_cluster_can_be_named_by_its_servers_or_its_zookeeper(
    spark: SparkSession, cluster: Cluster, client: Client
) -> None:
    frame = numbered(spark, "named-", 3).coalesce(1)
    for where in ({"servers": cluster.url}, {"zookeeper": cluster.file.zookeeper}):
        frame.write.format("kvstore").mode("append").options(**where).save()
    assert stored(client, "named-") == expected("named-", 3)


def test_task_that_is_tried_again_writes_the_same(
    spark: SparkSession, cluster: Cluster, client: Client, tmp_path: Path
) -> None:
    """Its first attempt is killed when most of its rows are written."""
    frame = numbered(spark, "again-", 4000).coalesce(1)
    write(interrupted(frame, tmp_path / "died", die, after=30), cluster, batchRows=50)
    assert (tmp_path / "died").exists()
    assert stored(client, "again-") == expected("again-", 4000)


def test_keys_that_are_there_can_be_left_alone(spark: SparkSession, cluster: Cluster, client: Client) -> None:
    write(numbered(spark, "kept-", 10), cluster)
    write(numbered(spark, "kept-", 20, "other"), cluster, onConflict="keep")
    assert stored(client, "kept-") == expected("kept-", 20, "other") | expected("kept-", 10)


def test_rows_delete_and_expire(spark: SparkSession, cluster: Cluster, client: Client) -> None:
    client.put(b"mixed-a", b"v")
    frame = spark.sql(
        """select * from values
        (cast('mixed-a' as binary), cast(null as binary), cast(null as timestamp)),
        (cast('mixed-b' as binary), cast('v' as binary), timestamp '2100-01-01'),
        (cast('mixed-c' as binary), cast('v' as binary), timestamp '2000-01-01')
        as (key, value, expires_at)"""
    )
    write(frame, cluster, onNull="delete")
    assert stored(client, "mixed-") == {b"mixed-b": b"v"}
    found = client.get(b"mixed-b")
    assert found is not None
    assert found.expires_ms == 4_102_444_800_000


def test_value_of_a_mebibyte_passes(spark: SparkSession, cluster: Cluster, client: Client) -> None:
    frame = spark.sql("select concat('large-', id) as key, repeat('x', 1048576) as value from range(8)")
    write(frame, cluster)
    assert {key: len(value) for key, value in stored(client, "large-").items()} == {
        b"large-%d" % number: 1 << 20 for number in range(8)
    }


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"bogus": "1"}, "ConfigError: unknown option 'bogus' for writing; expected one of servers"),
        ({"valueColumn": "v"}, "ConfigError: expected column 'v' (option valueColumn) with type binary or string"),
        ({"dataDir": "/nowhere"}, "ConfigError: dataDir: no cluster at /nowhere/cluster.json; start one"),
        ({"dataDir": "", "servers": "127.0.0.1:1", "timeout": "1s"}, "Unavailable: no server of the cluster answers"),
    ],
)
def test_error_is_reported_in_one_line_before_any_task_runs(
    spark: SparkSession, cluster: Cluster, options: dict[str, str], reason: str
) -> None:
    with pytest.raises(Exception, match="PYTHON_DATA_SOURCE_ERROR") as raised:
        write(numbered(spark, "wrong-", 1), cluster, **options)
    assert [line for line in str(raised.value).splitlines() if reason in line] != []


@pytest.mark.parametrize("mode", ["overwrite", "ignore", "error"])
def test_only_append_is_there_and_the_others_write_nothing(
    spark: SparkSession, cluster: Cluster, client: Client, mode: str
) -> None:
    writer = numbered(spark, "mode-", 1).write.format("kvstore").mode(mode)
    with pytest.raises(Exception, match=r'expected mode\("append"\)|SAVE_MODE|save mode') as raised:
        writer.option("dataDir", str(cluster.local.data_dir)).save()
    assert "append" in str(raised.value).lower()
    assert stored(client, "mode-") == {}


def test_row_that_the_store_would_not_take_is_named(spark: SparkSession, cluster: Cluster) -> None:
    frame = spark.sql("select '' as key, 'v' as value")
    with pytest.raises(Exception, match="InvalidRequest: column key: expected keys of 1 to 4096 bytes, got the key"):
        write(frame, cluster)


def test_load_outlives_the_leader(spark: SparkSession, cluster: Cluster, client: Client, tmp_path: Path) -> None:
    """Killed during the load: the partition's new leader accepts the rest."""
    victim = leader_of(cluster, "p1")
    frame = numbered(spark, "led-", 8000).coalesce(1)
    try:
        write(interrupted(frame, tmp_path / "killed", killer(cluster.pid(victim)), after=30), cluster, batchRows=200)
        wait_until_blocking(lambda: not cluster.is_running(victim), what=f"the end of {victim}")
        assert stored(client, "led-") == expected("led-", 8000)
    finally:
        cluster.start_node(victim)
    cluster.wait_ready(victim)
