"""Executors that die and tasks that run twice, on a Spark with processes of its own: rows are the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from kvstore.client import Client
from kvstore.spark.session import open_session
from tests.cluster.harness import Cluster
from tests.spark.conftest import SETTINGS
from tests.spark.jobs import fill, interrupted, killer, pairs, read

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]
SPECULATIVE = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.2",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.minTaskRuntime": "200ms",
}
LINGER_S = 30


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    """Two executors of one core."""
    session = open_session("executors", master="local-cluster[2,1,1024]", settings={**SETTINGS, **SPECULATIVE})
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture(scope="module")
def stored(cluster: Cluster) -> dict[bytes, bytes]:
    with Client(cluster.url + "?timeout=20s") as client:
        return fill(client, "s-", 3000, b"x" * 80)


def kill_the_executor() -> None:
    """It is the parent of the process that makes workers."""
    psutil.Process().parents()[1].kill()


def linger() -> None:
    """Long enough for a copy of this task to be started, and to end first."""
    threading.Event().wait(LINGER_S)


def test_a_read_outlives_an_executor_a_leader_and_a_copy_of_itself(
    spark: SparkSession, cluster: Cluster, stored: dict[bytes, bytes], tmp_path: Path
) -> None:
    frame = read(spark, cluster, prefix="s-", pageBytes="4096", splitBytes="64KiB", pinTtl="10m")
    victim = cluster.leaders()["p2"]
    for name, happens in (
        ("copied", linger),
        ("executor", kill_the_executor),
        ("leader", killer(cluster.pid(victim))),
    ):
        assert pairs(interrupted(frame, tmp_path / name, happens)) == sorted(stored.items()), name
        assert (tmp_path / name).exists()
    assert not cluster.is_running(victim)


def test_a_load_outlives_an_executor_and_a_copy_of_itself(
    spark: SparkSession, cluster: Cluster, stored: dict[bytes, bytes], tmp_path: Path
) -> None:
    for name, happens in (("copied", linger), ("executor", kill_the_executor)):
        rows = spark.range(0, 2000, 1, 4).selectExpr(f"concat('{name}-', id) as key", "concat('v', id) as value")
        load = interrupted(rows, tmp_path / name, happens).write.format("kvstore").mode("append")
        load.option("dataDir", str(cluster.local.data_dir)).save()
        found = dict(pairs(read(spark, cluster, prefix=f"{name}-")))
        assert found == {f"{name}-{number}".encode(): f"v{number}".encode() for number in range(2000)}
