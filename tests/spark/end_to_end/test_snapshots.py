"""Snapshots of a real cluster by a real Spark, while processes are killed: complete and correct, or absent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pyarrow as pa
import pytest

from kvstore.client import Client
from kvstore.client.feed import FeedReader
from kvstore.client.pinned.arrow import SCHEMA
from kvstore.client.pinned.pins import list_pins, unpin
from kvstore.errors import NoSuchPin, StoreError
from kvstore.spark.snapshots import compare, runners, tasks
from kvstore.spark.snapshots import create as jobs
from kvstore.spark.snapshots.create import create
from kvstore.spark.snapshots.directory import DirectoryStore
from kvstore.spark.snapshots.local_tables import LocalTables
from kvstore.spark.snapshots.manifest import Manifest
from kvstore.spark.snapshots.objects import RemoteStore
from kvstore.spark.snapshots.planning import SnapshotRequest, plan_snapshot
from kvstore.spark.snapshots.remote import RemotePath
from kvstore.spark.snapshots.runners import ThreadRunner
from kvstore.spark.snapshots.spark_tables import SparkTables
from kvstore.spark.snapshots.stored import StoredFile
from kvstore.spark.snapshots.table import TableWriter, read_table
from kvstore.spark.snapshots.work import Work
from tests.cluster.harness import Cluster
from tests.spark.jobs import give_up, leader_of
from tests.spark.snapshots.object_store import s3_server
from tests.spark.snapshots.taken import (
    BIG,
    ONE_FILE,
    ROWS,
    SPLIT_BYTES,
    assert_right,
    assert_store_is_the_same,
    config,
    fill,
    kill,
    meanwhile,
    notes,
    replayed,
    rows_of,
    running,
    take,
    wanted,
    writing,
)
from tests.waiting import wait_until_blocking

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.url + "?timeout=30s") as connected:
        fill(connected)
        yield connected


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "snapshots")


# ── S1, S3, S4: contents ──


def test_full_and_incremental_are_the_logs_at_their_positions(
    spark: SparkSession, cluster: Cluster, client: Client, store: DirectoryStore
) -> None:
    with writing(cluster) as done:
        wait_until_blocking(lambda: done[0] > 5, timeout_s=60, what="writes")
        first = take(spark, cluster, store)
        rows = rows_of(store, first)
        found = {row["key"]: row for row in rows}
        assert len(found) == len(rows), "each key once"
        assert found == replayed(cluster, first), "byte for byte"
        assert found[b"big"]["value"] == BIG
        assert found[b"nothing"]["value"] == b""
        assert found[b"for an hour"]["expires_at"] is not None
        before = done[0]
        wait_until_blocking(lambda: done[0] > before + 5, timeout_s=60, what="more writes")
        client.delete(b"nothing")
        second = take(spark, cluster, store, first)
    behind = first.places()
    changed = rows_of(store, second)
    assert len(changed) > 20
    assert not any(row["key"].startswith(b"key") for row in changed), "only what has changed"
    assert all(row["version"] > behind[row["partition"]].sequence for row in changed)
    assert any(row["key"] == b"nothing" and row["value"] is None for row in changed)
    assert_right(cluster, store, second)
    client.put(b"nothing", b"")
    assert_store_is_the_same(spark, cluster, store, second)
    for root in (store.root, store.root / "another", store.root):
        jobs.hold_for_next(config(cluster), root, second, 1.0)
    held = [pin.partition for pin in list_pins(config(cluster)) if "snapshot-next" in pin.id]
    assert sorted(held) == sorted([*behind, *behind]), "one for each directory"


def test_store_that_differs_is_found(
    spark: SparkSession, cluster: Cluster, client: Client, store: DirectoryStore
) -> None:
    first = take(None, cluster, store)
    rows = rows_of(store, first)
    other = DirectoryStore(store.root.parent / "other")
    forged = _forged(other, first, [row for row in rows if row["key"] != b"key00007"])
    for tables in (SparkTables(spark), LocalTables()):
        found = compare.against_origin(tables, other, [forged], config(cluster), 5)
        assert (found.examples, found.same) == (((b"key00007", "added"),), len(rows) - 1)


def _forged(store: DirectoryStore, like: Manifest, rows: list[dict[str, Any]]) -> Manifest:
    """Return the same snapshot with other rows."""
    folder = store.folder(like.id)
    (folder / "data").mkdir(parents=True)
    writer = TableWriter(folder / "data/p1-00000.parquet", "p1")
    writer.write(pa.RecordBatch.from_pylist(rows, SCHEMA))
    file = writer.close("data/p1-00000.parquet")
    return replace(like, files=(file,), rows=file.rows, size_bytes=file.size_bytes)


# ── S2, S5: tasks, executors and drivers that die ──


def test_every_attempt_at_a_piece_has_the_same_rows(cluster: Cluster, client: Client, store: DirectoryStore) -> None:
    plan = plan_snapshot(wanted(cluster), 1_700_000_000_000)
    work = Work.begin(store, plan)
    job = tasks.JobContext(
        attempts=work.attempts,
        kind=plan.kind,
        pin=plan.pin,
        positions={each.partition: each.position for each in plan.partitions},
        compression="zstd",
        cluster=config(cluster),
    )
    try:
        piece = max(plan.pieces, key=lambda each: each.rows)
        with writing(cluster):
            files = [tasks.write_piece(job, piece) for _ in range(2)]
        assert files[0].path != files[1].path
        tables = [pa.Table.from_batches(read_table(StoredFile(work.attempts / file.path, file))) for file in files]
        assert tables[0] == tables[1]
        assert tables[0].num_rows > 0
    finally:
        unpin(config(cluster), plan.pin)


def test_workers_that_are_killed_leave_no_trace(
    spark: SparkSession, cluster: Cluster, client: Client, store: DirectoryStore
) -> None:
    killed: list[int] = []

    def kill() -> None:
        for worker in _workers():
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
                killed.append(worker)

    with meanwhile(store, kill):
        manifest = take(spark, cluster, store)
    assert killed
    assert_right(cluster, store, manifest)


def _workers() -> list[int]:
    """Return the Python processes that run tasks for this process's Spark: children of the one that forks them."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            parent = each.parent()
            if parent is not None and all("pyspark.daemon" in " ".join(one.cmdline()) for one in (each, parent)):
                found.append(each.pid)
    return found


def test_killed_driver_leaves_no_apparent_snapshot_and_the_next_resumes(
    cluster: Cluster, client: Client, store: DirectoryStore
) -> None:
    store.root.mkdir()
    words = ("create", "--to", str(store.root), "--split-mib", "0.12")
    with running(cluster, store.root.parent / "log", *words, master="none", first=ONE_FILE) as driver:
        wait_until_blocking(lambda: notes(store), timeout_s=200, what="a first file")
        kill(driver)
        assert store.ids() == []
        (left,) = store.remains()
    plan = Work(store, left).plan_or_none()
    assert plan is not None
    client.put(b"key00001", b"written behind the pinned position")
    manifest = create(
        store,
        SnapshotRequest(cluster=config(cluster), instance=plan.cluster, split_bytes=SPLIT_BYTES),
        ThreadRunner(),
        lambda *_: None,
    )
    assert (manifest.id, manifest.partitions) == (plan.id, plan.partitions)
    assert_right(cluster, store, manifest)


# ── an object store, and no Spark ──


def command(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a `kvstore snapshot` that finds no Java."""
    line = [sys.executable, "-m", "kvstore", "snapshot", *words, "--data-dir", str(cluster.local.data_dir)]
    environ = {**os.environ, "KVSTORE_JAVA": "/nonexistent"}
    return subprocess.run(line, env=environ, capture_output=True, text=True, timeout=300)


def test_small_snapshot_needs_no_spark_and_has_the_same_files(
    spark: SparkSession, cluster: Cluster, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By commands without a Java into a bucket: a full snapshot, an incremental, the same by Spark's tasks; and Spark
    reads the contents of the cluster from it."""
    with s3_server() as bucket:
        where = {each: os.environ[each] for each in os.environ if each[:4] == "AWS_"}
        monkeypatch.setattr(spark.sparkContext, "environment", spark.sparkContext.environment | where)
        store = RemoteStore(RemotePath(f"{bucket}/snapshots"))
        to = ("--to", str(store.root), "--split-mib", "0.5", "--nice", "0")
        done = command(cluster, "create", *to, "--hold-hours", "1")
        assert done.returncode == 0, done.stderr
        client.put(b"key00003", b"changed")
        client.delete(b"key00004")
        done = command(cluster, "create", *to, "--incremental", "--json")
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert (answer["kind"], answer["path"]) == ("incremental", f"{store.root}/{answer['id']}")
        assert 2 <= answer["rows"] < ROWS
        last = store.load(answer["id"])
        assert_right(cluster, store, last)
        assert_store_is_the_same(spark, cluster, store, last)
        done = command(cluster, "verify", str(store.root), "--store")
        assert (done.returncode, done.stdout.splitlines()[1:2]) == (0, [f"the store is identical: {_same(client)}"])
        assert "no Java" in command(cluster, "verify", str(store.root), "--store", "--master", "local[1]").stderr

        third = take(spark, cluster, store, instance=last.cluster, split_bytes=SPLIT_BYTES // 4)
        assert_right(cluster, store, third)
        assert len(third.files) > 3
    own = DirectoryStore(tmp_path / "snapshots")
    here = create(own, wanted(cluster), ThreadRunner(), lambda *_: None)
    assert_right(cluster, own, here)
    by_spark = take(spark, cluster, own)
    assert rows_of(own, by_spark) == rows_of(own, here)


def _same(client: Client) -> str:
    size = sum(len(key) + len(item.value) for key, item in client.scan())
    return f"0 keys added, 0 removed, 0 changed, {client.count()} unchanged; {size} bytes before, {size} after"


# ── S6: pins ──


def test_workers_that_do_not_start_fail_the_job_before_anything_is_pinned(
    spark: SparkSession, cluster: Cluster, client: Client, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runners, "load_libraries", lambda _: 1 // 0)
    before = {pin.id for pin in list_pins(config(cluster))}
    with pytest.raises(StoreError, match="ZeroDivisionError"):
        take(spark, cluster, store)
    assert {pin.id for pin in list_pins(config(cluster))} <= before
    assert list(store.root.iterdir()) == []


def test_pin_that_ends_fails_the_job_and_leaves_nothing(
    cluster: Cluster, client: Client, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ThreadRunner.run

    def unpinned(runner: ThreadRunner, job: tasks.JobContext, *rest: Any) -> Any:
        give_up(job.cluster, job.pin)
        return run(runner, job, *rest)

    monkeypatch.setattr(ThreadRunner, "run", unpinned)
    with pytest.raises(NoSuchPin):
        take(None, cluster, store)
    assert list(store.root.iterdir()) == []


def test_work_with_an_expired_pin_begins_again(cluster: Cluster, client: Client, store: DirectoryStore) -> None:
    plan = plan_snapshot(wanted(cluster), 1_700_000_000_000)
    Work.begin(store, plan).release()
    give_up(config(cluster), plan.pin)
    manifest = take(None, cluster, store)
    assert manifest.id != plan.id
    assert_right(cluster, store, manifest)


# ── F60: the cluster changes during the job ──


def test_leader_that_is_killed_during_the_job(
    spark: SparkSession, cluster: Cluster, client: Client, store: DirectoryStore
) -> None:
    victim = leader_of(cluster, "p1")
    manifest = None
    try:
        with meanwhile(store, lambda: cluster.kill(victim)):
            try:
                manifest = take(spark, cluster, store)
            except StoreError:
                assert store.ids() == [], "whole, or not there"
        cluster.wait_led(by_other_than=victim)
    finally:
        cluster.start_node(victim)
    cluster.wait_ready(victim)
    manifest = manifest or take(spark, cluster, store)
    assert_right(cluster, store, manifest)


def test_partition_that_joins_during_the_job_changes_nothing_in_it(
    cluster: Cluster, client: Client, store: DirectoryStore
) -> None:
    first = take(None, cluster, store)

    def add() -> None:
        command = [sys.executable, "-m", "kvstore", "ring", "add", "p4", "--data-dir", str(cluster.local.data_dir)]
        subprocess.run(command, check=True, capture_output=True, timeout=120)

    with writing(cluster):
        with meanwhile(store, add):
            second = take(None, cluster, store, bytes_per_s=256 << 10)
        wait_until_blocking(lambda: "p4" in _owners(cluster), timeout_s=120, what="p4 owns something")
        client.delete(b"key00002")
        third = take(None, cluster, store, first)
    assert_right(cluster, store, second)
    assert "p4" in third.places()
    assert_right(cluster, store, third)
    assert_store_is_the_same(None, cluster, store, third)


def _owners(cluster: Cluster) -> set[str]:
    with FeedReader(config(cluster)) as feed, Client(cluster.url) as client:
        owned = {client.cluster.partition_of(b"key%05d" % number) for number in range(500)}
        return owned & {each.partition for each in feed.positions()}
