"""Simulated clusters whose servers start with two releases and end with one (docs/protocol.md, Versions)."""

from __future__ import annotations

import asyncio

from kvstore import versions
from kvstore.meta import paths
from kvstore.partition.state.entry import EntryKind
from kvstore.server.cluster.cluster_version import ClusterVersionStore
from tests.sim.cluster import Cluster
from tests.sim.judges.probes import declare, probe
from tests.sim.nodes import Node

declare("upgrade.back", "upgrade.done")


def older_ones(cluster: Cluster, count: int) -> list[Node]:
    """Let `count` servers start with the first release: the last servers, so that a server with the later release
    leads if there is one."""
    older = cluster.servers[len(cluster.servers) - count :]
    for node in older:
        node.can = versions.FIRST
    return older


async def upgrade(cluster: Cluster, older: list[Node], after_s: float) -> None:
    """Upgrade the servers one by one, and the first of several back and forth once. Until the last upgrade begins,
    no log may contain what the first release cannot read. A server that reads such a log, or learns of a rise, fails
    the run itself."""
    if not older:
        return
    await asyncio.sleep(after_s)
    steps = [(node, versions.LATEST) for node in older]
    if len(older) > 1:
        steps[1:1] = [(older[0], versions.FIRST), (older[0], versions.LATEST)]
    for node, can in steps:
        if any(each.can == versions.FIRST for each in older if each is not node):
            check_not_risen(cluster)
        node.can = can
        await node.stop()
        node.start()
        if can == versions.FIRST:
            probe("upgrade.back")
    probe("upgrade.done")


def check_not_risen(cluster: Cluster) -> None:
    """Raise AssertionError if a log claims a version later than the first."""
    for partition in cluster.partitions:
        for position, noted in cluster.logbook.entries.get(partition, {}).items():
            is_later = noted.entry.kinds == bytes((EntryKind.LOG_VERSION,))
            assert not is_later, f"V1 {partition} {position}: some server does not support its version"


async def all_risen(cluster: Cluster, within_s: float) -> None:
    """Return when every replica has found the last version in its log. Raises AssertionError."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while True:
        replicas = [(node, p, node.replica(p)) for node in cluster.servers for p in cluster.partitions]
        behind = [(node.name, p) for node, p, each in replicas if each and each.state.log_version < versions.LATEST]
        if not behind:
            return
        assert loop.time() < deadline, f"V4 after {within_s} s logs are written as before: {behind}"
        await asyncio.sleep(0.1)


# docs/protocol.md V1
async def written_back(cluster: Cluster, within_s: float) -> None:
    """Remove all versions from the metadata store, as an older copy would; return when it knows them again. Raises
    AssertionError."""
    loop = asyncio.get_running_loop()
    store = await cluster.metadata.connect()
    found, deadline = ClusterVersionStore(store), loop.time() + within_s
    await store.delete(paths.VERSION, -1)
    while (now := (await found.read()).version) < versions.LATEST:
        assert loop.time() < deadline, f"V1 after {within_s} s the version is {now}, and logs are by a later one"
        await asyncio.sleep(0.1)
    await store.close()
