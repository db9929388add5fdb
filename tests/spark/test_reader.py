"""`spark.read.format("kvstore")` with a real Spark and a real cluster: one state of the store, whatever happens."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstore.client import Client
from kvstore.client.pinned.pins import list_pins
from kvstore.spark.pins import hold
from tests.cluster.harness import Cluster
from tests.spark.jobs import command, die, fill, give_up, interrupted, killer, leader_of, pairs, read
from tests.waiting import wait_until_blocking

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.cluster]
SMALL = {"pageBytes": "4096", "splitBytes": "64KiB"}
"""Many pages and parts of little data."""


@pytest.fixture(scope="module")
def cluster(shared_cluster: Cluster) -> Cluster:
    return shared_cluster


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.url + "?timeout=20s") as connected:
        yield connected


@pytest.fixture(scope="module")
def stored(client: Client) -> dict[bytes, bytes]:
    """Some 300 KB of keys that no test changes."""
    return fill(client, "s-", 3000, b"x" * 80)


def test_rows_are_records(spark: SparkSession, cluster: Cluster, client: Client) -> None:
    client.put(b"r-1", b"a")
    client.put(b"r-1", b"b")
    client.put(b"r-2", b"c", ttl_s=1000)
    rows = {bytes(row.key): row for row in read(spark, cluster, prefix="r-").collect()}
    assert sorted(rows) == [b"r-1", b"r-2"]
    for key, row in rows.items():
        item = client.get(key)
        assert item is not None
        assert (bytes(row.value), row.version, row.created_version) == (item.value, item.version, item.created)
        assert row.partition == client.cluster.partition_of(key)
        assert milliseconds(row.written_at) == item.written_ms
        assert (milliseconds(row.expires_at) if row.expires_at else 0) == item.expires_ms
    assert rows[b"r-1"].version > rows[b"r-1"].created_version


def milliseconds(time: datetime.datetime) -> int:
    return round(time.timestamp() * 1000)


def test_all_actions_on_a_data_frame_see_one_moment(spark: SparkSession, cluster: Cluster, client: Client) -> None:
    before = fill(client, "m-", 100)
    frame = read(spark, cluster, prefix="m-")
    fill(client, "m-", 200, b"later")
    client.delete(b"m-7")
    assert frame.count() == frame.count() == 100
    assert pairs(frame) == sorted(before.items())
    assert read(spark, cluster, prefix="m-").count() == 199


def test_several_data_frames_can_see_one_moment(spark: SparkSession, cluster: Cluster, client: Client) -> None:
    fill(client, "h-", 10)
    with hold({"dataDir": str(cluster.local.data_dir)}) as pin:
        client.put(b"h-new", b"v")
        assert [spark.read.format("kvstore").options(**pin.options, prefix="h-").load().count() for _ in "ab"] == [
            10
        ] * 2
        assert pin.store.id in {each.id for each in list_pins(cluster.url)}
    # Followers keep it until the record reaches them; by itself it would end after 600 s.
    cluster.wait_until(lambda: pin.store.id not in {each.id for each in list_pins(cluster.url)}, "it is given back")


def test_partition_of_the_store_is_read_in_pieces(
    spark: SparkSession, cluster: Cluster, stored: dict[bytes, bytes]
) -> None:
    frame = read(spark, cluster, prefix="s-", **SMALL)
    assert frame.rdd.getNumPartitions() > 3
    assert pairs(frame) == sorted(stored.items())


def test_columns_can_be_chosen_before_anything_is_read(
    spark: SparkSession, cluster: Cluster, stored: dict[bytes, bytes]
) -> None:
    frame = read(spark, cluster, columns="version, key", prefix="s-1", end="s-11")
    assert frame.columns == ["version", "key"]
    assert {bytes(row.key) for row in frame.collect()} == {key for key in stored if b"s-1" <= key < b"s-11"}


def test_typed_columns_work_in_joins_views_and_caches(
    spark: SparkSession, cluster: Cluster, client: Client, tmp_path: Path
) -> None:
    """Point look-ups by `keys`, a join with a table of Spark's own, an outer one with nulls, SQL, and a cache."""
    client.put_many({b"t-%d" % number: b"%d" % (number * 10) for number in range(20)})
    frame = read(spark, cluster, prefix="t-", keyType="string", valueType="long", columns="key,value")
    assert [each.dataType.simpleString() for each in frame.schema] == ["string", "bigint"]
    other = spark.createDataFrame([("t-1", "one"), ("t-3", "three"), ("t-99", "none")], "key string, name string")
    joined = other.join(frame, "key", "left").orderBy("key").collect()
    assert [(row.key, row.name, row.value) for row in joined] == [
        ("t-1", "one", 10),
        ("t-3", "three", 30),
        ("t-99", "none", None),
    ]
    some = read(spark, cluster, keys='["t-2", "t-4", "t-98"]', keyType="string", valueType="double")
    assert {row.key: row.value for row in some.collect()} == {"t-2": 20.0, "t-4": 40.0}
    frame.cache().createOrReplaceTempView("counts")
    try:
        client.put(b"t-1", b"no number")
        asked = "select count(*) as n, sum(value) as total from counts where key < 't-2' and value > 10"
        assert spark.sql(asked).first().asDict() == {"n": 10, "total": sum(range(100, 200, 10))}
        assert frame.count() == 20
    finally:
        frame.unpersist()
        spark.catalog.dropTempView("counts")
    with pytest.raises(Exception, match=r"InvalidRequest: valueType long: expected a value that is a long") as raised:
        read(spark, cluster, prefix="t-", keyType="string", valueType="long").count()
    assert "no num" not in str(raised.value)
    assert hashlib.sha256(b"t-1").hexdigest()[:16] in str(raised.value)


def test_value_of_a_mebibyte_passes(spark: SparkSession, cluster: Cluster, client: Client) -> None:
    """The values are deleted at the end, because splits have equal numbers of bytes: 3 MiB beside the 300 KB of
    `stored` would give each later job of this file 350 tasks instead of 8."""
    values = {b"mib-%d" % number: bytes([number]) * (1 << 20) for number in range(3)}
    for key, value in values.items():
        client.put(key, value)
    try:
        assert dict(pairs(read(spark, cluster, prefix="mib-"))) == values
    finally:
        client.delete_prefix(b"mib-")


def test_task_that_is_tried_again_gives_the_same_rows(
    spark: SparkSession, cluster: Cluster, client: Client, stored: dict[bytes, bytes], tmp_path: Path
) -> None:
    frame = read(spark, cluster, prefix="s-", **SMALL)
    client.put(b"s-17", b"changed")
    try:
        assert pairs(interrupted(frame, tmp_path / "died", die)) == sorted(stored.items())
    finally:
        client.put(b"s-17", stored[b"s-17"])
    assert (tmp_path / "died").exists()


def test_moment_that_is_not_kept_any_more_is_an_error(
    spark: SparkSession, cluster: Cluster, stored: dict[bytes, bytes], tmp_path: Path
) -> None:
    """Before a job and in the middle of one: never other rows, never fewer."""
    with hold({"dataDir": str(cluster.local.data_dir)}, split_bytes=64 << 10) as pin:
        frame = spark.read.format("kvstore").options(**pin.options, prefix="s-", pageBytes="4096").load()
        url, id = cluster.url, pin.store.id
        for job in (interrupted(frame, tmp_path / "lost", lambda: give_up(url, id)), frame):
            with pytest.raises(Exception, match=r"NoSuchPin: .* call load\(\) again, with a new pin"):
                job.count()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"bogus": "1"}, "ConfigError: unknown option 'bogus' for reading; expected one of servers"),
        ({"columns": "kind"}, "ConfigError: columns: no column 'kind'"),
        ({"pin": "x"}, "ConfigError: pin: expected the option `pin`"),
        ({"dataDir": "/nowhere"}, "ConfigError: dataDir: no cluster at /nowhere/cluster.json"),
        ({"tlsCa": "/nowhere"}, "ConfigError: tlsCa, tlsCert, tlsKey: /nowhere: No such file or directory"),
        ({"dataDir": "", "servers": "127.0.0.1:1", "timeout": "1s"}, "Unavailable: no server of the cluster answers"),
    ],
)
def test_error_is_reported_in_one_line(
    spark: SparkSession, cluster: Cluster, options: dict[str, str], reason: str
) -> None:
    """One error for each place that may refuse; all wrong options are in test_options.py."""
    with pytest.raises(Exception, match="PYTHON_DATA_SOURCE_ERROR") as raised:
        read(spark, cluster, **options).count()
    assert [line for line in str(raised.value).splitlines() if reason in line] != []


def test_partition_may_join_during_a_job(
    spark: SparkSession, cluster: Cluster, client: Client, stored: dict[bytes, bytes], tmp_path: Path
) -> None:
    frame = read(spark, cluster, prefix="s-", pinTtl="10m", **SMALL)  # no task may run meanwhile, which would renew it
    joins = command(cluster, "ring", "add", "p9", "--wait")
    assert pairs(interrupted(frame, tmp_path / "joined", joins)) == sorted(stored.items())
    assert "p9" in {row.partition for row in read(spark, cluster, prefix="s-").select("partition").distinct().collect()}
    assert pairs(frame) == sorted(stored.items())


def test_job_outlives_a_node_that_leads(
    spark: SparkSession, cluster: Cluster, stored: dict[bytes, bytes], tmp_path: Path
) -> None:
    frame = read(spark, cluster, prefix="s-", **SMALL)
    victim = leader_of(cluster, "p1")
    kills = killer(cluster.pid(victim))
    try:
        assert pairs(interrupted(frame, tmp_path / "killed", kills)) == sorted(stored.items())
        wait_until_blocking(lambda: not cluster.is_running(victim), what=f"the end of {victim}")
        assert pairs(frame) == sorted(stored.items())
    finally:
        cluster.start_node(victim)
    cluster.wait_ready(victim)
