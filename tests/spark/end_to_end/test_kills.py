"""Incrementals and restores while their driver, or a leader, is killed: complete and correct, or with a message about
the remedy."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from kvstore.cli.cluster import ClusterOptions
from kvstore.cli.snapshot_tools import cluster_of
from kvstore.client import Client
from kvstore.errors import StoreError
from kvstore.spark.snapshots.create import create
from kvstore.spark.snapshots.directory import DirectoryStore
from kvstore.spark.snapshots.manifest import Manifest
from kvstore.spark.snapshots.runners import ThreadRunner
from kvstore.spark.snapshots.work import Work
from tests.cluster.harness import Cluster
from tests.spark.jobs import leader_of
from tests.spark.snapshots.taken import (
    ONE_FILE,
    ROWS,
    assert_right,
    fill,
    kill,
    meanwhile,
    notes,
    running,
    take,
    wanted,
)
from tests.waiting import wait_until_blocking

pytestmark = [pytest.mark.spark, pytest.mark.cluster, pytest.mark.slow]
SLOW_MIB = 0.1
"""With this rate the changes, 100 KiB in each partition, take some seconds."""
Base = tuple[DirectoryStore, Manifest]


@pytest.fixture(scope="module")
def base(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[DirectoryStore, Manifest]:
    """A full snapshot, and changes after it."""
    store = DirectoryStore(tmp_path_factory.mktemp("kills") / "snapshots")
    with Client(cluster.url + "?timeout=30s") as client:
        fill(client)
        _, instance = cluster_of(ClusterOptions(cluster.local.data_dir))
        full = take(None, cluster, store, instance=instance)
        client.put_many({b"key%05d" % number: b"changed" * 10 for number in range(ROWS)})
        client.delete(b"nothing")
    return store, full


def test_driver_that_is_interrupted_leaves_no_process(cluster: Cluster, base: Base, tmp_path: Path) -> None:
    """While its JVM starts, which would wait for a missing driver."""
    words = ("create", "--to", str(tmp_path / "snapshots"), "--rate", str(SLOW_MIB))
    with running(cluster, tmp_path / "log", *words) as driver:
        wait_until_blocking(lambda: has_java(driver.pid), timeout_s=200, what="Java")
        kill(driver, signal.SIGINT)
        assert driver.returncode == 130


def has_java(pid: int) -> bool:
    try:
        return any(each.name() == "java" for each in psutil.Process(pid).children())
    except psutil.NoSuchProcess:  # a child that has just ended
        return False


def test_driver_interrupted_while_tasks_write_ends_and_is_resumed(cluster: Cluster, base: Base, tmp_path: Path) -> None:
    store, full = DirectoryStore(tmp_path / "snapshots"), base[1]
    log = tmp_path / "log"
    words = ("create", "--to", str(store.root), "--split-mib", "0.1", "--rate", str(SLOW_MIB))
    with running(cluster, log, *words) as driver:
        wait_until_blocking(lambda: notes(store), timeout_s=200, what="a first file")
        kill(driver, signal.SIGINT)
        message = "kvstore: interrupted: run the same command within 15 minutes to continue\n"
        assert (driver.returncode, log.read_text()) == (130, message)
    assert len(store.remains()) == 1
    assert_right(cluster, store, take(None, cluster, store, instance=full.cluster))


def test_incremental_whose_driver_is_killed_is_resumed(cluster: Cluster, base: Base) -> None:
    store, full = base
    words = ("create", "--to", str(store.root), "--incremental", "--parent", full.id)
    with running(cluster, store.root.parent / "log", *words, master="none", first=ONE_FILE) as driver:
        wait_until_blocking(lambda: notes(store), timeout_s=200, what="a first file")
        kill(driver)
    assert store.ids() == [full.id]
    (left,) = store.remains()
    plan = Work(store, left).plan_or_none()
    assert plan is not None
    done = len(notes(store))
    again = wanted(cluster, full, instance=full.cluster)
    manifest = create(store, again, ThreadRunner(), lambda *_: None)
    assert (manifest.id, manifest.parent) == (plan.id, full.id)
    assert 0 < done < len(manifest.files)
    assert_right(cluster, store, manifest)


def test_incremental_outlives_a_leader_or_is_not_there(cluster: Cluster, base: Base) -> None:
    store, full = base
    before, victim, manifest = store.ids(), leader_of(cluster, "p1"), None
    try:
        with meanwhile(store, lambda: cluster.kill(victim)):
            try:
                manifest = take(None, cluster, store, full, bytes_per_s=SLOW_MIB * (1 << 20), instance=full.cluster)
            except StoreError:
                assert store.ids() == before, "whole, or not there"
        cluster.wait_led(by_other_than=victim)
    finally:
        cluster.start_node(victim)
    cluster.wait_ready(victim)
    manifest = manifest or take(None, cluster, store, full, instance=full.cluster)
    assert_right(cluster, store, manifest)
