"""Connections before any handler has them: they are counted, bounded, and leave descriptors for files."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trustme

from kvstore.env import accepting
from kvstore.env.accepting import files_for_connections
from kvstore.env.networks import KnownNetworks
from kvstore.env.tls import Tls
from kvstore.env.transport import TcpTransport
from tests.env.runners import on_asyncio, on_uvloop
from tests.env.test_transport import Echo, Recorder
from tests.waiting import wait_until

DEADLINE_S = 60
Run = Callable[[Any], None]
on_both = pytest.mark.parametrize("run", [on_asyncio, on_uvloop])


class Port:
    """A port that echoes, and its clients."""

    def __init__(self, transport: TcpTransport, listener: Any) -> None:
        self.transport, self.address = transport, listener.address
        self._listener = listener
        self.idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def connect_idle(self, count: int) -> None:
        """Connect this many clients that send nothing, not even a TLS hello."""
        host, _, port = self.address.rpartition(":")
        for _ in range(count):
            self.idle.append(await asyncio.open_connection(host, int(port)))

    async def wait_opening(self, count: int) -> None:
        async def opening() -> bool:
            return self.transport.statistics()["connections_opening"] == count

        await wait_until(opening)

    async def wait_handshakes(self, count: int) -> None:
        (acceptor,) = self._listener._acceptors

        async def begun() -> bool:
            return len(acceptor._handshakes) == count

        await wait_until(begun)

    async def echoes(self) -> bool:
        """Return True if one more client is served."""
        caller = Recorder()
        try:
            await self.transport.connect(self.address, caller)
            caller.stream.write(b"hello")
            await caller.until(lambda: caller.received or caller.is_lost)
            caller.stream.abort()
        except OSError:
            return False
        return bytes(caller.received) == b"hello"

    async def open_count(self) -> int:
        """Return how many of the idle connections the port has not closed."""
        await one_moment()
        return sum(not reader.at_eof() and reader.exception() is None for reader, _ in self.idle)


async def one_moment(seconds: float = 0.1) -> None:
    """Give background work the time to happen."""
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), seconds)


@pytest.fixture
def tls(tmp_path: Path) -> tuple[ssl.SSLContext | None, ssl.SSLContext]:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    ca, cert, key = (tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem"))
    authority.cert_pem.write_to_path(str(ca))
    issued.cert_chain_pems[0].write_to_path(str(cert))
    issued.private_key_pem.write_to_path(str(key))
    files = Tls(ca=ca, cert=cert, key=key)
    return files.server_context(), files.client_context()


@asynccontextmanager
async def port(
    tls: tuple[ssl.SSLContext | None, ssl.SSLContext] | None = None, known: KnownNetworks | None = None
) -> AsyncIterator[Port]:
    transport = TcpTransport(serving=tls[0], calling=tls[1], known=known) if tls else TcpTransport()
    listener = await transport.listen("127.0.0.1:0", Echo)
    found = Port(transport, listener)
    async with asyncio.timeout(DEADLINE_S):
        yield found
    listener.close()
    for _, writer in found.idle:
        writer.close()


@on_both
def test_oldest_silent_connection_gives_way_when_waiting_slots_run_out(run: Run, tls: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(accepting, "WAITING_MAX", 20)
    monkeypatch.setattr(accepting, "OPENING_S", 1e9)

    async def scenario() -> None:
        async with port(tls) as found:
            await found.connect_idle(20)
            await found.wait_opening(20)
            assert await found.echoes()
            await found.connect_idle(80)
            for _ in range(3):
                assert await found.echoes(), "100 silent connections keep nobody out"
            assert found.transport.statistics()["connections_opening"] <= 21
            assert found.transport.statistics()["connections_gave_way_total"] >= 50

    run(scenario)


HALF_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"


async def connect_from(host: str, address: str, said: bytes = HALF_HELLO) -> asyncio.StreamWriter:
    """Connect from one of the addresses of 127.0.0.0/8, which all belong to this machine, and send the first bytes."""
    place, _, number = address.rpartition(":")
    _, writer = await asyncio.open_connection(place, int(number), local_addr=(host, 0))
    writer.write(said)
    return writer


@on_both
def test_half_a_hello_takes_no_handshake_slot(run: Run, tls: Any, monkeypatch: Any) -> None:
    """400 connections that each sent 11 bytes kept everybody out: a handshake had begun for each."""
    monkeypatch.setattr(accepting, "OPENING_S", 1e9)

    async def scenario() -> None:
        async with port(tls) as found, AsyncExitStack() as stack:
            for _ in range(400):
                stack.callback((await connect_from("127.0.0.1", found.address)).close)
            await found.wait_opening(400)
            assert await found.echoes()
            assert found.transport.statistics()["connections_gave_way_total"] == 0

    run(scenario)


@on_both
def test_network_with_few_connections_keeps_them_when_another_has_many(run: Run, tls: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(accepting, "WAITING_MAX", 20)
    monkeypatch.setattr(accepting, "OPENING_S", 1e9)

    async def scenario() -> None:
        async with port(tls) as found, AsyncExitStack() as stack:
            host, _, number = found.address.rpartition(":")
            slow = Begun(tls[1], host, int(number))
            for _ in range(100):
                stack.callback((await connect_from("127.0.1.1", found.address)).close)
            await found.wait_opening(20)
            slow.say()
            assert await asyncio.to_thread(slow.finish) == b"x", "the oldest of all, and the only one of its address"

    run(scenario)


@on_both
def test_peers_of_many_networks_do_not_displace_a_known_one(run: Run, tls: Any, monkeypatch: Any) -> None:
    """The addresses that this transport has connected to are known, as the other nodes are to a node."""
    monkeypatch.setattr(accepting, "WAITING_MAX", 20)
    monkeypatch.setattr(accepting, "OPENING_S", 1e9)

    async def scenario() -> None:
        async with port(tls) as found, AsyncExitStack() as stack:
            assert await found.echoes()
            host, _, number = found.address.rpartition(":")
            slow = Begun(tls[1], host, int(number))
            for turn in range(100):
                stack.callback((await connect_from(f"127.0.1.{1 + turn}", found.address)).close)
            await found.wait_opening(20)
            slow.say()
            assert await asyncio.to_thread(slow.finish) == b"x"

    run(scenario)


@on_both
def test_handshakes_of_one_network_give_way_to_another_network(run: Run, tls: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(accepting, "HANDSHAKES_MAX", 10)
    monkeypatch.setattr(accepting, "HANDSHAKE_SURE_S", 1e9)
    monkeypatch.setattr(accepting, "OPENING_S", 1e9)

    async def scenario() -> None:
        async with port(tls) as found, AsyncExitStack() as stack:
            host, _, number = found.address.rpartition(":")
            hello = Begun(tls[1], host, int(number)).hello()
            for _ in range(30):
                stack.callback((await connect_from("127.0.1.1", found.address, hello)).close)
            await found.wait_opening(30)
            await found.wait_handshakes(10)
            assert found.transport.statistics()["connections_gave_way_total"] == 0, "those of one address wait"

            async def has_given_way() -> bool:
                assert await found.echoes()
                return found.transport.statistics()["connections_gave_way_total"] == 1

            await wait_until(has_given_way)  # the first clients may arrive before all slots are taken

    run(scenario)


@on_both
def test_handshakes_of_a_known_network_keep_no_unknown_client_out(run: Run, tls: Any, monkeypatch: Any) -> None:
    """Anyone behind the address of an authenticated client could lock out every unknown client."""
    monkeypatch.setattr(accepting, "HANDSHAKES_MAX", 10)
    monkeypatch.setattr(accepting, "HANDSHAKE_SURE_S", 1e9)
    monkeypatch.setattr(accepting, "OPENING_S", 1e9)
    known = KnownNetworks()
    known.note("ipv4:127.0.1.1")

    async def scenario() -> None:
        async with port(tls, known) as found, AsyncExitStack() as stack:
            host, _, number = found.address.rpartition(":")
            hello = Begun(tls[1], host, int(number)).hello()
            for _ in range(30):
                stack.callback((await connect_from("127.0.1.1", found.address, hello)).close)
            await found.wait_opening(30)
            await found.wait_handshakes(10)
            assert await found.echoes()

    run(scenario)


@on_both
def test_many_connections_end_none_that_has_no_handshake(run: Run, monkeypatch: Any) -> None:
    """Uvloop would never notify its handler, and the process would end at the handler's next write."""
    monkeypatch.setattr(accepting, "WAITING_MAX", 1)

    def crowd(address: str) -> int:
        host, _, number = address.rpartition(":")
        with ExitStack() as stack:
            callers = [stack.enter_context(socket.create_connection((host, int(number)))) for _ in range(200)]
            for each in callers:
                each.sendall(b"x")
            return sum(_heard(each) for each in callers)

    async def scenario() -> None:
        async with port() as found:
            assert await asyncio.to_thread(crowd, found.address) == 200
            assert found.transport.statistics()["connections_gave_way_total"] == 0

    run(scenario)


def _heard(caller: socket.socket) -> bool:
    caller.settimeout(DEADLINE_S)
    with suppress(OSError):
        return caller.recv(1) == b"x"
    return False


@on_both
def test_begun_handshake_gives_way_to_no_idle_connection(run: Run, tls: Any, monkeypatch: Any) -> None:
    """On a busy machine many handshakes take longer than their guaranteed time, and the oldest are the next to
    finish."""
    monkeypatch.setattr(accepting, "WAITING_MAX", 20)
    monkeypatch.setattr(accepting, "HANDSHAKE_SURE_S", 1e9)
    monkeypatch.setattr(accepting, "OPENING_S", 1e9)
    accepted = {"connections_gave_way_total": 0}

    async def scenario() -> None:
        async with port(tls) as found:
            host, _, number = found.address.rpartition(":")
            begun = [Begun(tls[1], host, int(number)) for _ in range(10)]
            for each in begun:
                each.say()
            await found.wait_opening(10)
            await found.connect_idle(80)
            while found.transport.statistics()["connections_gave_way_total"] < 60:
                await one_moment(0.01)
            accepted.update(found.transport.statistics())
            assert await asyncio.to_thread(lambda: [each.finish() for each in begun]) == [b"x"] * 10

    run(scenario)
    assert accepted["connections_gave_way_total"] >= 60


class Begun:
    """A client that has sent the first record of a handshake, and takes its time."""

    def __init__(self, tls: ssl.SSLContext, host: str, number: int) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._socket = socket.create_connection((host, number))
        self._socket.settimeout(DEADLINE_S)
        self._tls = tls.wrap_bio(self._incoming, self._outgoing, server_hostname=host)

    def say(self) -> None:
        with suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
        self._socket.sendall(self._outgoing.read())

    def hello(self) -> bytes:
        """Return the first record, and send nothing."""
        with suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
        return self._outgoing.read()

    def finish(self) -> bytes:
        """End the handshake, and return what is echoed."""
        with self._socket, suppress(OSError):
            self._until(self._tls.do_handshake)
            self._tls.write(b"x")
            return bytes(self._until(lambda: self._tls.read(1)))
        return b""

    def _until(self, step: Callable[[], Any]) -> Any:
        while True:
            try:
                done = step()
                self._socket.sendall(self._outgoing.read())
                return done
            except ssl.SSLWantReadError:
                self._socket.sendall(self._outgoing.read())
                came = self._socket.recv(1 << 16)
                if not came:
                    raise ConnectionError from None
                self._incoming.write(came)


@on_both
def test_handshake_has_a_time_limit(run: Run, tls: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(accepting, "OPENING_S", 0.2)

    async def scenario() -> None:
        async with port(tls) as found:
            await found.connect_idle(5)

            async def are_timed_out() -> bool:
                return found.transport.statistics()["connections_timed_out_total"] == 5

            async def are_closed() -> bool:
                return await found.open_count() == 0

            await wait_until(are_timed_out)
            await found.wait_opening(0)
            await wait_until(are_closed)
            monkeypatch.setattr(accepting, "OPENING_S", 1e9)
            assert await found.echoes()

    run(scenario)


@on_both
def test_handshake_keeps_its_slot_for_its_guaranteed_time(run: Run, tls: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(accepting, "HANDSHAKES_MAX", 2)
    monkeypatch.setattr(accepting, "HANDSHAKE_SURE_S", 1e9)
    monkeypatch.setattr(accepting, "OPENING_S", 1e9)

    async def scenario() -> None:
        async with port(tls) as found:
            host, _, number = found.address.rpartition(":")
            begun = [Begun(tls[1], host, int(number)) for _ in range(10)]
            for each in begun:
                each.say()
            await found.wait_opening(10)
            for each in begun:
                assert await asyncio.to_thread(each.finish) == b"x", "the others wait for their turn"
            assert found.transport.statistics()["connections_gave_way_total"] == 0

    run(scenario)


@on_both
def test_handshake_gives_way_to_its_own_network_after_its_time(run: Run, tls: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(accepting, "HANDSHAKES_MAX", 2)
    monkeypatch.setattr(accepting, "HANDSHAKE_SURE_S", 0.1)
    monkeypatch.setattr(accepting, "OPENING_S", 1e9)

    async def scenario() -> None:
        async with port(tls) as found:
            host, _, number = found.address.rpartition(":")
            stuck = [Begun(tls[1], host, int(number)) for _ in range(4)]
            for each in stuck:
                each.say()
            await found.wait_opening(4)
            assert await found.echoes()
            assert found.transport.statistics()["connections_gave_way_total"] >= 1

    run(scenario)


@on_both
def test_last_descriptors_are_reserved_for_files(run: Run, monkeypatch: Any) -> None:
    below = len(os.listdir("/proc/self/fd")) + 60

    async def scenario() -> None:
        async with port() as found:
            monkeypatch.setattr(accepting, "files_for_connections", lambda **_: below)
            await found.connect_idle(60)
            assert not await found.echoes()
            assert found.transport.statistics()["connections_refused_total"] > 0
            monkeypatch.setattr(accepting, "files_for_connections", lambda **_: 1 << 30)
            await wait_until(found.echoes)

    run(scenario)


@on_both
def test_accepting_pauses_without_descriptors_and_the_loop_continues(run: Run, monkeypatch: Any) -> None:
    """A listener whose accept fails is ready again at once, so the loop would do nothing else; uvloop closes its own
    one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def scenario() -> None:
        async with port() as found:
            wakeups = 0

            def files_for_connections(**_: bool) -> int:
                nonlocal wakeups
                wakeups += 1
                return 1 << 30

            monkeypatch.setattr(accepting, "files_for_connections", files_for_connections)
            host, _, number = found.address.rpartition(":")
            others = [socket.socket() for _ in range(5)]
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
            held = []
            with suppress(OSError):
                while True:
                    held.append(os.dup(0))
            try:
                for other in others:
                    other.connect((host, int(number)))
                await one_moment(0.5)
                assert 1 < wakeups <= 10, "the listener rests between attempts"
            finally:
                for each in held:
                    os.close(each)
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await wait_until(found.echoes)
            for other in others:
                other.close()

    run(scenario)


def test_quarter_of_all_descriptors_is_reserved_up_to_a_maximum(monkeypatch: Any) -> None:
    for files, wanted in ((1024, 768), (2048, 1536), (20_000, 18_976), (resource.RLIM_INFINITY, 1 << 30)):
        monkeypatch.setattr(resource, "getrlimit", lambda _which, files=files: (files, files))
        assert files_for_connections() == wanted
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (1024, 1024))
    assert files_for_connections(is_vital=True) == 896
