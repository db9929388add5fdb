"""Unauthenticated peers hold all capacity that they can get on every endpoint of every node at once, while clients,
links between nodes, probes and a takeover continue. Real processes, TLS and users on every endpoint.

KVSTORE_ATTACK_S sets the duration of the attack: 12 s by default, 60 s for the counts in docs/reference/faults.md. The
counts are in the log (`-o log_cli=true -o log_cli_level=INFO`). loadtest/bench/attacked.py measures latencies.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvstore.client import Client
from kvstore.env.accepting import UNKNOWN_PER_S, UNKNOWN_SAVED
from tests.cluster.access.attack import (
    COUNTED_LISTENERS,
    KEYS,
    LIMITS,
    Load,
    attacked,
    counted,
    page,
    redis_of,
    url_of,
)
from tests.cluster.harness import Cluster, running_cluster
from tests.waiting import PATIENCE_S

log = logging.getLogger(__name__)
pytestmark = [pytest.mark.cluster]

ATTACK_S = float(os.environ.get("KVSTORE_ATTACK_S", "12"))
HANDSHAKES = "process_handshakes_unknown_total"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("attack"), secure=True, settings=LIMITS) as started:
        yield started


def test_attack_on_every_endpoint_stops_no_client_no_probe_and_no_takeover(cluster: Cluster) -> None:
    with Client(url_of(cluster)) as store, closing(redis_of(cluster, "n1")) as client:
        for key in KEYS:
            store.put(key.encode(), b"1")
        since = time.monotonic()
        before = {each: counted(cluster, each, HANDSHAKES) for each in cluster.ids}
        with attacked(cluster):
            end = time.monotonic() + ATTACK_S
            with Load(cluster, client).running() as load:
                until(cluster, end - ATTACK_S / 2)
                cluster.wait_until(lambda: len(load.gets.took_s) >= len(KEYS), "every key is read before the takeover")
                failed = list(load.gets.failed)  # later calls wait for the takeover
                cluster.kill("n2")
                before["n2"] = 0.0
                cluster.wait_until(lambda: is_complete(cluster, "n1"), "n2's partitions have new leaders")
                led = len(load.gets.took_s)
                for key in KEYS:
                    store.put(key.encode(), b"2")
                cluster.start_node("n2")
                cluster.wait_until(lambda: is_complete(cluster, "n2"), "n2 is back, and knows every leader")
                until(cluster, end)
                cluster.wait_until(lambda: len(load.gets.took_s) >= led + len(KEYS), "every key is read after it")
                cluster.wait_until(
                    lambda: min(len(each.took_s) for each in load.others.values()) >= 3, "every probe has answers"
                )
            for key in KEYS:
                store.put(key.encode(), b"3")
            assert {client.get(key) for key in KEYS} == {b"3"}
            begun = {each: counted(cluster, each, HANDSHAKES) - before[each] for each in cluster.ids}
            took_s = time.monotonic() - since
    calls = {name: len(each.took_s) for name, each in load.others.items()}
    log.info(
        "calls: %d GETs, %s; handshakes of unknown networks in %.1f s: %s", len(load.gets.took_s), calls, took_s, begun
    )
    assert failed == []
    assert {name: each.failed for name, each in load.others.items()} == {name: [] for name in load.others}
    # The saved handshakes are given back once, when the network of the clients becomes known.
    assert max(begun.values()) <= COUNTED_LISTENERS * (2 * UNKNOWN_SAVED + UNKNOWN_PER_S * took_s)
    assert begun["n1"] >= COUNTED_LISTENERS, "the attackers reach every listener"


def until(cluster: Cluster, end: float) -> None:
    cluster.wait_until(lambda: time.monotonic() > end, "the time has passed", 2 * ATTACK_S + PATIENCE_S)


def is_complete(cluster: Cluster, node: str) -> bool:
    try:
        return page(cluster, node, "/clusterz") == 200
    except OSError:
        return False
