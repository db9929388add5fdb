"""The guarantees of a handler, over real TCP and in the simulated network."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from kvstore.env import Stream, Transport
from kvstore.env.transport import TcpTransport, join_address, split_address
from kvstore.proto.start_tls import ClientsPrelude
from tests.env.runners import on_asyncio, on_both, on_uvloop, run_by
from tests.sim.world.env import SimWorld
from tests.sim.world.network import NetworkConfig

Scenario = Callable[["Place"], Coroutine[Any, Any, None]]
DEADLINE_S = 60
_ASKED = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT


class Place:
    """Two ends of a network."""

    def __init__(self, server: Transport, client: Transport, host: str, nobody: str) -> None:
        self.server = server
        self.client = client
        self.any_port = f"{host}:0"
        self.nobody = nobody
        """An address at which nobody listens."""

        self._handlers: list[Recorder] = []

    def handler(self, handler: Recorder | None = None) -> Recorder:
        """Return a network, a new one unless it is given, and close its connections at the end."""
        self._handlers.append(handler or Recorder())
        return self._handlers[-1]

    async def close(self) -> None:
        for handler in self._handlers:
            if handler.is_made and not handler.is_lost:
                handler.stream.abort()
                await handler.until_lost()

    async def connect(self) -> tuple[Recorder, Recorder]:
        """The two handlers of a new connection: the accepting one, the connecting one."""
        accepted, caller = self.handler(), self.handler()
        listener = await self.server.listen(self.any_port, lambda: accepted)
        await self.client.connect(listener.address, caller)
        await accepted.until(lambda: accepted.is_made)
        listener.close()
        return accepted, caller


class Recorder:
    """A handler that records its calls."""

    def __init__(self) -> None:
        self.stream: Stream
        self.received = bytearray()
        self.calls: list[str] = []
        self.error: Exception | None = None
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def until_lost(self) -> None:
        await self.until(lambda: self.is_lost)

    @property
    def is_made(self) -> bool:
        return "made" in self.calls

    @property
    def is_lost(self) -> bool:
        return "lost" in self.calls

    def connection_made(self, transport: Any) -> None:
        self.stream = transport
        self._note("made")

    def data_received(self, data: bytes) -> None:
        assert data
        self.received += data
        self._note("data")

    def eof_received(self) -> bool:
        self._note("eof")
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.error = exc
        self._note("lost")

    def pause_writing(self) -> None:
        self._note("pause")

    def resume_writing(self) -> None:
        self._note("resume")

    def _note(self, call: str) -> None:
        if call != "data" or self.calls[-1:] != ["data"]:
            self.calls.append(call)
        self._changed.set()


async def with_deadline(scenario: Scenario, place: Place) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await scenario(place)
        await place.close()


def on_tcp(scenario: Scenario, run: Callable[[Any], None]) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        nobody = join_address(*reserved.getsockname())
        tcp = TcpTransport()
        run(lambda: with_deadline(scenario, Place(tcp, tcp, "127.0.0.1", nobody)))


def in_simulation(scenario: Scenario) -> None:
    for seed in range(10):
        with SimWorld(seed, network=NetworkConfig(recut_chance=0.5)) as world:
            place = Place(world.env("s").transport, world.env("c").transport, "s", "s:1")
            world.run(with_deadline(scenario, place))


def by_asyncio(scenario: Scenario) -> None:
    on_tcp(scenario, on_asyncio)


def by_uvloop(scenario: Scenario) -> None:
    on_tcp(scenario, on_uvloop)


everywhere = run_by([by_asyncio, by_uvloop, in_simulation], given="place")


class Echo(Recorder):
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.stream.write(data)


@everywhere
async def test_bytes_arrive_complete_and_in_order_both_ways(place: Place) -> None:
    accepted, caller = await place.connect()
    data = Random(1).randbytes(300_000)
    for start in range(0, len(data), 7_000):
        caller.stream.write(data[start : start + 7_000])
        accepted.stream.writelines([data[start : start + 1_000], data[start + 1_000 : start + 7_000]])
    await accepted.until(lambda: len(accepted.received) == len(data))
    await caller.until(lambda: len(caller.received) == len(data))
    assert bytes(accepted.received) == bytes(caller.received) == data


@everywhere
async def test_handler_has_its_connection_before_connect_returns(place: Place) -> None:
    listener = await place.server.listen(place.any_port, place.handler)
    caller = place.handler()
    stream = await place.client.connect(listener.address, caller)
    assert caller.is_made
    assert stream is caller.stream
    listener.close()


@everywhere
async def test_both_ends_agree_on_their_addresses(place: Place) -> None:
    accepted, caller = await place.connect()
    assert accepted.stream.get_extra_info("peername") == caller.stream.get_extra_info("sockname")
    assert accepted.stream.get_extra_info("sockname") == caller.stream.get_extra_info("peername")
    assert accepted.stream.get_extra_info("no such thing", 7) == 7


@everywhere
async def test_address_can_be_used_by_one_listener(place: Place) -> None:
    listener = await place.server.listen(place.any_port, Recorder)
    with pytest.raises(OSError, match=listener.address.rpartition(":")[2]):
        await place.server.listen(listener.address, Recorder)
    listener.close()


@everywhere
async def test_connection_is_refused_where_nobody_listens(place: Place) -> None:
    with pytest.raises(ConnectionRefusedError):
        await place.client.connect(place.nobody, Recorder())


@on_both
@pytest.mark.parametrize("address", [":3181", "n1:70000", f"{'a' * 64}:3181", "n1..example:3181", "n1\0:3181"])
async def test_malformed_address_is_an_error_of_connect(address: str) -> None:
    """Other bookies register any text. Another error would end the task that connects, and with it every node that
    reads such a registration."""
    for calling in (None, ssl.create_default_context()):
        for prelude in (None, lambda: ClientsPrelude(1)):
            with pytest.raises(OSError, match=r"no connection to|no such host"):
                await TcpTransport(calling=calling).connect(address, Recorder(), prelude=prelude)


@everywhere
async def test_closed_listener_leaves_its_connections_open(place: Place) -> None:
    accepted, caller = await place.connect()
    caller.stream.write(b"still here")
    await accepted.until(lambda: accepted.received)


@everywhere
async def test_close_sends_the_buffer_and_then_ends_both_sides(place: Place) -> None:
    accepted, caller = await place.connect()
    data = Random(2).randbytes(5_000_000)
    caller.stream.write(data)
    caller.stream.close()
    assert caller.stream.is_closing()
    await accepted.until_lost()
    await caller.until_lost()
    assert bytes(accepted.received) == data
    assert accepted.calls == ["made", "data", "eof", "lost"]
    assert [call for call in caller.calls if call not in ("pause", "resume")] == ["made", "lost"]
    assert accepted.error is caller.error is None


@everywhere
async def test_abort_ends_both_sides_once(place: Place) -> None:
    accepted, caller = await place.connect()
    caller.stream.write(b"x")
    caller.stream.abort()
    caller.stream.abort()
    caller.stream.close()
    await accepted.until_lost()
    await caller.until_lost()
    assert accepted.calls.count("lost") == caller.calls.count("lost") == 1
    assert caller.error is None


@everywhere
async def test_closing_side_receives_nothing_more(place: Place) -> None:
    accepted, caller = await place.connect()
    accepted.stream.write(b"x" * 100)
    caller.stream.close()
    await caller.until_lost()
    await accepted.until_lost()
    assert caller.calls == ["made", "lost"]


@everywhere
async def test_writer_is_paused_until_the_peer_reads(place: Place) -> None:
    accepted, caller = await place.connect()
    accepted.stream.pause_reading()
    sent = 0
    while "pause" not in caller.calls:
        caller.stream.write(bytes(64 * 1024))
        sent += 64 * 1024
        await asyncio.sleep(0)
    assert caller.stream.get_write_buffer_size() > 0
    assert caller.calls == ["made", "pause"]
    accepted.stream.resume_reading()
    await caller.until(lambda: "resume" in caller.calls)
    await accepted.until(lambda: len(accepted.received) == sent)
    assert caller.stream.get_write_buffer_size() == 0


@everywhere
async def test_write_buffer_limits_can_be_set(place: Place) -> None:
    accepted, caller = await place.connect()
    accepted.stream.pause_reading()
    caller.stream.set_write_buffer_limits(high=50_000_000)
    caller.stream.write(bytes(20_000_000))
    assert "pause" not in caller.calls
    caller.stream.set_write_buffer_limits(high=1000)
    caller.stream.write(b"x")
    assert "pause" in caller.calls
    caller.stream.abort()


@everywhere
async def test_paused_reader_gets_all_bytes_when_it_resumes(place: Place) -> None:
    accepted, caller = await place.connect()
    accepted.stream.pause_reading()
    caller.stream.write(b"one")
    accepted.stream.write(b"pong")
    await caller.until(lambda: caller.received)
    assert not accepted.received
    accepted.stream.resume_reading()
    await accepted.until(lambda: accepted.received == b"one")


@everywhere
async def test_handler_that_keeps_its_half_open_can_still_send(place: Place) -> None:
    class HalfOpen(Recorder):
        def eof_received(self) -> bool:
            super().eof_received()
            return True

    accepted = HalfOpen()
    listener = await place.server.listen(place.any_port, lambda: accepted)
    stream = await place.client.connect(listener.address, place.handler())
    await accepted.until(lambda: accepted.is_made)
    stream.close()
    await accepted.until(lambda: "eof" in accepted.calls)
    assert not accepted.is_lost
    accepted.stream.close()
    await accepted.until_lost()
    listener.close()


@everywhere
async def test_cancelled_connect_leaves_no_connection_and_notifies_its_handler(place: Place) -> None:
    accepted: list[Recorder] = []

    def accept() -> Recorder:
        accepted.append(place.handler(Echo()))
        return accepted[-1]

    listener = await place.server.listen(place.any_port, accept)
    callers = [place.handler() for _ in range(12)]
    for turns, caller in enumerate(callers):
        attempt = asyncio.get_running_loop().create_task(place.client.connect(listener.address, caller))
        for _ in range(turns):
            await asyncio.sleep(0)
        attempt.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            (await attempt).abort()
    last = place.handler()
    (await place.client.connect(listener.address, last)).write(b"last")
    await last.until(lambda: last.received)
    for handler in (*callers, *(each for each in accepted if not each.received)):
        if handler.is_made:
            await handler.until_lost()
        assert handler.calls in ([], ["made", "lost"], ["made", "eof", "lost"])
    listener.close()


@pytest.mark.parametrize("run", [on_asyncio, on_uvloop])
def test_small_frames_are_not_delayed(run: Callable[[Any], None]) -> None:
    async def scenario(place: Place) -> None:
        for end in await place.connect():
            sock = end.stream.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1

    on_tcp(scenario, run)


@pytest.mark.parametrize("run", [on_asyncio, on_uvloop])
def test_connection_to_a_vanished_peer_is_not_held_forever(run: Callable[[Any], None]) -> None:
    async def scenario(place: Place) -> None:
        accepted, _ = await place.connect()
        sock = accepted.stream.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        first_s, again_s, times = (sock.getsockopt(socket.IPPROTO_TCP, each) for each in _ASKED)
        assert first_s + times * again_s <= 120

    on_tcp(scenario, run)


@pytest.mark.parametrize(
    ("address", "parts"), [("n1:80", ("n1", 80)), ("127.0.0.1:0", ("127.0.0.1", 0)), ("[::1]:65535", ("::1", 65535))]
)
def test_address_has_a_host_and_a_port(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts
    assert join_address(*parts) == address


@pytest.mark.parametrize("address", ["", "n1", "n1:", ":80", "n1:x", "n1:-1", "n1:65536", "n1:8_0"])
def test_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        split_address(address)
