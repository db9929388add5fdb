"""An example of a simulation: a journal served over streams, a client that retries, and faults that strike them.

Frames are `length u8 | payload`, and a payload is one byte repeated. The server appends each frame to its journal and
answers with the same frame once a sync has covered it. Promise: every answered frame is in the journal, whatever
crashed in between.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from kvstore.env import Env, File
from tests.sim.world.env import SimWorld

SERVERS = ("s1", "s2", "s3")
FRAMES = 40
ANSWER_S_MAX = 0.5
CHAOS_S = 8.0


class Frames:
    """A stream handler that cuts a stream into frames."""

    def __init__(self, received: Callable[[Frames, bytes], None]) -> None:
        self.closed = asyncio.Event()
        self._received = received
        self._buffer = b""
        self._stream: Any = None

    def send(self, payload: bytes) -> None:
        if self.closed.is_set():
            return  # the other side is gone, and a write to a closed stream raises an error
        self._stream.write(bytes([len(payload)]) + payload)

    def connection_made(self, transport: Any) -> None:
        self._stream = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while self._buffer and len(self._buffer) > self._buffer[0]:
            size = self._buffer[0] + 1
            payload, self._buffer = self._buffer[1:size], self._buffer[size:]
            self._received(self, payload)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()

    def pause_writing(self) -> None:
        """Do nothing: frames are few and small."""

    def resume_writing(self) -> None:
        """Do nothing: frames are few and small."""


def stored(file: File) -> list[bytes]:
    """Return the frames in a journal, up to the first incomplete one. A frame ends with its first byte."""
    data = file.read(0, file.size())
    frames: list[bytes] = []
    while data and len(data) > data[0] > 1 and data[1] == data[data[0]] != 0:
        frames.append(data[1 : data[0] + 1])
        data = data[data[0] + 1 :]
    return frames


def renew(file: File) -> int:
    """Rewrite the content of the journal, truncate the rest, and return the end.

    A sync alone is not enough: after a failed sync under a former process, the page cache still shows frames that the
    disk does not have, and the next sync succeeds without writing them.
    """
    data = b"".join(bytes([len(frame)]) + frame for frame in stored(file))
    file.pwrite(0, data)
    file.truncate(len(data))
    file.sync()
    return len(data)


def answer_when_synced(file: File, connection: Frames, payload: bytes, fatal: Callable[[str], None]) -> None:
    file.submit_sync(lambda error: fatal(str(error)) if error else connection.send(payload))


async def serve(name: str, env: Env) -> None:
    """The main of a server. It runs until it is killed."""
    file = env.disk.open("journal", create=True)
    env.disk.sync_dir("")
    try:
        end = renew(file)
    except OSError as error:
        env.fatal(str(error))

    def store(connection: Frames, payload: bytes) -> None:
        nonlocal end
        file.pwrite(end, bytes([len(payload)]) + payload)
        end += len(payload) + 1
        answer_when_synced(file, connection, payload, env.fatal)

    await env.transport.listen(f"{name}:1", lambda: Frames(store))
    await asyncio.Event().wait()


async def submit(env: Env, server: str, payload: bytes) -> None:
    """Send `payload` to the server repeatedly until it is answered."""
    while True:
        answered = asyncio.Event()

        def receive(_: Frames, payload: bytes, wanted: bytes = payload, answered: asyncio.Event = answered) -> None:
            if payload == wanted:
                answered.set()

        handler = Frames(receive)
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                stream = await env.transport.connect(f"{server}:1", handler)
                try:
                    handler.send(payload)
                    await answered.wait()
                    return
                finally:
                    stream.close()
        except OSError:
            await asyncio.sleep(env.random.uniform(0.01, 0.1))


async def trouble(world: SimWorld) -> None:
    """Strike the servers with one fault after another and undo each a little later."""
    random = world.random
    end = world.loop.time() + CHAOS_S
    while world.loop.time() < end:
        node = world.node(random.choice(SERVERS))
        await asyncio.sleep(random.uniform(0, 0.3))
        match random.choice(("crash", "power", "silent", "pause", "cut", "reset", "sync")):
            case "crash":
                node.crash()
            case "power":
                node.crash(power=True)
            case "silent":
                node.crash(silent=True)
            case "pause":
                node.pause()
                await asyncio.sleep(random.uniform(0, 1))
                node.resume()
            case "cut":
                world.network.cut_one_way(*random.sample([node.name, "client"], 2))
                await asyncio.sleep(random.uniform(0, 1))
                world.network.heal()
            case "reset":
                world.network.reset_random()
            case "sync":
                node.disk.fail_sync(random.randint(1, 3))
        if not node.is_running:
            await asyncio.sleep(random.uniform(0, 0.5))
            node.restart()


async def scenario(world: SimWorld) -> None:
    """Clients submit frames to all servers while faults strike. Then the power of every server is cut and its
    journal is checked."""
    env = world.env("client")
    acknowledged: dict[str, list[bytes]] = {name: [] for name in SERVERS}

    async def client(name: str) -> None:
        for number in range(FRAMES):
            payload = bytes([1 + number]) * env.random.randint(2, 200)
            await submit(env, name, payload)
            acknowledged[name].append(payload)

    for name in SERVERS:
        world.node(name).start(partial(serve, name))
    clients = [env.nursery.spawn(client(name), name=f"client of {name}") for name in SERVERS]
    await trouble(world)
    for name in SERVERS:
        world.node(name).disk.mend()
        world.node(name).restart()
    for each in clients:
        await each
    world.power_cut()
    for name, frames in acknowledged.items():
        kept = stored(world.env(name).disk.open("journal"))
        assert set(frames) <= set(kept), f"{name} has lost {len(set(frames) - set(kept))} of {len(frames)} frames"


def run(seed: int) -> str:
    """Return the digest of a run."""
    with SimWorld(seed) as world:
        world.run(scenario(world))
        return world.trace.digest()


if __name__ == "__main__":
    for each in sys.argv[1:]:
        sys.stdout.write(f"{each} {run(int(each))}\n")
