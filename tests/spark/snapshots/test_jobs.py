"""Snapshots of a real cluster by a real Spark, while processes are killed: whole and right, or not there at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pyarrow as pa
import pytest

from kvstore.client import Client
from kvstore.client.config import ClientConfig, parse_url
from kvstore.client.feed import FeedReader
from kvstore.client.pinned import list_pins, unpin
from kvstore.client.pinned_arrow import SCHEMA
from kvstore.errors import NoSuchPin, StoreError
from kvstore.spark.snapshots import chains, compare, tasks, verify
from kvstore.spark.snapshots import create as jobs
from kvstore.spark.snapshots.create import create
from kvstore.spark.snapshots.manifest import Manifest
from kvstore.spark.snapshots.planning import Wanted, plan_snapshot
from kvstore.spark.snapshots.store import WORK, SnapshotStore
from kvstore.spark.snapshots.table import TableWriter, read_table
from kvstore.spark.snapshots.work import Work
from tests.cluster.harness import Cluster, is_alive
from tests.waiting import wait_until_blocking

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

ROWS = 4000
SPLIT_BYTES = 32 << 10
"""Small, so that a job has many tasks and can be met in its middle."""
BIG = b"\x07" * (1 << 20)


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.url + "?timeout=30s") as connected:
        rows = {b"key%05d" % number: b"%d" % number * 20 for number in range(ROWS)}
        names = sorted(rows)
        for at in range(0, ROWS, 500):
            connected.put_many({name: rows[name] for name in names[at : at + 500]})
        connected.put(b"big", BIG)
        connected.put(b"nothing", b"")
        connected.put(b"for an hour", b"x", ttl_s=3600)
        yield connected


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "snapshots")


def config(cluster: Cluster) -> ClientConfig:
    return parse_url(cluster.url + "?timeout=30s")


def wanted(cluster: Cluster, parent: Manifest | None = None) -> Wanted:
    return Wanted(cluster=config(cluster), instance="i", parent=parent, split_bytes=SPLIT_BYTES)


def take(spark: SparkSession, cluster: Cluster, store: SnapshotStore, parent: Manifest | None = None) -> Manifest:
    return create(store, wanted(cluster, parent), spark, lambda *_: None)


def rows_of(store: SnapshotStore, manifest: Manifest) -> list[dict[str, Any]]:
    batches = [batch for path in verify.parquet_paths(store, manifest) for batch in read_table(path)]
    rows: list[dict[str, Any]] = pa.Table.from_batches(batches, SCHEMA).to_pylist()
    return rows


def replayed(cluster: Cluster, manifest: Manifest) -> dict[bytes, dict[str, Any]]:
    """What the logs leave, up to the manifest's positions: read by another way than the snapshot was."""
    last: dict[bytes, dict[str, Any]] = {}
    for place in manifest.partitions:
        for batch in tasks.changes(config(cluster), place.partition, 0, place.sequence):
            for row in batch.to_pylist():
                known = last.get(row["key"])
                if known is None or known["version"] < row["version"]:
                    last[row["key"]] = row
    return {key: row for key, row in last.items() if row["value"] is not None}


def held(store: SnapshotStore, last: Manifest) -> dict[bytes, dict[str, Any]]:
    """What a chain says is there."""
    found: dict[bytes, dict[str, Any]] = {}
    for manifest in chains.chain_of(store.load_all(), last.id):
        for row in rows_of(store, manifest):
            known = found.get(row["key"])
            assert known is None or known["version"] != row["version"], "each row once"
            if known is None or known["version"] < row["version"]:
                found[row["key"]] = row
    return {key: row for key, row in found.items() if row["value"] is not None}


def assert_right(cluster: Cluster, store: SnapshotStore, last: Manifest) -> None:
    """Each file as described, nothing else in the directory, all of it what the logs say, and no pin left."""
    chain = chains.chain_of(store.load_all(), last.id)
    assert list(verify.problems_of(store, chain)) == []
    assert store.remains() == []
    assert _contents(held(store, last)) == _contents(replayed(cluster, last))
    wait_until_blocking(
        lambda: not [pin for pin in list_pins(config(cluster)) if pin.position is not None], what="no pin is left"
    )


def _contents(rows: dict[bytes, dict[str, Any]]) -> dict[bytes, dict[str, Any]]:
    """Without the partition: a change is in its old owner's log, and in a full snapshot at its new one's."""
    return {key: {**row, "partition": None} for key, row in rows.items()}


def assert_store_is_the_same(spark: SparkSession, cluster: Cluster, store: SnapshotStore, last: Manifest) -> None:
    chain = chains.chain_of(store.load_all(), last.id)
    found = compare.against_origin(spark, store, chain, config(cluster), 5)
    assert found.count == 0, found
    assert found.same > ROWS


@contextmanager
def writing(cluster: Cluster) -> Iterator[list[int]]:
    """Somebody writes and deletes all the time."""
    ended = threading.Event()
    done = [0]

    def write() -> None:
        with Client(cluster.url + "?timeout=30s") as own:
            while not ended.wait(0.005):
                number = done[0]
                own.put_many({b"moving%03d" % ((number + i) % 300): b"%d" % number for i in range(20)})
                own.delete(b"moving%03d" % (number % 300))
                done[0] += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield done
    finally:
        ended.set()
        writer.join()


@contextmanager
def meanwhile(store: SnapshotStore, what: Callable[[], object]) -> Iterator[None]:
    """Does something once the first file of a snapshot is finished. What it raises fails the test."""
    failed: list[BaseException] = []

    def act() -> None:
        try:
            wait_until_blocking(lambda: notes(store), timeout_s=120, what="a first file")
            what()
        except BaseException as error:  # noqa: BLE001 - told to the test's own thread
            failed.append(error)

    actor = threading.Thread(target=act)
    actor.start()
    try:
        yield
    finally:
        actor.join()
    assert failed == []


def notes(store: SnapshotStore) -> list[Path]:
    return list(store.root.glob(f"{WORK}*/attempts/*.json"))


# ── S1, S3, S4: what is in it ──


def test_full_and_incremental_are_the_logs_at_their_positions(
    spark: SparkSession, cluster: Cluster, client: Client, store: SnapshotStore
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
    jobs.hold_for_next(config(cluster), second, 1.0)
    assert {pin.partition for pin in list_pins(config(cluster)) if "snapshot-next" in pin.id} == behind.keys()


def test_a_store_that_differs_is_found(
    spark: SparkSession, cluster: Cluster, client: Client, store: SnapshotStore
) -> None:
    first = take(spark, cluster, store)
    rows = rows_of(store, first)
    other = SnapshotStore(store.root.parent / "other")
    forged = _forged(other, first, [row for row in rows if row["key"] != b"key00007"])
    found = compare.against_origin(spark, other, [forged], config(cluster), 5)
    assert (found.examples, found.same) == (((b"key00007", "added"),), len(rows) - 1)


def _forged(store: SnapshotStore, like: Manifest, rows: list[dict[str, Any]]) -> Manifest:
    """The same snapshot with other rows."""
    folder = store.folder(like.id)
    (folder / "data").mkdir(parents=True)
    writer = TableWriter(folder / "data/p1-00000.parquet", "p1")
    writer.write(pa.RecordBatch.from_pylist(rows, SCHEMA))
    file = writer.close("data/p1-00000.parquet")
    return replace(like, files=(file,), rows=file.rows, size_bytes=file.size_bytes)


# ── S2, S5: tasks, executors and drivers that die ──


def test_every_attempt_at_a_piece_has_the_same_rows(cluster: Cluster, client: Client, store: SnapshotStore) -> None:
    plan = plan_snapshot(wanted(cluster), 1_700_000_000_000)
    work = Work.begin(store, plan)
    job = tasks.Job(
        attempts=str(work.attempts),
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
        tables = [pa.Table.from_batches(read_table(work.attempts / file.path)) for file in files]
        assert tables[0] == tables[1]
        assert tables[0].num_rows > 0
    finally:
        unpin(config(cluster), plan.pin)


def test_workers_that_are_killed_leave_no_trace(
    spark: SparkSession, cluster: Cluster, client: Client, store: SnapshotStore
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
    """Python processes that run tasks for this process's Spark: children of the one that forks them."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            parent = each.parent()
            if parent is not None and all("pyspark.daemon" in " ".join(one.cmdline()) for one in (each, parent)):
                found.append(each.pid)
    return found


def test_a_driver_that_is_killed_leaves_nothing_that_looks_like_a_snapshot_and_the_next_goes_on(
    spark: SparkSession, cluster: Cluster, client: Client, store: SnapshotStore
) -> None:
    store.root.mkdir()
    command = [sys.executable, "-m", "kvstore", "snapshot", "create", "--to", str(store.root), "--split-mib", "0.03"]
    command += ["--data-dir", str(cluster.local.data_dir), "--master", "local[1]"]
    with (store.root.parent / "log").open("wb") as log:
        driver = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until_blocking(lambda: notes(store), timeout_s=200, what="a first file")
        family = psutil.Process(driver.pid).children(recursive=True)
        os.kill(driver.pid, signal.SIGKILL)
        wait_until_blocking(lambda: not is_alive(driver.pid), what="end of the driver")
        assert store.ids() == []
        (left,) = store.remains()
        wait_until_blocking(lambda: not any(map(_runs, family)), timeout_s=60, what="end of what it had started")
    finally:
        if is_alive(driver.pid):
            os.kill(driver.pid, signal.SIGKILL)
    plan = Work(left, -1).plan_or_none()
    assert plan is not None
    client.put(b"key00001", b"written behind the pinned position")
    manifest = create(
        store, Wanted(cluster=config(cluster), instance=plan.cluster, split_bytes=SPLIT_BYTES), spark, lambda *_: None
    )
    assert (manifest.id, manifest.partitions) == (plan.id, plan.partitions)
    assert_right(cluster, store, manifest)


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and is_alive(process.pid)


# ── S6: pins ──


def test_a_pin_that_ends_fails_the_job_and_leaves_nothing(
    spark: SparkSession, cluster: Cluster, client: Client, store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = jobs.run_pieces

    def unpinned(session: SparkSession, job: tasks.Job, *rest: Any) -> Any:
        unpin(job.cluster, job.pin)
        return run(session, job, *rest)

    monkeypatch.setattr(jobs, "run_pieces", unpinned)
    with pytest.raises(NoSuchPin):
        take(spark, cluster, store)
    assert list(store.root.iterdir()) == []


def test_work_whose_pin_has_ended_is_begun_anew(
    spark: SparkSession, cluster: Cluster, client: Client, store: SnapshotStore
) -> None:
    plan = plan_snapshot(wanted(cluster), 1_700_000_000_000)
    Work.begin(store, plan).release()
    unpin(config(cluster), plan.pin)
    manifest = take(spark, cluster, store)
    assert manifest.id != plan.id
    assert_right(cluster, store, manifest)


# ── F60: the cluster changes during the job ──


def test_a_leader_that_is_killed_during_the_job(
    spark: SparkSession, cluster: Cluster, client: Client, store: SnapshotStore
) -> None:
    victim = cluster.wait_led()["p1"]
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


def test_a_partition_that_joins_during_the_job_changes_nothing_in_it(
    spark: SparkSession, cluster: Cluster, client: Client, store: SnapshotStore
) -> None:
    first = take(spark, cluster, store)

    def add() -> None:
        command = [sys.executable, "-m", "kvstore", "ring", "add", "p4", "--data-dir", str(cluster.local.data_dir)]
        subprocess.run(command, check=True, capture_output=True, timeout=120)

    with writing(cluster):
        with meanwhile(store, add):
            second = take(spark, cluster, store)
        wait_until_blocking(lambda: "p4" in _owners(cluster), timeout_s=120, what="p4 owns something")
        client.delete(b"key00002")
        third = take(spark, cluster, store, first)
    assert_right(cluster, store, second)
    assert "p4" in third.places()
    assert_right(cluster, store, third)
    assert_store_is_the_same(spark, cluster, store, third)


def _owners(cluster: Cluster) -> set[str]:
    with FeedReader(config(cluster)) as feed, Client(cluster.url) as client:
        owned = {client.partition_of(b"key%05d" % number) for number in range(500)}
        return owned & {each.partition for each in feed.positions()}
