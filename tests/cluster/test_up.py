"""The local cluster as a newcomer uses it: up, three commands, down, and up again. Real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from urllib.error import HTTPError

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.client import Client, FeedReader
from kvstore.devcluster.layout import UpOptions
from kvstore.devcluster.local import LocalCluster
from kvstore.devcluster.probe import keys_to_ask, probe
from kvstore.devcluster.processes import is_alive
from kvstore.errors import Unavailable
from kvstore.server.http.metric_table import DECLARED
from kvstore.types import PartitionId, ServerId
from tests.cluster.harness import OFFSETS, Cluster, claim_ports, running_cluster
from tests.commands import Done, kvstore
from tests.pages import pages as guides
from tests.ring.rings import new_ring
from tests.source import ROOT

pytestmark = [pytest.mark.cluster]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as started:
        yield started


def on(cluster: Cluster, *arguments: str) -> Done:
    return kvstore(*arguments, "--data-dir", str(cluster.local.data_dir))


def as_process(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a shell runs it."""
    command = [sys.executable, "-m", "kvstore", *arguments, "--data-dir", str(cluster.local.data_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_up_writes_no_change_that_watchers_see(cluster: Cluster) -> None:
    """Each `up` left a write and a delete of each partition by each node in the change feeds."""
    with FeedReader(cluster.url) as feed:

        def stand() -> list[tuple[str, int, int, bool]]:  # which server is to be asked first changes with the lead
            return [(each.partition, each.oldest, each.latest, each.ended) for each in feed.positions()]

        before = stand()
        assert before == [(partition, 0, 0, False) for partition in ("p1", "p2", "p3")]
        assert on(cluster, "up", "--detach").returncode == 0
        assert stand() == before
        assert [list(feed.changes(partition, 0).keys) for partition, *_ in before] == [[]] * 3


def test_probe_succeeds_only_if_the_partition_accepts_writes(cluster: Cluster) -> None:
    first = cluster.file.node("n1")
    keys = keys_to_ask(new_ring([PartitionId("p1")], {ServerId("n1"): ""}, 1))
    probe(first.grpc, first.resp, keys)
    cluster.kill("n2")
    cluster.kill("n3")
    with pytest.raises(Unavailable, match="partition p1: expected a reply to a read at"):
        probe(first.grpc, first.resp, keys)
    assert as_process(cluster, "up", "--detach").returncode == 0
    probe(first.grpc, first.resp, keys)


def test_every_node_serves_every_key(cluster: Cluster) -> None:
    for writer in cluster.ids:
        cluster.redis(writer).mset({f"{writer}-{i}": i for i in range(30)})
    for reader in cluster.ids:
        for writer in cluster.ids:
            found = cluster.redis(reader).mget([f"{writer}-{i}" for i in range(30)])
            assert found == [b"%d" % i for i in range(30)]


def says_ok(cluster: Cluster, node: str, page: str) -> bool:
    try:
        return cluster.http(node, page) == b"ok\n"
    except OSError:
        return False


def test_cluster_is_the_same_by_every_path_to_its_directory(cluster: Cluster, tmp_path: Path) -> None:
    """`up` mistook the cluster's own ZooKeeper for another process, and `down` left ZooKeeper running and exited
    with 0."""
    link = tmp_path / "link"
    link.symlink_to(cluster.local.data_dir)

    def by_link(*arguments: str) -> Done:
        return kvstore(*arguments, "--data-dir", str(link))

    store = cluster.local.status()["zookeeper"]["pid"]
    cluster.wait_until(lambda: by_link("status").stdout.startswith("healthy:"), "the cluster is healthy")
    again = by_link("up", "--detach")
    assert (again.returncode, "starting" in again.stderr) == (0, False), again.stderr
    assert by_link("down").stdout == "stopped n1, n2, n3, zookeeper\n"
    assert not is_alive(store)
    assert by_link("up", "--detach").returncode == 0
    cluster.wait_succeeds("status")


def test_up_restarts_processes_that_were_stopping(cluster: Cluster) -> None:
    """Right after SIGTERM, `up` mistook a stopping node for a started one, and printed the log of the process that
    ended."""
    node, store = cluster.file.node("n2"), cluster.local.status()["zookeeper"]["pid"]
    assert node.pid is not None
    for pid in (node.pid, store):
        os.kill(pid, signal.SIGSTOP)
        os.kill(pid, signal.SIGTERM)
    said: list[str] = []

    def resume(line: str) -> None:
        """Let a process take its SIGTERM once `up` waits for it."""
        said.append(line)
        for pid, words in ((store, "waiting for ZooKeeper"), (node.pid, "waiting for node n2")):
            if line.startswith(words) and pid is not None:
                os.kill(pid, signal.SIGCONT)

    LocalCluster(cluster.local.data_dir, resume).up(UpOptions(data_dir=cluster.local.data_dir))
    assert "node n2 was stopping and has ended; starting it again" in said
    assert not is_alive(store)
    assert not is_alive(node.pid)
    cluster.wait_succeeds("status")


def test_nodes_answer_ping_and_are_healthy_and_ready(cluster: Cluster) -> None:
    for node in cluster.ids:
        assert cluster.redis(node).ping() is True
        for page in ("/healthz", "/readyz", "/clusterz"):
            cluster.wait_until(lambda node=node, page=page: says_ok(cluster, node, page), f"{node}'s {page}")
        assert b"kvstore_server_resp_commands_total" in cluster.http(node, "/metrics")
        assert cluster.status(node)["id"] == node


def test_nodes_answer_the_probes_of_apache_bookies(cluster: Cluster) -> None:
    """Helm charts of Apache Pulsar probe these pages, each of which was a 404."""
    for node in cluster.ids:
        pages = {name: f"/api/v1/bookie/{name}" for name in ("is_ready", "state", "state/readonly", "info")}
        found = {name: cluster.http(node, page) for name, page in pages.items()}
        assert cluster.http(node, "/heartbeat") == b"OK\n"
        assert found["is_ready"] == b"OK"
        state = {"running": True, "readOnly": False, "shuttingDown": False, "availableForHighPriorityWrites": True}
        assert json.loads(found["state"]) == state
        assert json.loads(found["state/readonly"]) == {"readOnly": False}
        info = json.loads(found["info"])
        assert 0 < info["freeSpace"] <= info["totalSpace"]

        def knows_all(node: str = node) -> bool:
            found = json.loads(cluster.http(node, "/api/v1/bookie/cluster_info"))
            counted = {"totalBookiesCount": 3, "writableBookiesCount": 3, "readonlyBookiesCount": 0}
            counted |= {"unavailableBookiesCount": 0, "ledgerReplicationEnabled": True, "auditorElected": True}
            return bool(found.items() >= counted.items() and found["auditorId"].startswith("n"))

        cluster.wait_until(knows_all, f"{node} knows three bookies and the auditor")


def test_requests_with_a_foreign_host_name_get_only_health(cluster: Cluster) -> None:
    """No user has to log in. The machine's own name and addresses are accepted."""
    host, port = cluster.address("n1", "http")

    def status(path: str, name: str) -> int:
        with closing(HTTPConnection(host, port, timeout=30)) as connection:
            connection.request("GET", path, headers={"Host": f"{name}:{port}"})
            return connection.getresponse().status

    for path in ("/", "/ui", "/metrics", "/v1/cluster"):
        assert [status(path, name) for name in ("evil.example", "localhost", socket.gethostname())] == [403, 200, 200]
    assert status("/healthz", "evil.example") == 200


def test_published_metrics_match_their_declarations_and_the_docs(cluster: Cluster) -> None:
    cluster.wait_led()
    pages = [cluster.http(node, "/metrics").decode() for node in cluster.ids]  # some node leads
    families = {each.name: each for page in pages for each in text_string_to_metric_families(page)}
    for each in (family for page in pages for family in text_string_to_metric_families(page)):
        if each.name.startswith("kvstore_"):
            name = each.name.removeprefix("kvstore_") + ("_total" if each.type == "counter" else "")
            labels = {label for sample in each.samples for label in sample.labels} - {"le"}
            assert name in DECLARED, "declare it in kvstore/server/http/metric_table.py"
            assert (each.type, labels) == (DECLARED[name].kind.value, set(filter(None, [DECLARED[name].label]))), name
    assert {"kvstore_bookie_sync_seconds", "kvstore_server_resp_command_seconds"} <= families.keys()
    assert "kvstore_server_grpc_call_seconds" in families
    assert families["process_cpu_seconds"].type == "counter"
    docs = "".join((ROOT / page).read_text(encoding="utf-8") for page in guides())
    named = set(re.findall(r"`(kvstore_\w+)`", docs))
    sometimes = {"kvstore_process_snapshot_age_seconds"}  # once a snapshot is there
    sometimes |= {f"kvstore_process_tls_{name}" for name in ("expires_seconds", "failing", "required")}  # with TLS
    sometimes.add("kvstore_process_grpc_connections_plain_total")
    sometimes |= {name for name in named if name.startswith("kvstore_namespace_")}  # with a namespace
    while_found = {"kvstore_cluster_findings"}  # only while something is found
    absent: set[str] = set()

    def is_complete() -> bool:  # a node knows some of the whole cluster only seconds after its start
        pages = [cluster.http(node, "/metrics").decode() for node in cluster.ids]
        found = [each for page in pages for each in text_string_to_metric_families(page)]
        there = {sample.name.removesuffix("_bucket") for each in found for sample in each.samples}
        absent.clear()
        absent.update(named - there - while_found)
        return absent <= sometimes

    with suppress(TimeoutError):
        cluster.wait_until(is_complete, "every metric of docs/how-to")
    assert absent <= sometimes, "others do not exist"


def test_commands_printed_by_up_work(cluster: Cluster) -> None:
    assert as_process(cluster, "put", "greeting", "hello").returncode == 0
    assert as_process(cluster, "get", "greeting").stdout.strip() == "hello"
    assert as_process(cluster, "ring", "locate", "greeting").stdout.split()[:3] == ["TOKEN", "PARTITION", "LEADER"]
    cluster.wait_until(lambda: as_process(cluster, "fsck").returncode == 0, "no error is found")
    cluster.wait_until(lambda: cluster.status("n1")["not_ready"] == [], "n1 is ready")
    with Client(cluster.url) as store:
        found = store.get(b"greeting")
    assert found is not None
    assert found.value == b"hello"
    assert cluster.redis("n2").get("greeting") == b"hello"


def test_drained_node_leads_nothing_but_still_serves(cluster: Cluster) -> None:
    leader = cluster.wait_led()["p1"]
    answer = on(cluster, "node", "drain", leader, "--json")
    assert answer.returncode == 1, "three servers have its replicas: no other takes them"
    assert "no other server can take" in json.loads(answer.stdout)["replicas_left"]
    assert set(json.loads(answer.stdout)["handed_over"]) <= {"p1", "p2", "p3"}, "what it still led when it was asked"
    assert leader not in cluster.wait_led(by_other_than=leader).values()
    with pytest.raises(HTTPError, match="503"):
        cluster.http(leader, "/readyz")
    assert cluster.redis(leader).set("through", "the drained node") is True
    undrained = on(cluster, "node", "undrain", leader)
    assert undrained.returncode == 0, undrained.stderr
    assert f"{leader} accepts operations again" in undrained.stdout
    cluster.wait_ready()
    cluster.wait_until(
        lambda: (
            all(each["role"] != "stopped" for each in cluster.status(leader)["partitions"].values())
            and len(cluster.status(leader)["partitions"]) == 3
        ),
        "its replicas are there again",
    )
    assert "was not draining" in on(cluster, "node", "undrain", leader).stdout


def test_cluster_json_names_every_process_and_endpoint(cluster: Cluster) -> None:
    document = json.loads((cluster.local.data_dir / "cluster.json").read_text())
    assert {"zookeeper", "zookeeper_pid", "nodes"} <= set(document)
    for node in document["nodes"]:
        assert {"id", "pid", "grpc", "resp", "http", "bookie", "data_dir", "config"} <= set(node)
        assert psutil.Process(node["pid"]).is_running()
        assert Path(node["config"]).exists()
    with FeedReader(cluster.url, identity=document["instance"]) as feed:
        assert feed.positions()


@pytest.mark.parametrize(
    "words",
    [("put", "k", "1", "--timeout", "1"), ("ring", "resume"), ("partition", "pins"), ("cluster", "version")],
    ids=" ".join,
)
def test_data_dir_of_another_cluster_on_the_same_ports_is_refused(
    cluster: Cluster, tmp_path: Path, words: tuple[str, ...]
) -> None:
    document = json.loads((cluster.local.data_dir / "cluster.json").read_text())
    (tmp_path / "cluster.json").write_text(json.dumps(document | {"instance": "another"}))

    def is_told_why() -> bool:  # if somebody has answered in its time
        answer = kvstore(*words, "--data-dir", str(tmp_path))
        assert answer.returncode == 1
        found = rf"expected (a server of cluster )?another, got (one of )?{document['instance']}"
        return re.search(found, answer.stderr) is not None  # the key-value client's message, or the server's

    cluster.wait_until(is_told_why, "whose nodes these are")
    cluster.wait_until(lambda: on(cluster, *words).returncode == 0, "the same in the folder of the cluster that runs")


def test_up_beside_a_running_cluster_returns_and_leaves_it_running(cluster: Cluster) -> None:
    """When its terminal ended, it also stopped the cluster that another `up` had started."""
    before = (cluster.local.data_dir / "cluster.json").read_bytes()
    answer = as_process(cluster, "up")
    assert answer.returncode == 0, answer.stderr
    assert "the cluster was already running and keeps running" in answer.stderr
    assert (cluster.local.data_dir / "cluster.json").read_bytes() == before
    assert all(node["running"] for node in cluster.local.status()["nodes"])


def test_status_shows_every_node(cluster: Cluster) -> None:

    def shows_all() -> bool:
        answer = on(cluster, "status", "--json")
        document = json.loads(answer.stdout)
        assert [node["id"] for node in document["nodes"]] == cluster.ids
        assert document["zookeeper"]["running"]
        return answer.returncode < 2 and all(node["ready"] for node in document["nodes"])

    cluster.wait_until(shows_all, "every node is ready")


def test_up_on_a_running_cluster_starts_what_is_down_and_nothing_else(cluster: Cluster) -> None:
    before = {node: cluster.pid(node) for node in cluster.ids}
    cluster.redis("n1").set("kept", "over a kill")
    cluster.kill("n2")
    answer = on(cluster, "up", "--detach", "--json")
    assert answer.returncode == 0, answer.stderr
    after = {node["id"]: node["pid"] for node in json.loads(answer.stdout)["nodes"]}
    assert {node for node in before if before[node] != after[node]} == {"n2"}
    assert cluster.redis("n2").get("kept") == b"over a kill"


def test_unrecorded_processes_are_found(cluster: Cluster) -> None:
    before = {node: cluster.pid(node) for node in cluster.ids}
    path = cluster.local.data_dir / "cluster.json"
    document = json.loads(path.read_text())
    document["nodes"][1]["pid"] = None  # as if `up` had been killed before it wrote it down
    document["nodes"][2]["pid"] = os.getpid()  # as if the number had been used again
    path.write_text(json.dumps(document))
    answer = on(cluster, "up", "--detach", "--json")
    assert answer.returncode == 0, answer.stderr
    assert {node["id"]: node["pid"] for node in json.loads(answer.stdout)["nodes"]} == before


def test_up_refuses_to_change_a_cluster(cluster: Cluster) -> None:
    answer = on(cluster, "up", "--detach", "--nodes", "5")
    assert answer.returncode == 1
    assert "was created with 3" in answer.stderr


def test_second_cluster_on_the_same_ports_names_the_taken_port(cluster: Cluster, tmp_path: Path) -> None:
    offset = str(cluster.file.port_offset)
    answer = kvstore("up", "--detach", "--data-dir", str(tmp_path), "--port-offset", offset)
    assert answer.returncode == 1
    assert f"{cluster.file.node('n1').resp} (resp of node n1)" in answer.stderr


def test_down_ends_every_process_and_up_restores_the_data(cluster: Cluster) -> None:
    cluster.redis("n1").mset({f"down-{i}": i for i in range(100)})
    pids = [*(cluster.pid(node) for node in cluster.ids), cluster.file.zookeeper_pid or 0]
    answer = on(cluster, "down")
    assert answer.returncode == 0, answer.stderr
    assert not any(map(is_alive, pids))
    assert [p.pid for p in psutil.process_iter() if str(cluster.directory) in _command_line(p)] == []
    cluster.start()
    assert cluster.redis("n3").mget([f"down-{i}" for i in range(100)]) == [b"%d" % i for i in range(100)]


@contextmanager
def claimed_offset() -> Iterator[str]:
    """Return an offset of ports that no cluster of another test uses meanwhile."""
    offset, claim = next((each, claim) for each in OFFSETS if (claim := claim_ports(each)) is not None)
    try:
        yield str(offset)
    finally:
        os.close(claim)


def test_stopped_cluster_restarts_on_other_ports(cluster: Cluster) -> None:
    cluster.redis("n1").set("moved", "here")
    before = cluster.file
    with claimed_offset() as other:
        answer = as_process(cluster, "up", "--detach", "--port-offset", other)
        assert answer.returncode == 1
        assert "runs on other ports; run `kvstore down` first" in answer.stderr
        assert cluster.file == before
        assert as_process(cluster, "down").returncode == 0
        answer = as_process(cluster, "up", "--detach", "--port-offset", other)
        assert answer.returncode == 0, answer.stderr
        assert {node.resp for node in before.nodes}.isdisjoint(node.resp for node in cluster.file.nodes)
        assert cluster.redis("n3").get("moved") == b"here"
        assert as_process(cluster, "down").returncode == 0
    assert as_process(cluster, "up", "--detach", "--port-offset", str(before.port_offset)).returncode == 0
    assert cluster.redis("n2").get("moved") == b"here"


def _command_line(process: psutil.Process) -> str:
    try:
        return "" if process.pid == os.getpid() else " ".join(process.cmdline())
    except psutil.Error:
        return ""
