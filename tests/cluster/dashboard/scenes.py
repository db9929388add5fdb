"""Faults of a real cluster, and what its dashboard must show: for the test, and for the pictures in docs/img."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage

from kvstore.partition.config import PartitionConfig
from kvstore.partition.state import rows
from kvstore.partition.state.engine_rocks import RocksEngine
from tests.cluster.harness import Cluster
from tests.commands import Done, kvstore

KEYS = 400
ASKED = "n1"
"""The node whose dashboard is read. No scene damages it."""
P1, P2 = "p1", "p2"
DAMAGED_EVERY = 2
"""One of this many rows is removed from a replica's state without the store's knowledge."""


@dataclass(frozen=True)
class Shown:
    """The texts that the page must contain: the state in one line, the reason, and the next step."""

    texts: tuple[str, ...]
    node: str = ASKED
    ledgers: tuple[str, ...] = ("Read from the metadata store just now.", "OPEN", "n1-")
    """The texts on the page of the ledgers of P1."""


Scene = Callable[[Cluster], AbstractContextManager[Shown]]


def command(cluster: Cluster, *words: str) -> Done:
    """Run a command of an operator. Raises AssertionError with its output if it fails."""
    at = ("--server", cluster.file.node(ASKED).grpc)
    done = kvstore(*words, *at)
    assert done.returncode == 0, done.stderr
    return done


def fill(cluster: Cluster) -> None:
    """Write some keys and read them, so that the dashboard shows figures."""
    cluster.wait_led()
    client = cluster.redis(ASKED, socket_timeout=30)
    for number in range(KEYS):
        client.set(f"k{number}", number)
    for number in range(KEYS):
        client.get(f"k{number}")


@contextmanager
def all_well(cluster: Cluster) -> Iterator[Shown]:
    fill(cluster)
    yield Shown(("Healthy: 3 nodes, 3 partitions, all served", "client batches: p50, p99"))


@contextmanager
def dead_node(cluster: Cluster) -> Iterator[Shown]:
    cluster.kill("n3")
    cluster.wait_led(by_other_than="n3")
    try:
        yield Shown(
            (
                "Degraded, all partitions served, ",
                "refuses connections",
                "; it has 3 replicas",
                "Next: start n3, or restart it if its process hangs; see its log",
                "no answer: refuses connections",
                "n3: down",
                "2 of 3 bookies accept writes, but each entry should have 3 copies",
            )
        )
    finally:
        cluster.start_node("n3")
    cluster.wait_ready()


@contextmanager
def metadata_store_away(cluster: Cluster) -> Iterator[Shown]:
    cluster.pause_zookeeper()
    try:
        yield Shown(
            (
                "Degraded, all partitions served, ",
                "no node reaches it; their knowledge is ",
                "Clients are still served, but no leader, ledger or bookie can be replaced",
                f"Next: start ZooKeeper at {cluster.file.zookeeper}",
                "suspended, read ",
            ),
            ledgers=("The metadata store is unavailable: this is the leader's present view of its log.", "OPEN", "n1-"),
        )
    finally:
        cluster.resume_zookeeper()
    cluster.wait_ready()


@contextmanager
def full_disk(cluster: Cluster) -> Iterator[Shown]:
    """Make a disk appear to have no more free bytes than the bookie must leave."""
    config = Path(cluster.file.node("n3").config)
    before = config.read_text()
    cluster.terminate("n3")
    config.write_text(f"{before}\n[storage]\nreserve_bytes = {disk_usage(config.parent).total}\n")
    cluster.start_node("n3")
    cluster.wait_ready()
    try:
        yield Shown(
            ("it is read-only because its disk is full: ", "free space on its disk, or add a bookie", "read-only")
        )
    finally:
        cluster.terminate("n3")
        config.write_text(before)
        cluster.start_node("n3")
    cluster.wait_ready()


@contextmanager
def stuck_move(cluster: Cluster) -> Iterator[Shown]:
    """Remove rows from a replica that sends the source's pages, like a disk whose damage no digest has found."""
    fill(cluster)
    document = json.loads(command(cluster, "ring", "show", "--json").stdout)
    [source] = [each for each in document["partitions"] if each["id"] == P1]
    # The ring prefers the first: another that leads hands the lead back. The target asks the next for pages, first of
    # all.
    leader, victim, *_ = source["replicas"]
    cluster.wait_until(lambda: cluster.leaders().get(P1) == leader, f"{leader} leads {P1}")
    cluster.wait_until(lambda: len({each["seq"] for each in stands(cluster, P1)}) == 1, "the replicas have it all")
    cluster.terminate(victim)
    (engine,) = (path for path in cluster.directory.glob(f"data/**/partitions/{P1}/engine") if victim in path.parts)
    take_rows(engine)
    cluster.start_node(victim)
    cluster.wait_ready()
    cluster.wait_until(lambda: cluster.leaders().get(P1) == leader, "the same leader")
    command(cluster, "ring", "move", P2, "--source", P1, "--share", "0.1")
    yield Shown(
        (
            ", p1 → p2",
            "no step has succeeded for ",
            "differ from two counts of the range",
            ", run kvstore fsck, and read its target's log",
            "copying, stuck",
        ),
        node=leader,
    )
    command(cluster, "ring", "cancel")


def stands(cluster: Cluster, partition: str) -> list[dict[str, object]]:
    """Return the reports of the replicas."""
    return [cluster.status(node)["partitions"][partition] for node in cluster.ids]


def take_rows(place: Path) -> None:
    """Remove rows from the state of a node that is down. The meta row still counts them."""
    config = PartitionConfig()
    engine = RocksEngine(str(place), write_buffer_bytes=config.write_buffer_bytes)
    batch = engine.batch()
    for number, (row_key, _) in enumerate(list(engine.iterate(*rows.ALL_DATA))):
        if number % DAMAGED_EVERY == 0:
            batch.delete(row_key)
    engine.write(batch)
    engine.close()


SCENES: dict[str, Scene] = {
    "healthy": all_well,
    "node-dead": dead_node,
    "metadata-store-away": metadata_store_away,
    "disk-full": full_disk,
    "move-stuck": stuck_move,
}
"""The scenes in their order. The last one leaves a damaged replica behind."""
