"""A replica whose state on disk differs from its log is outvoted by the others, set aside and rebuilt
(docs/protocol.md, P35)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from kvstore.partition.config import PartitionConfig
from kvstore.partition.state import rows
from kvstore.partition.state.engine_rocks import RocksEngine
from tests.cluster.harness import Cluster, running_cluster
from tests.commands import Done, kvstore

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
P1 = "p1"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path, partitions=1) as cluster:
        yield cluster


def damage(path: Path) -> None:
    """Change the state as if an entry had been applied wrongly."""
    config = PartitionConfig()
    engine = RocksEngine(str(path), write_buffer_bytes=config.write_buffer_bytes)
    meta = engine.get(rows.META_KEY)
    assert meta is not None
    found = rows.meta_of(meta)
    batch = engine.batch()
    batch.put(rows.META_KEY, rows.encode_meta(*found._replace(crc=found.crc ^ 1)))
    engine.write(batch)
    engine.close()


def trust(cluster: Cluster, replica: str) -> Done:
    return kvstore("partition", "trust", P1, "--replica", replica, "--yes", "--data-dir", str(cluster.local.data_dir))


def test_damaged_replica_is_rebuilt_while_the_others_serve(cluster: Cluster) -> None:
    client = cluster.redis("n1")
    for number in range(200):
        client.set(f"k{number}", number)
    bad = cluster.wait_led()[P1]
    other = next(node for node in cluster.ids if node != bad)
    cluster.terminate(bad)
    cluster.wait_until(lambda: cluster.leaders().get(P1) not in (None, bad), "another leads")
    (engine,) = (path for path in cluster.directory.glob(f"data/**/partitions/{P1}/engine") if bad in path.parts)
    damage(engine)
    cluster.start_node(bad)
    client = cluster.redis(other, socket_timeout=30)

    def is_set_aside() -> bool:
        with contextlib.suppress(redis.ResponseError):  # UNKNOWN: a leader may change here
            client.set("again", "v")
        return (engine.parent / "engine.damaged").exists()

    cluster.wait_until(is_set_aside, "the damaged copy is set aside")

    def is_well() -> bool:  # its page has no partitions until it is open
        replica = cluster.status(bad).get("partitions", {}).get(P1)
        return replica is not None and replica["failure"] is None

    cluster.wait_until(is_well, "it is well again")
    cluster.wait_ready()
    assert all(client.get(f"k{number}") == b"%d" % number for number in range(200))
    cluster.wait_until(lambda: "none does; got" in trust(cluster, bad).stderr, "nothing is in doubt any more")
