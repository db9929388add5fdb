"""Strikes a simulated cluster with faults and undoes each a little later. Faults compose: a plan is any set of them,
and several may be active at once. The promises bound them: the disks of at most one machine are wiped or
damaged in a run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any

from tests.sim.cluster import Cluster
from tests.sim.judges.probes import declare
from tests.sim.nodes import Node

Fault = Callable[["Chaos"], Awaitable[None]]
FAULTS: dict[str, Fault] = {}


def fault(work: Fault) -> Fault:
    """Add the fault to FAULTS by its name."""
    name = work.__name__
    declare(f"fault.{name}")
    FAULTS[name] = work
    return work


class Chaos:
    """Strikes for a given time, then waits until all faults are undone."""

    def __init__(self, cluster: Cluster, random: Random, enabled: list[str], pace_s: float) -> None:
        self.cluster, self.random = cluster, random
        self._enabled, self._pace_s = enabled, pace_s
        self._busy: set[str] = set()
        """Nodes that a fault is using."""
        self._is_all_busy = False
        self.struck: list[tuple[float, str]] = []

    async def run(self, duration_s: float) -> None:
        """Strike at random moments for `duration_s`."""
        loop = asyncio.get_running_loop()
        end = loop.time() + duration_s
        tasks = []
        while self._enabled:
            await asyncio.sleep(self.random.expovariate(1 / self._pace_s))
            if loop.time() >= end:
                break
            tasks.append(self.cluster.spawn(self._strike(self.random.choice(self._enabled)), name="fault"))
        for task in tasks:
            await task

    async def _strike(self, name: str) -> None:
        self.struck.append((asyncio.get_running_loop().time(), name))
        self.cluster.world.trace.event("chaos", "fault", name)
        await FAULTS[name](self)

    # ── what faults use ───────────────────────────────────────────────────────────────────────────────────────────────

    def a_node(self, *, leading: bool | None = None) -> Node | None:
        """Return a running node that no other fault is using. With `leading`, prefer a node that leads."""
        if self._is_all_busy:
            return None
        free = [node for node in self.cluster.nodes if node.name not in self._busy and node.is_running]
        leaders = [node for node in free if node.leads]
        chosen = leaders if leading and leaders else free
        return self.random.choice(chosen) if chosen else None

    def a_machine(self) -> list[Node]:
        """Return all nodes of a machine, mostly one. Empty if there is none on which all nodes run without a fault."""
        node = self.a_node()
        found = [] if node is None else self.cluster.machine(node)
        return found if all(each.name not in self._busy and each.is_running for each in found) else []

    async def hold(self, node: Node, work: Awaitable[Any]) -> None:
        """Do `work` on a node while no other fault touches the node."""
        await self.hold_these([node], work)

    async def hold_these(self, nodes: Sequence[Node], work: Awaitable[Any]) -> None:
        """Do `work` on some nodes while no other fault touches these nodes."""
        names = {node.name for node in nodes}
        self._busy |= names
        try:
            await work
        finally:
            self._busy -= names

    async def hold_all(self, work: Awaitable[Any]) -> None:
        """Do `work` on all nodes while no other fault touches any node."""
        self._is_all_busy = True
        try:
            await work
        finally:
            self._is_all_busy = False

    def a_pause(self, least: float, most: float) -> Awaitable[None]:
        """Sleep for a random time between the two bounds, in seconds."""
        return asyncio.sleep(self.random.uniform(least, most))

    def may_lose_data_of(self, node: Node) -> bool:
        """Return True for the nodes of one machine per run: the store promises to survive the loss of its disks."""
        if self.cluster.lossy is None:
            self.cluster.lossy = node
        return node in self.cluster.machine(self.cluster.lossy)

    @property
    def is_free(self) -> bool:
        """Return True if no fault is using a node."""
        return not self._is_all_busy and not self._busy
