"""A part of a node hangs while its process lives: its event loop, its disk, or the reader of its log. The other nodes
take over its partitions within ten seconds, with ZooKeeper here and with etcd in test_hanging_etcd.py."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvstore.env.liveness.watchdog import NOT_LIVE
from kvstore.meta.address import MetadataKind
from tests.cluster.hanging.faults import blocked_loop, frozen, may_freeze, mounted
from tests.cluster.harness import Cluster, running_cluster
from tests.cluster.pulse import Pulse, pulsing
from tests.cluster.test_kill import Counter, counting, wait_going_on, wait_led_for_good

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

GAP_S_MAX = 10.0
"""Longest time without an acknowledged write while two of three nodes are healthy."""
VICTIM = "n1"
OTHERS = ("n2", "n3")


@contextmanager
def disk_of_victim(directory: Path) -> Iterator[None]:
    if not may_freeze():
        yield
        return
    with mounted(directory / "data" / VICTIM, directory / "disk.img"):
        yield


@pytest.fixture(scope="module")
def kind() -> MetadataKind:
    return MetadataKind.ZOOKEEPER


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, kind: MetadataKind) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("cluster")
    with disk_of_victim(directory), running_cluster(directory, metadata=kind) as cluster:
        yield cluster


@pytest.fixture
def cluster(started: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The cluster, complete again after the previous test, with preferred leaders."""
    monkeypatch.setattr(Counter, "ANSWER_S", 1.0)
    started.start()
    wait_led_for_good(started)
    return started


def is_live(cluster: Cluster) -> bool:
    return b"kvstore_process_liveness_failing 0.0" in cluster.http(VICTIM, "/metrics")


def failures(cluster: Cluster) -> int:
    """Return how often the node has ended its session, according to its log, because the node may not answer now."""
    return (cluster.directory / f"data/logs/{VICTIM}.log").read_text(encoding="utf-8").count(NOT_LIVE)


def judge(counters: dict[str, Counter], pulse: Pulse) -> None:
    for partition, counter in counters.items():
        pulse.check(counter.longest_gap, GAP_S_MAX, partition)


# docs/protocol.md P45
def test_others_lead_within_ten_seconds_when_an_event_loop_is_blocked(cluster: Cluster) -> None:
    with pulsing() as pulse, counting(cluster, "loop", *OTHERS) as counters:
        before = failures(cluster)
        try:
            with blocked_loop(cluster.pid(VICTIM)):
                cluster.wait_until(lambda: failures(cluster) > before, "the node gives its session up")
                wait_going_on(cluster, counters)
        except OSError as error:
            if error.errno != errno.EPERM:
                raise
            pytest.skip("this kernel lets nobody but root stop a thread of another process")
        wait_going_on(cluster, counters)
    judge(counters, pulse)
    assert "the event loop has been blocked" in (cluster.directory / "data/logs/n1.log").read_text(encoding="utf-8")
    cluster.wait_until(lambda: is_live(cluster), "the node has a session again")


# docs/protocol.md P45
def test_others_lead_within_ten_seconds_when_a_disk_hangs(cluster: Cluster) -> None:
    if not may_freeze():
        pytest.skip("only root can freeze a file system")
    with pulsing() as pulse, counting(cluster, "disk", *OTHERS) as counters:
        before = failures(cluster)
        with frozen(cluster.directory / "data" / VICTIM):
            cluster.wait_until(lambda: failures(cluster) > before, "the node gives its session up")
            wait_going_on(cluster, counters)
        wait_going_on(cluster, counters)
    judge(counters, pulse)
    cluster.wait_until(lambda: is_live(cluster), "the node has a session again")


def test_leader_keeps_serving_when_nobody_reads_its_log(cluster: Cluster) -> None:
    """Standard error is a full pipe from the beginning."""
    node = cluster.file.node(VICTIM)
    config = cluster.directory / "n1-to-stderr.toml"
    lines = Path(node.config).read_text(encoding="utf-8").splitlines(keepends=True)
    config.write_text("".join(line for line in lines if not line.startswith("log_dir")), encoding="utf-8")
    cluster.kill(VICTIM)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 64)
    os.set_blocking(writer, True)
    command = (sys.executable, "-m", "kvstore", "node", "run", "--config", str(config))
    with subprocess.Popen(command, stderr=writer, stdout=writer) as process:
        try:
            cluster.wait_ready(VICTIM)
            wait_led_for_good(cluster)
            with pulsing() as pulse, counting(cluster, "log", *OTHERS) as counters:
                wait_going_on(cluster, counters)
            judge(counters, pulse)
            cluster.wait_until(lambda: is_live(cluster), "the node has a session")
        finally:
            process.kill()
            os.close(reader)
            os.close(writer)
