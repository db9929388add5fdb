"""`make snapshot-demo`: a million keys, a snapshot while others write, an incremental, a restore into another cluster.

Two clusters of three nodes run on this machine, one after the other; every process is ended. The commands are those
that users have; times are printed as they come.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.client import Client
from kvstore.errors import ConfigError, StoreError
from kvstore.server.layout import Wish
from kvstore.server.local import LocalCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OFFSETS = range(47_000, 52_000, 100)
PARTITIONS = (3, 5)
VALUE = "concat('value ', id, ' ', repeat(sha2(concat(id, '{tag}'), 256), 2))"
"""About 140 bytes, of which half can be compressed."""


class Demo:
    """What it has done so far, with times."""

    def __init__(self, directory: Path, rows: int, changes: int) -> None:
        self._directory, self._rows, self._changes = directory, rows, changes
        self._snapshots = directory / "snapshots"
        self._clusters: list[LocalCluster] = []

    def run(self) -> bool:
        """Whether all was as it should be."""
        first = self._up("first", PARTITIONS[0])
        with self._timed(f"{self._rows} keys loaded by the Spark writer", self._rows):
            self._load(first, self._rows, "a")
        with writing(first) as quiet:
            time.sleep(3.0)
        print(f"  foreground writes before: {quiet}")
        with self._timed("full snapshot, while others write"), writing(first) as busy:
            full = self._snapshot("create", "--to", self._snapshots, "--hold-hours", "1", of=first)
        print(
            f"  {full['rows']} rows, {full['files']} files, {full['bytes'] / 2**20:.0f} MiB; writes meanwhile: {busy}"
        )
        with self._timed("verified: files, and against the store"):
            self._snapshot("verify", self._snapshots, "--store", of=first)
        with self._timed(f"{self._changes} keys changed", self._changes):
            self._load(first, self._changes, "b")
        with self._timed("incremental snapshot"):
            increment = self._snapshot("create", "--to", self._snapshots, "--incremental", of=first)
        print(f"  {increment['rows']} changes in {increment['files']} files, {increment['bytes'] / 2**20:.1f} MiB")
        with self._timed("verified: both, and against the store"):
            self._snapshot("verify", self._snapshots, "--store", of=first)
        first.down()
        second = self._up("second", PARTITIONS[1])
        with self._timed("restored", full["rows"]):
            restored = self._snapshot("restore", self._snapshots, of=second)
        with self._timed("compared"):
            verdict = self._snapshot("verify", self._snapshots, "--store", of=second)["store"]
        differing = verdict["added"] + verdict["removed"] + verdict["changed"]
        print(f"{restored['written']} keys restored; {verdict['same']} the same, {differing} differ")
        print("identical" if not differing else "NOT identical")
        return not differing and verdict["same"] == restored["written"] >= self._rows

    def end(self) -> None:
        """Stop every process and remove the data."""
        for cluster in self._clusters:
            cluster.down()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _up(self, name: str, partitions: int) -> LocalCluster:
        cluster = LocalCluster(self._directory / name)
        self._clusters.append(cluster)
        with self._timed(f"{name} cluster up: 3 nodes, {partitions} partitions"):
            for offset in OFFSETS:
                try:
                    cluster.up(Wish(data_dir=cluster.data_dir, port_offset=offset, partitions=partitions))
                    return cluster
                except ConfigError as error:
                    if "taken by another process" not in str(error):
                        raise
        raise ConfigError(f"no free ports from {OFFSETS.start} to {OFFSETS.stop}")

    def _load(self, cluster: LocalCluster, rows: int, tag: str) -> None:
        """By the data source, in a process of its own: Spark keeps its memory as long as it lives."""
        command = [sys.executable, "-m", "loadtest.snapshot_demo", "--load", str(cluster.data_dir), str(rows), tag]
        _run(command)

    def _snapshot(self, verb: str, *arguments: Any, of: LocalCluster) -> dict[str, Any]:
        command = [sys.executable, "-m", "kvstore", "snapshot", verb, *map(str, arguments), "--json"]
        found: dict[str, Any] = json.loads(_run([*command, "--data-dir", str(of.data_dir)]))
        return found

    @contextmanager
    def _timed(self, what: str, rows: int = 0) -> Iterator[None]:
        began = time.monotonic()
        yield
        seconds = time.monotonic() - began
        rate = f", {rows / seconds:,.0f}/s with the start of Spark" if rows else ""
        print(f"{seconds:7.1f} s  {what}{rate}", flush=True)


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StoreError(f"{' '.join(command[2:])} ended with {done.returncode}: {done.stderr[-2000:] or done.stdout}")
    return done.stdout


class Writes:
    """Latencies of somebody who writes small values at a steady rate."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __str__(self) -> str:
        found = sorted(self.seconds) or [0.0]
        middle, late = found[len(found) // 2], found[int(len(found) * 0.99)]
        return f"{len(self.seconds)} batches, p50 {middle * 1000:.1f} ms, p99 {late * 1000:.1f} ms"


@contextmanager
def writing(cluster: LocalCluster, every_s: float = 0.02) -> Iterator[Writes]:
    """Writes ten keys of their own 50 times a second. What waits counts from when it was due."""
    ended, writes = threading.Event(), Writes()
    url = "kv://" + ",".join(node.grpc for node in cluster.load().nodes) + "?timeout=30s"

    def write() -> None:
        with Client(url) as client:
            due, number = time.monotonic(), 0
            while not ended.wait(max(0.0, due - time.monotonic())):
                client.put_many({b"written meanwhile %d" % ((number + i) % 1000): b"%d" % number for i in range(10)})
                writes.seconds.append(time.monotonic() - due)
                due += every_s
                number += 10

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        yield writes
    finally:
        ended.set()
        writer.join()


def load(data_dir: str, rows: int, tag: str) -> None:
    """`rows` keys with values of that tag."""
    from kvstore.spark.session import open_session

    session: SparkSession = open_session("snapshot demo")
    session.sparkContext.setLogLevel("OFF")
    frame = session.range(rows).selectExpr("format_string('user%012d', id) as key", f"{VALUE.format(tag=tag)} as value")
    frame.write.format("kvstore").mode("append").option("dataDir", data_dir).save()
    session.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--changes", type=int, default=100_000)
    parser.add_argument("--load", nargs=3, metavar=("DATA_DIR", "ROWS", "TAG"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.load:
        load(chosen.load[0], int(chosen.load[1]), chosen.load[2])
        return
    demo = Demo(Path(tempfile.mkdtemp(prefix="kvstore-snapshot-demo-")), chosen.rows, chosen.changes)
    try:
        sys.exit(0 if demo.run() else 1)
    except StoreError as error:
        sys.exit(f"snapshot demo: {error}")
    finally:
        demo.end()


if __name__ == "__main__":
    main()
