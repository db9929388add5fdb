"""Changes of the ring's znode by compare-and-set, with other writers and lost connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path

import pytest

from kvstore.env.real import real_env
from kvstore.errors import MetadataUnknown, Overloaded, StoreError
from kvstore.meta import paths, update
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.meta.store import ensure_path
from kvstore.ring import Pace, Ring, decode, encode, place_members, plan, steps
from kvstore.ring.once import once
from kvstore.server.cluster import ring_store
from kvstore.server.cluster.membership import Membership
from kvstore.server.cluster.ring_store import RingStore, change_ring
from kvstore.server.cluster.topology import Member
from kvstore.types import PartitionId, ServerId
from tests.meta.drivers import LaggingStore
from tests.ring.rings import new_ring

SERVERS = {ServerId("n1"): ""}
P1, P2, P3 = PartitionId("p1"), PartitionId("p2"), PartitionId("p3")


def adding(partition: PartitionId) -> ring_store.Callable[[Ring], Ring]:
    return lambda ring: plan.join(ring, place_members([partition], SERVERS, 1))


class Flaky(MemoryStore):
    """Breaks the connection after so many of the next writes, which are executed nevertheless. Another writer may
    write in between."""

    breaks = 0
    between: Ring | None = None

    async def set(self, path: str, data: bytes, version: int) -> int:
        done = await super().set(path, data, version)
        if self.breaks:
            self.breaks -= 1
            if self.between is not None:
                await super().set(path, encode(self.between), done)
            raise MetadataUnknown
        return done


@pytest.fixture
async def store(monkeypatch: pytest.MonkeyPatch) -> Flaky:
    monkeypatch.setattr(update, "RECONNECT_DELAY_S", 0)
    made = Flaky(MemoryTree())
    await made.create(paths.RING, encode(new_ring([P1], SERVERS, 1)))
    return made


async def stored(store: MemoryStore) -> Ring:
    return decode((await store.get(paths.RING))[0])


async def test_concurrent_changes_are_both_made(store: Flaky) -> None:
    await asyncio.gather(change_ring(store, adding(P2)), change_ring(MemoryStore(store.tree), adding(P3)))
    ring = await stored(store)
    assert set(ring.partitions) == {P1, P2, P3}
    assert ring.version == 3


async def test_change_is_made_if_only_a_lagging_server_shows_it_as_done() -> None:
    store = LaggingStore()
    await store.create(paths.RING, encode(new_ring([P1], SERVERS, 1)))
    paused = await change_ring(store, lambda ring: steps.set_pace(ring, Pace(paused=True)))
    store.lag()
    await change_ring(MemoryStore(store.tree), lambda ring: steps.set_pace(ring, Pace(paused=False)))
    ring = await change_ring(store, lambda ring: steps.set_pace(ring, Pace(paused=True)))
    assert (ring.version, ring.pace.paused) == (paused.version + 2, True)
    assert (await stored(MemoryStore(store.tree))).version == ring.version


async def test_unconfirmed_plan_is_made_once(store: Flaky) -> None:
    store.breaks = 1
    ring = await change_ring(store, adding(P2))
    assert ring.version == (await stored(store)).version == 2


async def test_plan_lost_to_another_change_is_unknown(store: Flaky) -> None:
    first = await stored(store)
    store.breaks, store.between = 1, steps.set_pace(adding(P2)(first), Pace(paused=True))
    with pytest.raises(MetadataUnknown, match="p2 is or was in the ring"):
        await change_ring(store, adding(P2))


async def test_operation_of_unknown_outcome_is_made_once(store: Flaky) -> None:
    """The outcome is known because the ring contains its ID. Plans without one keep an unknown outcome (H11)."""

    def one_more(ring: Ring) -> Ring:
        return adding(PartitionId(f"p{len(ring.partitions) + 1}"))(ring)

    def step(ring: Ring) -> Ring:
        return once(ring, "a1", "asked", one_more)

    store.breaks, store.between = 1, steps.set_pace(step(await stored(store)), Pace(paused=True))
    ring = await change_ring(store, step)
    assert set(ring.partitions) == {P1, P2}
    assert ring.pace.paused
    assert (await change_ring(MemoryStore(store.tree), step)).version == ring.version, "by way of another server"


async def test_refused_step_writes_nothing(store: Flaky) -> None:
    with pytest.raises(ValueError, match="p1 is or was in the ring"):
        await change_ring(store, adding(P1))
    assert (await stored(store)).version == 1


async def test_ring_too_large_for_its_znode_is_refused(store: Flaky, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_store, "RING_BYTES_MAX", 300)
    with pytest.raises(Overloaded, match="plan fewer changes at once"):
        await change_ring(store, adding(P2))
    assert (await stored(store)).version == 1


@pytest.fixture
async def membership(store: Flaky, tmp_path: Path) -> AsyncIterator[Membership]:
    env = real_env(tmp_path)
    await ensure_path(store, paths.SERVERS)
    made = Membership(env, store, Member(id="n1", resp="h:1"))
    made.start()
    await made.wait_ring()
    yield made
    await made.close()
    await env.nursery.close()


async def test_server_knows_its_own_writes_at_once(store: Flaky, membership: Membership) -> None:
    found = RingStore(store, membership)
    told: list[int] = []
    forget = found.on_ring(lambda: told.append(found.ring.version))
    ring = await found.change(adding(P2))
    assert found.ring is ring
    assert told == [2]
    forget()
    await found.change(adding(P3))
    assert told == [2]


async def test_changes_written_together_have_separate_outcomes(
    store: Flaky, membership: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many moves of a server end at once, and operations wait for the new ring."""
    tried = count_writes(monkeypatch)
    own = RingStore(store, membership)
    wanted = [PartitionId(f"q{number}") for number in range(8)]
    again = adding(wanted[3])
    made = await asyncio.gather(*map(own.change, [*map(adding, wanted), again]), return_exceptions=True)
    assert len(tried) == 2, "the first one, and all that came meanwhile"
    assert set((await stored(store)).partitions) == {P1, *wanted}
    for partition, ring in zip(wanted, made, strict=False):
        assert isinstance(ring, Ring)
        assert partition in ring.partitions
    assert isinstance(made[-1], ValueError), "what one refuses stops no other"
    assert own.ring.version == (await stored(store)).version


def count_writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    tried: list[int] = []
    write = MemoryStore.set

    async def slow(self: MemoryStore, path: str, data: bytes, version: int) -> int:
        tried.append(version)
        await asyncio.sleep(0)
        return await write(self, path, data, version)

    monkeypatch.setattr(MemoryStore, "set", slow)
    return tried


async def test_changes_written_together_fail_together(store: Flaky, membership: Membership) -> None:
    own = RingStore(store, membership)
    await store.delete(paths.RING, -1)
    made = await asyncio.gather(*map(own.change, map(adding, (P2, P3, P1))), return_exceptions=True)
    assert all(isinstance(each, StoreError) for each in made), made


async def test_change_that_is_too_large_fails_alone(
    store: Flaky, membership: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moves of this server end while an operator requests too many."""
    own = RingStore(store, membership)
    many = [PartitionId(f"q{number}") for number in range(40)]
    monkeypatch.setattr(ring_store, "RING_BYTES_MAX", 2_000)

    def too_much(ring: Ring) -> Ring:
        return plan.join(ring, place_members(many, SERVERS, 1))

    def planned(step: ring_store.Callable[[Ring], Ring]) -> Coroutine[None, None, Ring]:
        return own.change(step, plans=True)

    made = await asyncio.gather(*map(planned, (adding(P2), too_much, adding(P3))), return_exceptions=True)
    pausing = own.change(lambda ring: steps.set_pace(ring, Pace(paused=True)))
    made += await asyncio.gather(pausing, *map(planned, (too_much, adding(PartitionId("p4")))), return_exceptions=True)
    assert [type(each) for each in made] == [Ring, Overloaded, Ring, Ring, Overloaded, Ring]
    ring = await stored(store)
    assert set(ring.partitions) == {P1, P2, P3, "p4"}
    assert ring.pace.paused


async def test_planned_change_proceeds_when_planning_is_refused(
    store: Flaky, membership: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A range that its source has released has no owner for clients until the ring is flipped."""
    own = RingStore(store, membership)
    move = min((await own.change(adding(P2), plans=True)).moves)
    copying = await own.change(lambda ring: steps.begin(ring, move, 1))
    monkeypatch.setattr(ring_store, "RING_BYTES_MAX", len(encode(copying)))
    assert len(encode(flipped := steps.flip(copying, move, 1 << 40))) > len(encode(copying))
    flip = own.change(lambda ring: steps.flip(ring, move, 1 << 40), soon=True)
    made = await asyncio.gather(flip, own.change(adding(P3), plans=True), return_exceptions=True)
    assert [type(each) for each in made] == [Ring, Overloaded]
    assert (await stored(store)).moves == flipped.moves
    monkeypatch.setattr(ring_store, "RING_STEP_BYTES_MAX", len(encode(copying)))
    with pytest.raises(Overloaded, match="plan fewer changes at once"):
        await own.change(lambda ring: steps.set_pace(ring, Pace(paused=True, bytes_per_s=1 << 60)))


async def test_failing_change_fails_alone_at_its_caller(store: Flaky, membership: Membership) -> None:
    def broken(ring: Ring) -> Ring:
        raise KeyError(ring.version)

    own = RingStore(store, membership)
    made = await asyncio.gather(*map(own.change, (adding(P2), broken, adding(P3))), return_exceptions=True)
    assert [type(each) for each in made] == [Ring, KeyError, Ring]
    assert set((await stored(store)).partitions) == {P1, P2, P3}


async def test_change_too_large_after_unknown_attempt_is_unknown(
    store: Flaky, membership: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await stored(store)

    def pauses(ring: Ring) -> Ring:
        return steps.set_pace(ring, Pace(paused=True))

    after = pauses(first)
    store.breaks, store.between = 1, adding(P2)(after)
    monkeypatch.setattr(ring_store, "RING_BYTES_MAX", len(encode(after)) + 1)
    with pytest.raises(MetadataUnknown, match="may have been changed"):
        await change_ring(
            store, lambda ring: steps.set_pace(ring, Pace(paused=True, parallel=len(ring.partitions) + 1))
        )


async def test_joint_change_before_another_change_is_unknown(store: Flaky, membership: Membership) -> None:
    own = RingStore(store, membership)
    both = adding(P3)(adding(P2)(await stored(store)))
    pausing = asyncio.ensure_future(own.change(lambda ring: ring))
    rest = [asyncio.ensure_future(own.change(adding(each))) for each in (P2, P3)]
    await pausing
    store.breaks, store.between = 1, steps.set_pace(both, Pace(paused=True))
    made = await asyncio.gather(*rest, return_exceptions=True)
    assert [type(each) for each in made] == [MetadataUnknown, MetadataUnknown]


async def test_cancelled_change_is_not_made(
    store: Flaky, membership: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_writes(monkeypatch)
    own = RingStore(store, membership)
    first, second = (asyncio.ensure_future(own.change(adding(each))) for each in (P2, P3))
    await asyncio.sleep(0)
    second.cancel()
    await first
    assert set((await stored(store)).partitions) == {P1, P2}


# docs/protocol.md M10
async def test_urgent_change_is_written_without_reading(
    store: Flaky, membership: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations wait for a flip."""
    read: list[str] = []
    get = MemoryStore.get

    async def counted(self: MemoryStore, path: str) -> object:
        read.append(path)
        return await get(self, path)

    monkeypatch.setattr(MemoryStore, "get", counted)
    own = RingStore(store, membership)
    for wanted in (P2, P3):  # known from reading, and from writing
        await own.change(adding(wanted), soon=True)
    assert paths.RING not in read
    assert set((await stored(store)).partitions) == {P1, P2, P3}


async def test_stale_known_ring_decides_nothing(store: Flaky, membership: Membership) -> None:
    own = RingStore(store, membership)
    known = own.ring

    def forget_p1(ring: Ring) -> Ring:
        if P2 not in ring.partitions:
            raise ValueError("P2 comes first")
        return steps.set_pace(ring, Pace(paused=True))

    for soon in (forget_p1, adding(P3), lambda ring: steps.set_pace(ring, known.pace)):
        await change_ring(store, adding(PartitionId(f"q{(await stored(store)).version}")))
        if soon is forget_p1:
            await change_ring(store, adding(P2))
        await own.change(soon, soon=True)
    ring = await stored(store)
    assert P3 in ring.partitions
    assert not ring.pace.paused, "what is as it should be by the old ring is looked at again"


async def test_written_ring_is_known_and_older_ring_is_ignored(store: Flaky, membership: Membership) -> None:
    own = RingStore(store, membership)
    first = own.ring
    second = await own.change(adding(P2))
    assert own.ring is second
    membership.note_written(first, 7)
    assert own.ring is second
    assert (await own.change(adding(P3), soon=True)).version == 3
