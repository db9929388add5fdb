"""Messages between the servers of a cluster: batches, order, bounds and loss."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kvstore.env.nursery import TaskNursery
from kvstore.errors import InvalidRequest, OutcomeUnknown, Overloaded, Unavailable
from kvstore.server.redis import channel_peers, channels
from kvstore.server.redis.channel_peers import CHANNELS, PUBLISH, ChannelPeers
from kvstore.server.redis.channel_work import TURN_WORK
from kvstore.server.redis.channels import CHANNEL_BYTES_MAX, Channels, Message
from kvstore.types import PartitionId, ServerId
from tests.waiting import wait_until

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
        self.owner = "test"
        self.found: list[bytes] = []

    def push(self, message: Message) -> None:
        self.found.append(message.body)


class World:
    def __init__(self) -> None:
        self.links, self.channels, self.nursery = Links(), Channels(), TaskNursery("test")
        self.servers = [HERE, SECOND, THIRD]
        self.now = 0.0
        env = SimpleNamespace(nursery=self.nursery, clock=SimpleNamespace(now=lambda: self.now))
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
    assert max(sizes) == 1 << 20  # each in its own call, because calls that renew leases wait behind it
    for _ in range(2000):
        world.channels.publish(b"a", b"x" * 1000)
    await world.settle()
    found = [sum(len(message) for _, message in each) for each in world.links.to(SECOND)][5:]
    assert sum(found) == 2_000_000
    assert max(found) <= channel_peers.CALL_BYTES_MAX


async def test_server_that_refuses_calls_is_called_again_after_a_pause(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_peers, "PAUSE_S", 0.05)
    world.links.error = Unavailable("refused")
    for number in range(20):
        world.channels.publish(b"a", b"%d" % number)
        await world.settle()
    assert len(world.links.to(SECOND)) == 1

    async def has_called_again() -> bool:
        return len(world.links.to(SECOND)) == 2

    await wait_until(has_called_again, what="the next call")
    assert world.links.to(SECOND)[1] == [(b"a", b"%d" % number) for number in range(1, 20)]


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
async def test_messages_of_a_failed_call_are_counted_and_never_repeated(
    world: World, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_peers, "PAUSE_S", 0.0)
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


async def test_messages_to_a_server_that_has_left_are_dropped(world: World) -> None:
    world.links.gate.clear()
    for number in range(20):
        world.channels.publish(b"a", b"%d" % number)
        await world.settle()
    world.servers = [HERE, THIRD]
    world.links.gate.set()
    await world.settle()
    assert world.links.to(SECOND) == [[(b"a", b"0")]]
    assert len(world.links.to(THIRD)) == 2
    assert world.peers.dropped == 19


async def test_received_messages_are_delivered_here_and_sent_nowhere(world: World) -> None:
    subscriber = Subscriber()
    world.channels.subscribe(subscriber, [b"a"])
    body = msgspec.msgpack.encode([(b"a", b"x"), (b"b", b"y"), (b"a", b"z")])
    assert await world.peers.answer(SECOND, PUBLISH, body) == b""
    await world.settle()
    assert subscriber.found == [b"$1\r\nx\r\n", b"$1\r\nz\r\n"]
    assert world.links.calls == []
    assert world.channels.published == 0


def large_call(count: int) -> bytes:
    return msgspec.msgpack.encode([(b"a", b"%d" % number) for number in range(count)])


async def test_received_messages_are_spread_over_turns_and_keep_their_order(world: World) -> None:
    """Leases must be renewed while a large call is delivered."""
    subscriber = Subscriber()
    world.channels.subscribe(subscriber, [b"a"])
    answer = asyncio.ensure_future(world.peers.answer(SECOND, PUBLISH, large_call(5_000)))
    turns, most, before = 0, 0, 0
    while not answer.done():
        await asyncio.sleep(0)
        most, before = max(most, len(subscriber.found) - before), len(subscriber.found)
        turns += 1
    assert answer.result() == b""
    assert most <= TURN_WORK // channels.MESSAGE_WORK + 1
    assert turns >= 5_000 // most
    assert subscriber.found == [b"$%d\r\n%d\r\n" % (len(str(number)), number) for number in range(5_000)]


async def test_call_during_the_previous_one_of_its_server_is_refused(world: World) -> None:
    """Otherwise calls that have timed out would pile up, and their messages would mix."""
    first = asyncio.ensure_future(world.peers.answer(SECOND, PUBLISH, large_call(5_000)))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await world.peers.answer(SECOND, PUBLISH, large_call(1))
    other = asyncio.ensure_future(world.peers.answer(THIRD, PUBLISH, large_call(1)))
    assert await asyncio.gather(first, other) == [b"", b""]
    assert await world.peers.answer(SECOND, PUBLISH, large_call(1)) == b""


async def test_messages_that_the_caller_no_longer_waits_for_are_dropped(world: World) -> None:
    subscriber = Subscriber()
    world.channels.subscribe(subscriber, [b"a"])
    answer = asyncio.ensure_future(world.peers.answer(SECOND, PUBLISH, large_call(5_000)))
    await asyncio.sleep(0)
    world.now += channel_peers.TIMEOUT_S + 1
    with pytest.raises(Overloaded):
        await answer
    assert 0 < len(subscriber.found) < 5_000
    assert await world.peers.answer(SECOND, PUBLISH, large_call(1)) == b""


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
        await world.peers.answer(SECOND, PUBLISH, body)


async def test_nothing_is_sent_after_the_close(world: World) -> None:
    await world.peers.close()
    world.channels.publish(b"a", b"x")
    await world.settle()
    assert world.links.calls == []


def test_body_of_a_call_is_pinned() -> None:
    assert channel_peers._encoder.encode([(b"ch", b"\x00m")]) == b"\x91\x92\xc4\x02ch\xc4\x02\x00m"
