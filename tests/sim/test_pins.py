"""Pinned reads while partitions join and faults strike. All replicas that keep a pinned position return the same
bytes, which match the log up to there. Together the partitions own every token once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest

from kvstore.env import Task
from kvstore.errors import MetadataError, NoSuchPin, OutcomeUnknown, Retryable, StoreError
from kvstore.partition import pinning
from kvstore.partition.state import rows
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.tokens import TokenSpan
from kvstore.proto import data_pb2
from kvstore.proto.pinned_page import lengths_of
from kvstore.ring import PartitionState
from kvstore.ring.cover import flaw
from kvstore.ring.hashing import HASHES, TOKENS
from kvstore.server import app
from kvstore.server.feed.pins import PinKeeper
from kvstore.server.grpc.data import Data
from kvstore.types import EntryId, LedgerId, PartitionId, Position, ServerId
from kvstore.wal.ports import LogEntry
from tests.partition.state.engine_memory import MemoryEngine
from tests.sim.cluster import Cluster
from tests.sim.judges.probes import declare, hits, probe
from tests.sim.moving.moves import LONG_PAUSE_S, Users, World, play
from tests.sim.nodes import Node
from tests.sim.strikes.faults import FAULTS, Chaos
from tests.sim.strikes.knobs import Knobs, draw

declare("pins.pinned", "pins.read_twice", "pins.not_kept")

pytestmark = pytest.mark.sim

CALL_S = 30.0
TTL_MS = 20_000
PATIENT = (Retryable, OutcomeUnknown, MetadataError)


class Reader:
    """Pins from time to time, and reads the pinned data from every node repeatedly until the pin has ended."""

    def __init__(self, cluster: Cluster, random: Random, *, pause_s: float = 1.0, reads: float = 1.0) -> None:
        """`reads`: the share of pins that are read at all."""
        self._cluster, self._random, self._pause_s, self._reads = cluster, random, pause_s, reads
        self._expected: dict[tuple[PartitionId, Position], list[tuple[bytes, bytes]]] = {}
        self._stopping = False
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._cluster.spawn(self._work(), name="reader of pins")

    async def stop(self) -> None:
        self._stopping = True
        assert self._task is not None
        await self._task

    async def _work(self) -> None:
        number = 0
        while not self._stopping:
            number += 1
            await asyncio.sleep(self._random.uniform(0.0, self._pause_s))
            pinned = await self.pin(f"pin{number}")
            if pinned is None:
                continue
            probe("pins.pinned")
            owned = {
                each.partition: list(zip(each.first_tokens, each.last_tokens, strict=True))
                for each in pinned.partitions
            }
            if wrong := flaw(owned):
                self._cluster.broken(f"pin{number}: {wrong}")
            if self._random.random() < self._reads:
                await self._read_some_times(pinned)
            await self.unpin(pinned.id)

    async def unpin(self, pin: str, node: Node | None = None) -> Any:
        """Release a pin through a node, or through any node."""
        return await self._at(
            node or self._random.choice(self._cluster.nodes), lambda served: _keeper(served).unpin(pin)
        )

    async def _read_some_times(self, pinned: data_pb2.PinResponse) -> None:
        for _ in range(self._random.randrange(1, 4)):
            await asyncio.sleep(self._random.uniform(0.0, 2.0))
            for each in pinned.partitions:
                await self.compare(pinned.id, each)

    async def pin(self, pin: str, ttl_ms: int = TTL_MS) -> data_pb2.PinResponse | None:
        node = self._random.choice(self._cluster.nodes)
        request = data_pb2.PinRequest(id=pin, ttl_ms=ttl_ms, hashes=list(HASHES))
        found = await self._at(node, lambda served: _keeper(served).pin(request))
        return found if isinstance(found, data_pb2.PinResponse) else None

    async def renew(self, pin: str, ttl_ms: int) -> Any:
        """Return the answer, which may be an error."""
        request = data_pb2.RenewRequest(id=pin, ttl_ms=ttl_ms)
        return await self._at(self._cluster.nodes[0], lambda served: _keeper(served).renew(request))

    async def compare(self, pin: str, pinned: data_pb2.PinnedPartition) -> int:
        """Check that every node returns what the log says, or nothing. Returns the number of nodes that returned it."""
        position = Position(LedgerId(pinned.ledger), EntryId(pinned.entry))
        partition, given = PartitionId(pinned.partition), 0
        for node in self._cluster.nodes:
            pages = await self._at(node, lambda served: self._read(Data(served.env, served), pin, pinned))
            if isinstance(pages, NoSuchPin):
                probe("pins.not_kept")
            if not isinstance(pages, list):
                continue
            given += 1
            if pages != self._fold(partition, position):
                self._cluster.broken(f"{node.name} returns other rows of {partition} at {position} than its log")
        if given > 1:
            probe("pins.read_twice")
        return given

    async def decided(self, pin: str, pinned: data_pb2.PinnedPartition) -> int:
        """Return the number of nodes that answer another server about the decisions in their view of a partition."""
        partition, given = PartitionId(pinned.partition), 0
        for node in self._cluster.nodes:
            assert node.served is not None
            state = node.served.state_of(partition)
            assert state is not None
            asked = pinning.DecidedRequest(pin, state.pinned_views.by_pin[pin].number, [])
            call = partial(_call, ServerId(node.name), partition, pinning.DECIDED, pinning.encode(asked))
            given += await self._at(self._cluster.nodes[0], call) == pinning.encode([])
        return given

    async def _read(
        self, data: Data, pin: str, pinned: data_pb2.PinnedPartition, *, intents_only: bool = False
    ) -> list[tuple[bytes, bytes]]:
        request = data_pb2.ReadPinnedRequest(
            id=pin,
            partition=pinned.partition,
            ledger=pinned.ledger,
            entry=pinned.entry,
            page_bytes=200,
            intents_only=intents_only,
        )
        return [pair async for page in data.pages(request) for pair in pairs_of(page)]

    def _fold(self, partition: PartitionId, position: Position) -> list[tuple[bytes, bytes]]:
        """Return the rows that the partition owns, computed from the log alone."""
        if (partition, position) not in self._expected:
            state = ReplicaState(
                partition, MemoryEngine(), self._cluster.knobs.partition, hash=self._cluster.knobs.hash
            )
            for at, noted in sorted(self._cluster.logbook.entries[partition].items()):
                if at <= position:
                    state.apply(LogEntry(at, noted.payload))
            assert state.position == position, f"{partition} was pinned at {position}, where its log has no entry"
            owned = state.ownership.owned
            found = [pair for pair in state.engine.iterate(*rows.ALL_DATA) if owned.holds_row(pair[0])]
            self._expected[partition, position] = found
        return self._expected[partition, position]

    async def _at(self, node: Node, call: Any) -> Any:
        """Return the result of a call made in a node's process, or None if the process ends meanwhile."""
        if node.endpoint is None or not node.is_running:
            return None
        served = node.served
        assert served is not None
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def work(coroutine: Coroutine[Any, Any, Any]) -> None:
            try:
                found = await coroutine
            except StoreError as error:
                found = error
            if not answer.done():
                answer.set_result(found)

        served.env.nursery.spawn(work(call(served)), name="pinned read")
        try:
            async with asyncio.timeout(CALL_S):
                found = await answer
        except TimeoutError:
            return None
        assert not isinstance(found, StoreError) or isinstance(found, PATIENT), repr(found)
        return found


def _call(server: ServerId, partition: PartitionId, method: str, body: bytes, served: app.Node) -> Any:
    return served.links.call(server, partition, method, body, CALL_S)


def _keeper(served: app.Node) -> PinKeeper:
    return PinKeeper(served.env, served)


def pairs_of(page: data_pb2.PinnedPage) -> list[tuple[bytes, bytes]]:
    """Return row keys and rows."""
    found, key_at, row_at = [], 0, 0
    for key, row in zip(lengths_of(page.key_lengths), lengths_of(page.row_lengths), strict=True):
        found.append((page.keys[key_at : key_at + key], page.rows[row_at : row_at + row]))
        key_at, row_at = key_at + key, row_at + row
    return found


def drawn(seed: int) -> Knobs:
    random = Random(f"pins/{seed}")
    names = sorted(FAULTS)
    knobs = draw(random, names)
    faults = tuple(random.sample(names, random.choice((1, 2, 3))))
    partition = replace(knobs.partition, retry_window_ms=600_000, retry_bytes_max=64 << 20, retry_results_max=1024)
    return replace(knobs, partitions=random.choice((1, 2)), faults=faults, partition=partition)


async def pins_in_peace(world: World, users: Users) -> None:
    """Pin many times, also at moments in which a range has no owner, or two of the pinned partitions own it."""
    reader = Reader(world.cluster, world.cluster.world.fork("pins"), pause_s=0.01, reads=0.1)
    reader.start()
    await world.join("px")
    await world.moved()
    await reader.stop()


async def pins_in_trouble(world: World, users: Users) -> None:
    knobs, cluster = world.cluster.knobs, world.cluster
    reader = Reader(cluster, cluster.world.fork("pins"))
    reader.start()
    await world.join("px")
    await Chaos(cluster, cluster.world.fork("chaos"), list(knobs.faults), knobs.pace_s).run(min(knobs.chaos_s, 15.0))
    await reader.stop()


async def reader_that_has_pinned(cluster: Cluster, ttl_ms: int) -> tuple[Reader, data_pb2.PinResponse]:
    reader = Reader(cluster, cluster.world.fork("pins"))
    pinned = await reader.pin("pin", ttl_ms=ttl_ms)
    assert pinned is not None
    return reader, pinned


async def a_partition_retires_under_a_pin(world: World, users: Users) -> None:
    cluster = world.cluster
    reader, pinned = await reader_that_has_pinned(cluster, 60_000)
    leaver = pinned.partitions[0]
    await world.leave(leaver.partition)
    await world.moved()
    await users.stop()
    await asyncio.sleep(5.0)
    assert not any(node.replica(PartitionId(leaver.partition)) for node in cluster.nodes)
    ring = await world.read_ring()
    assert ring.partitions[PartitionId(leaver.partition)].state is PartitionState.RETIRED, "the pin holds its log"
    assert await reader.compare("pin", leaver) == 3
    assert await reader.decided("pin", leaver) == 3, "views of other partitions may need its decisions"
    renewed = await reader.renew("pin", 600_000)
    assert leaver.partition in renewed.partitions
    await asyncio.sleep(90.0)
    assert await reader.compare("pin", leaver) == 3, "it is still pinned, although no MARK says so"
    await reader.unpin("pin")
    await asyncio.sleep(5.0)
    assert await reader.compare("pin", leaver) == 0, "it has no leader any more that could record this in its log"
    await asyncio.sleep(5.0)
    assert PartitionId(leaver.partition) not in (await world.read_ring()).partitions
    assert await reader.compare("pin", leaver) == 0


async def a_partition_owns_nothing(world: World, users: Users) -> None:
    """The partition's keys have changed, and it may own some again: snapshots continue from its position."""
    emptied, target = sorted((await world.read_ring()).partitions)
    await world.shift(TokenSpan(0, TOKENS - 1), target)
    await world.moved()
    await users.stop()
    _, pinned = await reader_that_has_pinned(world.cluster, 60_000)
    found = {each.partition: each for each in pinned.partitions}
    assert list(found[emptied].first_tokens) == []
    assert found[emptied].sequence > 0
    await world.shift(TokenSpan(0, TOKENS // 2 - 1), emptied)
    await world.moved()
    again = await Reader(world.cluster, world.cluster.world.fork("again")).pin("again")
    assert again is not None
    assert {each.partition: list(each.first_tokens) != [] for each in again.partitions} == {emptied: True, target: True}


async def a_pin_is_given_back_while_nobody_leads(world: World, users: Users) -> None:
    cluster = world.cluster
    await users.stop()
    reader, pinned = await reader_that_has_pinned(cluster, 600_000)
    (each,) = pinned.partitions
    leader = cluster.leader(PartitionId(each.partition))
    assert leader is not None
    leader.crash()
    others = [node for node in cluster.nodes if node is not leader]
    assert list((await reader.unpin("pin", others[0])).partitions) == []
    assert await reader.compare("pin", each) == 2
    await asyncio.sleep(pinning.GIVEN_BACK_S)
    assert await reader.compare("pin", each) == 0


async def a_pin_ends_everywhere(world: World, users: Users) -> None:
    """A leader removes the rest of the pin in the metadata store a moment later."""
    cluster = world.cluster
    await users.stop()
    reader, pinned = await reader_that_has_pinned(cluster, 4_000)
    assert isinstance(await reader.renew("pin", 4_000), data_pb2.RenewResponse)
    partitions = [PartitionId(each.partition) for each in pinned.partitions]
    for node in cluster.nodes:
        for partition in partitions:
            replica = node.replica(partition)
            assert replica is not None
            replica.state.pinned_views.drop("pin")
    assert isinstance(await reader.renew("pin", 4_000), NoSuchPin)


# docs/protocol.md K2
def test_pin_released_while_partition_has_no_leader_ends() -> None:
    play(1, a_pin_is_given_back_while_nobody_leads, Knobs(partitions=1), users=1)


# docs/protocol.md K3
def test_pin_without_keeper_is_not_renewed() -> None:
    play(1, a_pin_ends_everywhere, Knobs(partitions=2), users=1)


# docs/protocol.md K5
def test_retired_partition_is_readable_at_pinned_position_until_pin_ends() -> None:
    play(1, a_partition_retires_under_a_pin, Knobs(partitions=2), users=2, pause_s=LONG_PAUSE_S)


def test_partition_that_owns_nothing_is_pinned_too() -> None:
    play(1, a_partition_owns_nothing, Knobs(partitions=2), users=2, pause_s=LONG_PAUSE_S)


@pytest.mark.parametrize("seed", range(1))
def test_every_replica_matches_log_while_ranges_move(seed: int) -> None:
    before = dict(hits)
    play(seed, pins_in_peace, users=4, pause_s=LONG_PAUSE_S)
    assert hits["pins.read_twice"] - before.get("pins.read_twice", 0) >= 2


def test_every_replica_matches_log_whatever_strikes() -> None:
    before = hits["pins.pinned"]
    play(11, pins_in_trouble, drawn(11), users=4, pause_s=LONG_PAUSE_S)
    assert hits["pins.pinned"] > before
