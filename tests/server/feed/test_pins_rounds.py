"""Pinning all partitions, with the answers of their leaders and replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvstore import versions
from kvstore.env.clock import SystemClock
from kvstore.env.real import real_env
from kvstore.errors import InvalidRequest, MetadataUnavailable, NoSuchPin, Unavailable
from kvstore.meta import paths
from kvstore.meta.memory import MemoryStore
from kvstore.meta.store import ensure_path
from kvstore.partition import pinning
from kvstore.partition.pinning import PinnedState
from kvstore.partition.state.tokens import EVERYTHING, TokenSpan
from kvstore.proto import data_pb2
from kvstore.ring import SLOTS_HASH, PartitionState, Ring, builder, codec, plan, steps
from kvstore.ring.hashing import TOKENS
from kvstore.ring.moves import MoveId
from kvstore.server.feed import pins as pins_module
from kvstore.server.feed.pins import PinKeeper
from kvstore.types import EntryId, LedgerId, PartitionId, Position, ServerId
from kvstore.wal.lists import LedgerLists
from kvstore.wal.pins import Pins
from tests.ring.rings import new_ring

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
        self.versions = versions.Fixed()
        self.kept: list[pinning.HeldPin] = []
        self.numbers: list[int] = []
        self.taken: list[PartitionId] = []
        self.unrenewable: set[PartitionId] = set()
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
                self.numbers.append(pinning.request_of(body).number)
                position = Position(LedgerId(1), EntryId(len(self.taken)))
                return pinning.encode(PinnedState(position, 1, 1, self.owned[partition], 1, 1, [], DEADLINE_MS))
            case pinning.RENEW:
                if partition in self.unrenewable:
                    raise NoSuchPin("it has ended")
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


async def test_pin_is_refused_to_a_client_that_cannot_compute_tokens(servers: Servers) -> None:
    servers.ring = builder.new_ring([A, B, C], {SERVER: ""}, 1, SLOTS_HASH)
    for known in ([], ["murmur3"]):
        with pytest.raises(InvalidRequest, match=r"knows the key hash slots .*; upgrade the client"):
            await servers.keeper.pin(data_pb2.PinRequest(id="pin", hashes=known))
    assert servers.taken == []
    pinned = await servers.keeper.pin(data_pb2.PinRequest(id="pin", hashes=["murmur3", "slots"]))
    assert pinned.hash == "slots"


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


# docs/protocol.md K4
async def test_pin_round_is_repeated_if_the_target_of_a_move_was_not_pinned(servers: Servers) -> None:
    """B may own the range soon and send messages of transactions without the pin's number, while others are pinned."""
    end = next(end for end in servers.ring.tokens if servers.ring.owner_of(end) == A)
    await servers.change(lambda ring: plan.shift_range(ring, end, end, B))
    refused: list[PartitionId] = []

    async def fails_once(partition: PartitionId) -> None:
        if partition not in refused:
            refused.append(partition)
            if partition == B:
                raise Unavailable("there is no leader for a moment")

    servers.before_take = fails_once
    await servers.keeper.pin(data_pb2.PinRequest(id="pin"))
    assert sorted(servers.taken) == [A, A, B, C, C]


# docs/protocol.md K4
async def test_pin_round_is_repeated_if_two_own_a_token(servers: Servers) -> None:
    """A range was released behind A's position, and owned before B's position."""
    owned = servers.owned

    async def moved(partition: PartitionId) -> None:
        servers.owned = {**owned, B: EVERYTHING.spans} if B not in servers.taken else {**owned}

    servers.before_take = moved
    await servers.keeper.pin(data_pb2.PinRequest(id="pin"))
    assert sorted(servers.taken) == [A, A, B, B, C, C]


async def test_partition_without_tokens_to_which_nothing_moves_need_not_answer(servers: Servers) -> None:
    async def fails(partition: PartitionId) -> None:
        if partition == B:
            raise Unavailable("there is no leader")

    servers.before_take = fails
    await servers.keeper.pin(data_pb2.PinRequest(id="pin"))
    assert sorted(servers.taken) == [A, C]


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


# docs/protocol.md P31
async def test_server_without_a_date_renews_no_pin_of_a_retired_partition(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await servers.pins.hold_on(C, "job", DEADLINE_MS)
    retired = replace(servers.ring.partitions[C], state=PartitionState.RETIRED)
    servers.ring = replace(servers.ring, partitions={**servers.ring.partitions, C: retired})
    monkeypatch.setattr(pins_module, "PATIENCE_S", 0.0)
    monkeypatch.setattr(SystemClock, "date_ms", lambda _: 1_000)
    monkeypatch.setattr(SystemClock, "may_lead", lambda _: False)
    with pytest.raises(Unavailable, match="not sure of its date"):
        await servers.keeper.renew(data_pb2.RenewRequest(id="job", partitions=[C]))
    assert await servers.pins.deadline(C, "job") == DEADLINE_MS


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


# docs/protocol.md Tx13
async def test_pin_of_named_partitions_pins_all_and_returns_the_named_ones(servers: Servers) -> None:
    """A partition's intents may have their decision in any other one, and a range may move between any two."""
    pinned = await servers.keeper.pin(data_pb2.PinRequest(id="pin", partitions=[C, A, C]))
    assert sorted(servers.taken) == [A, B, C]
    assert [each.partition for each in pinned.partitions] == [A, C]


async def test_pin_round_is_repeated_if_a_named_partition_was_not_pinned(servers: Servers) -> None:
    failures = [Unavailable("there is no leader for a moment")]

    async def fails_once(partition: PartitionId) -> None:
        if partition == B and failures:
            raise failures.pop()

    servers.before_take = fails_once
    pinned = await servers.keeper.pin(data_pb2.PinRequest(id="pin", partitions=[B]))
    assert [each.partition for each in pinned.partitions] == [B]
    assert sorted(servers.taken) == [A, A, B, C, C]


async def test_renewal_of_named_partitions_renews_the_others_if_it_can(servers: Servers) -> None:
    for partition in (A, B):
        await servers.pins.hold_on(partition, "pin", 1)
    servers.kept = [pinning.HeldPin("pin", Position(LedgerId(1), EntryId(1)), 1)]
    renew = data_pb2.RenewRequest(id="pin", partitions=[A])
    assert (await servers.keeper.renew(renew)).partitions == [A, B]
    servers.unrenewable = {B}
    assert (await servers.keeper.renew(renew)).partitions == [A]
    with pytest.raises(NoSuchPin):
        await servers.keeper.renew(data_pb2.RenewRequest(id="pin"))


async def test_number_of_intents_is_sent_only_if_there_are_any() -> None:
    """Servers of cluster version 2 do not know it, and have none."""
    state = PinnedState(Position(LedgerId(1), EntryId(1)), 1, 1, (), 1, 1, [], DEADLINE_MS)
    assert len(msgspec.msgpack.decode(pinning.encode_state(state))) == 8
    for each in (state, state._replace(intents=3)):
        assert pinning.pinned_state_of(pinning.encode_state(each)) == each


# docs/protocol.md Tx13
async def test_pin_has_one_rising_number_for_all_partitions(servers: Servers) -> None:
    servers.versions = versions.Fixed(cluster=pinning.NUMBERED_SINCE)
    for _ in range(2):
        await servers.keeper.pin(data_pb2.PinRequest(id="pin"))
    first, second = servers.numbers[:3], servers.numbers[3:]
    assert len(set(first)) == len(set(second)) == 1
    assert 0 < first[0] < second[0]


async def test_pin_that_is_taken_again_has_a_higher_number(servers: Servers) -> None:
    servers.versions = versions.Fixed(cluster=pinning.NUMBERED_SINCE)
    half = TOKENS // 2
    servers.owned |= {A: (TokenSpan(0, half),), B: (TokenSpan(half + 1, TOKENS - 1),)}
    refused = list[Unavailable]()

    async def refuses_once(partition: PartitionId) -> None:
        if partition == B and refused:
            raise refused.pop()

    servers.before_take = refuses_once
    for named in ([], [A, B]):
        refused[:] = [Unavailable("expected a pin with a number above 9")]
        servers.numbers.clear()
        servers.taken.clear()
        await servers.keeper.pin(data_pb2.PinRequest(id="pin", partitions=named))
        last = dict(zip(servers.taken, servers.numbers, strict=True))
        assert len(set(last.values())) == 1, "all partitions were pinned again"
        assert last[A] > servers.numbers[0]
        assert servers.taken.count(A) == 2


async def test_pin_has_no_number_before_version_three(servers: Servers) -> None:
    await servers.keeper.pin(data_pb2.PinRequest(id="pin"))
    assert set(servers.numbers) == {0}
    assert msgspec.msgpack.decode(pinning.encode_request(pinning.PinRequest("pin"))) == ["pin", 0, 0]


async def test_pin_numbers_rise_over_an_older_copy_of_the_store(servers: Servers) -> None:
    last = await servers.pins.next_number(5)
    assert await servers.pins.next_number(5) == last + 1 == 6
    await servers.store.delete(paths.PIN_NUMBER, -1)
    assert await servers.pins.next_number(1000) == 1000
