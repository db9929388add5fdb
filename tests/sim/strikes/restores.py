"""The metadata store is restored to an older copy of itself, under running and stopped nodes, and later to its
latest copy. Everything acknowledged in between must be there in the end (docs/protocol.md B29, G24, G26)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from kvstore.meta import paths
from kvstore.meta.history.verified import VerifiedStore
from tests.sim.cluster import Cluster
from tests.sim.judges.probes import probe
from tests.sim.nodes import Node
from tests.sim.strikes.chaos import Chaos, fault
from tests.sim.world.metadata import Copy

MARKED_S_MAX = 10.0
"""Maximum time in seconds until the high-water marks rise while clients write."""
LOOK_S = 0.1


def _has_marked(node: Node, since: Copy) -> bool:
    """Return True if the node knows of a confirmed high-water mark that the copy does not have."""
    found = since.nodes.get(paths.high_water(node.name))
    store = node.served.store if node.served is not None else None
    assert store is None or isinstance(store, VerifiedStore)
    mark = store._verifier.mark if store is not None else None
    return mark is not None and mark.confirmed > (int(found.data) if found is not None else 0)


async def have_marked(cluster: Cluster, since: Copy, nodes: Iterable[Node]) -> bool:
    """Return True once each of these nodes has a confirmed high-water mark that the copy does not have; False if that
    takes too long."""
    wanted = list(nodes)
    for _ in range(int(MARKED_S_MAX / LOOK_S)):
        if await _can_be_restored(cluster) and all(_has_marked(node, since) for node in wanted):
            return True
        await asyncio.sleep(LOOK_S)
    return False


async def _can_be_restored(cluster: Cluster) -> bool:
    return cluster.metadata.is_up and not cluster.metadata.is_frozen


def restore(cluster: Cluster, copy: Copy) -> Copy:
    """Replace the metadata by a copy, as an operator does with all servers stopped. Returns the latest copy."""
    metadata = cluster.metadata
    if metadata.is_up:
        metadata.stop()
    latest = metadata.copy()
    metadata.restore(copy)
    metadata.start()
    return latest


async def started_one_by_one(chaos: Chaos, nodes: Sequence[Node]) -> None:
    """Start the nodes one by one in any order."""
    for node in chaos.random.sample(nodes, len(nodes)):
        await chaos.a_pause(0.0, 1.5)
        node.start()


@fault
async def older_metadata(chaos: Chaos) -> None:
    """Sometimes one node is down from the copy on and knows of nothing later. It may be the first node to return."""
    cluster, random = chaos.cluster, chaos.random
    if not chaos.is_free or not await _can_be_restored(cluster):
        return

    async def restore_and_put_back() -> None:
        older = cluster.metadata.copy()
        stale = [random.choice(cluster.nodes)] if random.random() < 0.6 else []
        for node in stale:
            node.crash()
        others = [node for node in cluster.nodes if node not in stale and node.is_running]
        if await have_marked(cluster, older, others) and await _can_be_restored(cluster):
            probe("fault.older_metadata")
            stopped = [*stale, *random.sample(others, random.randint(0, len(others)))]
            for node in stopped:
                node.crash()
            latest = restore(cluster, older)
            await started_one_by_one(chaos, stopped)
            await chaos.a_pause(1.0, 8.0)
            restore(cluster, latest)
        for node in cluster.nodes:
            node.start()

    await chaos.hold_all(restore_and_put_back())
