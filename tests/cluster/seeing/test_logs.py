"""The logs of real nodes, and the commands that show a node's levels, slow operations and profile."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.cluster.harness import Cluster, running_cluster
from tests.commands import Done, kvstore
from tests.waiting import wait_until_blocking

pytestmark = [pytest.mark.cluster]
SECRET_KEY, SECRET_VALUE = b"customers/4711", b"who-they-are"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = ["log_output.format=json", "server.slow_ms=1", "partition.lead_back_s=1"]
    with running_cluster(tmp_path_factory.mktemp("logs"), settings=settings) as started:
        started.wait_led()
        yield started


def call(cluster: Cluster, *arguments: str) -> Done:
    return call_at(cluster, "n2", *arguments)


def call_at(cluster: Cluster, node: str, *arguments: str) -> Done:
    server = cluster.file.node(node).grpc
    return kvstore(*arguments, "--server", server)


def done(cluster: Cluster, *arguments: str) -> Any:
    answer = call(cluster, *arguments, "--json")
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def text_of(cluster: Cluster, node: str) -> str:
    return (cluster.local.data_dir / "logs" / f"{node}.log").read_text(encoding="utf-8")


def lines(cluster: Cluster, node: str) -> list[dict[str, Any]]:
    """Return the complete lines. The node may be writing the last one."""
    return [json.loads(line) for line in text_of(cluster, node).rpartition("\n")[0].splitlines()]


def wait_for_line(cluster: Cluster, node: str, begin: str, *, level: str, after: int) -> dict[str, Any]:
    """Return the first matching line after this many others."""

    def found() -> list[dict[str, Any]]:
        behind = lines(cluster, node)[after:]
        return [each for each in behind if each["level"] == level and each["event"].startswith(begin)]

    wait_until_blocking(found, timeout_s=90, what=f"{level} {begin} of {node}")
    return found()[0]


def settled(cluster: Cluster, partition: str) -> str:
    """Wait until the partition's preferred server leads it, some seconds after a restart, and return it."""
    [found] = [each for each in done(cluster, "ring", "show")["partitions"] if each["id"] == partition]
    preferred: str = found["replicas"][0]
    cluster.wait_until(lambda: cluster.leaders().get(partition) == preferred, f"{preferred} leads {partition}")
    return preferred


def test_log_lines_are_documents_with_process_and_fields(cluster: Cluster) -> None:
    for node in cluster.ids:
        found = lines(cluster, node)
        assert {each["process"] for each in found} == {node}
        assert all({"time", "level", "logger", "event"} <= each.keys() for each in found)
        assert any(each.get("partition") in {"p1", "p2", "p3"} for each in found)


def test_log_level_set_at_run_time_lasts_until_the_node_restarts(cluster: Cluster) -> None:
    assert done(cluster, "node", "log-level", "n1") == {"node": "n1", "levels": {"kvstore": "INFO"}}
    levels = done(cluster, "node", "log-level", "n1", "debug", "--logger", "kvstore.server.http")["levels"]
    assert levels == {"kvstore": "INFO", "kvstore.server.http": "DEBUG"}
    assert done(cluster, "node", "log-level", "n2")["levels"] == {"kvstore": "INFO"}
    refused = call(cluster, "node", "log-level", "n1", "DEBUG", "--logger", "kazoo")
    assert (refused.returncode, "expected the logger kvstore or one below it" in refused.stderr) == (1, True)
    assert "no server 'n9': expected one of n1, n2, n3" in call(cluster, "node", "log-level", "n9").stderr
    audit = (cluster.local.data_dir / "logs" / "n1.audit.jsonl").read_text(encoding="utf-8")
    assert 'logger: \\"kvstore.server.http\\" level: \\"DEBUG\\"' in audit
    cluster.terminate("n1")
    cluster.start_node("n1")
    cluster.wait_led()

    def is_forgotten() -> bool:
        answer = call(cluster, "node", "log-level", "n1", "--json")
        return answer.returncode == 0 and json.loads(answer.stdout)["levels"] == {"kvstore": "INFO"}

    wait_until_blocking(is_forgotten, timeout_s=90, what="n1 with its own levels")


def test_metadata_outage_and_its_end_are_logged_once(cluster: Cluster) -> None:
    before = len(lines(cluster, "n3"))
    cluster.kill_zookeeper()
    lost = wait_for_line(cluster, "n3", "metadata=", level="WARNING", after=before)
    assert lost["metadata"] in {"suspended", "lost"}
    cluster.start_zookeeper()
    text = "metadata=connected the metadata store is back"
    back = wait_for_line(cluster, "n3", text, level="INFO", after=before)
    assert back["metadata"] == "connected"
    told = [each["level"] for each in lines(cluster, "n3")[before:] if each["event"].startswith("metadata=")]
    assert told == (["WARNING", "INFO"] * len(told))[: len(told)], "each time that it goes, and that it comes, once"


def test_lost_leaders_and_lost_quorum_are_logged_with_the_reason(cluster: Cluster) -> None:
    """Two of three nodes die. Then their partitions have no leader, and the one remaining bookie is not an ack
    quorum."""

    def have_something_to_lose() -> bool:
        leaders = cluster.leaders()
        return len(leaders) == cluster.file.partitions and not {"n1", "n2"}.isdisjoint(leaders.values())

    cluster.wait_until(have_something_to_lose, "every partition is led, and some by n1 or n2")
    before = len(lines(cluster, "n3"))
    for node in ("n1", "n2"):
        cluster.kill(node)
    text = "writable=1 readonly=0 ack=2 the ack quorum is lost"
    quorum = wait_for_line(cluster, "n3", text, level="WARNING", after=before)
    assert (quorum["writable"], quorum["ack"]) == (1, 2)

    def wait_for(words: str) -> None:
        wait_until_blocking(
            lambda: [each for each in lines(cluster, "n3")[before:] if words in each["event"]],
            timeout_s=90,
            what=f"the line {words!r}",
        )

    wait_for("have no leader: server=")
    for node in ("n1", "n2"):
        cluster.start_node(node)
    wait_for("ack=2 the ack quorum is back")
    cluster.wait_led()
    wait_for("have a leader again")


def slow_of(cluster: Cluster, node: str) -> list[dict[str, Any]]:
    """Return the operations on SECRET_KEY in the slow log of a node."""
    found: list[dict[str, Any]] = done(cluster, "node", "slow-log", node, "--key", SECRET_KEY.decode())["operations"]
    return found


def test_slow_log_of_the_leader_shows_where_a_write_spent_its_time(cluster: Cluster) -> None:
    """Operations over one millisecond are slow here. Two disks need that long, but not every time."""
    partition = done(cluster, "ring", "locate", SECRET_KEY.decode())["partition"]
    leader = settled(cluster, partition)

    def is_noted() -> bool:
        with cluster.redis(leader) as client:
            client.set(SECRET_KEY, SECRET_VALUE)
        return bool(writes())

    def writes() -> list[dict[str, Any]]:
        return [each for each in slow_of(cluster, leader) if each["operation"] == "write"]

    wait_until_blocking(is_noted, what="a write that takes a millisecond")
    found = writes()[0]
    assert (found["at"], found["partition"]) == ("leader", partition)
    assert found["parts_ms"].keys() == {"queue", "log"}
    assert found["took_ms"] == pytest.approx(sum(found["parts_ms"].values()), abs=0.2)
    assert any(
        each["event"].startswith("slow at=leader") and each.get("log_ms", 0) > 0 for each in lines(cluster, leader)
    )
    other = next(node for node in cluster.ids if node != leader)
    cluster.wait_until(
        lambda: found["key"] in cluster.http(other, "/ui/slow").decode(), f"{other} shows the operation of {leader}"
    )


def test_slow_log_shows_operations_forwarded_to_a_paused_server(cluster: Cluster) -> None:
    partition = done(cluster, "ring", "locate", SECRET_KEY.decode())["partition"]
    leader = settled(cluster, partition)
    entry_node = next(node for node in cluster.ids if node not in (leader, "n2"))

    def ask() -> None:
        with cluster.redis(entry_node, socket_timeout=60) as client, suppress(redis.RedisError):
            client.get(SECRET_KEY)  # fails if it pauses for so long that the link is given up

    def uptime_s() -> float:
        document = json.loads(call_at(cluster, entry_node, "status", "--json").stdout)
        return float(next(each["uptime_s"] for each in document["nodes"] if each["id"] == entry_node))

    with cluster.redis(entry_node) as client:
        client.get(SECRET_KEY)  # the link is open
    with ThreadPoolExecutor(1) as threads:
        cluster.pause(leader)
        try:
            threads.submit(ask)
            wait_until_blocking(
                lambda: cluster.status(entry_node)["server"]["peer_operations_in_flight"] > 0, what="a frame"
            )
            seen = uptime_s()
            wait_until_blocking(lambda: uptime_s() > seen + 1.0, timeout_s=60, what="some looks at what is under way")
        finally:
            cluster.resume(leader)

    def link() -> list[dict[str, Any]]:
        """Return the entries of the slow GET. The GET before it may have been slow too."""
        asked = ("node", "slow-log", entry_node, "--key", SECRET_KEY.decode(), "--json")
        found = json.loads(call(cluster, *asked).stdout)["operations"]
        return [each for each in found if (each["at"], each["operation"]) == ("link", "GET") and each["took_ms"] > 250]

    wait_until_blocking(link, what="the operation in the slow log")
    assert link()[0]["partition"] == partition


def test_profile_of_a_running_node_writes_a_flame_graph(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "n1.svg"
    words = ("node", "profile", "n1", "--seconds", "1", "--out", str(file), "--server", cluster.file.node("n2").grpc)
    command = [sys.executable, "-m", "kvstore", *words, "--json"]
    with cluster.redis("n1") as client, subprocess.Popen(command, stdout=subprocess.PIPE) as taking:
        while taking.poll() is None:
            client.set(b"busy", b"value")
        assert taking.stdout is not None
        answer = json.loads(taking.stdout.read())
    assert (answer["node"], answer["file"]) == ("n1", str(file))
    assert answer["looks"] > 0
    picture = file.read_text(encoding="utf-8")
    assert "(kvstore/server/" in picture
    assert "MainThread" in picture
    refused = call(cluster, "node", "profile", "n1", "--seconds", "61")
    assert refused.returncode == 2


def test_logs_contain_no_key_and_no_value(cluster: Cluster) -> None:
    """This holds even at DEBUG, which logs everything."""
    for node in cluster.ids:
        done(cluster, "node", "log-level", node, "DEBUG")
    with cluster.redis("n1") as client:
        client.set(SECRET_KEY, SECRET_VALUE)
        assert client.get(SECRET_KEY) == SECRET_VALUE
        client.incr(SECRET_KEY + b"/count")
        with pytest.raises(Exception, match=r"WRONGTYPE|not an integer"):
            client.incr(SECRET_KEY)
    for path in (cluster.local.data_dir / "logs").iterdir():
        data = path.read_bytes()
        assert SECRET_KEY not in data, path
        assert SECRET_VALUE not in data, path
