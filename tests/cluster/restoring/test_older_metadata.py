"""ZooKeeper returns as an older copy, while bookies have later entries: no node serves or drops anything because of the
older copy, and with the later copy all data is there. Real processes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.cluster.harness import Cluster, running_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SAID = "the metadata store is an older copy of itself"
IS_UP = " is up: "


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("older")
    with running_cluster(directory, settings=("log.roll_bytes=200000",)) as started:
        yield started


def write(cluster: Cluster, name: str, first: int, last: int) -> None:
    client = cluster.redis("n1")
    for number in range(first, last):
        assert client.set(f"{name}{number}", b"%d" % number + bytes(20_000)) is True


def told(cluster: Cluster, node: str) -> str:
    path = cluster.local.data_dir / "logs" / f"{node}.log"
    return path.read_text(errors="replace")


def has_ended(cluster: Cluster, node: str, known: str) -> bool:
    """Return True if the node has ended, once it has started or logged why not after the `known` part of its log. A
    node that is up may log the same about a partition that it cannot lead, and stays."""
    cluster.wait_until(
        lambda: IS_UP in told(cluster, node)[len(known) :] or not cluster.is_running(node), f"{node} starts, or ends"
    )
    if IS_UP in told(cluster, node)[len(known) :]:
        return False
    assert SAID in told(cluster, node)[len(known) :]
    return True


# docs/protocol.md B29, G24
@pytest.mark.parametrize("restarted", [False, True])
def test_nodes_refuse_an_older_metadata_copy_and_accept_a_later_one(
    cluster: Cluster, tmp_path: Path, restarted: bool
) -> None:
    data, copies = cluster.local.data_dir / "zookeeper" / "data", (tmp_path / "older", tmp_path / "latest")
    name = f"restarted-{restarted}-"
    write(cluster, name, 0, 50)
    cluster.kill_zookeeper()
    shutil.copytree(data, copies[0])
    cluster.start_zookeeper()
    for node in cluster.ids:
        cluster.wait_until(lambda node=node: cluster.status(node)["metadata"] == "connected", f"{node} has a session")
    if restarted:
        for node in cluster.ids:
            cluster.terminate(node)
            cluster.start_node(node)
            cluster.wait_ready(node)
        cluster.wait_led()
    write(cluster, name, 50, 250)
    cluster.kill_everything()
    shutil.copytree(data, copies[1])

    shutil.rmtree(data)
    shutil.copytree(copies[0], data)
    cluster.start_zookeeper()
    known = {node: told(cluster, node) for node in cluster.ids}
    for node in cluster.ids:
        cluster.start_node(node)
    ended = [node for node in cluster.ids if has_ended(cluster, node, known[node])]
    assert len(ended) >= 2, "all but a bookie that had a share of none of the later ledgers"
    for node in ended:  # whenever a supervisor tries
        cluster.start_node(node)
    for node in ended:
        cluster.wait_until(lambda node=node: not cluster.is_running(node), f"{node} ends again")
    with pytest.raises(redis.RedisError):
        cluster.redis(next(iter({*cluster.ids} - {*ended}), "n1")).set("by", "the older copy")
    for node in {*cluster.ids} - {*ended}:
        cluster.kill(node)
    cluster.kill_zookeeper()
    shutil.rmtree(data)
    shutil.copytree(copies[1], data)
    cluster.start()
    client = cluster.redis("n2")
    assert [client.get(f"{name}{number}")[:3].rstrip(b"\0") for number in range(250)] == [b"%d" % n for n in range(250)]
    cluster.wait_succeeds("fsck")
