"""Calls without a message, and many calls from one address, leave room for others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from kvstore.env.networks import address_of
from kvstore.errors import Overloaded
from kvstore.rpc import calls
from kvstore.rpc import server as rpc_server
from kvstore.rpc.calls import Few
from kvstore.rpc.gate import Passage
from kvstore.rpc.server import GrpcServer
from kvstore.server.access.needs import RPC_NEEDS, nothing
from tests.rpc.test_server import NOT_SERVING, health_of
from tests.waiting import PATIENCE_S, wait_until

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
REQUEST = health_pb2.HealthCheckRequest().SerializeToString()


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(rpc_server, "CONCURRENT_CALLS_MAX", 8)
    running = GrpcServer([], [])
    yield await running.start("127.0.0.1:0")
    await running.stop(0)


@pytest.fixture
async def channel(port: int) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as opened:
        yield opened


def half_sent(channel: grpc.aio.Channel) -> Any:
    return channel.stream_unary(CHECK)()


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    async with asyncio.timeout(PATIENCE_S):
        return await call.code(), await call.details()


async def test_calls_without_message_do_not_block_others(
    channel: grpc.aio.Channel, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "HALF_SENT_MAX", 4)
    strangers = [half_sent(channel) for _ in range(30)]
    wanted = (grpc.StatusCode.RESOURCE_EXHAUSTED, "the message of the call did not arrive in time")

    async def have_given_way() -> bool:
        return [await status_of(each) for each in strangers if each.done()].count(wanted) >= 3

    await wait_until(have_given_way, what="the oldest give way")

    async def has_capacity() -> bool:
        try:
            return bool(await health_of(port, "") == NOT_SERVING)
        except grpc.aio.AioRpcError:
            return False

    await wait_until(has_capacity, what="a whole call is answered")
    for each in strangers:
        each.cancel()


async def test_message_may_take_its_time(channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MESSAGE_S", 0.1)
    code, _ = await status_of(half_sent(channel))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_call_that_ends_without_message_is_refused(channel: grpc.aio.Channel) -> None:
    call = half_sent(channel)
    await call.done_writing()
    assert await status_of(call) == (grpc.StatusCode.INVALID_ARGUMENT, "expected a message in the call, got none")


async def test_one_address_cannot_use_all_calls(
    channel: grpc.aio.Channel, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle streams look like those of a client that has nothing to do."""
    monkeypatch.setattr(calls, "ADDRESS_CALLS_MAX", 2)
    watching = [channel.unary_stream(WATCH)(REQUEST) for _ in range(2)]
    for each in watching:
        await each.read()
    refused = channel.unary_stream(WATCH)(REQUEST)
    assert await status_of(refused) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "expected at most 2 concurrent calls from one address; end some calls",
    )
    watching[0].cancel()

    async def has_capacity() -> bool:
        try:
            return bool(await health_of(port, "") == NOT_SERVING)
        except grpc.aio.AioRpcError:
            return False

    await wait_until(has_capacity, what="a call that has ended makes room")
    watching[1].cancel()


async def watches(channel: grpc.aio.Channel, count: int) -> list[Any]:
    """Begin health watches one after the other: gRPC keeps no order among calls that begin at once."""
    found = []
    for _ in range(count):
        found.append(channel.unary_stream(WATCH)(REQUEST))
        await found[-1].read()
    return found


async def test_health_watches_of_one_address_are_limited(
    channel: grpc.aio.Channel, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch needs no user: unauthenticated peers used to occupy all calls of a node with watches."""
    monkeypatch.setattr(calls, "ADDRESS_WATCHES_MAX", 2)
    under_way = await watches(channel, 2)
    code, text = await status_of(channel.unary_stream(WATCH)(REQUEST))
    assert (code, "2 health watches from one address" in text) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
    assert await health_of(port, "") == NOT_SERVING, "a check is no watch"
    under_way.pop().cancel()

    async def is_free() -> bool:
        call = channel.unary_stream(WATCH)(REQUEST)
        found = await call.read()
        call.cancel()
        return found is not grpc.aio.EOF

    async def has_capacity() -> bool:
        with suppress(grpc.aio.AioRpcError):
            return await is_free()
        return False

    await wait_until(has_capacity, what="a watch that has ended frees its slot")
    under_way.pop().cancel()


async def test_oldest_call_without_login_gives_way(
    channel: grpc.aio.Channel, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "OPEN_CALLS_MAX", 3)
    under_way = await watches(channel, 3)
    assert await health_of(port, "") == NOT_SERVING, "a probe is answered, however many watch"
    code, text = await status_of(under_way[0])
    assert (code, "3 concurrent calls without a login" in text) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
    under_way += await watches(channel, 1)
    for each in under_way:
        each.cancel()


def test_methods_without_login_match_the_table() -> None:
    open_methods = {method for method, need in RPC_NEEDS.items() if need is nothing}
    assert open_methods == {CHECK, WATCH}
    assert {method for method in RPC_NEEDS if Passage(None, method).needs_no_user} == open_methods


class Context:
    def __init__(self, address: str) -> None:
        self._address = address

    def peer(self) -> str:
        return f"ipv4:{self._address}:51112"


def test_costly_calls_are_limited_in_total_and_per_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "FEW", 4)
    few = Few("surveys")
    with ExitStack() as one, ExitStack() as another:
        for _ in range(2):
            one.enter_context(few.place(Context("10.0.0.1")))
        with (
            pytest.raises(Overloaded, match="4 concurrent surveys, and 2 from one address"),
            few.place(Context("10.0.0.1")),
        ):
            pass
        for _ in range(2):
            another.enter_context(few.place(Context("10.0.0.2")))
        with pytest.raises(Overloaded), few.place(Context("10.0.0.3")):
            pass
        one.close()
        with few.place(Context("10.0.0.3")):
            pass
    assert not few._of_address, "nobody is remembered"


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.9:51112", "ipv4:10.0.0.9"),
        ("ipv6:%5B2001:db8::1:2%5D:51112", "2001:db8::/64"),
        ("ipv6:%5B2001:db8::7%5D:51113", "2001:db8::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:51113", "fe80::/64"),
        ("ipv6:%5B::1%5D:1", "::/64"),
        ("ipv6:%5B::ffff:10.0.0.9%5D:51112", "ipv4:10.0.0.9"),
        ("ipv6:%5Bnonsense%5D:1", "ipv6:%5Bnonsense%5D"),
    ],
)
def test_address_of_machine_has_no_port(peer: str, address: str) -> None:
    assert address_of(peer) == address
