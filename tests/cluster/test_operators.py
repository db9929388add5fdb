"""Tasks of operators on real processes: they found a cluster by hand, list its parts, decommission a lost bookie,
and repair one."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.harness import Cluster, running_cluster
from tests.commands import Done, kvstore
from tests.waiting import wait_until_blocking

pytestmark = [pytest.mark.cluster]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("operators")) as started:
        for first in range(0, 600, 10):
            started.redis("n1").mset({f"k{number}": "x" * 100 for number in range(first, first + 10)})
        yield started


def on(cluster: Cluster, *arguments: str) -> Done:
    return kvstore(*arguments, "--data-dir", str(cluster.local.data_dir))


def document(cluster: Cluster, *arguments: str) -> Any:
    answer = on(cluster, *arguments, "--json")
    assert answer.stdout, answer.stderr
    return json.loads(answer.stdout)


def away(cluster: Cluster) -> list[dict[str, Any]]:
    """Return the bookies that ledgers name and that are not registered."""
    found: list[dict[str, Any]] = document(cluster, "autorecovery", "status")["away"]
    return found


def writable(cluster: Cluster) -> list[dict[str, Any]]:
    """Return the writable bookies. A bookie may lose its session for a moment."""
    return [each for each in document(cluster, "bookie", "list") if each["state"] == "writable"]


def bookie_of(cluster: Cluster, node: str, *, but: str = "") -> str:
    """Return the bookie of a node, once it is registered."""
    found: list[str] = []

    def is_there() -> bool:
        found[:] = [str(each["id"]) for each in writable(cluster) if each["id"].startswith(f"{node}-")]
        return len(found) == 1 and found != [but]

    cluster.wait_until(is_there, f"{node} has one bookie, which is not {but!r}")
    return found[0]


def test_cluster_init_founds_a_cluster_once(cluster: Cluster, tmp_path: Path) -> None:
    zookeeper = cluster.file.zookeeper.partition("/")[0] + "/by-hand"
    nodes = ["--node", "a=rack-1", "--node", "b=rack-2", "--node", "c=rack-3"]
    secret = tmp_path / "cluster.secret"
    init = ["cluster", "init", "--zookeeper", zookeeper, "--partitions", "2", "--secret-file", str(secret), "--json"]
    assert kvstore(*init, "--node", "a").returncode == 1, "one node cannot lose one"
    first, again = kvstore(*init, *nodes), kvstore(*init, *nodes)
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["founded"] is True
    assert [sorted(each["replicas"]) for each in json.loads(first.stdout)["partitions"]] == [["a", "b", "c"]] * 2
    assert again.returncode == 0
    assert json.loads(again.stdout)["secret_file"] == str(secret)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert json.loads(again.stdout)["founded"] is False
    other = kvstore(*init, "--node", "x", "--node", "y", "--node", "z")
    assert other.returncode == 1
    assert "with the nodes a, b, c" in other.stderr


def test_partitions_are_listed_with_leader_and_replicas(cluster: Cluster) -> None:
    def shown_as_they_are() -> bool:  # leads may move at any time, to spread
        leaders, found = cluster.wait_led(), document(cluster, "partition", "list")
        are_up = all(replica["is_up"] for each in found for replica in each["replicas"])
        return are_up and {each["id"]: each["leader"] for each in found} == leaders

    cluster.wait_until(shown_as_they_are, "the list is what the nodes say")
    shown = on(cluster, "partition", "show", "p1", "--json")
    assert shown.returncode == 0
    assert {each["server"] for each in json.loads(shown.stdout)["replicas"]} == set(cluster.ids)
    assert on(cluster, "partition", "show", "nothing").returncode == 1


def test_commands_learn_the_metadata_address_from_a_server(cluster: Cluster) -> None:
    server = "{}:{}".format(*cluster.address("n2", "grpc"))
    for command in (["partition", "list"], ["ledger", "list"], ["bookie", "list"], ["fsck"]):
        answer = kvstore(*command, "--json", "--server", f"127.0.0.1:1,{server}")
        assert answer.returncode == 0, answer.stderr
        assert json.loads(answer.stdout)
    nobody = kvstore("partition", "list", "--server", "127.0.0.1:1")
    assert nobody.returncode == 1
    assert "--server 127.0.0.1:1" in nobody.stderr


def test_bookies_report_their_free_space(cluster: Cluster) -> None:
    def all_say() -> bool:
        there = writable(cluster)
        return len(there) == len(cluster.ids) and all((each["free_bytes"] or 0) > 0 for each in there)

    cluster.wait_until(all_say, "three bookies with room")


def test_scrub_finds_nothing_on_a_healthy_bookie(cluster: Cluster) -> None:
    answer = on(cluster, "bookie", "scrub", bookie_of(cluster, "n1"))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "is good" in answer.stdout


def test_decommission_refuses_a_bookie_that_is_up(cluster: Cluster) -> None:
    answer = on(cluster, "bookie", "decommission", bookie_of(cluster, "n3"), "--yes")
    assert answer.returncode == 1
    assert "is up" in answer.stderr
    assert "stop its node for good" in answer.stderr, "a drain leaves it up"
    assert on(cluster, "bookie", "decommission", "n9-000000000000", "--yes").returncode == 1


def test_commands_show_and_switch_auto_recovery(cluster: Cluster) -> None:
    found: dict[str, Any] = {}

    def is_elected() -> bool:
        found.update(document(cluster, "autorecovery", "status"))
        return found["auditor"] is not None

    cluster.wait_until(is_elected, "one is elected")
    assert found["auditor"] in [each["id"] for each in document(cluster, "bookie", "list")]
    assert (found["enabled"], found["lost_bookie_delay_s"]) == (True, 60)
    assert document(cluster, "autorecovery", "disable") == {"enabled": False}
    assert document(cluster, "autorecovery", "status")["enabled"] is False
    assert on(cluster, "autorecovery", "enable").stdout == "auto-recovery is on\n"
    assert document(cluster, "autorecovery", "status")["enabled"] is True
    for seconds in ("90", "60"):
        assert document(cluster, "autorecovery", "lost-bookie-delay", seconds) == {"lost_bookie_delay_s": int(seconds)}
    assert on(cluster, "autorecovery", "lost-bookie-delay").stdout == "60 s\n"
    assert on(cluster, "autorecovery", "lost-bookie-delay", "-1").returncode == 2
    assert on(cluster, "autorecovery", "list").returncode == 0


def test_copies_of_a_lost_disk_are_recreated_and_its_id_is_removed(cluster: Cluster) -> None:
    document(cluster, "autorecovery", "lost-bookie-delay", "3600")  # what is typed here is not to come too late
    lost = bookie_of(cluster, "n3")
    cluster.kill("n3")
    shutil.rmtree(Path(cluster.file.node("n3").data_dir) / "bookie", ignore_errors=False)
    cluster.start_node("n3")
    cluster.wait_ready()
    bookie_of(cluster, "n3", but=lost)  # once the lost one's session has ended
    cluster.wait_until(
        lambda: [(each["bookie"], each["others"]) for each in away(cluster)] == [(lost, 0)],
        "the lost bookie is noticed, and leaders have rolled",
    )
    unasked = on(cluster, "bookie", "decommission", lost)
    assert (unasked.returncode, "expected --yes" in unasked.stderr) == (2, True)
    answer = on(cluster, "bookie", "decommission", lost, "--yes")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    cluster.wait_until(lambda: away(cluster) == [], "no bookie is away")
    assert lost not in [each["id"] for each in document(cluster, "bookie", "list")]
    cluster.wait_succeeds("fsck", "--strict")
    document(cluster, "autorecovery", "lost-bookie-delay", "60")
    assert cluster.redis("n2").get("k599") == b"x" * 100


def test_directory_from_an_old_copy_is_in_limbo_until_repaired(cluster: Cluster, tmp_path: Path) -> None:
    cluster.terminate("n2")
    directory = Path(cluster.file.node("n2").data_dir) / "bookie"
    shutil.copytree(directory, tmp_path / "copy")
    cluster.start_node("n2")
    cluster.wait_ready()
    for first in range(0, 300, 10):
        cluster.redis("n1").mset({f"later{number}": "x" * 100 for number in range(first, first + 10)})
    cluster.kill("n2")
    shutil.rmtree(directory)
    shutil.copytree(tmp_path / "copy", directory)
    cluster.start_node("n2")
    cluster.wait_ready()
    assert limbo(cluster, "n2") > 0, "it has forgotten what it had acknowledged, and knows that"
    for node in cluster.ids:  # an open ledger stays in doubt until it is closed, as by whoever takes over
        cluster.terminate(node)
        cluster.start_node(node)
        cluster.wait_ready()
    wait_until_blocking(lambda: limbo(cluster, "n2") == 0, timeout_s=90, what="nothing is doubted any more")
    cluster.wait_succeeds("fsck", "--strict")  # a node that was down for its restart may lack entries for a while
    assert cluster.redis("n2").get("later299") == b"x" * 100


def limbo(cluster: Cluster, node: str) -> int:
    return int(cluster.status(node)["bookie"]["limbo_ledgers"])
