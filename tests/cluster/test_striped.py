"""A striped cluster of real processes, 5/3/2 on five nodes. A leader is killed together with its bookie, whose disk is
lost. No acknowledged write is lost, and the copies are recreated within the configured rate. The log shows how much of
the rate was used: `pytest tests/cluster/test_striped.py -n 0 --log-cli-level=INFO`."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.harness import Cluster, running_cluster
from tests.cluster.test_kill import counting, wait_going_on
from tests.commands import Done, kvstore

pytestmark = [pytest.mark.cluster]

log = logging.getLogger(__name__)

RATE = 200_000
VALUE = "v" * 50_000
KEYS = 60
WHOLE_S = 150.0
SETTINGS = (
    "log.quorum.ensemble=5",
    "log.quorum.write=3",
    "log.quorum.ack=2",
    f"autorecovery.bytes_per_s={RATE}",
    "autorecovery.lost_bookie_delay_s=2",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("striped")
    with running_cluster(directory, nodes=5, partitions=2, settings=SETTINGS) as started:
        yield started


def on(cluster: Cluster, *arguments: str) -> Done:
    return kvstore(*arguments, "--data-dir", str(cluster.local.data_dir))


def document(cluster: Cluster, *arguments: str) -> Any:
    answer = on(cluster, *arguments, "--json")
    assert answer.stdout, answer.stderr
    return json.loads(answer.stdout)


def ledgers(cluster: Cluster) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = document(cluster, "ledger", "list")
    return found


def naming(cluster: Cluster, bookie: str) -> list[int]:
    return [each["id"] for each in ledgers(cluster) if bookie in each["bookies"]]


def wait_wide(cluster: Cluster) -> None:
    """Wait until all logs use the full ensemble. They begin with the bookies that are registered first."""

    def is_wide() -> bool:
        return {each["quorum"] for each in ledgers(cluster) if each["state"] == "OPEN"} == {"5/3/2"}

    cluster.wait_until(is_wide, "the open ledgers are striped over all five")


def test_nothing_is_lost_when_a_leader_and_its_disk_are_lost(cluster: Cluster) -> None:
    wait_wide(cluster)
    for number in range(KEYS):
        cluster.redis("n1").set(f"k{number}", f"{number}{VALUE}")
    victim = cluster.wait_led()["p1"]
    lost = next(each["id"] for each in document(cluster, "bookie", "list") if each["id"].startswith(f"{victim}-"))
    others = [node for node in cluster.ids if node != victim]
    with counting(cluster, "striped", *others) as counters:
        cluster.kill(victim)
        wait_going_on(cluster, counters)
        shutil.rmtree(Path(cluster.file.node(victim).data_dir) / "bookie")
        cluster.start_node(victim)
        cluster.wait_ready(victim)
        wait_wide(cluster)
        wait_going_on(cluster, counters)
    cluster.wait_until(lambda: not naming(cluster, lost), "no ledger names what is lost", WHOLE_S)
    cluster.wait_until(lambda: not document(cluster, "autorecovery", "list"), "no ledger is marked", WHOLE_S)
    cluster.wait_succeeds("fsck")
    for number in range(KEYS):
        assert cluster.redis("n2").get(f"k{number}") == f"{number}{VALUE}".encode()
    said = {node: cluster.status(node)["autorecovery"] for node in cluster.ids}
    assert sum(each["copies_made"] for each in said.values()) > 0
    for node, each in said.items():
        within = RATE * each["paced_seconds"]
        assert each["paced_bytes"] <= within * 1.001 + RATE / 1_000, f"{node}: {each}"
        log.info("%s: %d copies; %d of at most %d bytes", node, each["copies_made"], each["paced_bytes"], within)
