"""A simulated cluster: nodes with real code at every layer, a simulated metadata store, client endpoints, and rules
that are checked at every step."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from itertools import islice
from typing import Any

from sortedcontainers import SortedDict

from kvstore.env import Task
from kvstore.env.nursery import TaskNursery
from kvstore.ring import Ring
from kvstore.ring.placement import machine_count
from kvstore.ring.replicas import prefer_leader
from kvstore.server.cluster.bootstrap import found
from kvstore.server.cluster.ring_store import change_ring
from kvstore.server.processes import process_id
from kvstore.types import PartitionId, machine_of
from kvstore.wal.ledger_list import Listed
from tests.sim.asking.calls import EndpointNode
from tests.sim.judges.logbook import Logbook
from tests.sim.judges.operations import Recorder
from tests.sim.judges.rules import MetadataRules
from tests.sim.judges.starts import Starts
from tests.sim.nodes import Node
from tests.sim.strikes.knobs import Knobs
from tests.sim.world.env import SimWorld
from tests.sim.world.metadata import MetadataConfig, SimMetadata


def _server_name(number: int, knobs: Knobs) -> str:
    """Return the name of a server. The first server of each machine comes before any second one."""
    process, machine = divmod(number, knobs.machines or knobs.nodes)
    return process_id(f"n{machine + 1}", process + 1)


def _led_by_the_first(ring: Ring) -> Ring:
    for partition in ring.partitions:
        ring = prefer_leader(ring, partition, min(ring.partitions[partition].replicas))
    return ring


def _owned_by_the_first(ring: Ring) -> Ring:
    first, *others = sorted(ring.partitions)
    kept = {max(token for token, owner in ring.tokens.items() if owner == each): each for each in others}
    owners = SortedDict((token, kept.get(token, first)) for token in ring.tokens)
    return replace(ring, version=ring.version + 1, tokens=owners)


class RuleBroken(AssertionError):
    """A promise was broken at some step of the run."""


class Cluster:
    """Several nodes and the services that they share."""

    def __init__(self, world: SimWorld, knobs: Knobs) -> None:
        self.world, self.knobs = world, knobs
        self.network = world.network
        self.recorder = Recorder()
        self.logbook = Logbook(self.broken)
        self.rules = MetadataRules(self.logbook.last_confirmed, self.broken, self.logbook.close)
        self.rules.on_trim = self._check_trim
        config = MetadataConfig(session_timeout_s=knobs.session_s)
        self.metadata = SimMetadata(world.loop, world.fork("metadata"), config, world.trace)
        self.metadata.tree.observers.append(self.rules)
        self.starts = Starts(world.loop.time)
        self.metadata.tree.observers.append(self.starts)
        self.metadata.restore_observers.append(self.rules.restored)
        self.metadata.restore_observers.append(self.starts)  # a node without a high-water mark may read the older copy
        shared = knobs, self.metadata.connect, self.starts
        self.servers = [Node(world, _server_name(number, knobs), *shared) for number in range(knobs.nodes)]
        bookies = [Node(world, f"b{number + 1}", *shared, is_bookie=True) for number in range(knobs.bookies)]
        self.nodes = [*self.servers, *bookies]
        self.lossy: Node | None = None
        """The one node whose disk was wiped or damaged. The other nodes of its machine may be, too."""
        self.violations: list[str] = []
        self.on_violation = asyncio.Event()
        self._task_failed = world.task_failed
        world.task_failed = self._fail_at_once  # type: ignore[method-assign]
        self._nursery = TaskNursery("test", on_error=world.task_failed)

    @property
    def ring(self) -> Ring:
        """The ring in the metadata store."""
        assert self.rules.ring is not None
        return self.rules.ring

    @property
    def partitions(self) -> list[PartitionId]:
        return sorted(self.ring.partitions)

    @property
    def endpoints(self) -> list[EndpointNode]:
        return list(self.servers)

    def broken(self, message: str) -> None:
        """Report a broken rule: the run ends as soon as the test gets a turn."""
        self.violations.append(f"{message} (at {self.world.loop.time():.6f} s)")
        self.world.trace.event("rules", "broken", message)
        self.on_violation.set()

    def check(self) -> None:
        """Raise RuleBroken if a rule was broken so far, or SimulationFailed if a task ended with an error."""
        if self.violations:
            raise RuleBroken("\n".join(self.violations[:5]))
        self.world.check()

    def _fail_at_once(self, name: str, error: BaseException) -> None:
        self._task_failed(name, error)
        if self.world.errors:
            self.on_violation.set()

    def spawn(self, work: Coroutine[Any, Any, Any], *, name: str) -> Task:
        """Run a part of the test concurrently with the others."""
        return self._nursery.spawn(work, name=name)

    async def found(self) -> None:
        """Create the cluster in the empty metadata store and start all nodes. If a balancer works, the cluster begins
        uneven, as if servers and partitions had just joined: a few servers have all replicas, and the first partition
        owns nearly everything, or the first server may lead everything."""
        founder = await self.metadata.connect()
        servers = {node.id: node.zone for node in self.servers}
        replicas = min(3, machine_count(servers))
        if self.knobs.is_balanced:
            servers = dict(islice(servers.items(), replicas))
        await found(
            founder,
            servers,
            partitions=self.knobs.partitions,
            replicas=replicas,
            instance_id="simulated",
            hash=self.knobs.hash,
        )
        if self.knobs.balances_ranges:
            await change_ring(founder, _owned_by_the_first)
        elif self.knobs.is_balanced and self.world.fork("uneven").random() < 1 / 2:
            await change_ring(founder, _led_by_the_first)
        await founder.close()
        for node in self.nodes:
            node.start()

    def machine(self, node: Node) -> list[Node]:
        """Return all nodes of the node's machine, which lose power and disks together."""
        return [each for each in self.nodes if machine_of(each.name) == machine_of(node.name)]

    def leader(self, partition: PartitionId) -> Node | None:
        """Return a node that serves the partition now."""
        return next((node for node in self.nodes if partition in node.leads), None)

    def leader_other_than(self, node: Node) -> PartitionId | None:
        """Return a partition that another node serves, if there is one."""
        return next((each for other in self.nodes if other is not node for each in other.leads), None)

    # ── rules that need the nodes ─────────────────────────────────────────────────────────────────────────────────────

    def _check_trim(self, partition: PartitionId, dropped: list[Listed]) -> None:
        """Check that the synced state of two replicas contains everything that leaves the log."""
        last = dropped[-1].id
        end = (last, self.logbook.closed.get(last, -1))
        replicas = self.ring.partitions[partition].replicas
        durable = {node.name: node.engines.durable(partition) for node in self.nodes if node.id in replicas}
        held = [name for name, position in durable.items() if position is not None and position >= end]
        if len(held) < min(2, len(replicas)):
            self.broken(f"G6 {partition} is trimmed up to {end}, synced are only {durable}")
