"""A server's feeds over logs in memory, and readers of watches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from kvstore.client.core.watching import Change, WatchCursor, WatchedKeys
from kvstore.env.real import real_env
from kvstore.meta import paths
from kvstore.meta.layout import LayoutStore
from kvstore.meta.memory import MemoryStore
from kvstore.partition.state.changes import Interest
from kvstore.proto import kv_pb2
from kvstore.ring import Member, Ring, codec
from kvstore.server.feed.feeds import Feeds
from kvstore.server.feed.watch import send_watch
from kvstore.types import PartitionId, ServerId
from tests.ring.rings import new_ring
from tests.server.feed.logs import MemoryLog, MemoryLogs
from tests.waiting import PATIENCE_S

HEARTBEAT_S = 2 * PATIENCE_S
"""Notifications that arrive only with a heartbeat are late."""
EVERYTHING = Interest()


def owned_by(ring: Ring, partition: str) -> bytes:
    """Return a key of a partition."""
    return next(key for number in range(1_000) if ring.partition_of(key := b"k%d" % number) == partition)


class World:
    """One server, some partitions."""

    def __init__(self, feeds: Feeds, store: MemoryStore, logs: MemoryLogs, ring: Ring) -> None:
        self.feeds, self.store, self.logs, self.ring = feeds, store, logs, ring
        self.env = feeds._env
        self._following: list[Following] = []

    @staticmethod
    @asynccontextmanager
    async def open(root: Path, *partitions: str, cluster: str = "the cluster") -> AsyncIterator[World]:
        env, store, logs = real_env(root), MemoryStore(), MemoryLogs(*partitions)
        ring = new_ring([PartitionId(each) for each in partitions], {ServerId("n1"): ""}, 1)
        await store.create(paths.RING, codec.encode(ring))
        await LayoutStore(store).initialise(cluster)

        async def latest(partition: PartitionId) -> int:
            return logs.logs[partition].seq

        feeds = Feeds(env, store, logs, lambda: world.ring, latest)
        world = World(feeds, store, logs, ring)
        try:
            yield world
        finally:
            for each in world._following:
                await each.close()
            await feeds.close()
            await env.nursery.close()

    def owner(self, key: bytes) -> PartitionId:
        return self.ring.partition_of(key)

    def join(self, partition: str) -> None:
        """Add a partition to the ring that owns nothing yet."""
        self.logs.logs[PartitionId(partition)] = MemoryLog(partition)
        member = Member(PartitionId(partition), (ServerId("n1"),))
        partitions = {**self.ring.partitions, member.id: member}
        self.ring = replace(self.ring, version=self.ring.version + 1, partitions=partitions)

    async def join_unheard(self, partition: str) -> None:
        """Let the partition join while this server does not know of it."""
        known = self.ring
        self.join(partition)
        await self.store.set(paths.RING, codec.encode(self.ring), -1)
        self.ring = known

    def leave(self, partition: str) -> None:
        """Remove a partition that owns nothing any more from the ring."""
        others = {each: member for each, member in self.ring.partitions.items() if each != partition}
        tokens = type(self.ring.tokens)({token: min(others) for token in self.ring.tokens})
        retired = (*self.ring.retired, PartitionId(partition))
        version = self.ring.version + 1
        self.ring = replace(self.ring, version=version, partitions=others, tokens=tokens, retired=retired)

    async def watch(
        self,
        interest: Interest = EVERYTHING,
        *,
        of: bytes | None = None,
        after: Mapping[str, int] | None = None,
        seen: Mapping[str, int] | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        is_reading: bool = True,
        owner: str = "",
    ) -> Following:
        """Return a reader whose watch has started. Raises the error that prevented the start."""
        watched = WatchedKeys(interest.start, interest.end, heartbeat_s=heartbeat_s)
        assert of is None or watched.key == of
        following = Following(self.feeds, WatchCursor(watched, after, seen or {}), owner)
        self._following.append(following)
        await following.begin()
        if is_reading:
            following.read_on()
        return following

    async def settle(self) -> None:
        """Wait until everything that can be read has been read."""
        for _ in range(200):
            await asyncio.sleep(0)


class Following:
    """One reader, and the stream between server and reader. Takes one message at a time, when it reads."""

    def __init__(self, feeds: Feeds, reading: WatchCursor, owner: str = "") -> None:
        self.changes: list[Change] = []
        self.received: list[kv_pb2.Change] = []
        """The changes of all messages, as the server sent them."""
        self._reading, self._feeds, self._owner = reading, feeds, owner
        self._given = 0
        self._held: list[kv_pb2.WatchResponse] = []
        self._reads, self._news = asyncio.Event(), asyncio.Event()
        self._reads.set()
        self._ended: Exception | None = None
        self._task = asyncio.get_running_loop().create_task(self._serve())

    async def _serve(self) -> None:
        try:
            await send_watch(self._feeds, self._reading.request(), self, self._owner)
        except Exception as error:  # noqa: BLE001  # whatever it is, the reader must hear of it
            self._ended = error
            self._news.set()

    async def write(self, message: kv_pb2.WatchResponse) -> None:
        """Receive a message from the server."""
        self._held.append(message)
        await self._reads.wait()
        self._held.remove(message)
        self.received += message.changes
        self._reading.take(kv_pb2.WatchResponse.FromString(message.SerializeToString()))
        while self._reading.has_more:
            self.changes.append(self._reading.give())
        self._news.set()

    @property
    def position(self) -> dict[str, int]:
        return self._reading.position

    def held_bytes(self) -> int:
        return sum(message.ByteSize() for message in self._held)

    async def begin(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not self._reading.is_ready:
                await self._wait()
        self._reads.clear()

    def read_on(self) -> None:
        self._reads.set()

    async def take(self, count: int) -> list[Change]:
        """Return the next changes that it was shown."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.changes) < self._given + count:
                await self._wait()
        self._given += count
        return self.changes[self._given - count : self._given]

    async def wait_position(self, wanted: Mapping[str, int]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.position != wanted:
                await self._wait()

    async def failure(self) -> Exception:
        """Return the error that ended the watch."""
        async with asyncio.timeout(PATIENCE_S):
            while self._ended is None:
                self._news.clear()
                await self._news.wait()
        return self._ended

    async def _wait(self) -> None:
        if self._ended is not None:
            raise self._ended
        self._news.clear()
        await self._news.wait()

    async def close(self) -> None:
        self._task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
