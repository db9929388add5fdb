"""The death watch of a simulated process: its machine publishes the end, as kvstore.env.death.watcher does. Sometimes
nobody does, because the watcher died too."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from random import Random

from kvstore.env import Stream
from kvstore.env.death.port import CERTIFICATE_BYTES, DeathWatch
from tests.sim.judges.probes import declare, probe
from tests.sim.world.loop import Process, SimLoop
from tests.sim.world.network import SimNetwork, SimTransport

declare("death.published", "death.unpublished")

UNPUBLISHED = 0.3
"""Share of the ends that nobody publishes."""
DELAY_S = 0.05
"""Longest time in seconds from the end of a process until the watcher connects to another node."""


class SimDeathWatch(DeathWatch):
    """The watch of one process, beside it on its machine."""

    def __init__(self, loop: SimLoop, network: SimNetwork, name: str, random: Random) -> None:
        self.certificate = random.randbytes(CERTIFICATE_BYTES)
        self._loop, self._network, self._name, self._random = loop, network, name, random
        self._message, self._addresses = b"", ()  # type: tuple[bytes, tuple[str, ...]]
        self._tasks: list[asyncio.Task[None]] = []
        """Kept because an event loop holds tasks weakly."""

    def leave(self, message: bytes, addresses: Collection[str]) -> None:
        self._message, self._addresses = message, tuple(sorted(addresses))

    def publish(self) -> None:
        """Publish the end of the process. Its machine still runs."""
        if not self._message:
            return
        if self._random.random() < UNPUBLISHED:
            probe("death.unpublished")
            return
        probe("death.published")
        watcher = self._loop.process(self._name)
        for address in self._addresses:
            work = self._send(watcher, address, self._random.uniform(0, DELAY_S))
            self._tasks.append(self._loop.create_task(work, context=watcher.context.copy()))

    async def _send(self, watcher: Process, address: str, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        sender = _Sender(self._message)
        try:
            await SimTransport(self._network, watcher).connect(address, sender)
        except OSError:
            return


class _Sender:
    """Sends the message on a new connection. The other side closes the connection."""

    def __init__(self, message: bytes) -> None:
        self._message = message

    def connection_made(self, transport: Stream) -> None:
        transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        assert data in b"+OK\r\n", data

    def eof_received(self) -> bool | None:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        pass

    def pause_writing(self) -> None:
        pass

    def resume_writing(self) -> None:
        pass
