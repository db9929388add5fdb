"""What must be true at the end of a run."""

from __future__ import annotations

import asyncio

from tests.sim.cluster import Cluster
from tests.sim.witness import LogStates, Witness


async def judge(cluster: Cluster) -> None:
    await settled(cluster)
    for partition in cluster.partitions:
        states = LogStates(partition, cluster.logbook.log(partition))
        Witness(states).check(o for o in cluster.recorder.operations if o.partition == partition)
    cluster.check()


async def settled(cluster: Cluster) -> None:
    await asyncio.sleep(1)
