"""The mistakes of the first store of this kind, one test for each.

1. It acknowledged a write before any other replica had it. 2. It never synced. 3. After a restart it read nothing back.
4. It acknowledged a write although the log could not take it. 5. Two writers got one sequence, and one of the writes
was dropped. 6. Every replica accepted writes. 7. A deposed leader continued. 8. Leaders were chosen by numbers that may
be stale. 9. Clocks ordered the writes, and deleted keys came back. 10. A range was deleted before it had arrived. 11.
Keys in transit were "not found". 12. Servers had different rings, and no server noticed
(tests/ring/test_plan_first_ring.py tests the ring by itself).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from kvstore.errors import Retryable
from kvstore.meta import paths
from kvstore.partition.election.ranking import Published
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Level
from kvstore.types import Seq
from tests.sim.judges.operations import Status
from tests.sim.moving import moves
from tests.sim.moving.moves import Users, World, at_each_step, first_range, keys_in
from tests.sim.moving.moves_accidents import Accident, asker, crash
from tests.sim.moving.test_moves import TWO
from tests.sim.nodes import Node
from tests.sim.run import all_serve
from tests.sim.stories.scenarios import P, Stage, knobs, play
from tests.sim.world.inode import DROP_ALL

pytestmark = pytest.mark.sim

SPAN = first_range("p1", 2)
MOVING = keys_in(SPAN, 40, b"m")
COUNTER = keys_in(SPAN, 1, b"c")[0]


async def value(stage: Stage, node: Node, key: bytes = b"r1") -> bytes | None:
    """Return the result of a linearizable read, retried until it is answered."""
    for _ in range(200):
        done = await stage.get(node, key)
        if done.status is Status.OK:
            return None if done.result is None else bytes(done.result[0])
        await asyncio.sleep(0.05)
    raise AssertionError(f"{node.name} does not answer: {done}")


def written(done: Any) -> bytes:
    assert done.status is Status.OK, done
    return bytes(done.op.value)


# ── the log ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_01_acknowledged_writes_survive_simultaneous_death_of_leader() -> None:
    async def story(stage: Stage) -> None:
        old = stage.leader
        done = await stage.put_until_done(old)
        old.crash()
        assert await value(stage, await stage.until_led_by_another(old)) == written(done)

    play(story, knobs())


def test_02_acknowledged_writes_survive_power_failure_everywhere() -> None:
    async def story(stage: Stage) -> None:
        await stage.put_until_done(stage.leader)
        for node in stage.cluster.nodes:
            node.disk.slow_syncs((0.3, 0.3))
        done = await stage.put_until_done(stage.leader)
        for node in stage.cluster.nodes:
            node.disk.power_cut(DROP_ALL)
            node.crash(power=True)
            node.disk.slow_syncs((0.0, 0.0))
        for node in stage.cluster.nodes:
            node.start()
        await stage.until(lambda: stage.cluster.leader(P) is not None)
        assert await value(stage, stage.leader) == written(done)

    play(story, knobs())


def test_03_restarts_of_everything_lose_nothing_and_sequences_continue() -> None:
    async def story(stage: Stage) -> None:
        kept: dict[bytes, bytes] = {}
        versions: list[int] = []
        for round_ in range(3):
            for number in range(5):
                key = b"r%d" % (10 * round_ + number)
                done = await stage.put_until_done(stage.leader, key)
                kept[key] = written(done)
                versions.append(done.result)
            for node in stage.cluster.nodes:
                node.crash()
            for node in stage.cluster.nodes:
                node.start()
            await stage.until(lambda: stage.cluster.leader(P) is not None)
        assert versions == sorted(set(versions))
        assert {key: await value(stage, stage.leader, key) for key in kept} == kept

    play(story, knobs())


def test_04_write_stored_on_too_few_disks_is_not_acknowledged() -> None:
    async def story(stage: Stage) -> None:
        old = stage.leader
        for other in stage.others(old):
            other.disk.fail_sync()
        done = await stage.put(old)
        assert done.status is not Status.OK
        assert not any(other.sim.is_running for other in stage.others(old)), "both have ended because a sync failed"

    play(story, knobs())


def test_05_no_concurrent_write_is_dropped_even_while_a_range_moves() -> None:
    async def story(world: World, users: Users) -> None:
        asks = [asker(node) for node in world.cluster.nodes]
        sums: list[int] = []

        async def count(number: int) -> None:
            for _ in range(20):
                found = await asks[number % 3](commands.Increment(COUNTER, 1), None)
                sums.append(found[0])

        await world.shift(SPAN, "p2")
        counting = [world.cluster.spawn(count(number), name=f"count {number}") for number in range(12)]
        for each in counting:
            await each
        await world.moved()
        assert sorted(sums) == list(range(1, 241))

    moves.play(1, story, TWO, users=0, keys=MOVING, counters=())


# ── leaders ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_06_replica_accepts_no_write_on_its_own() -> None:
    async def story(stage: Stage) -> None:
        leader = stage.leader
        for other in stage.others(leader):
            stage.world.network.cut(leader.name, other.name)
        for other in stage.others(leader):
            if other.leads:
                continue
            assert (await stage.put(other)).status is not Status.OK
            assert not other.leads
        stage.world.network.heal()

    play(story, knobs())


def test_07_deposed_leader_neither_acknowledges_nor_shows_stale_data() -> None:
    async def story(stage: Stage) -> None:
        old = stage.leader
        await stage.put_until_done(old)
        for other in stage.others(old):
            stage.world.network.cut(old.name, other.name)
        stage.cluster.metadata.cut(old.name)
        stage.unseat(old)
        new = await stage.until_led_by_another(old)
        latest = written(await stage.put_until_done(new))
        assert P in old.leads, "it still believes that it leads"
        assert (await stage.get(old)).status is not Status.OK
        assert (await stage.put(old)).status is not Status.OK
        assert await value(stage, new) == latest
        stage.cluster.metadata.mend(old.name)

    play(story, knobs())


def test_08_leader_chosen_by_wrong_number_loses_nothing_and_does_not_hang() -> None:
    async def story(stage: Stage) -> None:
        old = stage.leader
        late, other = stage.others(old)
        for third in (old, other):
            stage.world.network.cut(late.name, third.name)
        done = await stage.put_until_done(old)
        await stage.put_until_done(old, b"r2")
        store = await stage.cluster.metadata.connect()
        stage.world.network.heal()
        old.crash()
        assert late.store is not None
        boast = Published(Seq(1_000_000), Seq(1_000_000), 1_000, "boast").encode()
        await store.set(paths.partition_replica(P, late.id), boast, -1)
        new = await stage.until_led_by_another(old)
        assert await value(stage, new) == written(done)

    play(story, knobs())


def test_09_clocks_order_nothing() -> None:
    """Leadership moves to a machine whose date is an hour behind. Deleted keys must stay deleted."""

    async def story(stage: Stage) -> None:
        old = stage.leader
        await stage.put_until_done(old)
        for other in stage.others(old):
            other.sim.clock.step_wall(-3_600_000)
        old.crash()
        new = await stage.until_led_by_another(old)
        later = await stage.put_until_done(new)
        assert await value(stage, new) == written(later)
        gone = await stage.ask(commands.Delete(b"r1"), new)
        assert gone.status is Status.OK
        assert gone.result > later.result
        old.start()
        assert await value(stage, new) is None

    play(story, knobs())


# ── the ring ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("step", ["after freeze", "after release", "before drop"])
def test_10_large_range_arrives_whole_when_its_source_dies_halfway(step: str) -> None:
    accident = Accident(step)

    async def story(world: World, users: Users) -> None:
        accident.strike = lambda: crash(world, ("p1",))
        ask = asker(world.cluster.nodes[0])
        for number, key in enumerate(MOVING):
            await ask(commands.Put(key, b"%d" % number + bytes(60_000)), None)
        await world.shift(SPAN, "p2")
        await world.moved()
        assert accident.has_struck
        await all_serve(world.cluster, 30.0)
        for number, key in enumerate(MOVING):
            found = await asker(world.cluster.nodes[0])(commands.Get(key), None)
            assert found[0] == b"%d" % number + bytes(60_000)

    with at_each_step(accident.reached):
        moves.play(2, story, TWO, users=0, keys=MOVING[:1], counters=())


def test_11_moving_key_is_never_absent_and_no_value_means_absent() -> None:
    async def story(world: World, users: Users) -> None:
        asks = [asker(node) for node in world.cluster.nodes]
        for key in MOVING:
            await asks[0](commands.Put(key, b"NOT FOUND"), None)
        reads = 0
        await world.shift(SPAN, "p2")
        while (await world.read_ring()).moves:
            for number, key in enumerate(MOVING):
                found = await asks[number % 3](commands.Get(key), None)
                assert found is not None
                assert found[0] == b"NOT FOUND"
                reads += 1
        assert reads > len(MOVING)
        assert await asks[1](commands.Get(b"never written"), None) is None

    moves.play(3, story, TWO, users=0, keys=MOVING[:1], counters=())


def test_12_server_with_old_ring_gives_no_answer_from_old_owner() -> None:
    """The server is cut off from the metadata store while the range changes hands. It must refuse, or answer as the
    new owner does."""

    async def story(world: World, users: Users) -> None:
        blind = next(node for node in reversed(world.cluster.nodes) if not node.leads)
        other = next(node for node in world.cluster.nodes if node.leads)
        ask, ask_blind = asker(other), asker(blind)
        await ask(commands.Put(MOVING[0], b"before"), None)
        world.cluster.metadata.cut(blind.name, silently=False)
        others = [node.name for node in world.cluster.nodes if node is not blind]
        for each in others:
            world.cluster.network.cut(blind.name, each)  # they would send it the new ring
        before = world.ring.routed
        await world.shift(SPAN, "p2")
        await world.moved()
        for each in others:
            world.cluster.network.heal(blind.name, each)
        assert world.ring.routed > before, "the range has changed hands"
        assert blind.served is not None
        assert blind.served.rings.ring.routed == before, "and this server does not know of it"
        await ask(commands.Put(MOVING[0], b"after"), None)
        for level in (Level.LINEARIZABLE, Level.STRICT):
            with suppress(Retryable):
                assert (await ask_blind(commands.Get(MOVING[0], level), None))[0] == b"after"
        with suppress(Retryable):
            await ask_blind(commands.Put(MOVING[0], b"later"), None)
            assert (await ask(commands.Get(MOVING[0]), None))[0] == b"later"
        world.cluster.metadata.mend(blind.name)
        await asyncio.sleep(5.0)
        await ask_blind(commands.Put(MOVING[0], b"last"), None)
        assert (await ask(commands.Get(MOVING[0]), None))[0] == b"last"

    moves.play(4, story, TWO, users=0, keys=MOVING[:1], counters=())
