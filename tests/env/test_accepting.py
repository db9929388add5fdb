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
from kvstore.env.networks import KnownNetworks, network_of
from kvstore.env.tls import Tls
from kvstore.env.transport import TcpTransport
from tests.env.runners import on_both
from tests.env.test_transport import Echo, Recorder
from tests.waiting import wait_until

DEADLINE_S = 60


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

    @property
    def _acceptor(self) -> accepting.Acceptor:
        (acceptor,) = self._listener._acceptors
        return acceptor  # type: ignore[no-any-return]

    async def wait_handshakes(self, count: int) -> None:
        async def begun() -> bool:
            return len(self._acceptor._handshakes) == count

        await wait_until(begun)

    def networks_in_handshake(self) -> list[str]:
        return [network_of(each.getpeername()[0]) for each in self._acceptor._handshakes]

    def oldest_waiting(self) -> tuple[str, int]:
        return next(iter(self._acceptor._waiting)).getpeername()  # type: ignore[no-any-return]

    def freeze_allowance(self) -> None:
        """Let the allowance of handshakes grow by what is given back only."""
        self._acceptor._allowance._per_s = 0

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
async def test_oldest_silent_connection_gives_way_when_waiting_slots_run_out(tls: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(accepting, "WAITING_MAX", 20)
    monkeypatch.setattr(accepting, "OPENING_S", 1e9)
    async with port(tls) as found:
        await found.connect_idle(20)
        await found.wait_opening(20)
        assert await found.echoes()
        await found.connect_idle(80)
        for _ in range(3):
            assert await found.echoes(), "100 silent connections keep nobody out"
        assert found.transport.statistics()["connections_opening"] <= 21
        assert found.transport.statistics()["connections_gave_way_total"] >= 50


HALF_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"


async def connect_from(host: str, address: str, said: bytes = HALF_HELLO) -> asyncio.StreamWriter:
    """Connect from one of the addresses of 127.0.0.0/8, which all belong to this machine, and send the first bytes."""
    place, _, number = address.rpartition(":")
    _, writer = await asyncio.open_connection(place, int(number), local_addr=(host, 0))
    writer.write(said)
    return writer


@on_both
async def test_half_a_hello_takes_no_handshake_slot(tls: Any, monkeypatch: Any) -> None:
    """400 connections that each sent 11 bytes kept everybody out: a handshake had begun for each."""
    monkeypatch.setattr(accepting, "OPENING_S", 1e9)
    async with port(tls) as found, AsyncExitStack() as stack:
        for _ in range(400):
            stack.callback((await connect_from("127.0.0.1", found.address)).close)
        await found.wait_opening(400)
        assert await found.echoes()
        assert found.transport.statistics()["connections_gave_way_total"] == 0


@on_both
async def test_network_with_few_connections_keeps_them_when_another_has_many(tls: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(accepting, "WAITING_MAX", 20)
    monkeypatch.setattr(accepting, "OPENING_S", 1e9)
    async with port(tls) as found, AsyncExitStack() as stack:
        host, _, number = found.address.rpartition(":")
        slow = Begun(tls[1], host, int(number))
        for _ in range(100):
            stack.callback((await connect_from("127.0.1.1", found.address)).close)
        await found.wait_opening(20)
        slow.say()
        assert await asyncio.to_thread(slow.finish) == b"x", "the oldest of all, and the only one of its address"


@on_both
async def test_peers_of_many_networks_do_not_displace_a_known_one(tls: Any, monkeypatch: Any) -> None:
    """The addresses that this transport has connected to are known, as the other nodes are to a node."""
    monkeypatch.setattr(accepting, "WAITING_MAX", 20)
    monkeypatch.setattr(accepting, "OPENING_S", 1e9)
    async with port(tls) as found, AsyncExitStack() as stack:
        assert await found.echoes()
        host, _, number = found.address.rpartition(":")
        slow = Begun(tls[1], host, int(number))
        for turn in range(100):
            stack.callback((await connect_from(f"127.0.1.{1 + turn}", found.address)).close)
        await found.wait_opening(20)
        slow.say()
        assert await asyncio.to_thread(slow.finish) == b"x"


@on_both
async def test_handshakes_of_one_network_give_way_to_another_network(tls: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(accepting, "HANDSHAKES_MAX", 10)
    monkeypatch.setattr(accepting, "HANDSHAKE_SURE_S", 1e9)
    monkeypatch.setattr(accepting, "OPENING_S", 1e9)
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


@on_both
async def test_handshakes_of_a_known_network_keep_no_unknown_client_out(tls: Any, monkeypatch: Any) -> None:
    """Anyone behind the address of an authenticated client could lock out every unknown client."""
    monkeypatch.setattr(accepting, "HANDSHAKES_MAX", 10)
    monkeypatch.setattr(accepting, "HANDSHAKE_SURE_S", 1e9)
    monkeypatch.setattr(accepting, "OPENING_S", 1e9)
    known = KnownNetworks()
    known.note("ipv4:127.0.1.1")
    async with port(tls, known) as found, AsyncExitStack() as stack:
        host, _, number = found.address.rpartition(":")
        hello = Begun(tls[1], host, int(number)).hello()
        for _ in range(30):
            stack.callback((await connect_from("127.0.1.1", found.address, hello)).close)
        await found.wait_opening(30)
        await found.wait_handshakes(10)
        assert await found.echoes()


@on_both
async def test_unknown_networks_begin_few_handshakes_a_second(tls: Any, monkeypatch: Any) -> None:
    """Each costs a millisecond of the event loop. At 100 a second and port, clients waited for half of it."""
    monkeypatch.setattr(accepting, "UNKNOWN_SAVED", 3)
    monkeypatch.setattr(accepting, "UNKNOWN_PER_S", 1e-3)
    monkeypatch.setattr(accepting, "OPENING_S", 1e9)
    known = KnownNetworks()
    known.note("ipv4:127.0.0.1")
    async with port(tls, known) as found, AsyncExitStack() as stack:
        host, _, number = found.address.rpartition(":")
        hello = Begun(tls[1], host, int(number)).hello()
        for turn in range(30):
            stack.callback((await connect_from(f"127.0.1.{1 + turn}", found.address, hello)).close)
        await found.wait_opening(30)
        await found.wait_handshakes(3)
        for _ in range(10):
            assert await found.echoes(), "known networks do not wait for others"
        await found.wait_handshakes(3)
        assert found.transport.statistics()["connections_opening"] == 30
        assert found.transport.statistics()["handshakes_unknown_total"] == 3


@on_both
async def test_handshakes_of_clients_that_authenticate_are_not_limited(tls: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(accepting, "UNKNOWN_SAVED", 3)
    monkeypatch.setattr(accepting, "UNKNOWN_PER_S", 20)
    monkeypatch.setattr(accepting, "OPENING_S", 1e9)
    known = KnownNetworks()
    async with port(tls, known) as found, AsyncExitStack() as stack:
        found.freeze_allowance()
        host, _, number = found.address.rpartition(":")
        hello = Begun(tls[1], host, int(number)).hello()
        for turn in range(9):
            stack.callback((await connect_from(f"127.0.1.{1 + turn}", found.address, hello)).close)
        await found.wait_opening(9)
        for begun in (3, 6, 9):
            await found.wait_handshakes(begun)
            for network in found.networks_in_handshake():
                known.note(network)


@on_both
async def test_network_whose_last_handshake_is_longest_ago_is_next(tls: Any, monkeypatch: Any) -> None:
    """A health probe from an unknown network had to wait for each of the attackers that came before it."""
    monkeypatch.setattr(accepting, "UNKNOWN_SAVED", 1)
    monkeypatch.setattr(accepting, "OPENING_S", 1e9)
    monkeypatch.setattr(accepting, "UNKNOWN_PER_S", 5)
    async with port(tls) as found, AsyncExitStack() as stack:
        host, _, number = found.address.rpartition(":")
        hello = Begun(tls[1], host, int(number)).hello()
        for turn in range(5):
            (await connect_from(f"127.0.1.{1 + turn}", found.address, hello + b"no handshake")).close()
            await found.wait_opening(0)
        for turn in range(5):
            stack.callback((await connect_from(f"127.0.1.{1 + turn}", found.address, hello)).close)
        await found.wait_opening(5)
        stack.callback((await connect_from("127.0.2.1", found.address, hello)).close)
        await found.wait_opening(6)

        async def has_begun() -> bool:
            return "ipv4:127.0.2.1" in found.networks_in_handshake()

        await wait_until(has_begun)
        assert len(found.networks_in_handshake()) <= 2, "one may have begun before the probe came"


@on_both
async def test_network_that_waits_displaces_few_others_and_is_closed_at_once(tls: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(accepting, "WAITING_MAX", 20)
    monkeypatch.setattr(accepting, "DISPLACING_SAVED", 5)
    monkeypatch.setattr(accepting, "DISPLACING_PER_S", 1e-3)
    monkeypatch.setattr(accepting, "OPENING_S", 1e9)
    async with port(tls) as found, AsyncExitStack() as stack:
        first = [await connect_from("127.0.1.1", found.address) for _ in range(20)]
        for each in first:
            stack.callback(each.close)
        await found.wait_opening(20)
        for _ in range(60):
            stack.callback((await connect_from("127.0.1.1", found.address)).close)

        async def are_closed() -> bool:
            return found.transport.statistics()["connections_gave_way_total"] == 60

        await wait_until(are_closed)
        assert found.oldest_waiting() == first[5].get_extra_info("sockname"), "five gave way, and then newcomers"
        stack.callback((await connect_from("127.0.2.1", found.address)).close)

        async def has_displaced() -> bool:
            return found.oldest_waiting() == first[6].get_extra_info("sockname")

        await wait_until(has_displaced)  # for a network of which none waits


@on_both
async def test_many_connections_end_none_that_has_no_handshake(monkeypatch: Any) -> None:
    """Uvloop would never notify its handler, and the process would end at the handler's next write."""
    monkeypatch.setattr(accepting, "WAITING_MAX", 1)

    def crowd(address: str) -> int:
        host, _, number = address.rpartition(":")
        with ExitStack() as stack:
            callers = [stack.enter_context(socket.create_connection((host, int(number)))) for _ in range(200)]
            for each in callers:
                each.sendall(b"x")
            return sum(_heard(each) for each in callers)

    async with port() as found:
        assert await asyncio.to_thread(crowd, found.address) == 200
        assert found.transport.statistics()["connections_gave_way_total"] == 0


def _heard(caller: socket.socket) -> bool:
    caller.settimeout(DEADLINE_S)
    with suppress(OSError):
        return caller.recv(1) == b"x"
    return False


@on_both
async def test_begun_handshake_gives_way_to_no_idle_connection(tls: Any, monkeypatch: Any) -> None:
    """On a busy machine many handshakes take longer than their guaranteed time, and the oldest are the next to
    finish."""
    monkeypatch.setattr(accepting, "WAITING_MAX", 20)
    monkeypatch.setattr(accepting, "HANDSHAKE_SURE_S", 1e9)
    monkeypatch.setattr(accepting, "OPENING_S", 1e9)
    accepted = {"connections_gave_way_total": 0}
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
async def test_handshake_has_a_time_limit(tls: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(accepting, "OPENING_S", 0.2)
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


@on_both
async def test_handshake_keeps_its_slot_for_its_guaranteed_time(tls: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(accepting, "HANDSHAKES_MAX", 2)
    monkeypatch.setattr(accepting, "HANDSHAKE_SURE_S", 1e9)
    monkeypatch.setattr(accepting, "OPENING_S", 1e9)
    async with port(tls) as found:
        host, _, number = found.address.rpartition(":")
        begun = [Begun(tls[1], host, int(number)) for _ in range(10)]
        for each in begun:
            each.say()
        await found.wait_opening(10)
        for each in begun:
            assert await asyncio.to_thread(each.finish) == b"x", "the others wait for their turn"
        assert found.transport.statistics()["connections_gave_way_total"] == 0


@on_both
async def test_handshake_gives_way_to_its_own_network_after_its_time(tls: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(accepting, "HANDSHAKES_MAX", 2)
    monkeypatch.setattr(accepting, "HANDSHAKE_SURE_S", 0.1)
    monkeypatch.setattr(accepting, "OPENING_S", 1e9)
    async with port(tls) as found:
        host, _, number = found.address.rpartition(":")
        stuck = [Begun(tls[1], host, int(number)) for _ in range(4)]
        for each in stuck:
            each.say()
        await found.wait_opening(4)
        assert await found.echoes()
        assert found.transport.statistics()["connections_gave_way_total"] >= 1


@on_both
async def test_last_descriptors_are_reserved_for_files(monkeypatch: Any) -> None:
    below = len(os.listdir("/proc/self/fd")) + 60
    async with port() as found:
        monkeypatch.setattr(accepting, "files_for_connections", lambda **_: below)
        await found.connect_idle(60)
        assert not await found.echoes()
        assert found.transport.statistics()["connections_refused_total"] > 0
        monkeypatch.setattr(accepting, "files_for_connections", lambda **_: 1 << 30)
        await wait_until(found.echoes)


@on_both
async def test_accepting_pauses_without_descriptors_and_the_loop_continues(monkeypatch: Any) -> None:
    """A listener whose accept fails is ready again at once, so the loop would do nothing else; uvloop closes its own
    one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
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


def test_quarter_of_all_descriptors_is_reserved_up_to_a_maximum(monkeypatch: Any) -> None:
    for files, wanted in ((1024, 768), (2048, 1536), (20_000, 18_976), (resource.RLIM_INFINITY, 1 << 30)):
        monkeypatch.setattr(resource, "getrlimit", lambda _which, files=files: (files, files))
        assert files_for_connections() == wanted
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (1024, 1024))
    assert files_for_connections(is_vital=True) == 896
