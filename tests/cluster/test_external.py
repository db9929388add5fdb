"""The store on external bookies (`kvstore up --bookies external`). Here they are nodes of ours that are only
bookies; tests/interop/test_store.py uses Apache's bookies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.types import BookieId
from tests.cluster.harness import Cluster, running_cluster
from tests.cluster.outside import Outside
from tests.cluster.test_kill import counting, wait_going_on
from tests.commands import kvstore

pytestmark = [pytest.mark.cluster]
WHOLE_S = 120.0


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    outside = Outside(tmp_path_factory.mktemp("outside") / "bookkeeper")
    try:
        outside.found()
        for number in range(4):
            outside.add_ours(f"b{number + 1}")
        yield outside
    finally:
        outside.end()


@pytest.fixture(scope="module")
def found_there(outside: Outside) -> dict[str, bytes]:
    return outside.identity()


@pytest.fixture(scope="module")
def cluster(
    outside: Outside, found_there: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    settings = ["autorecovery.lost_bookie_delay_s=2", "log.check_every_s=0.5"]
    directory = tmp_path_factory.mktemp("external")
    with running_cluster(directory, external_at=outside.address, settings=settings) as started:
        yield started


def naming(outside: Outside, bookie: BookieId) -> list[int]:
    found = outside.ledgers().values()
    return [each.ledger for each in found if any(bookie in fragment.ensemble for fragment in each.fragments)]


def test_cluster_founded_beside_bookkeeper_leaves_its_data_unchanged(
    outside: Outside, found_there: dict[str, bytes], cluster: Cluster
) -> None:
    again = kvstore(
        "cluster",
        "init",
        "--zookeeper",
        outside.address,
        "--node",
        "n1",
        "--node",
        "n2",
        "--node",
        "n3",
        "--secret-file",
        cluster.file.secret_file,
    )
    assert (again.returncode, "the cluster existed already" in again.stdout) == (0, True), again.stderr
    assert outside.identity() == found_there
    assert outside.writable() <= set(outside.bookies), "no node has registered one"
    cluster.wait_until(lambda: outside.writable() == set(outside.bookies), "they are all there")
    for node in cluster.ids:
        status = cluster.status(node)
        assert (status["roles"], "bookie" in status, "autorecovery" in status) == (["server"], False, True)
    assert [each["bookie"] for each in cluster.local.status()["nodes"]] == [None, None, None]


def test_node_commands_refuse_a_node_that_is_only_a_bookie(cluster: Cluster) -> None:
    for command in ("log-level", "slow-log", "profile"):
        refused = kvstore("node", command, "b1", "--data-dir", str(cluster.local.data_dir))
        assert refused.returncode != 0
        assert "b1 is only a bookie (b1-" in refused.stderr, refused.stderr


def test_nothing_is_lost_when_leaders_and_bookies_are_killed(outside: Outside, cluster: Cluster) -> None:
    victim = cluster.wait_led()["p1"]
    others = [node for node in cluster.ids if node != victim]
    with counting(cluster, "external", *others) as counters:
        cluster.kill(victim)
        cluster.wait_led(by_other_than=victim)
        wait_going_on(cluster, counters)
        cluster.start_node(victim)
        cluster.wait_ready(victim)
        lost = next(each for each in sorted(outside.bookies) if naming(outside, each))
        outside.kill(lost)
        wait_going_on(cluster, counters)
        # Only the servers can have done it: these bookies repair nothing.
        cluster.wait_until(lambda: not naming(outside, lost), "the copies of a dead bookie are made again", WHOLE_S)
        wait_going_on(cluster, counters)


def test_cluster_killed_at_once_restarts_with_all_data(outside: Outside, cluster: Cluster) -> None:
    with counting(cluster, "all", *cluster.ids) as counters:
        for node in cluster.ids:
            cluster.kill(node)
        cluster.start()
        wait_going_on(cluster, counters)
    cluster.wait_succeeds("fsck")


def test_up_reports_missing_bookies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.devcluster.local.BOOKIES_TIMEOUT_S", 0.0)
    outside = Outside(tmp_path / "bookkeeper")
    try:
        with (
            pytest.raises(AssertionError, match=f"expected at least 2 writable bookies .*{outside.address}, got none"),
            running_cluster(tmp_path / "cluster", external_at=outside.address),
        ):
            pass
    finally:
        outside.end()
