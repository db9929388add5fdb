"""A ZooKeeper of three members is restored to an older copy under running nodes, and a node that was down since then
returns first: no key is reported absent, and with the latest data everything is there. Real processes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import redis

from kvstore.devcluster import zookeeper
from tests.cluster.harness import Cluster, running_cluster
from tests.meta.ensembles import restored

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

KEYS, BEFORE = 150, 50


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("restored")
    with running_cluster(directory, zookeepers=3, settings=("log.roll_bytes=200000",)) as started:
        yield started


def value(number: int) -> bytes:
    return b"%d." % number + bytes(20_000)


def confirmed(cluster: Cluster, node: str) -> int:
    """Return the node's high-water mark; 0 if it has none yet."""
    path = cluster.local.data_dir / node / "HIGH_WATER"
    return int(path.read_text().split()[2]) if path.exists() else 0


def refuses(cluster: Cluster, node: str) -> bool:
    """Return True if the node refuses the metadata store; a node that was starting has ended."""
    try:
        return bool(cluster.status(node)["metadata"] == "older")
    except (OSError, KeyError):  # an OSError also if the node ends while it answers
        return not cluster.is_running(node)


# docs/protocol.md B29, G24
def test_every_key_is_found_when_the_ensemble_is_restored(cluster: Cluster, tmp_path: Path) -> None:
    client = cluster.redis("n2")
    for number in range(BEFORE):
        assert client.set(f"k{number}", value(number)) is True
    one = cluster.ensemble[0]
    one.kill()
    shutil.copytree(one.directory / "data", tmp_path / "older")
    cluster.ensemble[0] = zookeeper.restart(one)
    cluster.ensemble[0].wait_ready()
    cluster.kill("n1")
    cluster.wait_led()
    for number in range(BEFORE, KEYS):
        cluster.wait_until(lambda number=number: client.set(f"k{number}", value(number)), "a write goes through")
    known = {node: confirmed(cluster, node) for node in ("n2", "n3")}
    cluster.wait_until(lambda: all(confirmed(cluster, node) > known[node] for node in known), "high-water marks rise")
    for each in cluster.ensemble:
        each.kill()
    latest = [tmp_path / f"latest{place}" for place in range(3)]
    for each, copy in zip(cluster.ensemble, latest, strict=True):
        shutil.copytree(each.directory / "data", copy)

    cluster.ensemble[:] = restored(cluster.ensemble, [tmp_path / "older"] * 3)
    cluster.start_node("n1")
    for node in cluster.ids:
        cluster.wait_until(lambda node=node: refuses(cluster, node), f"{node} refuses the copy")
    assert all(map(cluster.is_running, known)), "what runs goes on without the store"
    answered = 0
    for node in known:
        reading = cluster.redis(node)
        for number in range(KEYS):
            with suppress(redis.RedisError):
                assert reading.get(f"k{number}") == value(number), "denied"
                answered += 1
            if not answered and number > 5:
                break  # nobody answers by an older copy: each refusal takes its time
    if cluster.is_running("n1"):
        cluster.kill("n1")

    cluster.ensemble[:] = restored(cluster.ensemble, latest)
    cluster.start()
    client = cluster.redis("n1")
    assert [client.get(f"k{number}") for number in range(KEYS)] == [value(number) for number in range(KEYS)]
    cluster.wait_succeeds("fsck")
