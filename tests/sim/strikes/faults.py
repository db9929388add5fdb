"""Faults of machines: their processes, disks and clocks. Those around them are in faults_around.py; FAULTS has all."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from kvstore.bookie.directories.places import PLACE
from kvstore.env.liveness.evidence import SILENCE_S
from tests.sim.cluster import Node
from tests.sim.judges.probes import probe
from tests.sim.strikes import faults_around as faults_around
from tests.sim.strikes import restores as restores
from tests.sim.strikes.chaos import FAULTS as FAULTS
from tests.sim.strikes.chaos import Chaos as Chaos
from tests.sim.strikes.chaos import fault
from tests.sim.strikes.damage import damage

EXCHANGED_S = 3.0
"""How long a disk waits to be exchanged: a node must have come up without it before."""
WRITABLE_S, LOOK_S = 3.0, 0.1
"""How soon after there is room on its disk a bookie takes adds; how often that is looked at."""

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


# docs/protocol.md P45
@fault
async def blocked_loop(chaos: Chaos) -> None:
    """The event loop of a node stands still while its session is kept alive, for longer than the evidence bears."""
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
    """The disk of a node, or that of one directory of several, completes no writes for a while."""
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
    """The engines of a node complete no flush and take no more rows for a while. Its disk works, and nothing fails."""
    if (node := chaos.a_node(leading=chaos.random.random() < 0.7)) is not None:
        probe("fault.wedged_engine")

        async def wedge() -> None:
            node.engines.are_wedged = True
            await chaos.a_pause(0.5, 12.0)
            node.engines.are_wedged = False

        await chaos.hold(node, wedge())


@fault
async def hidden_pause(chaos: Chaos) -> None:
    """A machine stands still, its clocks too, for as long as the store promises to bear within one lease."""
    if (node := chaos.a_node(leading=chaos.random.random() < 0.7)) is not None:
        probe("fault.hidden_pause")
        config = chaos.cluster.knobs.partition

        async def stand_still() -> None:
            node.pause(hidden=True)
            await asyncio.sleep(chaos.random.choice((0.3, 1.0)) * config.hidden_pause_ms / 1000)
            node.resume()
            await asyncio.sleep(1.1 * config.lease_ms / 1000)  # the next one falls into another lease

        await chaos.hold(node, stand_still())


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


@fault
async def damaged_replica(chaos: Chaos) -> None:
    """A replica's state, perhaps the leader's, comes to differ from its log's. Only its checksum does: what it answers
    until it is found out stays right, so that all else can be judged."""
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
    """Whether a node that was started is up so soon."""
    for _ in range(int(seconds / LOOK_S)):
        if node.served is not None:
            return True
        await asyncio.sleep(LOOK_S)
    return False


@fault
async def directory_dies(chaos: Chaos) -> None:
    """A disk of several that a bookie has breaks, while it runs or is down. Later its operator declares it lost, and
    perhaps mounts a new one there."""
    node = chaos.a_node()
    if node is None:
        return
    left = [each for each in node.journal_dirs if each not in node.lost_dirs]
    # One that is new and not in use yet is none that a bookie can go on with.
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
            await chaos.a_pause(0.0, 0.1)  # and is killed in the middle of that
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
    """A sync fails: the node must end itself, or go on without one directory of several, until it is started again."""
    node = chaos.a_node()
    if node is None:
        return

    async def fail_and_restart() -> None:
        node.disk.fail_sync(chaos.random.randint(1, 5))
        await chaos.a_pause(0.5, 2.0)
        node.disk.fail_sync(0)  # if it has not come to that
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
    """A disk has no more room for a while."""
    node = chaos.random.choice(chaos.cluster.nodes)
    probe("fault.full_disk")
    capacity = node.disk.config.capacity_bytes
    used = capacity - node.disk.free_bytes()
    node.disk.set_capacity(used + chaos.random.randint(0, 8 * chaos.cluster.knobs.segment_bytes))
    await chaos.a_pause(0.5, 5.0)
    node.disk.set_capacity(capacity)


@fault
async def inodes_used_up(chaos: Chaos) -> None:
    """No file can be made on a node's disk for a while, although bytes are free: its engines take no write, and its
    bookie begins no segment."""
    if (node := chaos.a_node(leading=chaos.random.random() < 0.7)) is not None:
        probe("fault.inodes_used_up")
        node.use_up_inodes()
        await chaos.a_pause(0.5, 12.0)
        node.free_inodes()


@fault
async def quota_exceeded(chaos: Chaos) -> None:
    """No file on the disk of a node, or of all, takes new blocks for a while, which `statvfs` does not show. No process
    ends by that, and without a restart each bookie must be written to once the quota is raised."""
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
            cluster.broken(f"B39 {name} has ended because of a quota: {message}")
    for node in nodes:
        await _until_writable(chaos, node)


@fault
async def disk_filled_and_freed(chaos: Chaos) -> None:
    """The disks of one node, or of all, have only a little room left, until their bookies are full and for a while
    longer. Trimming may free some; then there is room again, and without a restart each bookie must be written to."""
    random, segment_bytes = chaos.random, chaos.cluster.knobs.segment_bytes
    nodes = chaos.cluster.nodes if random.random() < 0.3 else [random.choice(chaos.cluster.nodes)]
    before = {node.name: node.disk.config.capacity_bytes for node in nodes}
    for node in nodes:
        used = before[node.name] - node.disk.free_bytes()
        node.disk.set_capacity(used + random.randint(4, 7) * segment_bytes)  # four are the reserve
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


def _has_room(node: Node) -> bool:
    """Return True if no other fault keeps files on its disk from growing."""
    return node.disk.free_bytes() > 1 << 30 and node.disk.has_inodes and not node.disk.refusals


async def _until_writable(chaos: Chaos, node: Node) -> None:
    """Break a rule if a process runs for WRITABLE_S with room on its disk and its bookie is read-only all the time."""
    process, looks = node.sim.process, 0
    while _is_readonly(node) and node.sim.process is process and _has_room(node):
        looks += 1
        if looks > WRITABLE_S / LOOK_S:
            chaos.cluster.broken(f"B9 {node.name} is read-only {WRITABLE_S} s after its disk has room")
            return
        await asyncio.sleep(LOOK_S)


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


JUMPS_MS = (200, 3_000, 60_000, 600_000, 3_600_000)


@fault
async def clock_jumps(chaos: Chaos) -> None:
    """A server's date jumps by up to an hour, perhaps twice, and comes back; of less than half of them at a time."""
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
    restart, or machines, one by one."""
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
