"""Operators see a transaction whose home has died, and free its keys (docs/how-to/when-a-transaction-hangs.md)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from kvstore import versions
from tests.cluster.harness import Cluster, running_cluster
from tests.cluster.test_transactions import Calls, log_versions, places_of, under_way
from tests.commands import Done, kvstore

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Each partition has one replica, so that nobody takes over for a node that dies."""
    with running_cluster(tmp_path_factory.mktemp("intents"), replicas=1) as started:
        started.wait_ready()
        started.wait_until(lambda: log_versions(started) == {versions.LATEST}, "the version rises")
        yield started


class Operator:
    """Commands that ask one node, and its metrics."""

    def __init__(self, cluster: Cluster, node: str) -> None:
        self.cluster, self.node = cluster, node

    def call(self, *words: str) -> Done:
        return kvstore(*words, "--server", self.cluster.file.node(self.node).grpc)

    def intents(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.call("partition", "intents", "--json").stdout)
        return found

    def metric(self, name: str) -> float:
        page = self.cluster.http(self.node, "/metrics").decode()
        return sum(float(each) for each in re.findall(rf"^kvstore_partition_leading_{name}{{.*}} (\S+)$", page, re.M))


# docs/protocol.md Tx6
async def test_operator_frees_keys_of_a_transaction_whose_home_is_lost(cluster: Cluster) -> None:
    calls, places = Calls(cluster), await places_of(cluster)
    operator = Operator(cluster, places.leaders[1])
    partition = next(each for each, leader in cluster.leaders().items() if leader == places.home)
    with under_way(calls, places, *places.put("1"), request=calls.request_id()):
        refused = operator.call("transaction", "abandon", partition, "--yes")
        assert f"{partition} has a leader, {places.home}, which alone knows" in refused.stderr
        cluster.kill(places.home)
    cluster.wait_until(lambda: partition not in cluster.leaders(), "the home has no leader")
    held = [each for each in operator.intents() if each["key"] == places.keys[1]]
    assert [(each["what"], each["home"], each["leader"]) for each in held] == [("exclusive intent", partition, True)]
    assert operator.metric("intents") == 1
    early = "expected a home that has had no leader for 60 s"
    abandon = partial(operator.call, "transaction", "abandon", partition, "--yes")
    cluster.wait_until(lambda: early in abandon().stderr, "the home may be changing leaders")
    cluster.wait_until(lambda: "transaction_hangs" in operator.call("status").stdout, "status names it", timeout_s=90)
    assert operator.metric("oldest_intent_seconds") > 30
    assert calls.is_held(places.keys[1], places.leaders[1])

    abandoned = operator.call("transaction", "abandon", partition, "--force", "--yes", "--json")
    assert places.keys[1] in {each["key"] for each in json.loads(abandoned.stdout)["abandoned"]}, abandoned.stderr
    assert operator.intents() == []
    assert calls.value(places.keys[1], node=places.leaders[1]) is None
    logs = cluster.local.data_dir / "logs"
    audit = [json.loads(line) for line in (logs / f"{operator.node}.audit.jsonl").read_text().splitlines()]
    assert [each["outcome"] for each in audit if each["call"] == "AbandonTransactions"][-2:] == ["BEGUN", "OK"]
    lines = (logs / f"{operator.node}.log").read_text(encoding="utf-8")
    assert f"abandoned a transaction partition={held[0]['partition']} attempt={held[0]['attempt']}" in lines

    cluster.start_node(places.home)
    cluster.wait_until(lambda: partition in cluster.leaders(), "the home is back")
    assert [calls.value(key) for key in places.keys] == [None] * 3, "nothing of it is left"
