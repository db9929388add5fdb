"""A leader whose file system has no inodes left, while bytes are free, loses its leads and does not get them back. Real
processes, on a real file system."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.beside import beside
from tests.cluster.harness import Cluster, running_cluster
from tests.cluster.pulse import pulsing
from tests.cluster.unfit.test_unreachable_leader import GAP_S_MAX, Writing
from tests.commands import kvstore

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="a file system is mounted"),
]

SICK = "n1"
KEYS = 12
"""Number of keys. With fixed names, all but one in 43 such sets have a key in each of the three partitions."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster with one node on a small file system of its own."""
    place = tmp_path / "data" / SICK

    def mounted(node: str, text: str) -> str:
        if node == SICK:
            mount = ["mount", "-t", "tmpfs", "-o", "size=3g,nr_inodes=2000", "tmpfs", str(place)]
            if subprocess.run(mount, capture_output=True, check=False).returncode:
                pytest.skip("this process may not mount a file system")
        return text

    try:
        with running_cluster(tmp_path, written=mounted) as cluster:
            cluster.wait_ready()
            yield cluster
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False)


def use_up_inodes(place: Path) -> None:
    place.mkdir()
    for number in range(os.statvfs(place).f_favail):
        try:
            (place / f"{number}").touch()
        except OSError:
            break  # the node has made files meanwhile
    assert os.statvfs(place).f_favail == 0


# docs/protocol.md P41
def test_leader_without_inodes_is_replaced_in_time_and_status_says_why(cluster: Cluster) -> None:
    cluster.wait_until(lambda: SICK in cluster.leaders().values(), f"{SICK} leads")
    writers = [Writing(cluster, "n2", f"key{number}") for number in range(KEYS)]
    with pulsing() as pulse, beside(*(each.run for each in writers)):
        use_up_inodes(cluster.directory / "data" / SICK / "files")
        cluster.wait_led(by_other_than=SICK)
        written = [each.written for each in writers]
        cluster.wait_until(
            lambda: all(each.written > before + 300 for each, before in zip(writers, written, strict=True)), "writes"
        )
        assert SICK not in cluster.leaders().values(), "it is not handed a lead back"
    for each in writers:
        pulse.check(each.gap, GAP_S_MAX, each.key)

    def reasons() -> list[str]:
        said = json.loads(kvstore("status", "--json", "--server", cluster.file.node("n2").grpc).stdout)
        named = [each for each in said["findings"] if each["code"] == "disk_not_writable"]
        return [each["reason"] for each in named if each["subject"] == f"node {SICK}"]

    cluster.wait_until(lambda: any("no inodes are free" in each for each in reasons()), "status says why")
