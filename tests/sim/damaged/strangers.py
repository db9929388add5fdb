"""Unauthenticated peers on the Redis port of simulated servers: they claim to be servers, and send what servers
send."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

from kvstore import versions
from kvstore.partition.moves.source import FLIPPED, ROUTED_BYTES
from kvstore.partition.state import commands
from kvstore.ring import Ring, codec
from kvstore.server.peer import frames
from kvstore.server.peer.frames import Lane
from kvstore.server.peer.proof import NONCE_BYTES, PURPOSE, CalledSide, CallingSide, Credentials
from kvstore.types import ServerId
from kvstore.versions import LINK_LATEST
from tests.sim.cluster import Cluster
from tests.sim.nodes import SECRET, Node

CLUSTER = "simulated"
WAIT_S = 1.0
VERSION_AHEAD = 1_000_000


class Stranger:
    """One connection: a StreamHandler that keeps the received data."""

    def __init__(self, cluster: Cluster, random: Random) -> None:
        self._cluster, self._random = cluster, random
        self.received = b""
        self.stream: Any = None
        self.is_lost = False
        self._version = LINK_LATEST
        self._heard = asyncio.Event()

    async def attempt(self, node: Node, how: str) -> bytes:
        """Try to be a server to `node` in one of the WAYS, and send forged frames whatever it answers. Returns the
        answer."""
        transport = self._cluster.world.env("stranger").transport
        try:
            async with asyncio.timeout(WAIT_S):
                await transport.connect(f"{node.name}:6401", self)
        except (OSError, TimeoutError):
            return b""
        if node.served is not None:  # with another one it would be refused for that, before it has to prove anything
            self._version = versions.link_version(node.served.peers.versions.cluster)
        caller = ServerId(self._random.choice([each.name for each in self._cluster.nodes if each is not node]))
        for part in (*WAYS[how](self, caller, node.id), self.frames()):
            self._send(part)
            await self._wait_for_an_answer()
        if self.stream is not None and not self.is_lost:
            self.stream.abort()
        return self.received

    # ── ways to be taken for a server ─────────────────────────────────────────────────────────────────────────────────

    def _says_so(self, caller: ServerId, called: ServerId) -> tuple[bytes, ...]:
        """Claim to be a server, as servers did before proofs were required."""
        return (_packed(b"KVSTORE.PEER", b"1", caller.encode(), called.encode()),)

    def _guesses(self, caller: ServerId, called: ServerId) -> tuple[bytes, ...]:
        """Send a proof made with another secret."""
        own = self._credentials(caller, (self._random.randbytes(32),))
        calling = CallingSide(own, called, self._version)
        proof, _ = calling.take(b"+%b\r\n" % self._random.randbytes(NONCE_BYTES).hex().encode())
        return calling.hello(), proof

    def _replays(self, caller: ServerId, called: ServerId) -> tuple[bytes, ...]:
        """Replay what two servers once sent to each other."""
        calling = CallingSide(self._credentials(caller, SECRET.derive_all(PURPOSE)), called, self._version)
        hello = calling.hello()
        answering = CalledSide(self._credentials(called, SECRET.derive_all(PURPOSE)), _unpacked(hello)[1:])
        proof, _ = calling.take(answering.nonce())
        return hello, proof

    def _is_of_another_cluster(self, caller: ServerId, called: ServerId) -> tuple[bytes, ...]:
        own = replace(self._credentials(caller, SECRET.derive_all(PURPOSE)), cluster="another")
        return CallingSide(own, called, self._version).hello(), self._random.randbytes(32)

    def _babbles(self, caller: ServerId, called: ServerId) -> tuple[bytes, ...]:
        hello = CallingSide(self._credentials(caller, (bytes(32),)), called, self._version).hello()
        return hello[: self._random.randrange(len(hello))], self._random.randbytes(self._random.randrange(200))

    def _credentials(self, server: ServerId, keys: tuple[bytes, ...]) -> Credentials:
        return Credentials(server, CLUSTER, keys, lambda: self._random.randbytes(NONCE_BYTES))

    # ── what it would do as one ───────────────────────────────────────────────────────────────────────────────────────

    def frames(self) -> bytes:
        """Return a ring that is far ahead and names no replica here, and unrequested writes, also with that ring."""
        ring = forged(self._cluster.ring)
        told = (codec.encode(ring), ring.routed.to_bytes(ROUTED_BYTES, "big"))
        calls = [
            frames.Call(number, str(partition), FLIPPED, self._random.choice(told))
            for number, partition in enumerate(sorted(ring.partitions), start=1)
        ]
        writes = [
            frames.Operations(version, [self._writes(str(partition))])
            for partition in sorted(ring.partitions)
            for version in (self._cluster.ring.routed, ring.routed)
        ]
        return b"".join(frames.encode(each) for each in [*calls, *writes])

    def _writes(self, partition: str) -> Lane:
        puts = [(number, commands.Put(b"r%d" % number, b"forged")) for number in range(1, 7)]
        return Lane(partition, [], puts, [])  # type: ignore[arg-type]

    # ── the connection ────────────────────────────────────────────────────────────────────────────────────────────────

    def _send(self, data: bytes) -> None:
        """Send the data in pieces, as a network would."""
        while data and not self.is_lost:
            size = self._random.choice((1, 100, len(data)))
            self.stream.write(data[:size])
            data = data[size:]

    async def _wait_for_an_answer(self) -> None:
        """Wait for an answer for a while, or not at all."""
        if self._random.random() < 0.2:
            return
        self._heard.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S / 2):
                await self._heard.wait()

    def connection_made(self, transport: Any) -> None:
        self.stream = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        self._heard.set()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._heard.set()

    def pause_writing(self) -> None:
        """Do nothing: it sends little."""

    def resume_writing(self) -> None:
        """Do nothing: it sends little."""


WAYS = {
    "says so": Stranger._says_so,
    "guesses": Stranger._guesses,
    "replays": Stranger._replays,
    "is of another cluster": Stranger._is_of_another_cluster,
    "babbles": Stranger._babbles,
}


def forged(ring: Ring) -> Ring:
    """Return a later ring in which no partition has a replica on any existing server."""
    nowhere = {id_: replace(each, replicas=(ServerId("n99"),), replacing=()) for id_, each in ring.partitions.items()}
    version = ring.version + VERSION_AHEAD
    return replace(ring, version=version, routed=version, partitions=nowhere)


def _packed(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def _unpacked(array: bytes) -> list[bytes]:
    found, rest = [], array.partition(b"\r\n")[2]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        found.append(rest[: int(size[1:])])
        rest = rest[int(size[1:]) + 2 :]
    return found
