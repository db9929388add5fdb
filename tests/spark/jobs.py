"""Data frames of the tests, and events in the middle of a job: they happen in a task, between two batches.

Spark's Python processes load this module, so it imports little.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from kvstore.client.pinned.pins import list_pins, unpin
from kvstore.spark.snapshots.tasks import write_piece
from tests.waiting import wait_until_blocking

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from kvstore.client import Client
    from kvstore.client.core.config import ClientConfig
    from kvstore.spark.snapshots.manifest import DataFile
    from kvstore.spark.snapshots.tasks import JobContext
    from kvstore.spark.snapshots.work import SnapshotPart
    from tests.cluster.harness import Cluster

LINGER_S = 200
Happening = Callable[[], object]


def read(spark: SparkSession, cluster: Cluster, **options: Any) -> DataFrame:
    where = {"dataDir": str(cluster.local.data_dir), "pinTtl": "60s", **options}
    return spark.read.format("kvstore").options(**where).load()


def fill(client: Client, prefix: str, count: int, value: bytes = b"v") -> dict[bytes, bytes]:
    """Return `count` keys and their values."""
    items = {f"{prefix}{number}".encode(): value + b"%d" % number for number in range(count)}
    client.put_many(items)
    return items


def pairs(frame: DataFrame) -> list[tuple[bytes, bytes]]:
    """Return the sorted keys and values; duplicates are kept."""
    return sorted((bytes(row.key), bytes(row.value)) for row in frame.select("key", "value").collect())


def interrupted(frame: DataFrame, marker: Path, happens: Happening, *, after: int = 2) -> DataFrame:
    """Return the same rows. Once, when some task has passed on `after` of its batches, `happens()` is called."""

    def pass_on(batches: Iterator[Any]) -> Iterator[Any]:
        for number, batch in enumerate(batches, start=1):
            yield batch
            if number == after and _is_first(marker):
                happens()

    return frame.mapInArrow(pass_on, frame.schema)


def interrupted_parts(marker: Path, happens: Happening) -> Callable[[JobContext, SnapshotPart], DataFile]:
    """Return `write_piece` for the tasks of a snapshot. Once, when some task has read a batch of its part and not yet
    written it, it waits until another executor has done the same. Then the ids of its family go into the file `marker`,
    and `happens()` is called. An executor that begins later would fetch the tasks' code from the one that stopped."""

    def begun() -> list[Path]:
        return list(marker.parent.glob(f"{marker.name}-executor-*"))

    def interrupt() -> None:
        ids = [each.pid for each in family()]
        marker.with_name(f"{marker.name}-executor-{ids[0]}").touch()
        if _is_first(marker):
            wait_until_blocking(lambda: len(begun()) > 1, what="another executor has begun")
            marker.write_text(" ".join(map(str, ids)))
            happens()

    def write(job: JobContext, piece: SnapshotPart) -> DataFile:
        return write_piece(job, piece, interrupt)

    return write


def _is_first(marker: Path) -> bool:
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def die() -> None:
    """End the task's process; Spark tries the task again."""
    os._exit(1)


def kill_the_executor() -> None:
    family()[0].kill()


def family() -> list[psutil.Process]:
    """Return the executor of this task, the process that creates its workers, and this worker."""
    worker = psutil.Process()
    daemon, executor = worker.parents()[:2]
    return [executor, daemon, worker]


def stop_the_executor() -> None:
    """Stop the executor with its Python processes. They continue when a test tells them to."""
    for each in family():
        each.suspend()


def linger() -> None:
    """Wait until Spark ends this attempt because a copy of it finished first."""
    threading.Event().wait(LINGER_S)


def killer(pid: int) -> Happening:
    return lambda: os.kill(pid, 9)


def command(cluster: Cluster, *words: str) -> Happening:
    """Run a `kvstore` command on the cluster and wait for it."""
    line = [sys.executable, "-m", "kvstore", *words, "--data-dir", str(cluster.local.data_dir)]
    return lambda: subprocess.run(line, check=True, capture_output=True, timeout=240)


def give_up(cluster: str | ClientConfig, pin: str) -> None:
    """Release a pin; return when no server keeps it: followers keep it until the record reaches them."""

    def is_gone() -> bool:
        unpin(cluster, pin)
        return pin not in {each.id for each in list_pins(cluster)}

    wait_until_blocking(is_gone, what=f"nobody keeps the pin {pin}")


def leader_of(cluster: Cluster, partition: str) -> str:
    """Return the node that leads the partition, once a node reports it in time."""
    found: dict[str, str] = {}

    def is_led() -> bool:
        found.update(cluster.leaders())
        return partition in found

    cluster.wait_until(is_led, f"a leader of {partition}")
    return found[partition]
