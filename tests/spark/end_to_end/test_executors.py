"""Executors that die, tasks that run twice and late attempts, on a Spark of several machines: rows are the same, and a
snapshot is unchanged."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

from kvstore.client import Client
from kvstore.devcluster.processes import is_alive
from kvstore.spark.session import open_session
from kvstore.spark.snapshots import runners
from kvstore.spark.snapshots.directory import DirectoryStore
from tests.cluster.harness import Cluster
from tests.spark.conftest import SETTINGS, stop_spark
from tests.spark.jobs import (
    Happening,
    fill,
    interrupted,
    interrupted_parts,
    kill_the_executor,
    linger,
    pairs,
    read,
    stop_the_executor,
)
from tests.spark.snapshots.taken import assert_right, take
from tests.spark.standalone import spark_cluster, tasks, won_by_copies
from tests.waiting import wait_until_blocking

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.cluster, pytest.mark.slow]
SPECULATIVE = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.2",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.minTaskRuntime": "200ms",
    "spark.speculation.efficiency.enabled": "false",
    "spark.network.timeout": "10min",  # an executor that is stopped for less is not given up
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    "spark.ui.enabled": "true",
    "spark.ui.port": "0",
}
SPLIT_BYTES = 32 << 10
ROWS = 2000


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    with spark_cluster(tmp_path_factory.mktemp("spark")) as master:
        stop_spark()
        session = open_session("executors", master=master, settings={**SETTINGS, **SPECULATIVE})
        session.sparkContext.setLogLevel("OFF")
        yield session
        session.stop()


@pytest.fixture(scope="module")
def stored(cluster: Cluster) -> dict[bytes, bytes]:
    with Client(cluster.url + "?timeout=20s") as client:
        return fill(client, "s-", 3000, b"x" * 80)


@contextmanager
def copied(spark: SparkSession) -> Iterator[None]:
    """Fail unless Spark has started a copy of a task meanwhile, and used the copy."""
    before = won_by_copies(spark)
    yield
    wait_until_blocking(lambda: won_by_copies(spark) - before, what="a copy that was first")


# ── reads ──


def test_of_a_read_task_that_hangs_the_copy_counts_and_rows_come_once(
    spark: SparkSession, cluster: Cluster, stored: dict[bytes, bytes], tmp_path: Path
) -> None:
    frame = read(spark, cluster, prefix="s-", pageBytes="4096", splitBytes="64KiB", pinTtl="10m")
    with copied(spark):
        assert pairs(interrupted(frame, tmp_path / "copied", linger)) == sorted(stored.items())


def test_read_outlives_an_executor(
    spark: SparkSession, cluster: Cluster, stored: dict[bytes, bytes], tmp_path: Path
) -> None:
    frame = read(spark, cluster, prefix="s-", pageBytes="4096", splitBytes="64KiB", pinTtl="10m")
    assert pairs(interrupted(frame, tmp_path / "killed", kill_the_executor)) == sorted(stored.items())
    assert (tmp_path / "killed").exists()


# ── snapshots ──


@contextmanager
def interrupting(marker: Path, happens: Happening) -> Iterator[None]:
    """Once, in a task that has begun to write a part of a snapshot, call `happens()`."""
    with patch.object(runners, "write_piece", interrupted_parts(marker, happens)):
        yield


def interrupted_family(marker: Path) -> list[int]:
    """Return the ids of the executor that was interrupted and of its Python processes."""
    return list(map(int, marker.read_text().split()))


def is_idle(spark: SparkSession) -> bool:
    return not [each for each in tasks(spark) if each["status"] == "RUNNING"]


def test_late_attempt_changes_nothing_in_a_published_snapshot(
    spark: SparkSession, cluster: Cluster, stored: dict[bytes, bytes], tmp_path: Path
) -> None:
    store, marker = DirectoryStore(tmp_path / "snapshots"), tmp_path / "stopped"
    try:
        with copied(spark), interrupting(marker, stop_the_executor):
            manifest = take(spark, cluster, store, split_bytes=SPLIT_BYTES)
        assert_right(cluster, store, manifest)
    finally:
        for pid in reversed(interrupted_family(marker)):  # an executor that runs would end its worker
            os.kill(pid, signal.SIGCONT)
    wait_until_blocking(lambda: is_idle(spark), timeout_s=60, what="the end of the attempt that woke up")
    assert_right(cluster, store, manifest)
    assert sorted(os.listdir(store.root)) == [".lock", manifest.id]


def test_snapshot_outlives_an_executor(
    spark: SparkSession, cluster: Cluster, stored: dict[bytes, bytes], tmp_path: Path
) -> None:
    store, marker = DirectoryStore(tmp_path / "snapshots"), tmp_path / "killed"
    with interrupting(marker, kill_the_executor):
        manifest = take(spark, cluster, store, split_bytes=SPLIT_BYTES)
    killed = interrupted_family(marker)
    wait_until_blocking(lambda: not any(map(is_alive, killed)), what="the end of the executor's processes")
    # A Python worker outlives its executor for a moment. `prune` removes files that it writes while the driver removes
    # the folder of the work.
    left = store.remains()
    assert store.remove_remains(left) == left
    assert_right(cluster, store, manifest)


# ── loads ──


def load(spark: SparkSession, cluster: Cluster, prefix: str, marker: Path, happens: Happening, **options: str) -> None:
    """Load `ROWS` rows of a KiB in four tasks. An event happens in the last batches of one, when the others were
    written: Spark passes on full buffers."""
    rows = spark.range(0, ROWS, 1, 4).selectExpr(
        f"concat('{prefix}', id) as key", "concat(repeat('x', 1024), id) as value"
    )
    writer = interrupted(rows, marker, happens, after=4).write.format("kvstore").mode("append")
    writer.options(dataDir=str(cluster.local.data_dir), batchRows="50", **options).save()
    assert marker.exists()


def versions(cluster: Cluster, prefix: str) -> list[bool]:
    """Return for each row whether it was written once. All rows exist, each with its own value."""
    with Client(cluster.url + "?timeout=20s") as client:
        found = dict(client.scan(prefix=prefix.encode()))
    expected = {f"{prefix}{number}".encode(): b"x" * 1024 + b"%d" % number for number in range(ROWS)}
    assert {key: item.value for key, item in found.items()} == expected
    return [item.version == item.created for item in found.values()]


def test_of_a_load_task_that_hangs_the_copy_writes_the_same_rows_again(
    spark: SparkSession, cluster: Cluster, tmp_path: Path
) -> None:
    with copied(spark):
        load(spark, cluster, "twice-", tmp_path / "copied", linger)
    once = versions(cluster, "twice-")
    assert 0 < once.count(False) < ROWS / 4, "what the attempt that hung had written, and nothing else"


def test_load_that_keeps_existing_rows_leaves_one_version_of_each(
    spark: SparkSession, cluster: Cluster, tmp_path: Path
) -> None:
    with copied(spark):
        load(spark, cluster, "kept-", tmp_path / "copied", linger, onConflict="keep")
    assert all(versions(cluster, "kept-"))


def test_load_outlives_an_executor(spark: SparkSession, cluster: Cluster, tmp_path: Path) -> None:
    load(spark, cluster, "executor-", tmp_path / "killed", kill_the_executor)
    assert versions(cluster, "executor-")
