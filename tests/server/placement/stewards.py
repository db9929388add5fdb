"""A ring, servers that join and leave, and their steward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kvstore.env import Env
from kvstore.env.clock import Unjudged
from kvstore.errors import NodeExists, NoSuchNode
from kvstore.meta import paths
from kvstore.meta.memory import MemoryStore
from kvstore.meta.store import MetadataStore, ensure_path
from kvstore.partition.election.ranking import Published
from kvstore.ring import Ring, codec
from kvstore.server.cluster.topology import ClusterTopology, Member
from kvstore.server.cluster.version_follower import VersionFollower
from kvstore.server.placement.retirement import ledgers_made_for, remove_rest, set_apart
from kvstore.server.placement.steward import Steward
from kvstore.types import PartitionId, Seq, ServerId
from tests.ring.rings import new_ring
from tests.waiting import wait_until

P1, P2, P3 = PartitionId("p1"), PartitionId("p2"), PartitionId("p3")
N1, N2, N3, N4, N5 = (ServerId(f"n{i}") for i in range(1, 6))


class Clock(Unjudged):
    at = 100.0

    def now(self) -> float:
        return self.at

    def wall_ms(self) -> int:
        return int(self.at * 1000)


class World:
    """A ring that only this test and the steward change, and servers that join and leave."""

    def __init__(self, env: Env) -> None:
        self.clock = Clock()
        self.env = replace(env, clock=self.clock)  # type: ignore[arg-type]
        self.store = MemoryStore()
        self.ring = new_ring([P1, P2], dict.fromkeys((N1, N2, N3), ""), 3)
        self.undecodable_servers: list[ServerId] = []
        self.up = {each: Member(id=each, resp=f"{each}:1") for each in (N1, N2, N3, N4)}

    @property
    def topology(self) -> ClusterTopology:
        return ClusterTopology(self.ring, {}, self.up)

    async def change(self, step: Callable[[Ring], Ring]) -> Ring:
        self.ring = step(self.ring)
        await self.store_ring()
        return self.ring

    async def store_ring(self) -> None:
        with suppress(NodeExists):
            await self.store.create(paths.RING, b"")
        await self.store.set(paths.RING, codec.encode(self.ring), -1)

    def on_ring(self, changed: Callable[[], None]) -> Callable[[], None]:
        raise NotImplementedError

    def steward(self, server: ServerId = N1, repair_after_s: float = 60.0, logs_at: int = 1) -> Steward:
        membership: Any = self
        self.known = VersionFollower(self.env, self.store, server)
        of_cluster = (self.store, membership, self, self.known)
        made = Steward(self.env, server, *of_cluster, repair_after_s=repair_after_s, logs_at=lambda: logs_at)
        made.start()
        return made

    async def publish(
        self, partition: PartitionId, server: ServerId, seq: int, *, taken: tuple[int, int] | None = (0, 0)
    ) -> None:
        await ensure_path(self.store, paths.partition_replicas(partition))
        said = Published(Seq(seq), Seq(seq), int(seq > 0), "x", taken=taken).encode()
        path = paths.partition_replica(partition, server)
        with suppress(NoSuchNode):
            await self.store.delete(path, -1)
        await self.store.create(path, said, ephemeral=True)


async def looks(steward: Steward) -> None:
    """Return once the steward has looked at least twice from now, and removed what it could."""
    count = 0
    note = steward._note_missing

    def counting(servers: Any) -> None:
        nonlocal count
        count += 1
        note(servers)

    steward._note_missing = counting  # type: ignore[method-assign]

    async def twice() -> bool:
        return count >= 2 and (steward._removal is None or steward._removal.done())

    await wait_until(twice, what="the steward looks")


async def remove_log(store: MetadataStore, partition: PartitionId, *, now_ms: int) -> bool:
    """Remove the remains of one retired partition, as the steward does for all."""
    if not await set_apart(store, partition, now_ms=now_ms):
        return False
    made = await ledgers_made_for(store, {partition})
    return await remove_rest(store, partition, made[partition], now_ms=now_ms)
