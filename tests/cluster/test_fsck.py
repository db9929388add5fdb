"""`kvstore fsck` on a real cluster while a node is down, and after its copies have been repaired."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from kvstore.cli.fsck import UNCHECKED
from kvstore.meta.address import MetadataKind
from tests.cluster.harness import Cluster, running_cluster
from tests.commands import Done, kvstore
from tests.waiting import wait_until_blocking

pytestmark = [pytest.mark.cluster]


@pytest.fixture(
    scope="module", params=[MetadataKind.ZOOKEEPER, pytest.param(MetadataKind.ETCD, marks=pytest.mark.slow)]
)
def cluster(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("fsck"), metadata=request.param) as started:
        yield started


def fsck(cluster: Cluster, *options: str) -> Done:
    return kvstore("fsck", *options, "--data-dir", str(cluster.local.data_dir))


def write(cluster: Cluster, node: str, count: int = 300) -> None:
    for first in range(0, count, 10):
        cluster.redis(node).mset({f"{node}-{number}": "x" * 100 for number in range(first, first + 10)})


def test_fsck_names_a_node_that_is_down_until_it_is_back(cluster: Cluster) -> None:
    write(cluster, "n1")
    cluster.kill("n2")
    cluster.wait_led(by_other_than="n2")
    write(cluster, "n1")
    answer = fsck(cluster)  # soon after: n2 is still registered
    assert "none on n2-" in answer.stdout, answer.stdout
    assert "(not up)" in answer.stdout
    assert "kvstore up" in answer.stdout
    assert answer.stdout.splitlines()[-1].startswith(("No data is lost", "AT RISK")), answer.stdout
    assert len(answer.stdout.splitlines()) < 40, "one line for each ledger, not for each entry"

    def is_well() -> bool:
        strict = fsck(cluster, "--strict", "--json")
        if strict.returncode == UNCHECKED:
            return False
        assert (strict.returncode == 0) == (json.loads(strict.stdout)["verdict"] == "Healthy"), strict.stdout
        return strict.returncode == 0

    cluster.start_node("n2")
    cluster.wait_ready()
    wait_until_blocking(is_well, timeout_s=90, what="no warning once repair is done")


def test_fsck_reports_a_cluster_that_cannot_be_read_as_not_checked(cluster: Cluster) -> None:
    cluster.pause_zookeeper()
    try:
        answer = fsck(cluster)
    finally:
        cluster.resume_zookeeper()
    assert answer.returncode == 3
    assert "not checked" in answer.stderr
    cluster.wait_succeeds("fsck")  # once the bookies whose sessions had expired are back


def lacking(cluster: Cluster) -> int:
    """Return the number of under-replicated ledgers, as their leaders count them."""
    cluster.wait_led()
    page = "".join(cluster.http(node, "/metrics").decode() for node in cluster.ids if cluster.is_running(node))
    rows = [line for line in page.splitlines() if line.startswith("kvstore_partition_log_ledgers_lacking_copies{")]
    assert rows, "some node leads"
    return sum(int(float(row.rpartition(" ")[2])) for row in rows)


def test_leaders_count_under_replicated_ledgers(cluster: Cluster) -> None:
    wait_until_blocking(lambda: lacking(cluster) == 0, timeout_s=90, what="all copies are there")
    cluster.kill("n3")
    cluster.wait_led(by_other_than="n3")
    wait_until_blocking(lambda: lacking(cluster) > 0, timeout_s=90, what="copies lack")
    cluster.start_node("n3")
    cluster.wait_ready()
    wait_until_blocking(lambda: lacking(cluster) == 0, timeout_s=90, what="all copies are there again")
