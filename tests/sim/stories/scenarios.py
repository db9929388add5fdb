"""Directed stories of a simulated cluster: only the schedule is random, and one accident happens at a chosen step."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from dataclasses import replace
from typing import Any

from kvstore.partition.config import PartitionConfig
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Level, Op
from kvstore.types import PartitionId
from kvstore.wal.config import LogConfig
from tests.sim.clients import Identity, Worker
from tests.sim.cluster import Cluster
from tests.sim.judges import checks
from tests.sim.judges.operations import Operation, Status
from tests.sim.nodes import Node, small_journals
from tests.sim.run import TAIL, Only, all_serve, heal, until_broken
from tests.sim.strikes.knobs import Knobs
from tests.sim.watching import watching
from tests.sim.world.env import SimWorld
from tests.sim.world.loop import Process

P = PartitionId("p1")
QUIET = Knobs(nodes=3, partitions=1, session_s=3.0, search=True, power_cut_at_end=False)
TAKEOVER_S_MAX = 45.0
KEY = b"r1"
OTHER_KEY = b"r2"
Story = Callable[["Stage"], Coroutine[Any, Any, None]]


def knobs(
    *,
    lease_ms: int = 500,
    roll_entries: int = 250_000,
    retention_ms: int = 0,
    session_s: float = QUIET.session_s,
    **more: Any,
) -> Knobs:
    """Return calm knobs, with one partition on three nodes."""
    partition = PartitionConfig(lease_ms=lease_ms, flush_s=0.5, trim_s=1.0, retention_ms=retention_ms, **more)
    return replace(
        QUIET, session_s=session_s, partition=partition, log=LogConfig(roll_entries=roll_entries, check_every_s=0.3)
    )


def play(story: Story, chosen: Knobs, seed: int = 1) -> SimWorld:
    """Start a cluster, run the story, repair what it leaves behind, and judge the run. Raises the failure."""
    with SimWorld(seed) as world:
        try:
            world.run(_staged(world, chosen, story))
        except BaseException as error:
            error.add_note(world.trace.tail(TAIL))
            raise
    return world


async def _staged(world: SimWorld, chosen: Knobs, story: Story) -> None:
    cluster = Cluster(world, chosen)
    stage = Stage(cluster)

    async def acts() -> None:
        await cluster.found()
        await all_serve(cluster, TAKEOVER_S_MAX)
        await story(stage)
        heal(cluster)
        await all_serve(cluster, TAKEOVER_S_MAX)
        await checks.judge(cluster, search=True)

    with watching(cluster.logbook, cluster.rules), small_journals(chosen):
        await until_broken(cluster, acts())


class Stage:
    """A cluster with short methods for the steps of a story."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.world = cluster, cluster.world
        self.identity = Identity(cluster.world.fork("stage"))
        self._workers = 0
        self._values = 0

    @property
    def leader(self) -> Node:
        """Return the serving node. If two nodes believe that they lead, return the one that has led for longer."""
        node = self.cluster.leader(P)
        assert node is not None, "no node leads"
        return node

    def others(self, node: Node) -> list[Node]:
        return [each for each in self.cluster.nodes if each is not node]

    async def ask(self, op: Op, node: Node, *, attempts: int = 1, timeout_s: float = 2.0) -> Operation:
        """Send one operation through one node, as a new client."""
        self._workers += 1
        worker = Worker(
            Only(self.cluster, node), f"client{self._workers}", self.world.fork(f"c{self._workers}"), self.identity
        )
        worker.attempts_max, worker.timeout_s = attempts, timeout_s
        return await worker.do(op, with_id=False)

    async def put(self, node: Node, key: bytes = KEY, *, attempts: int = 1) -> Operation:
        """Write a new value."""
        self._values += 1
        return await self.ask(commands.Put(key, b"value-%d" % self._values), node, attempts=attempts)

    async def get(
        self, node: Node, key: bytes = KEY, level: Level = Level.LINEARIZABLE, *, timeout_s: float = 2.0
    ) -> Operation:
        return await self.ask(commands.Get(key, level), node, timeout_s=timeout_s)

    async def put_until_done(self, node: Node, key: bytes = KEY) -> Operation:
        """Write until a write is acknowledged."""
        for _ in range(200):
            done = await self.put(node, key)
            if done.status is Status.OK:
                return done
            await asyncio.sleep(0.05)
        raise AssertionError(f"{node.name} accepts no write: {done}")

    def unseat(self, node: Node) -> None:
        """End the node's session, so that another node may lead, without notifying the node."""
        self.cluster.metadata.expire(node.name)

    async def until_led_by_another(self, node: Node) -> Node:
        """Wait until a node other than `node` serves."""
        async with asyncio.timeout(TAKEOVER_S_MAX):
            while True:
                for other in self.others(node):
                    if P in other.leads:
                        return other
                await asyncio.sleep(0.01)

    async def until(self, holds: Callable[[], bool], within_s: float = TAKEOVER_S_MAX) -> None:
        """Wait until a condition is true."""
        deadline = self.world.loop.time() + within_s
        while not holds():
            assert self.world.loop.time() < deadline, "the expected state was not reached"
            await asyncio.sleep(0.005)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.cluster.spawn(work, name="scene")


# ── accidents at a chosen step ────────────────────────────────────────────────────────────────────────────────────────


class Stepped:
    """Awaits a coroutine and counts its waits. `at_wait(count)` is called at each wait, in its process."""

    def __init__(self, work: Coroutine[Any, Any, Any], at_wait: Callable[[int], object]) -> None:
        self._work, self._at_wait = work, at_wait

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._work.__await__()
        count, sent, thrown = 0, None, None
        while True:
            try:
                waits_for = steps.send(sent) if thrown is None else steps.throw(thrown)
            except StopIteration as end:
                return end.value
            count += 1
            self._at_wait(count)
            try:
                sent, thrown = (yield waits_for), None
            except BaseException as error:  # noqa: BLE001 - passed on to whom it is meant for
                sent, thrown = None, error


class Countdown(deque[asyncio.Handle]):
    """A process's ready queue that calls `over` after `count` more callbacks."""

    def __init__(self, process: Process, count: int, over: Callable[[], object]) -> None:
        super().__init__(process.ready)
        self._left, self._over = count, over
        process.ready = self

    def popleft(self) -> asyncio.Handle:
        handle: Any = super().popleft()
        self._left -= 1
        if self._left == 0 and not handle._cancelled:
            callback = handle._callback

            def run_then(*args: Any) -> None:
                try:
                    callback(*args)
                finally:
                    self._over()

            handle._callback = run_then
        elif self._left == 0:
            self._left = 1
        return handle
