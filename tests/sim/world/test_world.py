"""Nodes of a simulated world: what survives, what dies, and what fails a run."""

from __future__ import annotations

import asyncio
import gc
import io
from itertools import count

import pytest

from kvstore.env import Env
from tests.sim.world.env import ClockConfig, NodeCrashed, SimulationFailed, SimWorld, TimeUp

pytestmark = pytest.mark.sim


async def forever(env: Env) -> None:
    await asyncio.Event().wait()


def test_node_restarts_on_its_own_disk_as_new_incarnation() -> None:
    starts: list[tuple[bytes, float]] = []

    async def main(env: Env) -> None:
        file = env.disk.open("f", create=True)
        starts.append((file.read(0, 10), env.random.random()))
        file.pwrite(file.size(), b"x")
        await forever(env)

    async def act(world: SimWorld) -> None:
        node = world.node("n")
        node.start(main)
        for _ in range(3):
            await asyncio.sleep(1)
            node.restart()
        await asyncio.sleep(1)

    with SimWorld(1) as world:
        world.run(act(world))
    assert [content for content, _ in starts] == [b"", b"x", b"xx", b"xxx"]
    assert len({luck for _, luck in starts}) == 4


def test_process_ends_with_its_main_and_everything_it_started() -> None:
    log: list[str] = []

    async def tick() -> None:
        for number in range(100):
            await asyncio.sleep(1)
            log.append(str(number))

    async def main(env: Env) -> None:
        env.nursery.spawn(tick(), name="tick")
        await asyncio.sleep(2.5)

    async def act(world: SimWorld) -> None:
        node = world.node("n")
        node.start(main)
        await asyncio.sleep(1)
        states = [node.is_running]
        await asyncio.sleep(10)
        assert [*states, node.is_running] == [True, False]
        assert log == ["0", "1"]

    with SimWorld(1) as world:
        world.run(act(world))


def test_paused_node_stops_entirely() -> None:
    log: list[float] = []

    async def main(env: Env) -> None:
        while True:
            await asyncio.sleep(1)
            log.append(world.loop.time())

    async def act() -> None:
        node = world.node("n")
        node.start(main)
        await asyncio.sleep(1.5)
        node.pause()
        await asyncio.sleep(10)
        node.resume()
        await asyncio.sleep(0.75)

    with SimWorld(1) as world:
        world.run(act())
    assert log == [1.0, 11.5]


def test_call_on_node_returns_raises_or_dies_with_it() -> None:
    async def answer(after: float) -> str:
        await asyncio.sleep(after)
        return "answer"

    async def fail() -> None:
        raise ValueError("wrong")

    async def act(world: SimWorld) -> None:
        node = world.node("n")
        assert await node.call(answer(1)) == "answer"
        with pytest.raises(ValueError, match="wrong"):
            await node.call(fail())
        world.loop.call_later(1, node.crash)
        with pytest.raises(NodeCrashed, match="n"):
            await node.call(answer(2))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await node.call(answer(2))

    with SimWorld(1) as world:
        world.run(act(world))


def test_fatal_error_ends_process_and_is_recorded() -> None:
    log: list[str] = []

    async def main(env: Env) -> None:
        asyncio.get_running_loop().call_later(1, env.fatal, "from a callback")
        await asyncio.sleep(2)
        log.append("went on")

    async def other(env: Env) -> None:
        async def fail() -> None:
            env.fatal("from a task")
            log.append("went on")

        await env.nursery.spawn(fail(), name="fail")
        log.append("went on")

    async def act(world: SimWorld) -> None:
        world.node("n").start(main)
        world.node("m").start(other)
        await asyncio.sleep(5)
        assert not world.node("n").is_running
        assert not world.node("m").is_running

    with SimWorld(1) as world:
        world.run(act(world))
        assert world.fatals == [("m", "from a task"), ("n", "from a callback")]
    assert log == []


def test_error_that_leaves_main_or_a_task_fails_run(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(env: Env) -> None:
        raise ValueError("main is wrong")

    async def fail_aside(env: Env) -> None:
        env.nursery.spawn(fail(env), name="aside")
        await forever(env)

    async def act(world: SimWorld) -> None:
        world.node("n").start(fail)
        world.node("m").start(fail_aside)
        await asyncio.sleep(1)

    with SimWorld(7) as world:
        with pytest.raises(SimulationFailed, match="main is wrong") as caught:
            world.run(act(world))
        assert "make sim SEED=7" in caught.value.__notes__[0]
        world.run(asyncio.sleep(1))
        with pytest.raises(SimulationFailed):
            world.run(act_again(world))


async def act_again(world: SimWorld) -> None:
    world.loop.call_soon(lambda: 1 / 0)
    await asyncio.sleep(1)


def test_test_can_remove_expected_error() -> None:
    async def fail(env: Env) -> None:
        raise ValueError("as expected")

    async def act(world: SimWorld) -> None:
        world.node("n").start(fail)
        await asyncio.sleep(1)
        [(task, error)] = world.errors
        assert (task, str(error)) == ("n", "as expected")
        world.errors.clear()

    with SimWorld(1) as world:
        world.run(act(world))


def test_run_that_does_not_end_names_waiting_tasks() -> None:
    async def act() -> None:
        for _ in count():
            await asyncio.sleep(1)

    with SimWorld(1) as world:
        with pytest.raises(TimeUp, match=r"not over after 10 virtual seconds(.|\n)*test_world\.py"):
            world.run(act(), limit_s=10)
        assert world.loop.time() <= 10


def test_world_can_be_run_repeatedly() -> None:
    with SimWorld(1) as world:
        for number in range(3):
            world.run(asyncio.sleep(100))
            assert world.loop.time() == 100 * (number + 1)


def test_clocks_drift_apart_within_bounds_and_dates_differ() -> None:
    async def act(world: SimWorld) -> None:
        clocks = [world.node(f"n{number}").clock for number in range(5)]
        began = [clock.now() for clock in clocks]
        dates = [clock.wall_ms() for clock in clocks]
        assert len(set(dates)) > 1
        assert max(dates) - min(dates) <= 4000
        await asyncio.sleep(1000)
        passed = [clock.now() - start for clock, start in zip(clocks, began, strict=True)]
        assert len(set(passed)) == 5
        assert all(abs(each - 1000) <= 1 for each in passed)
        clocks[0].step_wall(-3_600_000)
        assert clocks[0].wall_ms() - dates[0] == -2_600_000
        assert clocks[0].now() - began[0] == passed[0], "only the date has changed"

    with SimWorld(1, clock=ClockConfig(drift_max=0.001)) as world:
        world.run(act(world), limit_s=2000)


def test_power_cut_restarts_boot_clock_and_crash_does_not() -> None:
    async def act(world: SimWorld) -> None:
        node = world.node("n")
        node.start(forever)
        await asyncio.sleep(1000)
        now = node.clock.now()
        node.crash()
        assert node.clock.now() == now
        node.crash(power=True)
        assert node.clock.now() <= 110

    with SimWorld(1) as world:
        world.run(act(world), limit_s=2000)


def test_draw_in_one_place_changes_nothing_in_another() -> None:
    with SimWorld(1) as one, SimWorld(1) as other:
        one.fork("a").random()
        assert one.fork("b").random() == other.fork("b").random()
        assert one.fork("a").random() != other.fork("b").random()
    with SimWorld(2) as third:
        assert third.fork("b").random() != SimWorld(1).fork("b").random()


def test_trace_can_be_read() -> None:
    text = io.StringIO()

    async def act(world: SimWorld) -> None:
        node = world.node("node-1")
        node.start(forever)
        await asyncio.sleep(1)
        node.crash()

    with SimWorld(1, text=text) as world:
        world.run(act(world))
    start, crash = text.getvalue().splitlines()
    assert start.split() == ["0.000000", "node-1", "start", "1"]
    assert crash.split()[:3] == ["1.000000", "node-1", "crash"]


def test_digest_distinguishes_schedules_whoever_reads_trace() -> None:
    def digest(seed: int, text: io.StringIO | None = None) -> str:
        async def act(world: SimWorld) -> None:
            for name in "abc":
                world.node(name).start(idle)
            await asyncio.sleep(10)

        async def idle(env: Env) -> None:
            for _ in range(20):
                await asyncio.sleep(0)

        with SimWorld(seed, text=text) as world:
            world.run(act(world))
            return world.trace.digest()

    assert digest(1) == digest(1, io.StringIO())
    assert len({digest(seed) for seed in range(10)}) == 10


def test_closing_world_finalizes_live_and_dead_processes(caplog: pytest.LogCaptureFixture) -> None:
    log: list[str] = []

    async def main(env: Env) -> None:
        try:
            await forever(env)
        finally:
            log.append("buried")
            env.disk.open("f", create=True)
            log.append("touched the disk")

    async def act(world: SimWorld) -> None:
        world.node("n").start(main)
        world.env("m").nursery.spawn(forever(world.env("m")), name="m")
        await asyncio.sleep(1)

    with SimWorld(1) as world:
        world.run(act(world))
        assert gc.isenabled()
        assert log == []
    world.close()
    disk = world.node("n").disk
    del world
    gc.collect()
    assert log == ["buried"]
    assert not disk.exists("f")
    assert caplog.text == ""
