"""`make snapshot-demo`: a million keys, a snapshot while others write, an incremental, a restore into another cluster.

Two clusters of three nodes run on this machine, one after the other; every process is ended. The commands are those
that users have; times are printed as they come.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil

from kvstore.devcluster.local import LocalCluster
from kvstore.errors import StoreError
from kvstore.spark.snapshots.directory import DirectoryStore
from loadtest.bench import peers
from loadtest.bench.foreground import writing

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITIONS = (3, 5)
WARM_S, QUIET_S = 3.0, 10.0
FEED_RATE, FEED_WARM_S, FEED_S = 500, 10.0, 12.0
TRIGGERS = ("1 second", "500 milliseconds", "0 seconds")
"""Trigger intervals of micro-batches; 0: each begins when the one before has ended."""
BEFORE, MEANWHILE, AFTER = "before", "meanwhile", "after"
VALUE = "concat('value ', id, ' ', repeat(sha2(concat(id, '{tag}'), 256), 2))"
"""About 140 bytes, of which half can be compressed."""


class Demo:
    """A demonstration, with the times of its steps."""

    def __init__(self, directory: Path, rows: int, changes: int, rate: int) -> None:
        self._directory, self._rows, self._changes, self._rate = directory, rows, changes, rate
        self._snapshots = directory / "snapshots"
        self._clusters: list[LocalCluster] = []

    def run(self) -> bool:
        """Run all steps. Return True if all results are as expected."""
        first = self._up("first", PARTITIONS[0])
        with self._timed(f"{self._rows} keys loaded by the Spark writer", self._rows):
            self._load(first, self._rows, "a")
        full = self._snapshot_meanwhile(first)
        with self._timed("verified: files, and against the store"):
            self._snapshot("verify", self._snapshots, "--store", of=first)
        with self._timed(f"{self._changes} keys changed", self._changes):
            self._load(first, self._changes, "b")
        with self._timed("incremental snapshot"):
            increment = self._snapshot("create", "--to", self._snapshots, "--incremental", of=first)
        print(f"  {increment['rows']} changes in {increment['files']} files, {increment['bytes'] / 2**20:.1f} MiB")
        with self._timed("verified: both, and against the store"):
            self._snapshot("verify", self._snapshots, "--store", of=first)
        with self._timed("change feed read"), writing([node.resp for node in first.load().nodes], FEED_RATE):
            said = _run([sys.executable, "-m", "loadtest.snapshot_demo", "--feed", str(first.data_dir)])
        print(f"  from write to data frame:\n{said.rstrip()}")
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

    def _snapshot_meanwhile(self, cluster: LocalCluster) -> dict[str, Any]:
        """Take the full snapshot, and measure its cost for clients that write."""
        nodes = cluster.load().nodes
        with writing([node.resp for node in nodes], self._rate) as foreground:
            time.sleep(WARM_S)
            foreground.phase(BEFORE)
            time.sleep(QUIET_S)
            foreground.phase(MEANWHILE)
            with self._timed(f"full snapshot, while others write {self._rate:,} times a second"), Peak() as peak:
                full = self._snapshot("create", "--to", self._snapshots, "--hold-hours", "1", of=cluster)
            foreground.phase(AFTER)
            time.sleep(QUIET_S)
            found = foreground.end()
        manifest = DirectoryStore(self._snapshots).load(full["id"])
        seconds = (manifest.ended_ms - manifest.started_ms) / 1000
        print(f"  {full['rows']} rows, {full['files']} files, {full['bytes'] / 2**20:.0f} MiB")
        print(f"  {full['rows'] / seconds:,.0f} rows/s, {seconds:.1f} s without the start of Spark")
        for phase in (BEFORE, MEANWHILE, AFTER):
            print(f"  writes {phase}: {found[phase]}")
        factor = found[MEANWHILE].p99 / min(found[BEFORE].p99, found[AFTER].p99)
        print(f"  the p99 of writes was {factor:.2f} times what it is without")
        memory = {f"node {node.id}": peak_of(node.pid) for node in nodes if node.pid} | peak.bytes
        print("  memory at most: " + ", ".join(f"{name} {size >> 20} MiB" for name, size in memory.items()))
        return full

    def end(self) -> None:
        """Stop every process."""
        for cluster in self._clusters:
            cluster.down()

    def _up(self, name: str, partitions: int) -> LocalCluster:
        cluster = LocalCluster(self._directory / name)
        self._clusters.append(cluster)
        with self._timed(f"{name} cluster up: 3 nodes, {partitions} partitions"):
            peers.up_on_free_ports(cluster, partitions=partitions)
        return cluster

    def _load(self, cluster: LocalCluster, rows: int, tag: str) -> None:
        """Load the keys by the data source, in a separate process, because Spark keeps its memory as long as it
        lives."""
        command = [sys.executable, "-m", "loadtest.snapshot_demo", "--load", str(cluster.data_dir), str(rows), tag]
        seconds = float(_run(command).split()[-1])
        print(f"  {rows / seconds:,.0f} rows/s, {seconds:.1f} s without the start of Spark")

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


class Peak:
    """The maximum memory of a command's processes: its own, Java's, and one of Spark's workers."""

    def __init__(self) -> None:
        self.bytes = {"driver": 0, "java": 0, "worker": 0}
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.5):
            for each in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    words = " ".join(each.cmdline())
                    kind = "worker" if "pyspark.daemon" in words else "java" if "SparkSubmit" in words else "driver"
                    if kind != "driver" or "snapshot" in words:
                        self.bytes[kind] = max(self.bytes[kind], each.memory_info().rss)


def peak_of(process: int) -> int:
    """Return the maximum memory that a process has had, in bytes."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines() if sys.platform == "linux" else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")), 0)


def load(data_dir: str, rows: int, tag: str) -> None:
    """Write `rows` keys with values of that tag. Prints how many seconds the write took."""
    from kvstore.cli.snapshot_tools import QUICK_START
    from kvstore.spark.session import open_session

    session: SparkSession = open_session("snapshot demo", settings=QUICK_START)
    session.sparkContext.setLogLevel("OFF")
    _write_rows(session, data_dir, 1, tag)  # starts what Spark runs Python in, for the plan, the tasks and the commit
    began = time.monotonic()
    _write_rows(session, data_dir, rows, tag)
    print(f"{time.monotonic() - began:.3f}")
    session.stop()


def _write_rows(session: SparkSession, data_dir: str, rows: int, tag: str) -> None:
    frame = session.range(rows).selectExpr(
        "concat('user', lpad(id, 12, '0')) as key", f"{VALUE.format(tag=tag)} as value"
    )
    frame.write.format("kvstore").mode("append").option("dataDir", data_dir).save()


def feed_delay(data_dir: str) -> None:
    """Print how long after its write a change is in a data frame, and the duration of a micro-batch."""
    from kvstore.spark.session import open_session

    session = open_session("feed demo")
    session.sparkContext.setLogLevel("OFF")
    for trigger in TRIGGERS:
        _feed_delay(session, data_dir, trigger)
    session.stop()


def _feed_delay(session: SparkSession, data_dir: str, trigger: str) -> None:
    stream = session.readStream.format("kvstore").option("dataDir", data_dir).option("columns", "written_at").load()
    delays: list[float] = []
    counts_from = time.time() + FEED_WARM_S

    def take(frame: DataFrame, number: int) -> None:
        written = [row.at for row in frame.selectExpr("cast(written_at as double) as at").collect()]
        delays.extend(time.time() - at for at in written if at >= counts_from)

    with peers.scratch() as checkpoint:
        writer = stream.writeStream.foreachBatch(take).option("checkpointLocation", str(checkpoint))
        query = writer.trigger(processingTime=trigger).start()
        query.awaitTermination(int(FEED_WARM_S + FEED_S))
        parts: dict[str, int] = query.lastProgress["durationMs"] if query.lastProgress else {}
        query.stop()
    delays.sort()
    if not delays:
        print(f"    trigger {trigger}: no change came within {FEED_WARM_S + FEED_S:g} s")
    else:
        middle, late = delays[len(delays) // 2], delays[int(len(delays) * 0.99)]
        took = ", ".join(f"{name} {each}" for name, each in parts.items() if each)
        print(f"    trigger {trigger}: {len(delays)}, p50 {middle:.2f} s, p99 {late:.2f} s; last batch, ms: {took}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--changes", type=int, default=100_000)
    parser.add_argument("--rate", type=int, default=3_000, help="writes a second while the snapshot is taken")
    parser.add_argument("--load", nargs=3, metavar=("DATA_DIR", "ROWS", "TAG"), help=argparse.SUPPRESS)
    parser.add_argument("--feed", metavar="DATA_DIR", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.feed:
        feed_delay(chosen.feed)
        return
    if chosen.load:
        load(chosen.load[0], int(chosen.load[1]), chosen.load[2])
        return
    with peers.scratch() as folder:
        demo = Demo(folder, chosen.rows, chosen.changes, chosen.rate)
        try:
            sys.exit(0 if demo.run() else 1)
        except StoreError as error:
            sys.exit(f"snapshot demo: {error}")
        finally:
            demo.end()


if __name__ == "__main__":
    main()
