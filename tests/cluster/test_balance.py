"""Five nodes under a zipfian load balance themselves, and no client notices. Real processes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from functools import partial
from random import Random
from typing import Any

import pytest

from kvstore.loadtest.generator.choosers import Ranks
from kvstore.ring import SLOTS_HASH, new_ring
from kvstore.server.balance.judge import threshold
from kvstore.types import PartitionId, ServerId
from tests.beside import beside
from tests.cluster.harness import Cluster, running_cluster
from tests.commands import kvstore

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NODES, PARTITIONS, KEYS = 5, 10, 400
SETTLE_S = 1.0
PIPELINE, GETS = 64, 3
"""Operations in one round of a client, and gets per put."""
VALUE_BYTES = 4096
"""Size of a value. The balancer counts bytes that are written as work, and they cost little processor time."""
REST_S = 0.02
"""Pause of a client between two rounds, which leaves processors to the servers and to other tests."""
SLACK = 1.12
"""Multiple of the load from which a server counts as overloaded, below which this test takes the load as even. Loads
fluctuate."""
PAUSE_MAX_S = 5.0
"""Longest time without an answer that a client may see: a handover takes a fraction of a second, and the machine may be
busy."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = (
        "balance.mode=auto",
        f"balance.settle_s={SETTLE_S}",
        "balance.moves_per_hour=40",
        "partition.lead_back_s=1",
    )
    directory = tmp_path_factory.mktemp("balance")
    with running_cluster(directory, nodes=NODES, partitions=PARTITIONS, settings=settings) as started:
        yield started


def skewed_names() -> tuple[list[str], float]:
    """Return keys, the most popular first, with which a new cluster is skewed, and max/mean of its servers' load."""
    servers = dict.fromkeys((ServerId(f"n{i + 1}") for i in range(NODES)), "")
    ring = new_ring([PartitionId(f"p{i + 1}") for i in range(PARTITIONS)], servers, 3, SLOTS_HASH)
    ranks = Ranks(KEYS)
    best: tuple[float, list[str]] = 0.0, []
    for attempt in range(200):
        names = [f"{attempt}-{number}" for number in range(KEYS)]
        loads = dict.fromkeys(servers, 0.0)
        for rank, owner in enumerate(ring.partitions_of([name.encode() for name in names])):
            loads[ring.partitions[owner].replicas[0]] += ranks.share(rank)
        best = max(best, (max(loads.values()) * NODES, names))
    return best[1], best[0]


class Load:
    """Clients that put and get zipfian keys at each node, and check what they get."""

    def __init__(self, cluster: Cluster, names: list[str]) -> None:
        self._cluster, self._names = cluster, names
        self.acknowledged: dict[str, int] = {}
        self.failures: list[str] = []
        self.pause_s = 0.0
        self.rounds = 0

    def run(self, over: threading.Event, number: int) -> None:
        random, ranks = Random(number), Ranks(KEYS)
        own = [name for place, name in enumerate(self._names) if place % 2 == number]
        node = self._cluster.ids[number]
        with self._cluster.redis(node, socket_timeout=60) as client:
            while not over.is_set():
                since = time.monotonic()
                try:
                    self._round(client, random, ranks, own)
                except Exception as error:  # noqa: BLE001 - the test reports it
                    self.failures.append(repr(error))
                    return
                self.pause_s = max(self.pause_s, time.monotonic() - since)
                self.rounds += 1
                over.wait(REST_S)

    def _round(self, client: Any, random: Random, ranks: Ranks, own: list[str]) -> None:
        with client.pipeline(transaction=False) as pipe:
            puts: dict[str, int] = {}
            for turn in range(PIPELINE):
                name = self._names[ranks.draw(random)]
                if turn % (GETS + 1) == 0 and name in own:
                    puts[name] = puts.get(name, self.acknowledged.get(name, 0)) + 1
                    pipe.set(name, f"{puts[name]:0{VALUE_BYTES}}")
                else:
                    pipe.get(name)
            pipe.execute()
        self.acknowledged |= puts


def explained(cluster: Cluster) -> Any:
    answer = kvstore("balance", "explain", "--data-dir", str(cluster.local.data_dir), "--json")
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def is_even(found: Any) -> bool:
    works = [each["work_per_s"] for each in found["servers"]]
    return max(works) < SLACK * threshold(sum(works) / len(works))


def test_zipfian_load_is_balanced_without_errors(cluster: Cluster) -> None:
    names, expected = skewed_names()
    assert expected > 1.6
    cluster.redis("n1").mset(dict.fromkeys(names, 0))
    load = Load(cluster, names)
    with beside(*(partial(load.run, number=number) for number in range(2))):

        def is_balanced() -> bool:
            found = explained(cluster)
            made = any("units of work/s" in each["reason"] for each in found["made"])
            return (made and is_even(found) and found["step"] is None) or bool(load.failures)

        cluster.wait_until(is_balanced, "the load is balanced", 360)
    assert not load.failures
    assert load.pause_s < PAUSE_MAX_S
    last = cluster.redis("n2").mget(names)
    assert {name: int(value) for name, value in zip(names, last, strict=True) if int(value)} == load.acknowledged
    made = [each["command"] for each in explained(cluster)["made"]]
    assert len(made) == len(set(made)), "no step is made twice"
    lines = "".join(path.read_text() for path in cluster.local.data_dir.glob("n1/**/*audit*") if path.is_file())
    logs = "".join(path.read_text() for path in (cluster.local.data_dir / "logs").glob("*"))
    assert '"who":"balancer"' in lines + logs


def test_status_shows_the_balancer(cluster: Cluster) -> None:
    shown = kvstore("status", "--data-dir", str(cluster.local.data_dir))
    assert "balancer: auto, " in shown.stdout
    assert "kvstore_server_balance_steps_total" in cluster.http("n1", "/metrics").decode()


def test_unhealthy_cluster_is_left_alone(cluster: Cluster) -> None:
    cluster.kill("n5")
    cluster.wait_until(lambda: any("not healthy" in each for each in explained(cluster)["waits"]), "the balancer waits")
    text = kvstore("balance", "explain", "--data-dir", str(cluster.local.data_dir)).stdout
    assert "the cluster is not healthy: " in text
    cluster.start_node("n5")
    cluster.wait_ready("n5")


def test_lead_moves_by_command(cluster: Cluster) -> None:
    def ask(*arguments: str) -> Any:
        answer = kvstore(*arguments, "--data-dir", str(cluster.local.data_dir), "--json")
        assert answer.returncode == 0, answer.stderr
        return json.loads(answer.stdout)

    [p1, *_] = ask("ring", "show")["partitions"]
    target = next(each for each in p1["replicas"] if each != p1["leader"])
    assert ask("partition", "move-lead", "p1", target)["preferred_leader"] == target
    cluster.wait_until(lambda: cluster.leaders().get("p1") == target, f"{target} leads p1")
    refused = kvstore("partition", "move-lead", "p1", "n99", "--data-dir", str(cluster.local.data_dir))
    assert refused.returncode == 1
    assert "expected a server with a lasting replica" in refused.stderr
