"""Moving ranges in a simulated cluster: users on keys all over the ring, plans, and the conditions at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from random import Random
from typing import Any

import pytest

from kvstore.errors import ConditionFailed, MetadataUnavailable, MetadataUnknown, StoreError
from kvstore.meta.store import MetadataStore
from kvstore.namespaces import Namespace
from kvstore.partition.moves import mover
from kvstore.partition.moves.import_driver import Means
from kvstore.partition.state import commands, rows
from kvstore.partition.state.commands import Code, Flag, Level
from kvstore.partition.state.tokens import TokenSpan, spans_of
from kvstore.ring import Member, PartitionState, Ring, new_ring, plan
from kvstore.ring.hashing import HASHES, MURMUR3, SLOTS_HASH, TOKENS, KeyHash
from kvstore.server.cluster.ring_store import change_ring
from kvstore.types import PartitionId, ServerId
from tests.sim.clients import Identity, Worker
from tests.sim.cluster import Cluster
from tests.sim.judges import history
from tests.sim.judges.history import Kind, Result, history_of
from tests.sim.judges.operations import Operation, Status
from tests.sim.nodes import Node, small_journals
from tests.sim.run import all_serve, heal, until_broken
from tests.sim.spaces.tenants import Tenants, check_counts
from tests.sim.strikes.knobs import Knobs
from tests.sim.versions import check_versions
from tests.sim.watching import watching
from tests.sim.world.disk import DiskConfig
from tests.sim.world.env import SimWorld
from tests.sim.world.network import NetworkConfig

SPREAD = tuple(b"k%d" % number for number in range(24))
COUNTERS = tuple(b"c%d" % number for number in range(6))
MOVED_S_MAX = 120.0
SETTLE_S_MAX = 60.0
LONG_PAUSE_S = 0.04
"""For stories of many moves: some thousands of operations, and several during each move."""
SPACES = (Namespace(name="counters", prefix=b"c"), Namespace(name="keys", prefix=b"k", keys_max=10_000))
"""Used in half of the runs: the leaders' counts of namespaces stay right, whatever moves."""
LEAVING = (PartitionState.LEAVING, PartitionState.RETIRED)


class Users:
    """Workers on a few keys. Each performs one operation at a time."""

    def __init__(
        self,
        cluster: Cluster,
        random: Random,
        count: int,
        keys: Sequence[bytes],
        counters: Sequence[bytes],
        pause_s: float,
    ) -> None:
        self._cluster, self._random, self._pause_s = cluster, random, pause_s
        self._keys, self._counters = keys, counters
        self._stopping = False
        self._numbers = 0
        self._written: dict[tuple[str, bytes], int] = {}
        """By user and key: the version of the user's last write."""
        self._tasks = [cluster.spawn(self._live(number), name=f"user {number}") for number in range(count)]

    def calm_down(self) -> None:
        """Work more slowly from now on."""
        self._pause_s = max(self._pause_s, 0.3)

    async def stop(self) -> None:
        """Stop each worker after its current operation."""
        self._stopping = True
        for task in self._tasks:
            await task

    async def _live(self, number: int) -> None:
        random = Random(self._random.getrandbits(64))
        worker = Worker(self._cluster, f"user{number}", random, Identity(random))
        while not worker.identity.seen_ms and not self._stopping:
            await worker.do(commands.Get(random.randbytes(4)))
        while not self._stopping:
            await self._do_something(worker)
            await asyncio.sleep(random.expovariate(1 / self._pause_s))

    async def _do_something(self, worker: Worker) -> None:
        random = worker.random
        key = random.choice(self._keys)
        self._numbers += 1
        value = b"%s-%d" % (worker.name.encode(), self._numbers)
        roll = random.random()
        if roll < 0.1:
            await self._session_read(worker, key)
        elif roll < 0.35:
            level = random.choice((Level.LINEARIZABLE, Level.LINEARIZABLE, Level.STRICT))
            await worker.do(commands.Get(key, level))
        elif roll < 0.65:
            self._note(await worker.do(commands.Put(key, value), with_id=random.random() < 0.8))
        elif roll < 0.75:
            await worker.do(commands.Delete(key))
        elif roll < 0.85:
            self._note(await worker.do(commands.Put(key, value, flags=Flag.IF_ABSENT)))
        else:
            await worker.do(commands.Increment(random.choice(self._counters), 1))

    def _note(self, put: Operation) -> None:
        if put.status is Status.OK and isinstance(put.result, int):
            self._written[put.client, put.key] = put.result

    async def _session_read(self, worker: Worker, key: bytes) -> None:
        """Read from any replica that has applied what this worker has seen. The result must not be older than the
        worker's last write."""
        token = worker.tokens.get(worker.ring.partition_of(key), 0)
        known = self._written.get((worker.name, key), 0)
        done = await worker.do(commands.Get(key, Level.SESSION, token))
        if done.status is Status.OK and done.result is not None and done.result[1] < known:
            self._cluster.broken(f"P6 {done} is older than this session's own version {known}")


class World:
    """A cluster whose ring changes."""

    def __init__(
        self, cluster: Cluster, store: MetadataStore, keys: Sequence[bytes], counters: Sequence[bytes]
    ) -> None:
        self.cluster, self.store, self.keys, self.counters = cluster, store, keys, counters
        self.at_end: list[Callable[[], Coroutine[Any, Any, None]]] = []
        """Checks to run when all users have stopped."""

    @property
    def ring(self) -> Ring:
        return self.cluster.ring

    async def change(self, step: Callable[[Ring], Ring]) -> Ring:
        """Change the ring as an operator would."""
        while True:
            try:
                return await change_ring(self.store, step)
            except (MetadataUnavailable, MetadataUnknown):
                await asyncio.sleep(0.1)

    async def read_ring(self) -> Ring:
        return await self.change(lambda ring: ring)

    async def join(self, *names: str) -> None:
        """Plan that partitions join."""
        replicas = tuple(node.id for node in self.cluster.nodes[:3])
        turned = [replicas[turn % 3 :] + replicas[: turn % 3] for turn in range(1, len(names) + 1)]
        members = [Member(PartitionId(name), turn) for name, turn in zip(names, turned, strict=True)]
        await self.change(lambda ring: plan.join(ring, members))

    async def shift(self, span: TokenSpan, target: str) -> None:
        """Plan that one range goes to `target`, in one move."""
        await self.change(lambda ring: plan.shift_range(ring, span.first, span.last, PartitionId(target)))

    async def leave(self, *names: str) -> None:
        await self.change(lambda ring: plan.leave(ring, [PartitionId(name) for name in names]))

    async def moved(self, within_s: float = MOVED_S_MAX) -> None:
        """Return when no move is open. Raises AssertionError."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        while (await self.read_ring()).moves:
            assert loop.time() < deadline, f"moves still open: {self.ring.moves}, {self.steps()}"
            await asyncio.sleep(0.1)

    async def retired(self, within_s: float = MOVED_S_MAX) -> None:
        """Return when nothing is left of the leaving partitions. Raises AssertionError."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        while left := [each for each in (await self.read_ring()).partitions.values() if each.state in LEAVING]:
            assert loop.time() < deadline, f"not gone: {left}, {self.steps()}"
            await asyncio.sleep(0.1)

    def steps(self) -> list[Any]:
        """Return the step of each move, for messages."""
        found = []
        for node in self.cluster.nodes:
            for partition in node.leads:
                replica = node.replica(partition)
                if replica is not None:
                    found.append((node.name, partition, replica.mover.statistics(), replica.state.ownership))
        return found

    def movers(self) -> Iterator[tuple[Node, Any]]:
        for node in self.cluster.nodes:
            for partition in self.cluster.partitions:
                replica = node.replica(partition)
                if replica is not None:
                    yield node, replica.mover

    def leader_of(self, partition: PartitionId) -> Node | None:
        return self.cluster.leader(partition)

    # ── judging ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def judge(self, *, read_all: bool = True) -> None:
        """Raise AssertionError unless every promise was kept. Call it when all users have stopped."""
        if read_all:
            await self._read_all()
        await self._settle()
        operations = self.cluster.recorder.operations
        check_versions(history_of(each for each in map(_translated, operations) if each is not None))
        check_counters(operations, self.counters)
        self.check_places()
        self.cluster.check()

    async def _read_all(self) -> None:
        random = self.cluster.world.fork("last reads")
        worker = Worker(self.cluster, "last", random, Identity(random))
        for key in [*self.keys, *self.counters]:
            done = await worker.do(commands.Get(key))
            assert done.status is Status.OK, f"the read of {key!r} at the end failed: {done}"

    async def _settle(self) -> None:
        """Wait until all replicas of each partition are at one position."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + SETTLE_S_MAX
        while behind := [each for each in self.cluster.partitions if len(self._positions(each)) != 1]:
            assert loop.time() < deadline, f"P8 replicas do not catch up: {behind}"
            await asyncio.sleep(0.1)

    def _positions(self, partition: PartitionId) -> set[Any]:
        found = set()
        for node in self.cluster.nodes:
            if node.id in self.ring.partitions[partition].replicas:
                replica = node.replica(partition)
                found.add(None if replica is None else replica.state.position)
        return found

    def check_places(self) -> None:
        """Check that each token is owned exactly once, by the owner in the ring; no partition has rows that it does
        not own; replicas agree."""
        owned: list[tuple[int, int, PartitionId]] = []
        for partition in self.cluster.partitions:
            states = [(node.name, replica.state) for node in self.cluster.nodes if (replica := node.replica(partition))]
            assert len({state.fingerprint() for _, state in states}) == 1, f"P5 replicas of {partition} differ"
            for name, state in states:
                ownership = state.ownership
                assert not ownership.imports, f"{name} {partition} keeps {ownership.imports}"
                assert not ownership.frozen, f"{name} {partition} keeps {ownership.frozen}"
                assert not ownership.released, f"{name} {partition} keeps {ownership.released}"
                row_keys = [key for key, _ in state.engine.iterate(*rows.ALL_DATA)]
                strange = [key for key in row_keys if not ownership.owned.holds_row(key)]
                assert not strange, f"{name} {partition} has rows that it does not own: {strange}"
                count = state.key_count
                assert count == len(row_keys), f"{name} {partition} counts {count} of {len(row_keys)}"
                order = [key[1:] for key, _ in state.engine.iterate(*rows.ALL_ORDER)]
                assert order == sorted(key[5:] for key in row_keys), f"{name} {partition}: the index is wrong"
                state.retries.check()
            owned += [(first, last, partition) for first, last in states[0][1].ownership.owned.spans]
        following = 0
        for first, last, partition in sorted(owned):
            assert first == following, f"tokens {following} to {first} are owned by none or two"
            assert self.ring.owner_of(first) == self.ring.owner_of(last) == partition
            following = last + 1
        assert following == TOKENS


def check_counters(operations: list[Operation], counters: Sequence[bytes]) -> None:
    """Check that each increment counted once, and increments of unknown outcome at most once."""
    for key in counters:
        mine = [each for each in operations if each.key == key and each.code is Code.INCREMENT]
        known = [each.result[0] for each in mine if each.status is Status.OK]
        assert len(known) == len(set(known)), f"{key!r}: an increment was answered or applied twice: {known}"
        unknown = sum(each.status is Status.INFO for each in mine)
        last = [each for each in operations if each.key == key and each.code is Code.GET and each.status is Status.OK]
        if last:
            value = int(last[-1].result[0]) if last[-1].result is not None else 0
            assert len(known) <= value <= len(known) + unknown, f"{key!r} is {value}, {len(known)} known, {unknown} not"


def _translated(operation: Operation) -> history.Operation | None:
    """Return the operation in the form for the version-based checker."""
    status, code = operation.status, operation.code
    if operation.key[:1] != b"k" or status is Status.OPEN or (status is Status.INFO and not operation.is_write):
        return None
    if operation.level is Level.SESSION:
        return None
    failed = status is Status.OK and isinstance(operation.result, ConditionFailed)
    if status is Status.FAIL:
        return None
    fields: dict[str, Any] = {"process": operation.client, "key": operation.key, "began": operation.began}
    fields |= {"ended": operation.ended, "node": ",".join(operation.attempts), "condition_failed": failed}
    fields["result"] = Result.FAIL if failed else Result.INFO if status is Status.INFO else Result.OK
    known = status is Status.OK
    match code:
        case Code.GET:
            record = operation.result
            found = (record[0], record[1]) if record is not None else (None, None)
            return history.Operation(kind=Kind.GET, value=found[0], version=found[1], **fields)
        case Code.DELETE:
            version = (operation.result or None) if known else None
            return history.Operation(kind=Kind.DEL, version=version, **fields)
        case Code.PUT:
            if failed:
                version = operation.result.version or None
            else:
                version = operation.result if known and not isinstance(operation.result, StoreError) else None
            assert isinstance(operation.op, commands.Put)
            kind = Kind.CAS if operation.op.flags & Flag.IF_ABSENT else Kind.PUT
            return history.Operation(kind=kind, value=operation.op.value, version=version, **fields)
    return None


# ── runs ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

Story = Callable[[World, Users], Coroutine[Any, Any, None]]
each_hash = pytest.mark.parametrize("hash", HASHES.values(), ids=lambda each: each.name)
"""Runs a story with each key hash."""


def hash_for(number: int) -> KeyHash:
    """Return the key hash for one of many cases of a story, so that they have both."""
    return (MURMUR3, SLOTS_HASH)[number % 2]


def play(
    seed: int,
    story: Story,
    knobs: Knobs | None = None,
    *,
    users: int = 6,
    keys: Sequence[bytes] = SPREAD,
    counters: Sequence[bytes] = COUNTERS,
    network: NetworkConfig | None = None,
    disk: DiskConfig | None = None,
    pause_s: float = 0.01,
    hash: KeyHash | None = None,
) -> None:
    """Start a cluster, let users work and the story happen, stop the users, and judge everything. Raises the
    failure. `pause_s` is the mean time in seconds between two operations of a user; long stories use longer pauses and
    have as many operations. `hash` replaces the key hash of the knobs."""
    knobs = knobs or Knobs()
    knobs = replace(knobs, hash=hash or knobs.hash)
    with SimWorld(seed, network=network, disk=disk) as world:
        try:
            world.run(_guarded(world, knobs, story, users, keys, counters, pause_s), limit_s=600.0)
        except BaseException as error:
            error.add_note(world.trace.tail(40))
            raise


async def _guarded(
    world: SimWorld,
    knobs: Knobs,
    story: Story,
    users: int,
    keys: Sequence[bytes],
    counters: Sequence[bytes],
    pause_s: float,
) -> None:
    cluster = Cluster(world, knobs)

    def reached(means: Means, step: str, move: int) -> None:
        if step == "differs":
            cluster.broken(f"M6 move {move}: the copy differs from the frozen range")

    with watching(cluster.logbook, cluster.rules), small_journals(knobs), at_each_step(reached):
        await until_broken(cluster, _scenario(cluster, story, users, keys, counters, pause_s))


async def _scenario(
    cluster: Cluster, story: Story, count: int, keys: Sequence[bytes], counters: Sequence[bytes], pause_s: float
) -> None:
    await cluster.found()
    await all_serve(cluster, 30.0)
    world = World(cluster, await cluster.metadata.connect(), keys, counters)
    spaces = SPACES if cluster.world.fork("spaces").random() < 1 / 2 else ()
    await Tenants(cluster, spaces).define()
    users = Users(cluster, cluster.world.fork("users"), count, keys, counters, pause_s)
    await asyncio.sleep(0.3)
    await story(world, users)
    heal(cluster)
    await world.moved()
    await world.retired()
    await all_serve(cluster, 90.0)
    await asyncio.sleep(0.3)
    await users.stop()
    for check in world.at_end:
        await check()
    await check_counts(cluster, spaces)
    await world.judge()


# ── one range ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def keys_in(span: TokenSpan, count: int, prefix: bytes) -> tuple[bytes, ...]:
    """Return the first `count` keys with this prefix whose tokens are in the range by each key hash."""
    keys = (b"%b%d" % (prefix, number) for number in range(1_000_000))
    found = (key for key in keys if all(span.holds(hash.token_of(key)) for hash in HASHES.values()))
    return tuple(islice(found, count))


def first_range(owner: str, partitions: int, nodes: int = 3) -> TokenSpan:
    """Return a range that `owner` has in a new ring of each key hash, as large as one move may be."""
    ids = [PartitionId(f"p{number + 1}") for number in range(partitions)]
    servers = {ServerId(f"n{number + 1}"): "" for number in range(nodes)}
    rings = [new_ring(ids, servers, min(3, nodes), hash) for hash in HASHES.values()]
    spans = [max(spans_of(ring, PartitionId(owner)), key=lambda span: span.last - span.first) for ring in rings]
    unit = SLOTS_HASH.unit  # by murmur3, a range may end within a slot
    first = -(-max(span.first for span in spans) // unit) * unit
    end = min(1 + min(span.last for span in spans), first + plan.MOVE_TOKENS_MAX) // unit * unit
    return TokenSpan(first, end - 1)


# ── accidents ─────────────────────────────────────────────────────────────────────────────────────────────────────────

Reached = Callable[[Means, str, int], None]


@contextmanager
def at_each_step(reached: Reached) -> Iterator[None]:
    """Call `reached(means, step, move)` at each step of a mover, in all nodes that start in the block."""
    original = mover.Mover.__init__

    def init(self: Any, means: Any) -> None:
        original(self, means)
        before = means.reached

        def tell(step: str, move: int) -> None:
            before(step, move)
            reached(means, step, move)

        means.reached = tell

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mover.Mover, "__init__", init)
        yield
