"""Messages between the servers of a cluster: batches, order, bounds and loss."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kvstore.env.nursery import TaskNursery
from kvstore.errors import InvalidRequest, OutcomeUnknown, Unavailable
from kvstore.server.redis import channel_peers
from kvstore.server.redis.channel_peers import CHANNELS, PUBLISH, ChannelPeers
from kvstore.server.redis.channels import CHANNEL_BYTES_MAX, Channels, Frames
from kvstore.types import PartitionId, ServerId

HERE, SECOND, THIRD = map(ServerId, ("n1", "n2", "n3"))
Messages = list[tuple[bytes, bytes]]


class Links:
    """Links to other servers, which answer when the test says so."""

    def __init__(self) -> None:
        self.calls: list[tuple[ServerId, Messages]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None

    async def call(self, server: ServerId, partition: PartitionId, method: str, body: bytes, timeout_s: float) -> bytes:
        assert (partition, method) == (CHANNELS, PUBLISH)
        self.calls.append((server, msgspec.msgpack.decode(body, type=Messages)))
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return b""

    def to(self, server: ServerId) -> list[Messages]:
        return [messages for each, messages in self.calls if each == server]


class Subscriber:
    def __init__(self) -> None:
        self.channels: dict[bytes, None] = {}
        self.patterns: dict[bytes, None] = {}
        self.found: list[bytes] = []

    def push(self, frames: Frames) -> None:
        self.found.append(frames[2])


class World:
    def __init__(self) -> None:
        self.links, self.channels, self.nursery = Links(), Channels(), TaskNursery("test")
        self.servers = [HERE, SECOND, THIRD]
        env = SimpleNamespace(nursery=self.nursery)
        self.peers = ChannelPeers(cast(Any, env), HERE, self.links, lambda: self.servers, self.channels)

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    await made.peers.close()
    await made.nursery.close()


async def test_message_goes_once_to_every_other_server(world: World) -> None:
    world.channels.publish(b"a", b"x")
    await world.settle()
    assert world.links.calls == [(SECOND, [(b"a", b"x")]), (THIRD, [(b"a", b"x")])]
    assert world.peers.dropped == 0


async def test_messages_of_one_turn_leave_in_one_call(world: World) -> None:
    for number in range(100):
        world.channels.publish(b"a", b"%d" % number)
    await world.settle()
    assert world.links.to(SECOND) == [[(b"a", b"%d" % number) for number in range(100)]]


async def test_messages_during_a_call_leave_in_order_in_the_next(world: World) -> None:
    world.links.gate.clear()
    world.channels.publish(b"a", b"0")
    await world.settle()
    for number in range(1, 5):
        world.channels.publish(b"a", b"%d" % number)
        await world.settle()
    assert world.links.to(SECOND) == [[(b"a", b"0")]]
    world.links.gate.set()
    await world.settle()
    assert world.links.to(SECOND) == [[(b"a", b"0")], [(b"a", b"%d" % number) for number in range(1, 5)]]


async def test_large_messages_are_divided_among_calls(world: World) -> None:
    for number in range(5):
        world.channels.publish(b"a", bytes([number]) * (1 << 20))
    await world.settle()
    sizes = [sum(len(message) for _, message in each) for each in world.links.to(SECOND)]
    assert sum(sizes) == 5 << 20
    assert max(sizes) <= channel_peers.CALL_BYTES_MAX + (1 << 20)


async def test_waiting_messages_are_bounded_and_newer_ones_dropped(world: World) -> None:
    world.links.gate.clear()
    for number in range(20):
        world.channels.publish(b"a", bytes([number]) * (1 << 20))
        await world.settle()
    world.links.gate.set()
    await world.settle()
    seen = [message[0] for each in world.links.to(SECOND) for _, message in each]
    assert seen == list(range(len(seen)))
    assert 8 <= len(seen) <= 10
    assert world.peers.dropped == 2 * (20 - len(seen))


@pytest.mark.parametrize("error", [Unavailable("gone"), OutcomeUnknown("silent")])
async def test_messages_of_a_failed_call_are_counted_and_never_repeated(world: World, error: Exception) -> None:
    world.links.error = error
    world.channels.publish(b"a", b"x")
    world.channels.publish(b"a", b"y")
    await world.settle()
    assert world.peers.dropped == 4
    world.links.error = None
    world.channels.publish(b"a", b"z")
    await world.settle()
    assert world.links.to(SECOND) == [[(b"a", b"x"), (b"a", b"y")], [(b"a", b"z")]]


async def test_messages_go_to_the_servers_of_the_moment(world: World) -> None:
    world.servers = [HERE]
    world.channels.publish(b"a", b"x")
    world.servers = [HERE, THIRD]
    world.channels.publish(b"a", b"y")
    await world.settle()
    assert world.links.calls == [(THIRD, [(b"a", b"y")])]


async def test_received_messages_are_delivered_here_and_sent_nowhere(world: World) -> None:
    subscriber = Subscriber()
    world.channels.subscribe(subscriber, [b"a"])
    body = msgspec.msgpack.encode([(b"a", b"x"), (b"b", b"y"), (b"a", b"z")])
    assert world.peers.answer(SECOND, PUBLISH, body) == b""
    await world.settle()
    assert [frame[-4:] for frame in subscriber.found] == [b"\nx\r\n", b"\nz\r\n"]
    assert world.links.calls == []
    assert world.channels.published == 0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([b"a"]),
        msgspec.msgpack.encode([(b"", b"x")]),
        msgspec.msgpack.encode([(b"a" * (CHANNEL_BYTES_MAX + 1), b"x")]),
    ],
)
async def test_malformed_messages_are_refused(world: World, body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        world.peers.answer(SECOND, PUBLISH, body)


async def test_nothing_is_sent_after_the_close(world: World) -> None:
    await world.peers.close()
    world.channels.publish(b"a", b"x")
    await world.settle()
    assert world.links.calls == []


def test_body_of_a_call_is_pinned() -> None:
    assert channel_peers._encoder.encode([(b"ch", b"\x00m")]) == b"\x91\x92\xc4\x02ch\xc4\x02\x00m"
