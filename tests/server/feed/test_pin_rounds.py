"""Pinning all partitions, with the answers of their leaders and replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.env.real import real_env
from kvstore.errors import MetadataUnavailable, NoSuchPin
from kvstore.meta import paths
from kvstore.meta.memory import MemoryStore
from kvstore.meta.store import ensure_path
from kvstore.partition import pinning
from kvstore.partition.pinning import PinnedState
from kvstore.partition.state.tokens import EVERYTHING, TokenSpan
from kvstore.proto import data_pb2
from kvstore.ring import PartitionState, Ring, codec, new_ring, plan, steps
from kvstore.ring.moves import MoveId
from kvstore.server.feed.pins import PinKeeper
from kvstore.types import EntryId, LedgerId, PartitionId, Position, ServerId
from kvstore.wal.lists import LedgerLists
from kvstore.wal.pins import Pins

A, B, C = map(PartitionId, "abc")
SERVER = ServerId("n1")
DEADLINE_MS = 1 << 60


class Servers:
    """The node, and the one server that leads all partitions."""

    def __init__(self, root: Path) -> None:
        self.env, self.store = real_env(root), MemoryStore()
        self.ring = new_ring([A, B, C], {SERVER: ""}, 1)
        self.links = self
        self.servers: dict[ServerId, Any] = {SERVER: SimpleNamespace(grpc="h:1")}
        self.owned: dict[PartitionId, tuple[TokenSpan, ...]] = {A: EVERYTHING.spans, B: (), C: ()}
        self.kept: list[pinning.HeldPin] = []
        self.taken: list[PartitionId] = []
        self.before_take: Callable[[PartitionId], Coroutine[Any, Any, None]] = self.nothing
        self.keeper = PinKeeper(self.env, self)  # type: ignore[arg-type]
        self.pins = Pins(self.store, LedgerLists(self.store))

    async def nothing(self, partition: PartitionId) -> None:
        """Set up the normal state."""

    @property
    def topology(self) -> Any:
        return SimpleNamespace(
            ring=self.ring, leaders=dict.fromkeys(self.ring.partitions, (SERVER, 1)), servers=self.servers
        )

    async def change(self, step: Callable[[Ring], Ring]) -> Ring:
        self.ring = step(self.ring)
        await ensure_path(self.store, paths.RING)
        await self.store.set(paths.RING, codec.encode(self.ring), -1)
        return self.ring

    async def call(self, server: ServerId, partition: PartitionId, method: str, body: bytes, timeout_s: float) -> bytes:
        match method:
            case pinning.TAKE:
                await self.before_take(partition)
                self.taken.append(partition)
                position = Position(LedgerId(1), EntryId(len(self.taken)))
                return pinning.encode(PinnedState(position, 1, 1, self.owned[partition], 1, 1, [], DEADLINE_MS))
            case pinning.RENEW:
                return pinning.encode(DEADLINE_MS)
            case pinning.TELL:
                return pinning.encode(self.kept)
            case pinning.RELEASE:
                return b""
        raise AssertionError(method)


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[Servers]:
    made = Servers(tmp_path)
    await made.change(lambda ring: ring)
    yield made
    await made.keeper.close()
    await made.env.nursery.close()


# docs/protocol.md K4
async def test_pin_round_is_repeated_when_a_range_moved_on(servers: Servers) -> None:
    """A owns it at A's position. B has owned it, written to it, and released it before B's position; C does not own it
    yet at C's position."""

    async def moves_on(partition: PartitionId) -> None:
        if partition != B or B in servers.taken:
            return
        first = servers.ring.next_move
        end = next(end for end in servers.ring.tokens if servers.ring.owner_of(end) == A)
        for target in (B, C):
            ring = await servers.change(lambda ring, target=target: plan.shift_range(ring, end, end, target))
            move = MoveId(ring.next_move - 1)
            await servers.change(lambda ring, move=move: steps.begin(ring, move, 1))
            if target == B:
                await servers.change(lambda ring, move=move: steps.flip(ring, move, 1))
                await servers.change(lambda ring, move=move: steps.finish(ring, move))
        assert servers.ring.next_move == first + 2

    servers.before_take = moves_on
    pinned = await servers.keeper.pin(data_pb2.PinRequest(id="pin"))
    assert sorted(servers.taken) == [A, A, B, B, C, C]
    assert {each.entry for each in pinned.partitions} == {4, 5, 6}


async def test_single_move_costs_no_further_pin_round(servers: Servers) -> None:
    end = next(end for end in servers.ring.tokens if servers.ring.owner_of(end) == A)
    ring = await servers.change(lambda ring: plan.shift_range(ring, end, end, B))
    move = MoveId(ring.next_move - 1)
    await servers.change(lambda ring: steps.begin(ring, move, 1))

    async def flips(partition: PartitionId) -> None:
        if partition == B:
            await servers.change(lambda ring: steps.flip(ring, move, 1))

    servers.before_take = flips
    await servers.keeper.pin(data_pb2.PinRequest(id="pin"))
    assert sorted(servers.taken) == [A, B, C]


async def test_pin_round_is_repeated_while_moves_are_unknown(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    get, failures = servers.store.get, [MetadataUnavailable("away")]

    async def fails_once(path: str) -> Any:
        if path == paths.RING and failures:
            raise failures.pop()
        return await get(path)

    monkeypatch.setattr(servers.store, "get", fails_once)
    await servers.keeper.pin(data_pb2.PinRequest(id="pin"))
    assert len(servers.taken) >= 6


# docs/protocol.md K3
async def test_pin_is_not_gone_while_no_replica_answers(servers: Servers) -> None:
    """Servers register again after an outage, and the pin on the log is renewed."""
    await servers.pins.hold_on(A, "pin", 1)
    renew = data_pb2.RenewRequest(id="pin", partitions=[A])
    with pytest.raises(NoSuchPin):
        await servers.keeper.renew(renew)
    servers.servers = {}
    assert (await servers.keeper.renew(renew)).deadline_ms == DEADLINE_MS


async def test_pin_of_retired_partition_is_listed_and_released(servers: Servers) -> None:
    """It is what keeps the partition: an operator who waits for the partition's end needs to see it."""
    await servers.pins.hold_on(C, "job", DEADLINE_MS)
    retired = replace(servers.ring.partitions[C], state=PartitionState.RETIRED)
    servers.ring = replace(servers.ring, partitions={**servers.ring.partitions, C: retired})
    [pin] = (await servers.keeper.listed()).pins
    assert (pin.partition, pin.id, pin.retired) == (C, "job", True)
    assert C in (await servers.keeper.unpin("job")).partitions
    assert (await servers.keeper.listed()).pins == []


async def test_pins_are_listed_when_a_partition_is_removed_meanwhile(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await servers.pins.hold_on(A, "mine", 1)
    every = servers.keeper._pins.all

    async def slow(partition: PartitionId) -> Any:
        servers.ring = new_ring([A, B], {SERVER: ""}, 1)
        return await every(partition)

    monkeypatch.setattr(servers.keeper._pins, "all", slow)
    assert [(each.partition, each.id) for each in (await servers.keeper.listed()).pins] == [(A, "mine")]
