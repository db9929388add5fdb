"""Faults of machines: processes, disks and clocks. faults_around.py has the faults of their environment; FAULTS has
all."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from kvstore.bookie.directories.places import PLACE
from kvstore.env.liveness.evidence import SILENCE_S
from tests.sim.judges.probes import probe
from tests.sim.nodes import Node
from tests.sim.strikes import faults_around as faults_around
from tests.sim.strikes import restores as restores
from tests.sim.strikes.chaos import FAULTS as FAULTS
from tests.sim.strikes.chaos import Chaos as Chaos
from tests.sim.strikes.chaos import fault
from tests.sim.strikes.damage import damage

EXCHANGED_S = 3.0
"""Seconds until a disk is replaced: the node must have started without it before."""
WRITABLE_S, LOOK_S = 3.0, 0.1
"""Maximum time in seconds until a bookie takes adds after space is free on its disk, and the interval of the checks."""

# ── processes ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _down_and_up(chaos: Chaos, *nodes: Node, **how: bool) -> None:
    for node in nodes:
        node.crash(**how)
    await chaos.a_pause(0.01, 3.0)
    for node in nodes:
        node.start()


@fault
async def kill(chaos: Chaos) -> None:
    """kill -9 of one node, which restarts soon."""
    if (node := chaos.a_node()) is not None:
        probe("fault.kill")
        await chaos.hold(node, _down_and_up(chaos, node))


@fault
async def kill_leader(chaos: Chaos) -> None:
    """kill -9 of a leading node, which restarts soon."""
    if (node := chaos.a_node(leading=True)) is not None:
        probe("fault.kill_leader")
        await chaos.hold(node, _down_and_up(chaos, node))


@fault
async def power_cut(chaos: Chaos) -> None:
    """A machine loses its unsynced data. Its peers see silence, not a reset."""
    if nodes := chaos.a_machine():
        probe("fault.power_cut")
        await chaos.hold_these(nodes, _down_and_up(chaos, *nodes, power=True, silent=chaos.random.random() < 0.7))


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
    """SIGSTOP for less than a session timeout."""
    if (node := chaos.a_node()) is not None:
        probe("fault.pause")
        await chaos.hold(node, _sleep_and_wake(chaos, node, chaos.random.uniform(0.05, 2.0)))


@fault
async def pause_leader_beyond_its_session(chaos: Chaos) -> None:
    """SIGSTOP until another node leads."""
    if (node := chaos.a_node(leading=True)) is not None:
        probe("fault.pause_leader_beyond_its_session")
        session_s = chaos.cluster.knobs.session_s
        await chaos.hold(node, _sleep_and_wake(chaos, node, session_s + chaos.random.uniform(0.2, 3.0)))


# docs/protocol.md P45
@fault
async def blocked_loop(chaos: Chaos) -> None:
    """A node's event loop is blocked while its session is kept alive, for longer than the liveness evidence allows."""
    if (node := chaos.a_node(leading=True)) is not None:
        probe("fault.blocked_loop")

        async def block() -> None:
            node.block()
            await asyncio.sleep(SILENCE_S + chaos.random.uniform(-1.0, 4.0))
            node.resume()
            await chaos.a_pause(0.0, 0.5)

        await chaos.hold(node, block())


# docs/protocol.md P45
@fault
async def hung_disk(chaos: Chaos) -> None:
    """The disk of a node, or one directory of several, completes no writes for a while."""
    if (node := chaos.a_node(leading=chaos.random.random() < 0.5)) is not None:
        probe("fault.hung_disk")

        async def hang() -> None:
            node.sim.hang(chaos.random.choice(("", *node.journal_dirs)))
            await asyncio.sleep(SILENCE_S + chaos.random.uniform(-1.0, 4.0))
            node.disk.thaw()
            if has_failed_directory(node):
                node.crash()
                node.start()

        await chaos.hold(node, hang())


# docs/protocol.md P41, P46
@fault
async def wedged_engine(chaos: Chaos) -> None:
    """A node's engines complete no flush and take no more rows for a while. The disk works, and nothing fails."""
    if (node := chaos.a_node(leading=chaos.random.random() < 0.7)) is not None:
        probe("fault.wedged_engine")

        async def wedge() -> None:
            node.engines.are_wedged = True
            await chaos.a_pause(0.5, 12.0)
            node.engines.are_wedged = False

        await chaos.hold(node, wedge())


@fault
async def hidden_pause(chaos: Chaos) -> None:
    """A machine and its clocks stop for as long as the store promises to tolerate within one lease."""
    if (node := chaos.a_node(leading=chaos.random.random() < 0.7)) is not None:
        probe("fault.hidden_pause")
        config = chaos.cluster.knobs.partition

        async def stand_still() -> None:
            node.pause(hidden=True)
            await asyncio.sleep(chaos.random.choice((0.3, 1.0)) * config.hidden_pause_ms / 1000)
            node.resume()
            await asyncio.sleep(1.1 * config.lease_ms / 1000)  # the next pause falls into another lease

        await chaos.hold(node, stand_still())


async def _stop_and_start(chaos: Chaos, node: Node) -> None:
    await node.stop()
    await chaos.a_pause(0.0, 1.0)
    node.start()


@fault
async def hand_over(chaos: Chaos) -> None:
    """Stop a node gracefully and start it again."""
    if (node := chaos.a_node()) is not None:
        probe("fault.hand_over")
        await chaos.hold(node, _stop_and_start(chaos, node))


@fault
async def rolling_restart(chaos: Chaos) -> None:
    """Stop each node in turn gracefully and start it again."""
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
    """A machine returns with empty disks, only while all other machines are healthy."""
    nodes = chaos.a_machine()
    if not nodes or not chaos.is_free or not chaos.may_lose_data_of(nodes[0]):
        return
    probe("fault.wipe")

    async def replace_disk() -> None:
        for node in nodes:
            node.crash()
            node.wipe()
        await chaos.a_pause(0.01, 2.0)
        for node in nodes:
            node.start()
        await chaos.a_pause(2.0, 4.0)

    await chaos.hold_all(replace_disk())


@fault
async def damaged_replica(chaos: Chaos) -> None:
    """The state of a replica, possibly the leader, begins to differ from its log. Only its checksum differs: its
    answers stay right until it is detected, so that everything else can be judged."""
    node = chaos.a_node()
    if node is None or not chaos.may_lose_data_of(node):
        return
    partition = chaos.random.choice(chaos.cluster.partitions)
    replica = node.replica(partition)
    takes_writes = not node.engines.refusal and (replica is None or replica.state.engine.stopped is None)
    if replica is not None and replica.state.position is not None and takes_writes:
        probe("fault.damaged_replica")
        damage(node, partition)


async def _is_up_within(node: Node, seconds: float) -> bool:
    """Return True if the started node is up within `seconds`."""
    for _ in range(int(seconds / LOOK_S)):
        if node.served is not None:
            return True
        await asyncio.sleep(LOOK_S)
    return False


@fault
async def directory_dies(chaos: Chaos) -> None:
    """One of a bookie's several disks breaks while the bookie runs or is down. Later its operator declares it lost,
    and sometimes mounts a new disk in its place."""
    node = chaos.a_node()
    if node is None:
        return
    left = [each for each in node.journal_dirs if each not in node.lost_dirs]
    # A bookie cannot continue with a new directory that is not in use yet.
    used = [each for each in left if node.disk.exists(f"{each}/{PLACE}")]
    if len(used) < 2 or not chaos.may_lose_data_of(node):
        return
    probe("fault.directory_dies")
    path = chaos.random.choice(left)

    async def die_and_start_without() -> None:
        if chaos.random.random() < 0.3:
            node.crash(power=chaos.random.random() < 0.5)
        node.disk.die(path)
        await chaos.a_pause(0.2, 3.0)
        node.crash(power=chaos.random.random() < 0.5)
        node.declare_lost((*node.lost_dirs, path))
        await chaos.a_pause(0.0, 1.0)
        node.start()
        if chaos.random.random() < 0.3:
            await chaos.a_pause(0.0, 0.1)  # and is killed in the middle
            node.crash(power=chaos.random.random() < 0.5)
            node.start()
        if chaos.random.random() < 0.6 and await _is_up_within(node, EXCHANGED_S):
            await chaos.a_pause(0.0, 2.0)
            node.crash(power=chaos.random.random() < 0.5)
            node.disk.exchange(path)
            node.declare_lost(tuple(each for each in node.lost_dirs if each != path))
            node.start()

    await chaos.hold(node, die_and_start_without())


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
    """A sync fails: the node must end itself, or continue without one directory of several, until it restarts."""
    node = chaos.a_node()
    if node is None:
        return

    async def fail_and_restart() -> None:
        node.disk.fail_sync(chaos.random.randint(1, 5))
        await chaos.a_pause(0.5, 2.0)
        node.disk.fail_sync(0)  # if no sync has happened
        if not node.is_running or has_failed_directory(node):
            probe("fault.failing_sync")
            node.crash()
            node.start()

    await chaos.hold(node, fail_and_restart())


def has_failed_directory(node: Node) -> bool:
    bookie = node.served.bookie if node.served is not None else None
    return bookie is not None and bookie.statistics()["directories_failed"] > 0


@fault
async def full_disk(chaos: Chaos) -> None:
    """A disk has no free space for a while."""
    node = chaos.random.choice(chaos.cluster.nodes)
    probe("fault.full_disk")
    capacity = node.disk.config.capacity_bytes
    used = capacity - node.disk.free_bytes()
    node.disk.set_capacity(used + chaos.random.randint(0, 8 * chaos.cluster.knobs.segment_bytes))
    await chaos.a_pause(0.5, 5.0)
    node.disk.set_capacity(capacity)


@fault
async def inodes_used_up(chaos: Chaos) -> None:
    """No file can be created on a node's disk for a while, although bytes are free. The node's engines take no
    write, and its bookie begins no segment."""
    if (node := chaos.a_node(leading=chaos.random.random() < 0.7)) is not None:
        probe("fault.inodes_used_up")
        node.use_up_inodes()
        await chaos.a_pause(0.5, 12.0)
        node.free_inodes()


@fault
async def quota_exceeded(chaos: Chaos) -> None:
    """No file on the disk of one node, or of all, takes new blocks for a while, and `statvfs` does not show it. No
    process ends because of that. Once the quota is raised, each bookie must accept writes without a restart."""
    random, cluster = chaos.random, chaos.cluster
    nodes = cluster.nodes if random.random() < 0.3 else [random.choice(cluster.nodes)]
    probe("fault.quota_exceeded")
    for node in nodes:
        node.exceed_quota()
    await chaos.a_pause(0.5, 12.0)
    for node in nodes:
        node.raise_quota()
    for name, message in cluster.world.fatals:
        if "quota" in message.lower():
            cluster.broken(f"B39 {name} ended because of a quota: {message}")
    for node in nodes:
        await _until_writable(chaos, node)


@fault
async def disk_filled_and_freed(chaos: Chaos) -> None:
    """The disks of one node, or of all, have little space left, until their bookies are full and for a while longer.
    Trimming may free some space. When space is free again, each bookie must accept writes without a restart."""
    random, segment_bytes = chaos.random, chaos.cluster.knobs.segment_bytes
    nodes = chaos.cluster.nodes if random.random() < 0.3 else [random.choice(chaos.cluster.nodes)]
    before = {node.name: node.disk.config.capacity_bytes for node in nodes}
    for node in nodes:
        used = before[node.name] - node.disk.free_bytes()
        node.disk.set_capacity(used + random.randint(4, 7) * segment_bytes)  # four segments are the reserve
    await chaos.a_pause(0.5, 10.0)
    if any(_is_readonly(node) for node in nodes):
        probe("fault.disk_filled_and_freed")
    for node in nodes:
        node.disk.set_capacity(before[node.name])
    for node in nodes:
        await _until_writable(chaos, node)


def _is_readonly(node: Node) -> bool:
    bookie = node.served.bookie if node.is_running and node.served is not None else None
    return bookie is not None and bookie.storage.is_readonly


def _has_capacity(node: Node) -> bool:
    """Return True if no other fault keeps files on its disk from growing."""
    return node.disk.free_bytes() > 1 << 30 and node.disk.has_inodes and not node.disk.refusals


async def _until_writable(chaos: Chaos, node: Node) -> None:
    """Report a broken rule if a process runs for WRITABLE_S with free disk space while its bookie stays read-only."""
    process, looks = node.sim.process, 0
    while _is_readonly(node) and node.sim.process is process and _has_capacity(node):
        looks += 1
        if looks > WRITABLE_S / LOOK_S:
            chaos.cluster.broken(f"B9 {node.name} is read-only {WRITABLE_S} s after its disk has free space")
            return
        await asyncio.sleep(LOOK_S)


@fault
async def flip_bits(chaos: Chaos) -> None:
    """Bits of a bookie's journal flip, on the disk and in the page cache. Sometimes the node then restarts."""
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


JUMPS_MS = (200, 3_000, 60_000, 600_000, 3_600_000)


@fault
async def clock_jumps(chaos: Chaos) -> None:
    """A server's date jumps by up to an hour, sometimes twice, and comes back. Fewer than half of the servers jump
    at a time."""
    clocks = [node.sim.clock for node in chaos.cluster.servers]
    if 2 * (sum(clock.is_stepped for clock in clocks) + 1) >= len(clocks):
        return
    clock = chaos.random.choice([clock for clock in clocks if not clock.is_stepped])
    probe("fault.clock_jumps")
    for _ in range(chaos.random.choice((1, 1, 2))):
        clock.step_wall(chaos.random.choice((-1, 1)) * chaos.random.choice(JUMPS_MS))
        await chaos.a_pause(0.5, 5.0)
    clock.set_right()


STEPS_MS = (2_500, 15_000, 60_000, 3_600_000, 365 * 86_400_000)


@fault
async def clocks_of_a_majority(chaos: Chaos) -> None:
    """The wall clocks of most servers, or of all, step together by up to a year, and come back. Meanwhile processes
    or machines restart one by one."""
    clocks = [node.sim.clock for node in chaos.cluster.servers]
    if any(clock.is_stepped for clock in clocks):
        return
    probe("fault.clocks_of_a_majority")
    by_ms = chaos.random.choice((-1, 1, 1)) * chaos.random.choice(STEPS_MS)
    stepped = chaos.random.sample(clocks, chaos.random.randint(len(clocks) // 2 + 1, len(clocks)))
    for clock in stepped:
        clock.step_wall(by_ms)
    for _ in range(chaos.random.choice((0, 1, 3))):
        await chaos.a_pause(0.5, 3.0)
        if (node := chaos.a_node()) is not None:
            await chaos.hold(node, _down_and_up(chaos, node, power=chaos.random.random() < 0.5))
    await chaos.a_pause(2.0, 8.0)
    for clock in stepped:
        clock.set_right()
