"""The other end of a bookie's connection, in a test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from kvstore.bookie.config import BookieConfig
from kvstore.bookie.connections.service import BookieService
from kvstore.env import Env
from kvstore.proto import bookkeeper as wire
from kvstore.proto.bookkeeper import BookieResponse
from kvstore.proto.frames import FrameReader
from tests.bookie.support import CLUSTER, Metadata, Shelf, tiny
from tests.sim.world.env import SimWorld

ADDRESS = "b1:3181"


class Peer:
    """Sends frames and collects answers."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.deliveries = 0
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: Any = None
        self._reader = FrameReader(wire.PAYLOAD_MAX)
        self._waiting: tuple[int, asyncio.Future[None]] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.deliveries += 1
        self.frames += self._reader.feed(data)
        if self._waiting is not None and len(self.frames) >= self._waiting[0]:
            self._waiting[1].set_result(None)
            self._waiting = None

    def eof_received(self) -> bool | None:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def pause_writing(self) -> None:
        pass

    def resume_writing(self) -> None:
        pass

    def send(self, *frames: bytes) -> None:
        self.transport.write(b"".join(frames))

    async def answers(self, count: int) -> list[bytes]:
        """The payloads of the next `count` answers."""
        if len(self.frames) < count:
            self._waiting = (count, asyncio.get_running_loop().create_future())
            await self._waiting[1]
        taken, self.frames = self.frames[:count], self.frames[count:]
        return taken

    async def ask(self, frame: bytes) -> BookieResponse:
        """Send one request and return its answer."""
        self.send(frame)
        return wire.decode_response((await self.answers(1))[0])


class Served:
    """A bookie's service on node b1 of a world."""

    def __init__(self, world: SimWorld, meta: Metadata | None = None, **config: Any) -> None:
        self.world = world
        self.meta = meta or Metadata()
        self.config: BookieConfig = tiny(segment_bytes=1 << 20, **config)
        self.shelf: Shelf
        self.service: BookieService
        world.node("b1").start(self._main)

    async def _main(self, env: Env) -> None:
        self.shelf = await Shelf(env, self.config, self.meta).start()
        self.service = BookieService(self.shelf.storage, self.config, CLUSTER)
        await env.transport.listen(ADDRESS, self.service.handler)
        await asyncio.get_running_loop().create_future()

    async def connect(self) -> Peer:
        """A connection from node c, made as soon as the bookie listens."""
        env = self.world.env("c")
        while True:
            peer = Peer()
            try:
                await env.transport.connect(ADDRESS, peer)
            except ConnectionRefusedError:
                await asyncio.sleep(0)
                continue
            return peer


def serve(
    world: SimWorld, scenario: Callable[[Served, Peer], Awaitable[None]], meta: Metadata | None = None, **config: int
) -> None:
    """Run a scenario with a bookie and one connection to it."""

    async def work() -> None:
        served = Served(world, meta, **config)
        await scenario(served, await served.connect())

    world.run(work())
