"""Faults that strike a simulated cluster, each undone a little later. They compose: a plan is any set of them, and
several may be under way at once. What the promises allow bounds them: at most one disk is wiped or damaged in a run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from random import Random
from typing import Any

from tests.sim.cluster import Cluster, Node
from tests.sim.probes import declare, probe

Fault = Callable[["Chaos"], Awaitable[None]]
FAULTS: dict[str, Fault] = {}
CLIENTS = tuple(f"{kind}{number}" for kind in ("register", "counter", "bank", "reader") for number in range(2))


def fault(work: Fault) -> Fault:
    """Adds it to FAULTS by its name."""
    name = work.__name__
    declare(f"fault.{name}")
    FAULTS[name] = work
    return work


class Chaos:
    """Strikes until its time is over, then waits until everything is undone."""

    def __init__(self, cluster: Cluster, random: Random, enabled: list[str], pace_s: float) -> None:
        self.cluster, self.random = cluster, random
        self._enabled, self._pace_s = enabled, pace_s
        self._busy: set[str] = set()
        """Nodes that a fault has in its hands."""
        self._is_all_busy = False
        self.struck: list[tuple[float, str]] = []

    async def run(self, duration_s: float) -> None:
        """Strike at random moments for so long."""
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
        """A running node that no other fault has in its hands; with `leading` one that leads, if there is one."""
        if self._is_all_busy:
            return None
        free = [node for node in self.cluster.nodes if node.name not in self._busy and node.is_running]
        leaders = [node for node in free if node.leads]
        chosen = leaders if leading and leaders else free
        return self.random.choice(chosen) if chosen else None

    async def hold(self, node: Node, work: Awaitable[Any]) -> None:
        """Do `work` on a node while no other fault touches it."""
        self._busy.add(node.name)
        try:
            await work
        finally:
            self._busy.discard(node.name)

    async def hold_all(self, work: Awaitable[Any]) -> None:
        """Do `work` on all nodes while no other fault touches any."""
        self._is_all_busy = True
        try:
            await work
        finally:
            self._is_all_busy = False

    def a_pause(self, least: float, most: float) -> Awaitable[None]:
        """Some time between the two."""
        return asyncio.sleep(self.random.uniform(least, most))

    def may_lose_data_of(self, node: Node) -> bool:
        """True for one node in a run: what the store promises is to survive the loss of one disk."""
        if self.cluster.lossy in (None, node):
            self.cluster.lossy = node
        return self.cluster.lossy is node

    @property
    def is_free(self) -> bool:
        """Does no fault have a node in its hands?"""
        return not self._is_all_busy and not self._busy


# ── processes ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _down_and_up(chaos: Chaos, node: Node, **how: bool) -> None:
    node.crash(**how)
    await chaos.a_pause(0.01, 3.0)
    node.start()


@fault
async def kill(chaos: Chaos) -> None:
    """kill -9 of one node; it comes back soon."""
    if (node := chaos.a_node()) is not None:
        probe("fault.kill")
        await chaos.hold(node, _down_and_up(chaos, node))


@fault
async def kill_leader(chaos: Chaos) -> None:
    """The same, of one that leads."""
    if (node := chaos.a_node(leading=True)) is not None:
        probe("fault.kill_leader")
        await chaos.hold(node, _down_and_up(chaos, node))


@fault
async def power_cut(chaos: Chaos) -> None:
    """A machine loses what it had not synced; its peers see silence, not a reset."""
    if (node := chaos.a_node()) is not None:
        probe("fault.power_cut")
        await chaos.hold(node, _down_and_up(chaos, node, power=True, silent=chaos.random.random() < 0.7))


async def _all_down_and_up(chaos: Chaos, *, power: bool) -> None:
    running = [node for node in chaos.cluster.nodes if node.is_running]
    for node in running:
        node.crash(power=power)
    for node in chaos.random.sample(running, len(running)):
        await chaos.a_pause(0.0, 0.8)
        node.start()


@fault
async def kill_all(chaos: Chaos) -> None:
    """kill -9 of all nodes at once."""
    if chaos.is_free:
        probe("fault.kill_all")
        await chaos.hold_all(_all_down_and_up(chaos, power=False))


@fault
async def power_cut_all(chaos: Chaos) -> None:
    """The power of all machines fails at once."""
    if chaos.is_free:
        probe("fault.power_cut_all")
        await chaos.hold_all(_all_down_and_up(chaos, power=True))


async def _sleep_and_wake(chaos: Chaos, node: Node, seconds: float) -> None:
    node.pause()
    await asyncio.sleep(seconds)
    node.resume()
    await chaos.a_pause(0.0, 0.5)


@fault
async def pause(chaos: Chaos) -> None:
    """SIGSTOP for a while shorter than a session."""
    if (node := chaos.a_node()) is not None:
        probe("fault.pause")
        await chaos.hold(node, _sleep_and_wake(chaos, node, chaos.random.uniform(0.05, 2.0)))


@fault
async def pause_leader_beyond_its_session(chaos: Chaos) -> None:
    """SIGSTOP until another leads."""
    if (node := chaos.a_node(leading=True)) is not None:
        probe("fault.pause_leader_beyond_its_session")
        session_s = chaos.cluster.knobs.session_s
        await chaos.hold(node, _sleep_and_wake(chaos, node, session_s + chaos.random.uniform(0.2, 3.0)))


async def _stop_and_start(chaos: Chaos, node: Node) -> None:
    await node.stop()
    await chaos.a_pause(0.0, 1.0)
    node.start()


@fault
async def hand_over(chaos: Chaos) -> None:
    """A node is asked to stop, and started again."""
    if (node := chaos.a_node()) is not None:
        probe("fault.hand_over")
        await chaos.hold(node, _stop_and_start(chaos, node))


@fault
async def rolling_restart(chaos: Chaos) -> None:
    """Each node in turn is asked to stop, and started again."""
    if not chaos.is_free:
        return
    probe("fault.rolling_restart")

    async def each_in_turn() -> None:
        for node in chaos.cluster.nodes:
            if node.is_running:
                await _stop_and_start(chaos, node)
                await chaos.a_pause(0.2, 1.0)

    await chaos.hold_all(each_in_turn())


@fault
async def wipe(chaos: Chaos) -> None:
    """A node comes back with an empty disk. Only while all others are well."""
    node = chaos.a_node()
    if node is None or not chaos.is_free or not chaos.may_lose_data_of(node):
        return
    probe("fault.wipe")

    async def replace_disk() -> None:
        node.crash()
        node.wipe()
        await chaos.a_pause(0.01, 2.0)
        node.start()
        await chaos.a_pause(2.0, 4.0)

    await chaos.hold_all(replace_disk())


# ── network ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _two(chaos: Chaos) -> tuple[str, str]:
    names = [node.name for node in chaos.cluster.nodes]
    one = chaos.random.choice(names)
    others = [*names, *CLIENTS] if chaos.random.random() < 0.3 else names
    return one, chaos.random.choice([name for name in others if name != one])


@fault
async def cut_a_link(chaos: Chaos) -> None:
    """Two nodes, or a node and a client, do not reach each other; perhaps in one direction only. All others do."""
    one, other = _two(chaos)
    probe("fault.cut_a_link")
    network = chaos.cluster.world.network
    if chaos.random.random() < 0.5:
        network.cut(one, other)
    else:
        network.cut_one_way(one, other)
    await chaos.a_pause(0.1, 8.0)
    network.heal(one, other)


@fault
async def isolate(chaos: Chaos) -> None:
    """A node is cut from the others, but neither from clients nor from the metadata store."""
    node = chaos.random.choice(chaos.cluster.nodes)
    probe("fault.isolate")
    network = chaos.cluster.world.network
    others = [each.name for each in chaos.cluster.nodes if each is not node]
    network.split([node.name], others)
    await chaos.a_pause(0.2, 8.0)
    for other in others:
        network.heal(node.name, other)


@fault
async def swizzle_clog(chaos: Chaos) -> None:
    """Links are clogged one by one, and freed in another order."""
    probe("fault.swizzle_clog")
    network, random = chaos.cluster.world.network, chaos.random
    names = [node.name for node in chaos.cluster.nodes]
    links = [(one, other) for one in names for other in names if one != other]
    chosen = random.sample(links, random.randint(1, len(links)))
    for one, other in chosen:
        network.cut_one_way(one, other)
        await chaos.a_pause(0.0, 0.3)
    for one, other in random.sample(chosen, len(chosen)):
        await chaos.a_pause(0.0, 0.3)
        network.heal(one, other)


@fault
async def slow_links(chaos: Chaos) -> None:
    """Everything to and from a node takes longer."""
    probe("fault.slow_links")
    node = chaos.random.choice(chaos.cluster.nodes).name
    others = [each.name for each in chaos.cluster.nodes if each.name != node]
    network, extra_s = chaos.cluster.world.network, chaos.random.uniform(0.005, 0.3)
    for other in others:
        network.slow(node, other, extra_s)
        network.slow(other, node, extra_s)
    await chaos.a_pause(0.5, 4.0)
    for other in others:
        network.slow(node, other, 0.0)
        network.slow(other, node, 0.0)


@fault
async def resets(chaos: Chaos) -> None:
    """A few connections break."""
    probe("fault.resets")
    for _ in range(chaos.random.randint(1, 4)):
        chaos.cluster.world.network.reset_random()
        await chaos.a_pause(0.0, 0.2)


# ── disks and clocks ──────────────────────────────────────────────────────────────────────────────────────────────────


@fault
async def slow_disk(chaos: Chaos) -> None:
    """Syncs of a node take up to a second."""
    node = chaos.random.choice(chaos.cluster.nodes)
    probe("fault.slow_disk")
    node.disk.slow_syncs((0.05, chaos.random.uniform(0.1, 1.0)))
    await chaos.a_pause(0.5, 4.0)
    normal = chaos.cluster.world.disk_config
    node.disk.config = replace(node.disk.config, sync_s=normal.sync_s, slow_chance=normal.slow_chance)


@fault
async def failing_sync(chaos: Chaos) -> None:
    """A sync fails: the node must end itself."""
    node = chaos.a_node()
    if node is None:
        return

    async def fail_and_restart() -> None:
        node.disk.fail_sync(chaos.random.randint(1, 5))
        await chaos.a_pause(0.5, 2.0)
        node.disk.fail_sync(0)  # if it has not come to that
        if not node.is_running:
            probe("fault.failing_sync")
            node.start()

    await chaos.hold(node, fail_and_restart())


@fault
async def full_disk(chaos: Chaos) -> None:
    """A disk has no more room for a while."""
    node = chaos.random.choice(chaos.cluster.nodes)
    probe("fault.full_disk")
    capacity = node.disk.config.capacity_bytes
    used = capacity - node.disk.free_bytes()
    node.disk.set_capacity(used + chaos.random.randint(0, 8 * chaos.cluster.knobs.segment_bytes))
    await chaos.a_pause(0.5, 5.0)
    node.disk.set_capacity(capacity)


@fault
async def flip_bits(chaos: Chaos) -> None:
    """Bits of a bookie's journal turn over, on the disk and in the page cache. Perhaps the node starts again then."""
    node = chaos.a_node()
    if node is None or not chaos.may_lose_data_of(node):
        return
    probe("fault.flip_bits")
    journals = sorted(path for path in node.disk.names.now.files if path.endswith(".journal"))
    for path in chaos.random.sample(journals, min(len(journals), 2)):
        written = len(node.disk.names.now.files[path].platter.data)
        for _ in range(chaos.random.choice((1, 1, 5))):
            if written:
                node.disk.flip_bit(path, chaos.random.randrange(8 * written))
    if chaos.random.random() < 0.5:
        await chaos.hold(node, _down_and_up(chaos, node))


@fault
async def wall_clock(chaos: Chaos) -> None:
    """A node's date jumps, and perhaps comes back."""
    probe("fault.wall_clock")
    clock = chaos.random.choice(chaos.cluster.nodes).sim.clock
    step_ms = chaos.random.choice((-3_600_000, -5_000, -200, 200, 5_000, 3_600_000))
    clock.step_wall(step_ms)
    await chaos.a_pause(0.5, 5.0)
    if chaos.random.random() < 0.5:
        clock.step_wall(-step_ms)


# ── the metadata store ────────────────────────────────────────────────────────────────────────────────────────────────


@fault
async def metadata_down(chaos: Chaos) -> None:
    """The metadata store crashes and comes back; sessions do not age meanwhile."""
    probe("fault.metadata_down")
    metadata = chaos.cluster.metadata
    if metadata.is_up and not metadata.is_frozen:
        metadata.stop()
        await chaos.a_pause(0.2, 8.0)
        metadata.start()


@fault
async def metadata_frozen(chaos: Chaos) -> None:
    """The metadata store is stopped by SIGSTOP, perhaps for longer than a session."""
    probe("fault.metadata_frozen")
    metadata = chaos.cluster.metadata
    if metadata.is_up and not metadata.is_frozen:
        metadata.freeze()
        await chaos.a_pause(0.2, 8.0)
        metadata.thaw()


@fault
async def metadata_cut(chaos: Chaos) -> None:
    """One node does not reach the metadata store, perhaps for longer than its session."""
    if (node := chaos.a_node(leading=chaos.random.random() < 0.7)) is not None:
        probe("fault.metadata_cut")
        chaos.cluster.metadata.cut(node.name, silently=chaos.random.random() < 0.5)
        await chaos.a_pause(0.2, 10.0)
        chaos.cluster.metadata.mend(node.name)


@fault
async def session_expiry(chaos: Chaos) -> None:
    """A session ends at the server, of one node or of all at once."""
    probe("fault.session_expiry")
    nodes = chaos.cluster.nodes
    for node in nodes if chaos.random.random() < 0.3 else [chaos.random.choice(nodes)]:
        chaos.cluster.metadata.expire(node.name)


@fault
async def metadata_trouble(chaos: Chaos) -> None:
    """Connections to the metadata store break while calls are under way."""
    probe("fault.metadata_trouble")
    chaos.cluster.metadata.trouble(chaos.random.choice((0.02, 0.1, 0.3)))
    await chaos.a_pause(0.5, 4.0)
    chaos.cluster.metadata.trouble(0.0)
