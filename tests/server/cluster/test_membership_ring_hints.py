"""A reported ring version causes a server to read the ring, and has no other effect (docs/protocol.md H9)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstore.env.real import real_env
from kvstore.meta import paths
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.meta.store import Stat, Watch, ensure_path
from kvstore.ring import Ring, codec, steps
from kvstore.ring.moves import MoveState
from kvstore.ring.plan import join
from kvstore.ring.ring import Member as RingMember
from kvstore.ring.ring import PartitionState
from kvstore.server.cluster import membership as module
from kvstore.server.cluster.membership import Membership
from kvstore.server.cluster.topology import Member
from kvstore.types import PartitionId, ServerId
from tests.ring.rings import new_ring
from tests.waiting import wait_until

P1, P2 = PartitionId("p1"), PartitionId("p2")
RING = new_ring([P1], {ServerId("n1"): ""}, 1)


class Lagging(MemoryStore):
    """A session with a metadata server that shows its first state until it is synced, and whose watches never fire."""

    def __init__(self, tree: MemoryTree) -> None:
        super().__init__(tree)
        self.reads = self.syncs = 0
        self.lags = False
        self._seen: dict[str, tuple[bytes, Stat]] = {}

    async def get(self, path: str) -> tuple[bytes, Stat]:
        self.reads += path == paths.RING
        if not self.lags or path not in self._seen:
            self._seen[path] = await super().get(path)
        return self._seen[path]

    async def sync(self, path: str) -> None:
        self.syncs += 1
        self._seen.clear()
        await super().sync(path)

    def watch(self, path: str, changed: object) -> Watch:  # type: ignore[override]
        return super().watch(f"{path}-never", lambda: None)


class World:
    def __init__(self, store: Lagging, membership: Membership, other: MemoryStore) -> None:
        self.store, self.membership, self.other = store, membership, other

    async def flip(self, ring: Ring) -> Ring:
        """Another server flips the ring's first planned move."""
        id_ = next(move.id for move in ring.moves.values() if move.state is MoveState.PLANNED)
        flipped = steps.flip(steps.begin(ring, id_, 1), id_)
        await self.other.set(paths.RING, codec.encode(flipped), -1)
        return flipped

    async def knows(self, version: int) -> bool:
        return self.membership.topology.ring.version == version


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    env, tree = real_env(tmp_path), MemoryTree()
    other, store = MemoryStore(tree), Lagging(tree)
    await ensure_path(other, paths.SERVERS)
    await other.create(
        paths.RING, codec.encode(join(RING, [RingMember(P2, (ServerId("n1"),), PartitionState.JOINING)]))
    )
    membership = Membership(env, store, Member(id="n1", resp="h:1"))
    membership.start()
    await membership.wait_ring()
    yield World(store, membership, other)
    await env.nursery.close()


async def test_hint_is_followed_at_once_when_metadata_server_lags(world: World) -> None:
    for lags in (False, True):
        world.store.lags = lags
        flipped = await world.flip(world.membership.topology.ring)
        before = world.store.reads
        assert world.membership.hint_ring(flipped.routed)
        assert world.membership.hint_ring(flipped.routed)
        await wait_until(lambda version=flipped.version: world.knows(version), what="the ring is read")
        assert world.store.reads - before == 1 + lags
    assert not world.membership.hint_ring(flipped.routed), "it is known"


async def test_false_hint_is_ignored_for_a_while(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DISBELIEF_S", 600.0)
    known, reads = world.membership.topology, world.store.reads

    async def is_refuted(times: int) -> bool:
        return world.membership.false_hints == times

    for _ in range(10):
        world.membership.hint_ring(1 << 60)
    await wait_until(lambda: is_refuted(1), what="nothing is found")
    for _ in range(1000):
        assert not world.membership.hint_ring(1 << 61)
        await asyncio.sleep(0)
    assert (world.store.reads - reads, world.store.syncs) == (2, 1)
    assert world.membership.topology.ring.version == known.ring.version
    flipped = await world.flip(known.ring)
    assert not world.membership.hint_ring(flipped.routed)
    world.membership._disbelieves_until = 0.0  # the period has passed
    assert world.membership.hint_ring(flipped.routed)
    await wait_until(lambda: world.knows(flipped.version), what="who tells the truth is believed again")


async def test_true_hint_during_false_one_is_followed(world: World) -> None:
    world.membership.hint_ring(world.membership.topology.ring.routed + 5)
    flipped = await world.flip(world.membership.topology.ring)
    world.membership.hint_ring(flipped.routed)
    await wait_until(lambda: world.knows(flipped.version), what="the ring is read")


class Slow(Lagging):
    """A store whose answers take a turn of the event loop."""

    async def get(self, path: str) -> tuple[bytes, Stat]:
        await asyncio.sleep(0)
        return await super().get(path)


@pytest.fixture
async def busy(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """A membership that starts each full read directly after the last: whichever hint arrives, a full read is due."""
    monkeypatch.setattr(module, "REREAD_S", 0.0)
    store = Slow(world.store.tree)
    membership = Membership(world.membership._env, store, Member(id="n2", resp="h:2"))
    membership.start()
    await membership.wait_ring()
    return World(store, membership, world.other)


async def test_hint_during_full_read_is_followed_after_sync(busy: World) -> None:
    """The full read may come from a metadata server that lags. A repeated hint of the same version is answered with the
    information that this version is already being fetched."""
    busy.store.lags = True
    await busy.store.get(paths.RING)
    flipped = await busy.flip(busy.membership.topology.ring)
    assert busy.membership.hint_ring(flipped.routed)
    await wait_until(lambda: busy.knows(flipped.version), what="the ring is read")


async def test_false_hint_during_full_read_is_detected(busy: World) -> None:
    assert busy.membership.hint_ring(1 << 60)

    async def is_refuted() -> bool:
        return busy.membership.false_hints == 1

    await wait_until(is_refuted, what="it is found out")
    assert not busy.membership.hint_ring(1 << 60), "who names it would wait for nothing"
