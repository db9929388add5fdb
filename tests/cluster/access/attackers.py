"""Unauthenticated peers that hold all that they can get of a cluster's endpoints. Run as its own process:

    python -m tests.cluster.access.attackers begin|finish CA ADDRESSES...

where an address is `name=host:port` with the name of a listener (resp, http, bookie, grpc). `begin` begins TLS
handshakes and goes no further; `finish` finishes them and does nothing more, or watches health. Both call from
127.0.1.0/24, so that the server can distinguish them from clients at 127.0.0.1. They reconnect after a disconnect, and
continue until they are killed.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import selectors
import socket
import ssl
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import uvloop

Endpoint = tuple[str, str, int]
"""The name of a listener, its host and its port."""
ADDRESSES = 200
HALF_HELLOS, HELLOS, IDLE, WATCHING = 500, 150, 150, 12
"""Number of connections to each port, by kind: a part of a TLS hello; a whole hello and no more; a finished
handshake and nothing else; health watches, which only gRPC has."""
WATCHES = 64
"""Number of health watches on one connection."""
REST_S = 2.0
"""Average delay in seconds before a peer that had finished its handshake reconnects. Without a delay, the handshakes
would use up the processors, which this test is not about."""
BEGIN_REST_S = 0.5
"""The same delay for a peer that had not finished its handshake, which costs the peer nothing."""
HALF_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
"""The beginning of an HTTP/2 connection, with an empty SETTINGS frame."""


def hello_of(context: ssl.SSLContext) -> bytes:
    outgoing = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


def watch_of(stream: int) -> bytes:
    """Return the frames of one call of grpc.health.v1.Health/Watch."""
    headers = {
        ":method": "POST",
        ":scheme": "https",
        ":path": "/grpc.health.v1.Health/Watch",
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    block = b"".join(
        b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in headers.items()
    )
    return _frame(1, 4, stream, block) + _frame(0, 0, stream, bytes(5))


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


async def stay_away(seconds: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), seconds)


def source(chosen: random.Random) -> tuple[str, int]:
    return f"127.0.1.{chosen.randrange(1, ADDRESSES + 1)}", 0


class Beginners:
    """Peers that begin handshakes, in one thread: a part of a hello, or a whole one."""

    def __init__(self, endpoints: list[Endpoint], hello: bytes) -> None:
        self._poll = selectors.EpollSelector()
        self._random = random.Random(7)
        self._due: list[tuple[float, int, tuple[str, int], bytes]] = []
        for number, said in ((HALF_HELLOS, HALF_HELLO), (HELLOS, hello)):
            for endpoint in endpoints:
                for _ in range(number):
                    self._come_again(endpoint[1:], said)

    def run(self) -> None:
        while True:
            while self._due and self._due[0][0] <= time.monotonic():
                _, _, address, said = heapq.heappop(self._due)
                self._connect(address, said)
            for key, events in self._poll.select(BEGIN_REST_S):
                self._resume(key, events)

    def _come_again(self, address: tuple[str, int], said: bytes) -> None:
        at = time.monotonic() + 2 * BEGIN_REST_S * self._random.random()
        heapq.heappush(self._due, (at, self._random.getrandbits(64), address, said))

    def _connect(self, address: tuple[str, int], said: bytes) -> None:
        peer = socket.socket()
        peer.setblocking(False)
        peer.bind(source(self._random))
        with suppress(BlockingIOError):
            peer.connect(address)
        self._poll.register(peer, selectors.EVENT_WRITE, (address, said))

    def _resume(self, key: selectors.SelectorKey, events: int) -> None:
        peer, (address, said) = key.fileobj, key.data
        assert isinstance(peer, socket.socket)
        with suppress(OSError):
            if events & selectors.EVENT_WRITE:
                peer.send(said)
                self._poll.modify(peer, selectors.EVENT_READ, key.data)
                return
            if peer.recv(1 << 16):
                return
        self._poll.unregister(peer)
        peer.close()
        self._come_again(address, said)


class Finishers:
    """Peers that finish their handshake, on one event loop."""

    def __init__(self, context: ssl.SSLContext, h2: ssl.SSLContext) -> None:
        self._context, self._h2 = context, h2
        self._random = random.Random(8)

    async def run(self, endpoints: list[Endpoint]) -> None:
        async with asyncio.TaskGroup() as group:
            for name, host, port in endpoints:
                kinds = [(IDLE, self._idle)]
                if name == "grpc":
                    kinds = [(IDLE, self._idle_h2), (WATCHING, self._watches)]
                for number, kind in kinds:
                    for _ in range(number):
                        group.create_task(self._again(kind, host, port))

    async def _again(self, kind: Callable[..., Awaitable[None]], host: str, port: int) -> None:
        while True:
            await stay_away(2 * REST_S * self._random.random())
            with suppress(OSError, ssl.SSLError, asyncio.IncompleteReadError):
                await kind(host, port, source(self._random))

    async def _idle(self, host: str, port: int, own: tuple[str, int]) -> None:
        await self._hold(host, port, own, b"", ssl=self._context, server_hostname="localhost")

    async def _idle_h2(self, host: str, port: int, own: tuple[str, int]) -> None:
        await self._hold(host, port, own, PREFACE, ssl=self._h2, server_hostname="localhost")

    async def _watches(self, host: str, port: int, own: tuple[str, int]) -> None:
        said = PREFACE + b"".join(watch_of(1 + 2 * number) for number in range(WATCHES))
        await self._hold(host, port, own, said, ssl=self._h2, server_hostname="localhost")

    async def _hold(self, host: str, port: int, own: tuple[str, int], said: bytes, **tls: ssl.SSLContext | str) -> None:
        """Send these bytes, and keep the connection until the server closes it."""
        reader, writer = await asyncio.open_connection(host, port, local_addr=own, **tls)  # type: ignore[arg-type]
        try:
            writer.write(said)
            while await reader.read(1 << 16):
                pass
        finally:
            writer.close()


def main() -> None:
    what, ca, *addresses = sys.argv[1:]
    context, h2 = (ssl.create_default_context(cafile=ca) for _ in range(2))
    h2.set_alpn_protocols(["h2"])
    endpoints: list[Endpoint] = []
    for each in addresses:
        name, _, address = each.partition("=")
        host, _, port = address.rpartition(":")
        endpoints.append((name, host, int(port)))
    if what == "begin":
        Beginners(endpoints, hello_of(context)).run()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(Finishers(context, h2).run(endpoints))


if __name__ == "__main__":
    main()
