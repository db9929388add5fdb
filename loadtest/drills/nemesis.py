"""The faults of a drill by seed: network cuts, pauses, kills, failing disks, wrong clocks and many clients, often
several at a time.

Each fault begins, lasts, and undoes itself. `FAULTS` names them all.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from random import Random

from kvstore.env.liveness.evidence import FORGIVEN_S, HOLD_FIRST_S, HOLD_MAX_S
from kvstore.env.liveness.watchdog import GAVE_UP, NOT_LIVE
from loadtest.drills.load import Load
from loadtest.drills.mixed import Endpoint, NotDone, Unknown
from loadtest.drills.net import CLIENTS, ZOOKEEPER, Cut, WiredCluster
from tests.cluster.unfit.quota import file_sizes_limited

LONGEST_S = 15.0
FILE_BYTES = 4_096
"""File size limit while files cannot grow: every file that grows is larger."""
AWAY = "away"
RATES = ("512kbit", "4mbit")
HICCUP_S = 0.1
PATIENCE_S = 90.0
"""Time limit of a repeated request. The longest fault and the recovery from it take less."""


class Field:
    """The cluster and its present faults."""

    def __init__(self, cluster: WiredCluster, random: Random, load: Load) -> None:
        self.cluster, self.random, self.load = cluster, random, load
        self.nodes = cluster.ids
        self._cuts: dict[int, set[Cut]] = {}
        self._hidden: set[str] = set()
        self._numbers = itertools.count()
        self._held: set[str] = set()
        """Processes that are stopped or down."""
        self.starting = asyncio.Lock()
        """Each start writes the cluster's file."""
        self.wrong: list[str] = []
        """Violations: events that must never happen."""
        self.unrepaired: list[str] = []
        """Nodes whose disks were lost and whose copies were not recreated in time, and what was missing last."""
        self.wiping = asyncio.Lock()
        """Held until the copies of one wiped disk are recreated, so that no other disk is lost before."""

    async def supervise(self) -> None:
        """Restart each node whose watchdog has ended its process (docs/protocol.md P45), as a supervisor does."""
        while True:
            await asyncio.sleep(1.0)
            for node in self.nodes:
                if not self.cluster.is_running(node) and self._gave_up(node):
                    async with self.starting:
                        await asyncio.to_thread(self.cluster.start_node, node)

    def _gave_up(self, node: str) -> bool:
        log = self.cluster.local.data_dir / "logs" / f"{node}.log"
        return GAVE_UP in log.read_text(errors="replace").rpartition("\n")[0].rpartition("\n")[2]

    def hold_s(self, since: float) -> float:
        """Return how long a node may stay without a metadata session although it works again (docs/protocol.md P45).

        Args:
            since: wall-clock time in seconds. A node whose watchdog ended its session later is held.
        """
        return max(map(partial(self._hold_s, since=since), self.nodes))

    def _hold_s(self, node: str, since: float) -> float:
        log = self.cluster.local.data_dir / "logs" / f"{node}.log"
        hold_s, failed_at = 0.0, 0.0
        for line in log.read_text(errors="replace").splitlines():
            if NOT_LIVE in line:
                before, failed_at = failed_at, time.mktime(time.strptime(line[:19], "%Y-%m-%d %H:%M:%S"))
                is_first = failed_at - before > FORGIVEN_S
                hold_s = HOLD_FIRST_S if is_first else min(HOLD_MAX_S, 2 * hold_s)
        return hold_s if failed_at >= since else 0.0

    def some_time(self) -> float:
        """Return a time in seconds: mostly a few, sometimes longer than a session timeout."""
        return min(LONGEST_S, 0.1 + self.random.expovariate(1 / 4))

    def a_long_time(self) -> float:
        """Return a time in seconds, longer than a cluster may need to continue without the faulty node."""
        return self.random.uniform(12.0, 25.0)

    def a_node(self, *, leading: bool = False) -> str:
        leaders = {node.grpc: node.id for node in self.cluster.file.nodes}
        led = [leaders.get(self.load.client.cluster.leader_of(each)) for each in self.load.partitions]
        return self.random.choice([each for each in led if each] if leading and any(led) else self.nodes)

    def others(self, node: str) -> list[str]:
        return [each for each in self.nodes if each != node]

    @asynccontextmanager
    async def cut(self, cuts: Iterable[Cut]) -> AsyncIterator[None]:
        number = next(self._numbers)
        self._cuts[number] = set(cuts)
        await self._apply()
        try:
            yield
        finally:
            del self._cuts[number]
            await self._apply()

    @asynccontextmanager
    async def hidden(self, node: str) -> AsyncIterator[None]:
        """Refuse all connections to the node, which still connects to others."""
        self._hidden.add(node)
        await self._apply()
        try:
            yield
        finally:
            self._hidden.discard(node)
            await self._apply()

    async def _apply(self) -> None:
        await asyncio.to_thread(self.cluster.network.cut, set().union(*self._cuts.values()), set(self._hidden))

    @asynccontextmanager
    async def holding(self, process: str) -> AsyncIterator[bool]:
        """Reserve the process for a fault. Yields False if another fault has it."""
        if process in self._held:
            yield False
            return
        self._held.add(process)
        try:
            yield True
        finally:
            self._held.discard(process)

    async def patiently(self, *words: bytes) -> object:
        """Return the first node's reply. Raises NotDone or Unknown if no node replies within PATIENCE_S."""
        until = time.perf_counter() + PATIENCE_S
        for node in itertools.cycle(self.nodes):
            endpoint = Endpoint(self.cluster.address(node, "resp"))
            try:
                return await endpoint.ask(words, timeout_s=5.0)
            except (NotDone, Unknown):
                if time.perf_counter() > until:
                    raise
                await asyncio.sleep(0.2)
            finally:
                endpoint.close()
        raise AssertionError("a cluster has nodes")

    def pid(self, process: str) -> int:
        found = self.cluster.file.zookeeper_pid if process == ZOOKEEPER else self.cluster.pid(process)
        assert found is not None
        return found


Fault = Callable[[Field], Awaitable[None]]
FAULTS: dict[str, Fault] = {}
ONE_ILL: set[str] = set()
"""Faults that leave two healthy nodes, which reach each other and the metadata store."""


def fault(work: Fault) -> Fault:
    FAULTS[work.__name__] = work
    return work


def one_ill(work: Fault) -> Fault:
    """Register a fault that leaves two healthy nodes, which reach each other and the metadata store."""
    ONE_ILL.add(work.__name__)
    return fault(work)


def both(one: Iterable[str], other: Iterable[str]) -> set[Cut]:
    """Return the cuts of both directions between two groups of processes."""
    pairs = list(itertools.product(one, other))
    return {*pairs, *((b, a) for a, b in pairs)}


async def _cut_for_a_while(field: Field, cuts: set[Cut], seconds: float | None = None) -> None:
    async with field.cut(cuts):
        await asyncio.sleep(seconds or field.some_time())


# ── networks ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@one_ill
async def cut_from_peers(field: Field) -> None:
    """Cut a node from the other nodes. ZooKeeper and clients still reach it."""
    node = field.a_node(leading=True)
    await _cut_for_a_while(field, both([node], field.others(node)))


@one_ill
async def cut_from_zookeeper(field: Field) -> None:
    node = field.a_node(leading=True)
    await _cut_for_a_while(field, both([node], [ZOOKEEPER]))


@one_ill
async def cut_from_all_but_clients(field: Field) -> None:
    node = field.a_node(leading=True)
    await _cut_for_a_while(field, both([node], [*field.others(node), ZOOKEEPER]))


@one_ill
async def cut_from_all(field: Field) -> None:
    node = field.a_node()
    await _cut_for_a_while(field, both([node], [*field.others(node), ZOOKEEPER, CLIENTS]))


@fault
async def mute(field: Field) -> None:
    """Drop everything that a node sends: requests arrive there, answers do not return."""
    node = field.a_node(leading=True)
    heard_by = [*field.others(node), *field.random.choice(([], [ZOOKEEPER], [CLIENTS], [ZOOKEEPER, CLIENTS]))]
    await _cut_for_a_while(field, {(node, each) for each in heard_by})


@fault
async def deaf(field: Field) -> None:
    """Drop everything that is sent to a node."""
    node = field.a_node(leading=True)
    unheard = [*field.others(node), *field.random.choice(([], [ZOOKEEPER], [CLIENTS], [ZOOKEEPER, CLIENTS]))]
    await _cut_for_a_while(field, {(each, node) for each in unheard})


@one_ill
async def unreachable(field: Field) -> None:
    """The node connects to everybody and holds its session; nobody can connect to it, as with a wrong `advertise`."""
    async with field.hidden(field.a_node(leading=True)):
        await asyncio.sleep(field.a_long_time())


@fault
async def bridge(field: Field) -> None:
    """Cut two nodes from each other. Both still reach the third."""
    one, other = field.random.sample(field.nodes, 2)
    await _cut_for_a_while(field, both([one], [other]))


@fault
async def all_apart(field: Field) -> None:
    """Cut every node from every other."""
    await _cut_for_a_while(field, set(itertools.permutations(field.nodes, 2)))


@fault
async def zookeeper_apart(field: Field) -> None:
    """Cut every node from ZooKeeper, which keeps running."""
    await _cut_for_a_while(field, both([ZOOKEEPER], field.nodes))


@fault
async def flapping(field: Field) -> None:
    """Cut and restore a node's links every second."""
    node = field.a_node(leading=True)
    far = field.random.choice((field.others(node), [ZOOKEEPER], [*field.others(node), ZOOKEEPER]))
    for _ in range(field.random.randint(2, 6)):
        await _cut_for_a_while(field, both([node], far), 0.5)
        await asyncio.sleep(0.5)


@fault
async def slow_link(field: Field) -> None:
    """Limit a node's outgoing bandwidth, so that its data are late by a full queue."""
    node, rate = field.a_node(leading=True), field.random.choice(RATES)
    await asyncio.to_thread(field.cluster.network.slow, node, rate)
    await asyncio.sleep(field.some_time())
    await asyncio.to_thread(field.cluster.network.slow, node, None)


# ── processes and disks ───────────────────────────────────────────────────────────────────────────────────────────────


async def _stop_and_continue(field: Field, process: str, seconds: float) -> None:
    pid = field.pid(process)
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)


@one_ill
async def stopped(field: Field) -> None:
    node = field.a_node(leading=True)
    async with field.holding(node) as is_free:
        if is_free:
            await _stop_and_continue(field, node, field.some_time())


@fault
async def all_stopped(field: Field) -> None:
    """Pause all nodes for a moment, as on a machine that is suspended."""
    seconds = field.some_time()

    async def one(node: str) -> None:
        async with field.holding(node) as is_free:
            if is_free:
                await _stop_and_continue(field, node, seconds)

    await asyncio.gather(*map(one, field.nodes))


@one_ill
async def hiccups(field: Field) -> None:
    """Pause a node for every other tenth of a second."""
    node = field.a_node(leading=True)
    async with field.holding(node) as is_free:
        for _ in range(field.random.randint(10, 40) if is_free else 0):
            await _stop_and_continue(field, node, HICCUP_S)
            await asyncio.sleep(HICCUP_S)


@fault
async def stopped_zookeeper(field: Field) -> None:
    async with field.holding(ZOOKEEPER) as is_free:
        if is_free:
            await _stop_and_continue(field, ZOOKEEPER, field.some_time())


@one_ill
async def killed(field: Field) -> None:
    await _down_and_up(field, field.a_node(leading=True), field.cluster.kill)


@one_ill
async def told_to_stop(field: Field) -> None:
    await _down_and_up(field, field.a_node(leading=True), field.cluster.terminate)


async def _down_and_up(field: Field, node: str, end: Callable[[str], None]) -> None:
    async with field.holding(node) as is_free:
        if is_free:
            await asyncio.to_thread(end, node)
            await asyncio.sleep(field.some_time() / 2)
            async with field.starting:
                await asyncio.to_thread(field.cluster.start_node, node)


@fault
async def two_killed(field: Field) -> None:
    await asyncio.gather(
        *(_down_and_up(field, node, field.cluster.kill) for node in field.random.sample(field.nodes, 2))
    )


@fault
async def killed_zookeeper(field: Field) -> None:
    async with field.holding(ZOOKEEPER) as is_free:
        if is_free:
            await asyncio.to_thread(field.cluster.kill_zookeeper)
            await asyncio.sleep(field.some_time() / 2)
            async with field.starting:
                await asyncio.to_thread(field.cluster.start_zookeeper)


@one_ill
async def full_disk(field: Field) -> None:
    node = field.a_node(leading=True)
    await asyncio.to_thread(field.cluster.fill_disk, node)
    await asyncio.sleep(field.some_time())
    await asyncio.to_thread(field.cluster.free_disk, node)


@one_ill
async def blocked_loop(field: Field) -> None:
    """Block a node's event loop while its other threads run, as a pipe that nobody reads does."""
    node, seconds = field.a_node(leading=True), field.a_long_time()
    async with field.holding(node) as is_free:
        if is_free:
            field.cluster.block_loop(node, seconds)
            await asyncio.sleep(seconds)


@one_ill
async def hung_disk(field: Field) -> None:
    """Make every write to a node's disk hang without an error."""
    await _hold_ill(field, field.cluster.freeze_disk, field.cluster.thaw_disk)


@one_ill
async def no_inodes(field: Field) -> None:
    """Use up the inodes of a node's disk."""
    await _hold_ill(field, field.cluster.use_up_inodes, field.cluster.free_inodes)


async def _hold_ill(field: Field, begin: Callable[[str], None], end: Callable[[str], None]) -> None:
    """Begin a fault of a leading node's disk, and end it after a long time, also if the drill is ended."""
    node = field.a_node(leading=True)
    async with field.holding(node) as is_free:
        if is_free:
            await asyncio.to_thread(begin, node)
            try:
                await asyncio.sleep(field.a_long_time())
            finally:
                await asyncio.to_thread(end, node)


@one_ill
async def files_cannot_grow(field: Field) -> None:
    """Limit the size of a node's files, as a quota does: the disk has free bytes and inodes but accepts neither."""
    node = field.a_node(leading=True)
    async with field.holding(node) as is_free:
        if is_free:
            with file_sizes_limited([field.pid(node)], FILE_BYTES):
                await asyncio.sleep(field.a_long_time())


@fault
async def older_metadata(field: Field) -> None:
    """Restore ZooKeeper to an older copy under running nodes, and later to the latest copy."""
    cluster = field.cluster
    async with field.holding(ZOOKEEPER) as is_free:
        if not is_free:
            return
        async with field.starting:  # a node that starts by an older copy ends itself, and is to
            await asyncio.to_thread(cluster.replace_metadata, None, "older")
        await asyncio.sleep(field.a_long_time())
        async with field.starting:
            await asyncio.to_thread(cluster.replace_metadata, "older", "latest")
            await asyncio.sleep(field.a_long_time())
            await asyncio.to_thread(cluster.replace_metadata, "latest", None)


JUMPS_S = (3.0, 60.0, 3600.0)


@one_ill
async def wrong_date(field: Field) -> None:
    """Move a node's wall clock forwards or back, and correct it after a while."""
    node, jump = field.a_node(leading=True), field.random.choice(JUMPS_S) * field.random.choice((1, -1))
    field.cluster.set_date(node, jump)
    await asyncio.sleep(field.some_time())
    field.cluster.set_date(node, 0.0)


@fault
async def wrong_dates(field: Field) -> None:
    """Move the wall clocks of most nodes together, forwards or back, and correct them after a while."""
    jump = field.random.choice(JUMPS_S) * field.random.choice((1, -1))
    nodes = field.random.sample(field.nodes, len(field.nodes) // 2 + 1)
    for node in nodes:
        field.cluster.set_date(node, jump)
    await asyncio.sleep(field.a_long_time())
    for node in nodes:
        field.cluster.set_date(node, 0.0)


REPAIRED_MAX_S = 180.0
CHECKS_MAX = 4
"""Maximum number of checks. A check reads every copy of every entry while other faults last and ledgers change."""


@fault
async def wiped(field: Field) -> None:
    """Replace a node's disk by an empty one, so that it returns as another bookie, and decommission the lost one.

    It lasts until the lost bookie is decommissioned, its copies are recreated, and a check finds all copies."""
    node = field.a_node()
    if field.wiping.locked():
        return
    async with field.wiping, field.holding(node) as is_free:
        if not is_free:
            return
        await asyncio.to_thread(field.cluster.kill, node)
        await asyncio.to_thread(field.cluster.wipe, node)
        async with field.starting:
            await asyncio.to_thread(field.cluster.start_node, node)
        until = time.perf_counter() + REPAIRED_MAX_S
        given_up: set[str] = set()
        while blocked := await _what_blocks(field.cluster, given_up):
            if time.perf_counter() > until:
                field.unrepaired.append(f"{node}: {blocked}")
                return
            await asyncio.sleep(2.0)
        for _ in range(CHECKS_MAX):
            code, found = await _kvstore(field.cluster, "fsck", "--strict")
            if code == 0:
                return
        field.unrepaired.append(f"{node}: {found.decode(errors='replace')}")


async def _what_blocks(cluster: WiredCluster, given_up: set[str]) -> str:
    """Decommission each bookie whose node has returned as another one. Return why that failed; empty once all are
    decommissioned and the lost copies are recreated."""
    code, listed = await _kvstore(cluster, "bookie", "list", "--json")
    if code:
        return f"bookie list ended with {code}"
    state = {each["id"]: each["state"] for each in json.loads(listed)}
    up = {bookie.rpartition("-")[0] for bookie in state if state[bookie] != AWAY}
    for bookie in state:
        if state[bookie] == AWAY and bookie.rpartition("-")[0] in up:
            code, found = await _kvstore(cluster, "bookie", "decommission", "--yes", "--json", bookie)
            if code:
                return f"bookie {bookie} cannot be decommissioned: {found.decode(errors='replace')}"
            given_up.add(bookie)
    return "" if given_up else f"no bookie has come back as another: {state}"


async def _kvstore(cluster: WiredCluster, *words: str) -> tuple[int, bytes]:
    """Run a `kvstore` command. Return its exit code and output."""
    command = [sys.executable, "-m", "kvstore", *words, "--data-dir", str(cluster.local.data_dir)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    out, _ = await process.communicate()
    return process.returncode or 0, out
