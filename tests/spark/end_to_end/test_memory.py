"""The memory of a job does not grow with the store: a job of 256 MiB, in values of the largest size, passes through
every process in parts."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from pyspark.sql import functions as F

from kvstore.client import Client
from kvstore.spark.session import open_session
from kvstore.spark.snapshots import verify
from kvstore.spark.snapshots.chains import Cut
from kvstore.spark.snapshots.directory import DirectoryStore
from kvstore.spark.snapshots.manifest import Manifest
from kvstore.spark.snapshots.restore import restore
from kvstore.spark.snapshots.spark_tables import SparkTables
from tests.cluster.harness import Cluster
from tests.spark.conftest import SETTINGS, stop_spark
from tests.spark.jobs import read
from tests.spark.snapshots.taken import config, take

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]
MIB = 1 << 20
VALUES = 256
"""Of a MiB each, all in one partition, and so in one task: sixteen times the size of a page, a batch or a group."""
SPLIT_BYTES = 1 << 32
HEAP_BYTES = 512 * MIB
"""spark.driver.memory of these tests."""
JVM_BYTES = 768 * MIB
"""The need of a JVM with Arrow besides its heap."""
WORKER_BYTES = 192 * MIB
"""The need of a worker besides its data: Python with pyspark, pyarrow and gRPC uses about 150 MiB."""
DATA_BYTES = VALUES * MIB // 2
"""The limit of the data that a process may hold. It holds less than half of that at every size of the store; a process
that collects the data holds twice that."""


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    """With its own Python processes: those of other files keep the memory they once used."""
    stop_spark()
    session = open_session("memory", master="local[2,3]", settings=SETTINGS)
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture(scope="module", autouse=True)
def stored(cluster: Cluster) -> None:
    chooser = random.Random(1)
    with Client(cluster.url + "?timeout=60s") as client:
        for number in range(0, VALUES, 8):
            client.put_many({b"{m}%03d" % (number + each): chooser.randbytes(MIB) for each in range(8)})


@dataclass(frozen=True, slots=True)
class Peaks:
    """In bytes, the largest process of each kind."""

    driver: int
    """In addition to its use before."""
    jvm: int
    worker: int
    server: int
    """In addition to its use before."""


@contextmanager
def measured(cluster: Cluster) -> Iterator[list[Peaks]]:
    """The peaks during the block."""
    servers = [cluster.pid(node) for node in cluster.ids]
    before = {pid: _reset(pid) for pid in (*servers, *_family())}
    found: list[Peaks] = []
    yield found
    jvms, workers = ([pid for pid in _family() if each in _read(pid, "cmdline")] for each in ("java", "pyspark.daemon"))
    found.append(
        Peaks(
            driver=_peak(os.getpid()) - before[os.getpid()],
            jvm=max(map(_peak, jvms)),
            worker=max(map(_peak, workers)),
            server=max(_peak(pid) - before[pid] for pid in servers),
        )
    )


def _family() -> list[int]:
    me = psutil.Process()
    return [me.pid, *(each.pid for each in me.children(recursive=True))]


def _reset(pid: int) -> int:
    """Reset the process' peak to its present use, and return that."""
    with suppress(OSError):  # it has ended
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _peak(pid)


def _peak(pid: int) -> int:
    """Return 0 for a process that has ended."""
    found = re.search(r"VmHWM:\s*(\d+) kB", _read(pid, "status"))
    return int(found[1]) << 10 if found else 0


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:
        return ""


def assert_bounded(peaks: Peaks) -> None:
    sizes = {name: round(size / MIB) for name, size in asdict(peaks).items()}
    assert peaks.driver < 32 * MIB, sizes
    assert peaks.jvm < HEAP_BYTES + JVM_BYTES, sizes
    assert WORKER_BYTES / 2 < peaks.worker < WORKER_BYTES + DATA_BYTES, sizes
    assert peaks.server < DATA_BYTES, sizes


def test_read_holds_some_pages(spark: SparkSession, cluster: Cluster) -> None:
    """The first of these tests: workers keep the memory they once used."""
    with measured(cluster) as peaks:
        frame = read(spark, cluster, splitBytes="4GiB")
        assert frame.agg(F.sum(F.length("value"))).collect()[0][0] == VALUES * MIB
    assert_bounded(peaks[0])


@pytest.fixture(scope="module")
def taken(
    spark: SparkSession, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> tuple[DirectoryStore, Manifest, Peaks]:
    store = DirectoryStore(tmp_path_factory.mktemp("memory") / "snapshots")
    with measured(cluster) as peaks:
        manifest = take(spark, cluster, store, split_bytes=SPLIT_BYTES)
    return store, manifest, peaks[0]


def test_snapshot_holds_some_groups_of_rows(taken: tuple[DirectoryStore, Manifest, Peaks]) -> None:
    store, manifest, peaks = taken
    (large,) = (file for file in manifest.files if file.rows)
    assert (large.rows, list(verify.problems_of(store, [manifest]))) == (VALUES, [])
    assert_bounded(peaks)


def test_restore_holds_some_batches(
    spark: SparkSession, cluster: Cluster, taken: tuple[DirectoryStore, Manifest, Peaks]
) -> None:
    store, manifest, _ = taken
    spark.conf.set("spark.sql.files.minPartitionNum", "1")  # one task has all of it
    spark.conf.set("spark.sql.files.maxPartitionBytes", "4g")
    with measured(cluster) as peaks:
        done = restore(
            SparkTables(spark), store, [manifest], Cut(), config(cluster), into_filled=True, progress=lambda *_: None
        )
    assert done.written == VALUES
    assert_bounded(peaks[0])
