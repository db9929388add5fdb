"""The reports and exit codes of `kvstore status` while faults happen to a cluster of real processes."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.harness import Cluster, running_cluster
from tests.commands import Done, kvstore
from tests.waiting import wait_until_blocking

pytestmark = [pytest.mark.cluster]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("status")) as started:
        started.wait_led()
        yield started


def at(cluster: Cluster, node: str = "n1") -> tuple[str, str]:
    return "--server", cluster.file.node(node).grpc


def look(cluster: Cluster, node: str = "n1") -> tuple[int, dict[str, Any]]:
    """Return the exit code and the document of `kvstore status`, as one node sees the cluster."""
    answer = kvstore("status", "--json", *at(cluster, node))
    assert answer.stdout, answer.stderr
    return answer.returncode, json.loads(answer.stdout)


def codes(document: dict[str, Any]) -> set[str]:
    return {each["code"] for each in document["findings"]}


def wait_for(
    cluster: Cluster, condition: Callable[[int, dict[str, Any]], object], what: str, node: str = "n1"
) -> tuple[int, dict[str, Any]]:
    """Return the first status that fulfils the condition."""
    seen: list[tuple[int, dict[str, Any]]] = []

    def is_so() -> bool:
        seen.append(look(cluster, node))
        return bool(condition(*seen[-1]))

    try:
        wait_until_blocking(is_so, timeout_s=90, what=what)
    except TimeoutError as error:
        raise AssertionError(f"{error}; last: {seen[-1][0]} {seen[-1][1]['findings']}") from None
    return seen[-1]


def wait_said(cluster: Cluster, condition: Callable[[int, str], object], what: str) -> str:
    """Return the output of `kvstore status --data-dir` once it fulfils the condition."""
    seen: list[Done] = []

    def is_so() -> bool:
        seen.append(kvstore("status", "--data-dir", str(cluster.local.data_dir)))
        return bool(condition(seen[-1].returncode, seen[-1].stdout))

    try:
        wait_until_blocking(is_so, timeout_s=90, what=what)
    except TimeoutError as error:
        raise AssertionError(f"{error}; last: {seen[-1]}") from None
    return seen[-1].stdout


def silent(document: dict[str, Any]) -> list[str]:
    return [each["id"] for each in document["nodes"] if each["no_answer"]]


def wait_complete(cluster: Cluster) -> None:
    """Wait until every node answers and everything is served; copies may still be missing."""
    wait_for(
        cluster,
        lambda code, found: code < 2 and codes(found) <= {"repair_backlog", "copies_lacking"},
        "a whole cluster",
    )


def wait_open_ledgers_whole(cluster: Cluster) -> None:
    """Wait until each open ledger has three bookies. A ledger that was created while a node was down is replaced by
    another one (docs/protocol.md, G10)."""

    def are_whole() -> bool:
        found = json.loads(kvstore("ledger", "list", "--json", *at(cluster)).stdout)
        return all(len(each["bookies"]) == 3 for each in found if each["state"] == "OPEN")

    wait_until_blocking(are_whole, timeout_s=90, what="open ledgers with three bookies")


def test_status_of_a_healthy_cluster_exits_with_0(cluster: Cluster) -> None:

    def is_healthy(code: int, found: dict[str, Any]) -> bool:  # a lead that changes hands may be nobody's, or both's
        return code == 0 and sorted(each for node in found["nodes"] for each in node["leads"]) == ["p1", "p2", "p3"]

    _, found = wait_for(cluster, is_healthy, "health")
    assert found["health"] == {"grade": "healthy", "text": "healthy: 3 nodes, 3 partitions, all served"}
    nodes = {each["id"]: each for each in found["nodes"]}
    assert sorted(nodes) == cluster.ids
    assert all(each["report"]["disk"]["total_bytes"] > 0 and each["uptime_s"] > 0 for each in nodes.values())
    assert [len(each["replicas"]) for each in found["partitions"]] == [3, 3, 3]
    assert all(each["failed_directories"] == [] and each["free_bytes"] for each in found["bookies"])
    text = found["health"]["text"]
    local = wait_said(cluster, lambda code, said: code == 0 and said.splitlines()[0] == text, "health, by the folder")
    assert str(cluster.pid("n2")) in local


def test_status_and_its_watchers_name_a_killed_node_with_the_reason(cluster: Cluster) -> None:
    wait_for(cluster, lambda code, _: code == 0, "health")
    command = [sys.executable, "-m", "kvstore", "status", "--watch", "--interval", "0.5", *at(cluster)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        healthy = "healthy: 3 nodes, 3 partitions, all served"
        assert any(line.rstrip().endswith(healthy) for line in watch.stdout)
        cluster.kill("n3")
        _, found = wait_for(
            cluster,
            lambda code, found: code == 1 and "node_silent" in codes(found) and silent(found) == ["n3"],
            "the others to serve",
        )
        assert any("n3" in line for line in watch.stdout), "perhaps after others: another node may be late for a look"
        watch.send_signal(signal.SIGINT)
        watch.communicate(timeout=30)
        assert watch.returncode in (1, 2), "as the last look was"
    [node] = [each for each in found["nodes"] if each["no_answer"]]
    assert (node["id"], node["report"], node["leads"]) == ("n3", None, [])
    assert "refuses connections" in node["no_answer"]
    assert {each["leader"] for each in found["partitions"]} <= {"n1", "n2"}
    local = wait_said(
        cluster, lambda code, said: code == 1 and "node n3: refuses connections" in said, "the same, by the folder"
    )
    assert "To start everything that is down, run: " in local
    cluster.start_node("n3")
    wait_complete(cluster)


def test_status_is_not_delayed_by_a_hanging_node(cluster: Cluster) -> None:
    cluster.pause("n2")
    try:
        wait_for(cluster, lambda _, found: "node_silent" in codes(found) and silent(found) == ["n2"], "n2 to be missed")
        asked = ",".join(cluster.file.node(each).grpc for each in ("n2", "n1"))
        answer = kvstore("status", "--server", asked)
        assert "node n2: " in answer.stdout, "the next server is asked where the first one hangs"
    finally:
        cluster.resume("n2")
    wait_complete(cluster)


def wait_same(cluster: Cluster, *words: str) -> Any:
    """Return a command's document once a node and the metadata store give the same one. A ledger may be created or
    closed between the two reads."""
    found: list[Done] = []

    def is_same() -> bool:
        found[:] = [
            kvstore(*words, "--json", *where) for where in (at(cluster), ("--metadata", cluster.file.zookeeper))
        ]
        return found[0].returncode == 0 and found[0].stderr == "" and found[0].stdout == found[1].stdout

    wait_until_blocking(is_same, timeout_s=90, what=f"one answer to {words}")
    return json.loads(found[0].stdout)


def test_commands_show_last_known_state_while_metadata_is_unavailable(cluster: Cluster) -> None:
    cluster.redis("n1").set("k", "v")
    wait_open_ledgers_whole(cluster)
    away = "ZooKeeper: no node reaches it; their knowledge is "
    cluster.pause_zookeeper()
    try:
        _, found = wait_for(
            cluster,
            lambda code, found: code == 1 and "metadata_away" in codes(found) and away in found["health"]["text"],
            "ZooKeeper to be missed, and all to be served",
        )
        assert found["metadata"]["state"] == "suspended"
        for command in (("partition", "list"), ("bookie", "list"), ("ring", "show")):
            answer = kvstore(*command, "--json", *at(cluster))
            assert answer.returncode == 0, answer.stderr
            assert "showing what n1 read from it" in answer.stderr
            document = json.loads(answer.stdout)
            rows = document if isinstance(document, list) else document["partitions"]
            assert len(rows) == 3
            assert all(each["age_s"] > 0 for each in (rows if isinstance(document, list) else [document]))
        bookies = json.loads(kvstore("bookie", "list", "--json", *at(cluster)).stdout)
        assert all(each["state"] == "writable" and each["free_bytes"] for each in bookies)
        partitions = json.loads(kvstore("partition", "list", "--json", *at(cluster)).stdout)
        assert all(each["leader"] in cluster.ids and each["ledger_count"] for each in partitions)
        assert kvstore("partition", "show", "p1", *at(cluster)).returncode == 0
        listed = kvstore("ledger", "list", "--json", *at(cluster))
        assert listed.returncode == 0, listed.stderr
        assert "showing the ledgers that the partitions' leaders know of" in listed.stderr
        ledgers = {each["id"]: each for each in json.loads(listed.stdout)}
        assert {each["partition"] for each in ledgers.values() if each["state"] == "OPEN"} == {"p1", "p2", "p3"}
        last = max(ledgers)
        shown = kvstore("ledger", "show", str(last), "--json", *at(cluster))
        assert (json.loads(shown.stdout)["bookies"], shown.returncode) == (ledgers[last]["bookies"], 0)
        assert len(ledgers[last]["bookies"]) == 3
        unknown = kvstore("partition", "show", "p9", *at(cluster))
        assert (unknown.returncode, unknown.stdout) == (1, "")
    finally:
        cluster.resume_zookeeper()
    wait_complete(cluster)
    now = wait_same(cluster, "ledger", "list")
    assert set(ledgers) <= {each["id"] for each in now}
    assert wait_same(cluster, "ledger", "show", str(last))["id"] == last
    listed = kvstore("partition", "list", "--json", *at(cluster))
    assert listed.stderr == ""
    assert all(each["ledgers"] for each in json.loads(listed.stdout))


def test_status_names_a_bookie_with_a_full_disk_and_its_free_space(cluster: Cluster) -> None:
    config = Path(cluster.file.node("n3").config)
    before = config.read_text()
    assert "[storage]" not in before
    cluster.terminate("n3")
    config.write_text(f"{before}\n[storage]\nreserve_bytes = {1 << 40}\n")
    cluster.start_node("n3")
    _, found = wait_for(cluster, lambda code, found: code == 1 and "bookie_readonly" in codes(found), "a full disk")
    [full] = [each for each in found["findings"] if each["code"] == "bookie_readonly"]
    assert full["subject"].startswith("bookie n3-")
    assert "its disk is full: " in full["reason"]
    assert full["next_step"] == "free space on its disk, or add a bookie"
    cluster.terminate("n3")
    config.write_text(before)
    cluster.start_node("n3")
    wait_complete(cluster)


FINDING = 'kvstore_cluster_findings{finding="copies_lacking"} 1.0\n'


def tells(metrics: str) -> bool:
    """Return True if a node's metrics report missing copies and a degraded cluster."""
    return FINDING in metrics and "kvstore_cluster_grade 1.0\n" in metrics


def page(cluster: Cluster, node: str, path: str) -> str:
    return cluster.http(node, path).decode()


def test_every_report_names_a_lost_disk_until_it_is_repaired(cluster: Cluster) -> None:
    """Auto-recovery waits for its delay, or is off, so no mark shows the missing copy."""
    folder = ("--data-dir", str(cluster.local.data_dir))
    wait_for(cluster, lambda code, _: code == 0, "health")
    assert kvstore("autorecovery", "lost-bookie-delay", "3600", *folder).returncode == 0
    assert kvstore("autorecovery", "status", *folder).returncode == 0
    cluster.kill("n3")
    shutil.rmtree(Path(cluster.file.node("n3").data_dir) / "bookie")
    cluster.start_node("n3")
    cluster.wait_ready()

    def is_lacking(code: int, found: dict[str, Any]) -> bool:
        return code == 1 and {"copies_lacking", "bookie_away"} <= codes(found) and not silent(found)

    _, found = wait_for(cluster, is_lacking, "the lost copies to be told")
    assert found["copies"]["lacking"] > 0
    text = found["health"]["text"]
    assert text.startswith("degraded, all partitions served: ")
    status = kvstore("autorecovery", "status", "--json", *folder)
    assert (status.returncode, len(json.loads(status.stdout)["away"])) == (1, 1)
    checked = kvstore("fsck", *folder)
    assert not checked.stdout.splitlines()[-1].startswith("Healthy"), checked.stdout
    assert "under-replicated; none is marked for repair yet" in checked.stdout
    for node in cluster.ids:
        cluster.wait_until(lambda node=node: tells(page(cluster, node, "/metrics")), f"{node}'s metrics of 15 s ago")
        cluster.wait_ready(node)  # by /clusterz: all is served
        assert "DEGRADED" in page(cluster, node, "/ui").upper()
    kvstore("autorecovery", "disable", *folder)
    wait_for(cluster, lambda code, found: code == 1 and "repair_off" in codes(found), "the switch to be told")
    kvstore("autorecovery", "enable", *folder)
    kvstore("autorecovery", "lost-bookie-delay", "1", *folder)
    wait_for(cluster, lambda code, _: code == 0, "health once the copies are made again")
    assert kvstore("autorecovery", "status", *folder).returncode == 0


def test_status_names_partitions_without_a_leader(cluster: Cluster) -> None:
    cluster.kill("n2")
    cluster.kill("n3")
    code, found = wait_for(cluster, lambda code, found: code == 2 and "no_ack_quorum" in codes(found), "no quorum")
    assert found["health"]["grade"] == "down"
    assert codes(found) & {"no_leader", "leader_silent", "leader_not_serving", "no_ack_quorum"}
    assert code == 2
    assert kvstore("status", *at(cluster, "n2")).returncode == 2, "nobody answers there"
    cluster.start_node("n2")
    cluster.start_node("n3")
    wait_complete(cluster)
