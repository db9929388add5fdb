"""An echo server and recording clients for the tests of the network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tests.sim.world.env import SimWorld
from tests.sim.world.network import NetworkConfig

CALM = NetworkConfig(spike_chance=0, recut_chance=0, stall_s=(5, 10))
ADDRESS = "s:1"


class Peer:
    """A handler that records the events and data it receives, with their times."""

    def __init__(self, world: SimWorld, *, echo: bool = False) -> None:
        self.world = world
        self.echo = echo
        self.stream: Any = None
        self.received = b""
        self.sizes: list[int] = []
        self.times: list[float] = []
        self.lost_at: float | None = None
        self.error: Exception | None = None
        self.arrived = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        self.stream = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.sizes.append(len(data))
        self.times.append(self.world.loop.time())
        self.arrived.set()
        if self.echo:
            self.stream.write(data)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        assert self.lost_at is None
        self.lost_at, self.error = self.world.loop.time(), exc

    def pause_writing(self) -> None:
        """Do nothing: peers send little."""

    def resume_writing(self) -> None:
        """Do nothing: peers send little."""


class Scene:
    """A server `s` that echoes, and clients."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world
        self.accepted: list[Peer] = []
        self.server = world.node("s")
        self.server.start(self._serve)

    async def _serve(self, env: Any) -> None:
        await env.transport.listen(ADDRESS, self._accept)
        await asyncio.Event().wait()

    def _accept(self) -> Peer:
        self.accepted.append(Peer(self.world, echo=True))
        return self.accepted[-1]

    async def connect(self, name: str = "c") -> Peer:
        peer = Peer(self.world)
        await self.world.env(name).transport.connect(ADDRESS, peer)
        return peer

    @property
    def now(self) -> float:
        return self.world.loop.time()


def play(
    scenario: Callable[[Scene], Coroutine[Any, Any, None]], *, seeds: int = 20, network: NetworkConfig = CALM
) -> None:
    for seed in range(seeds):
        with SimWorld(seed, network=network) as world:

            async def act(world: SimWorld = world) -> None:
                scene = Scene(world)
                await asyncio.sleep(0.1)
                await scenario(scene)

            world.run(act())
