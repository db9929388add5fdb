"""Helpers for snapshots of a real cluster: making them, and their expected contents by the logs."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import psutil
import pyarrow as pa

from kvstore.client import Client
from kvstore.client.core.config import ClientConfig, parse_url
from kvstore.client.feed import FeedReader
from kvstore.client.pinned.arrow import SCHEMA
from kvstore.client.pinned.pins import list_pins
from kvstore.devcluster.processes import is_alive
from kvstore.spark.snapshots import chains, compare, tasks, verify
from kvstore.spark.snapshots.create import create
from kvstore.spark.snapshots.directory import DirectoryStore
from kvstore.spark.snapshots.local_tables import LocalTables
from kvstore.spark.snapshots.manifest import Manifest
from kvstore.spark.snapshots.planning import SnapshotRequest
from kvstore.spark.snapshots.runners import SparkRunner, ThreadRunner
from kvstore.spark.snapshots.spark_tables import SparkTables
from kvstore.spark.snapshots.store import WORK
from kvstore.spark.snapshots.table import read_table
from kvstore.spark.snapshots.tables import Tables
from kvstore.spark.snapshots.usable import stored_files
from kvstore.spark.snapshots.work import Work
from tests.beside import beside
from tests.cluster.harness import Cluster
from tests.waiting import PATIENCE_S, wait_until_blocking

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = 4000
SPLIT_BYTES = 128 << 10
"""Small, so that a full snapshot of `fill` has about 25 tasks and can be interrupted in the middle. Where the server
estimates a size, the value of a MiB counts for its neighbours too: splits of 32 KiB gave 111 tasks."""
WRITER_PAUSE_S = 0.05
"""Pause of a writer between two of its batches, which leaves the processors to the snapshot."""
BIG = b"\x07" * (1 << 20)
ONE_FILE = """
import threading
from kvstore.spark.snapshots import runners

write, taken = runners.write_piece, threading.Lock()

def write_one(*given):
    taken.acquire()  # by one, for ever: there is time to kill this process
    return write(*given)

runners.write_piece = write_one
"""
"""The code that a driver without Spark runs first, to finish one file only."""


def fill(client: Client) -> None:
    """Many small keys and some special ones."""
    rows = {b"key%05d" % number: b"%d" % number * 20 for number in range(ROWS)}
    names = sorted(rows)
    for at in range(0, ROWS, 500):
        client.put_many({name: rows[name] for name in names[at : at + 500]})
    client.put(b"big", BIG)
    client.put(b"nothing", b"")
    client.put(b"for an hour", b"x", ttl_s=3600)


def config(cluster: Cluster) -> ClientConfig:
    return parse_url(cluster.url + "?timeout=30s")


def wanted(cluster: Cluster, parent: Manifest | None = None, **more: Any) -> SnapshotRequest:
    given = {"cluster": config(cluster), "parent": parent, "split_bytes": SPLIT_BYTES, **more}
    if "instance" not in given:
        with FeedReader(config(cluster)) as feed:
            given["instance"] = feed.positions()[0].cluster
    return SnapshotRequest(**given)


def take(
    spark: SparkSession | None, cluster: Cluster, store: DirectoryStore, parent: Manifest | None = None, **more: Any
) -> Manifest:
    """By tasks of Spark; where the test is not about these, by threads of this process."""
    runner = SparkRunner(spark) if spark else ThreadRunner()
    return create(store, wanted(cluster, parent, **more), runner, lambda *_: None)


def rows_of(store: DirectoryStore, manifest: Manifest) -> list[dict[str, Any]]:
    batches = [batch for stored in stored_files(store, manifest) for batch in read_table(stored)]
    rows: list[dict[str, Any]] = pa.Table.from_batches(batches, SCHEMA).to_pylist()
    return rows


def replayed(cluster: Cluster, manifest: Manifest) -> dict[bytes, dict[str, Any]]:
    """Return the contents of the logs up to the manifest's positions, read by a different method than the snapshot."""
    last: dict[bytes, dict[str, Any]] = {}
    for place in manifest.partitions:
        for batch in tasks.changes(config(cluster), place.partition, 0, place.sequence):
            for row in batch.to_pylist():
                known = last.get(row["key"])
                if known is None or known["version"] < row["version"]:
                    last[row["key"]] = row
    return {key: row for key, row in last.items() if row["value"] is not None}


def held(store: DirectoryStore, last: Manifest) -> dict[bytes, dict[str, Any]]:
    """Return the contents of a chain."""
    found: dict[bytes, dict[str, Any]] = {}
    for manifest in chains.chain_of(store.load_all(), last.id):
        for row in rows_of(store, manifest):
            known = found.get(row["key"])
            assert known is None or known["version"] != row["version"], "each row once"
            if known is None or known["version"] < row["version"]:
                found[row["key"]] = row
    return {key: row for key, row in found.items() if row["value"] is not None}


def assert_right(cluster: Cluster, store: DirectoryStore, last: Manifest) -> None:
    """Check that each file is as described, that the directory contains nothing else, that all of it agrees with the
    logs, and that no pin is left."""
    chain = chains.chain_of(store.load_all(), last.id)
    assert list(verify.problems_of(store, chain)) == []
    assert store.remains() == []
    assert _contents(held(store, last)) == _contents(replayed(cluster, last))
    wait_until_blocking(
        lambda: not [pin for pin in list_pins(config(cluster)) if last.id in pin.id],
        timeout_s=60,
        what="no pin is left",
    )


def _contents(rows: dict[bytes, dict[str, Any]]) -> dict[bytes, dict[str, Any]]:
    """Without the partition: a change is in the log of its old owner, and in a full snapshot at the new one."""
    return {key: {**row, "partition": None} for key, row in rows.items()}


def assert_store_is_the_same(
    spark: SparkSession | None, cluster: Cluster, store: DirectoryStore, last: Manifest
) -> None:
    """By Spark; where the test is not about that, by this process."""
    chain = chains.chain_of(store.load_all(), last.id)
    found = compare.against_origin(tables_of(spark), store, chain, config(cluster), 5)
    assert found.count == 0, found
    assert found.same > ROWS


def tables_of(spark: SparkSession | None) -> Tables[Any]:
    return SparkTables(spark) if spark else LocalTables()


@contextmanager
def writing(cluster: Cluster) -> Iterator[list[int]]:
    """Write and delete continuously."""
    done = [0]

    def write(over: threading.Event) -> None:
        with Client(cluster.url + "?timeout=30s") as own:
            while not over.wait(WRITER_PAUSE_S):
                number = done[0]
                own.put_many({b"moving%03d" % ((number + i) % 300): b"%d" % number for i in range(20)})
                own.delete(b"moving%03d" % (number % 300))
                done[0] += 1

    with beside(write):
        yield done


@contextmanager
def meanwhile(store: DirectoryStore, what: Callable[[], object]) -> Iterator[None]:
    """Call a function once the first file of a snapshot is finished, and before it is published. Its exception fails
    the test."""
    publish = Work.publish

    def publish_then(work: Work, *given: Any) -> Manifest:
        acting.exception()  # this process may have been delayed for the duration of the other files
        return publish(work, *given)

    def act() -> None:
        wait_until_blocking(lambda: notes(store), timeout_s=120, what="a first file")
        what()

    with ThreadPoolExecutor(1) as threads, patch.object(Work, "publish", publish_then):
        acting = threads.submit(act)
        yield
    acting.result()


def notes(store: DirectoryStore) -> list[Path]:
    return list(store.root.glob(f"{WORK}*/attempts/*.json"))


@contextmanager
def running(
    cluster: Cluster, log: Path, *words: str, master: str = "local[1]", first: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a `kvstore snapshot` command on the cluster, with its own Spark unless `master` is `none`; it is killed at
    the end. `first`: code that its process runs before."""
    start = ("-c", f"{first}\nfrom kvstore.__main__ import main\nmain()") if first else ("-m", "kvstore")
    line = [sys.executable, *start, "snapshot", *words, "--data-dir", str(cluster.local.data_dir)]
    with log.open("wb") as output:
        driver = subprocess.Popen(
            [*line, "--master", master, "--nice", "0"], stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield driver
    finally:
        kill(driver)


def kill(driver: subprocess.Popen[bytes], how: signal.Signals = signal.SIGKILL) -> None:
    """Return when all its child processes have ended."""
    if driver.poll() is not None:
        return
    family = psutil.Process(driver.pid).children(recursive=True)
    driver.send_signal(how)
    driver.wait(PATIENCE_S)
    wait_until_blocking(lambda: not any(map(_runs, family)), timeout_s=60, what="end of what it had started")


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and is_alive(process.pid)
