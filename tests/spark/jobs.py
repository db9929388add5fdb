"""Data frames of the tests, and what may happen in the middle of a job: it happens in a task, between two batches.

Spark's Python processes load this module: it needs little.
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
from tests.waiting import wait_until_blocking

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from kvstore.client import Client
    from kvstore.client.core.config import ClientConfig
    from tests.cluster.harness import Cluster

LINGER_S = 200
Happening = Callable[[], object]


def read(spark: SparkSession, cluster: Cluster, **options: Any) -> DataFrame:
    where = {"dataDir": str(cluster.local.data_dir), "pinTtl": "60s", **options}
    return spark.read.format("kvstore").options(**where).load()


def fill(client: Client, prefix: str, count: int, value: bytes = b"v") -> dict[bytes, bytes]:
    """`count` keys, and what they hold."""
    items = {f"{prefix}{number}".encode(): value + b"%d" % number for number in range(count)}
    client.put_many(items)
    return items


def pairs(frame: DataFrame) -> list[tuple[bytes, bytes]]:
    """Keys and values, sorted; what is there twice stands twice."""
    return sorted((bytes(row.key), bytes(row.value)) for row in frame.select("key", "value").collect())


def interrupted(frame: DataFrame, marker: Path, happens: Happening, *, after: int = 2) -> DataFrame:
    """The same rows. Once, when some task has passed on `after` of its batches, `happens()`."""

    def pass_on(batches: Iterator[Any]) -> Iterator[Any]:
        for number, batch in enumerate(batches, start=1):
            yield batch
            if number == after and _is_first(marker):
                happens()

    return frame.mapInArrow(pass_on, frame.schema)


def _is_first(marker: Path) -> bool:
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def die() -> None:
    """The task's process ends; Spark tries the task again."""
    os._exit(1)


def kill_the_executor() -> None:
    """It is the parent of the process that makes workers."""
    psutil.Process().parents()[1].kill()


def linger() -> None:
    """Until Spark ends this attempt, since a copy of it was first."""
    threading.Event().wait(LINGER_S)


def killer(pid: int) -> Happening:
    return lambda: os.kill(pid, 9)


def command(cluster: Cluster, *words: str) -> Happening:
    """A `kvstore` command on the cluster, awaited."""
    line = [sys.executable, "-m", "kvstore", *words, "--data-dir", str(cluster.local.data_dir)]
    return lambda: subprocess.run(line, check=True, capture_output=True, timeout=240)


def give_up(cluster: str | ClientConfig, pin: str) -> None:
    """Give a pin back; returns when nobody keeps it: replicas that follow do until its record reaches them."""

    def is_gone() -> bool:
        unpin(cluster, pin)
        return pin not in {each.id for each in list_pins(cluster)}

    wait_until_blocking(is_gone, what=f"nobody keeps the pin {pin}")


def leader_of(cluster: Cluster, partition: str) -> str:
    """The node that leads it, once one says so in time."""
    found: dict[str, str] = {}

    def is_led() -> bool:
        found.update(cluster.leaders())
        return partition in found

    cluster.wait_until(is_led, f"a leader of {partition}")
    return found[partition]
