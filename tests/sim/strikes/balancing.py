"""The balancer of simulated clusters. It moves leads, replicas and ranges by itself while faults strike and users work.

Runs are short and their load is small. So a cluster with a balancer begins uneven (tests/sim/cluster.py), and the
balancer acts on small differences and lets a partition rest only briefly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kvstore.server.balance import judge, leads, ranges, record, survey
from kvstore.server.balance.balancer import Balancer
from kvstore.server.load import load, sampler
from tests.sim.cluster import Cluster
from tests.sim.nodes import Node
from tests.sim.strikes.knobs import NO_BALANCER, Knobs

STEPS_S_MAX = 6.0
"""Maximum time in seconds to wait for the first steps. Faults strike while the last one of them takes effect."""
ENDED_S_MAX = 90.0
"""Maximum time in seconds until the last replacement of a replica has ended. A newcomer without progress is given up
after 60 s."""


@contextmanager
def restless(knobs: Knobs) -> Iterator[None]:
    """Let balancers in the block make many steps."""
    with pytest.MonkeyPatch.context() as patch:
        if knobs.balances_blindly:
            patch.setattr(Balancer, "_balancing", property(lambda self: self._node.id))
            patch.setattr(survey, "_obstacles", lambda report, ring, loads: ())
        if knobs.is_balanced:
            for module in (judge, leads):
                patch.setattr(module, "WORK_MIN", 1.0)
            patch.setattr(judge, "HIGH", 1.05)
            patch.setattr(leads, "GAIN", 0.01)
            patch.setattr(sampler, "IDLE_S", 0.2)
            patch.setattr(load, "SAMPLES_MIN", 20)
            patch.setattr(record, "COOLDOWN_SETTLES", 2)
            patch.setattr(record, "BACK_SETTLES", 6)
            if knobs.balances_ranges:
                patch.setattr(ranges, "KEYS_MIN", 1)
                patch.setattr(ranges, "SHARE_HIGH", 1.25)
            else:
                patch.setattr(ranges, "RANGES_MAX", 0)
        yield


async def first_steps(cluster: Cluster) -> None:
    """Return when the balancer has made one or two steps, or after STEPS_S_MAX."""
    if not cluster.knobs.is_balanced:
        return
    loop = asyncio.get_running_loop()
    deadline, wanted = loop.time() + STEPS_S_MAX, cluster.world.fork("first steps").choice((1, 2))
    while loop.time() < deadline and sum(map(_steps, cluster.servers)) < wanted:  # noqa: ASYNC110 - counted by nodes
        await asyncio.sleep(0.1)


def _steps(node: Node) -> int:
    return node.served.balancer.steps if node.served is not None else 0


async def end_balancing(cluster: Cluster) -> None:
    """End all balancers for good, and return when the ring has no open replacement and only its replicas are left.
    Raises AssertionError after ENDED_S_MAX."""
    if not cluster.knobs.is_balanced:
        return
    loop = asyncio.get_running_loop()
    deadline = loop.time() + ENDED_S_MAX
    for node in cluster.servers:
        node.config = replace(node.config, balance=NO_BALANCER)
    for node in cluster.servers:
        while node.served is None:
            assert loop.time() < deadline, f"{node.name} does not start"
            await asyncio.sleep(0.1)
        await node.served.balancer.close()
    while left := list(_left(cluster)):
        assert loop.time() < deadline, f"H6 the balancer's steps do not end within {ENDED_S_MAX} s: {left}"
        await asyncio.sleep(0.1)


def _left(cluster: Cluster) -> Iterator[str]:
    """Yield the changes in flight, the open replacements, and the replicas on servers to which the ring gives none."""
    members = cluster.ring.partitions
    yield from (f"{each} is replacing {member.replacing}" for each, member in members.items() if member.replacing)
    for node in cluster.servers:
        if node.served is not None and node.served.changes._in_flight:
            yield f"{node.name} changes the ring"
        for partition, member in members.items():
            if node.id not in member.replicas and node.replica(partition) is not None:
                yield f"{partition} is still on {node.name}"
