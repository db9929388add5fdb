"""Processes on the simulated loop: what they own, and what remains of it when they crash or pause."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Coroutine, Iterator
from random import Random
from typing import Any

import pytest

from tests.sim.world.loop import Deadlock, Process, SimLoop, current_node


@pytest.fixture
def loop() -> Iterator[SimLoop]:
    loop = SimLoop(Random(1))
    yield loop
    loop.close()


def start(loop: SimLoop, process: Process, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return loop.create_task(work, context=process.context.copy())


def test_process_owns_everything_it_starts(loop: SimLoop) -> None:
    seen: list[tuple[str, Process | None]] = []

    def note(what: str) -> None:
        seen.append((what, current_node.get()))

    async def child() -> None:
        note("child")

    async def main() -> None:
        note("main")
        loop.call_soon(note, "soon")
        loop.call_later(1, note, "later")
        await loop.create_task(child())
        await asyncio.sleep(2)
        future = loop.create_future()
        future.add_done_callback(lambda _: note("done"))
        future.set_result(None)

    process = loop.process("n1")
    start(loop, process, main())
    loop.run_until_complete(asyncio.sleep(10))
    assert [what for what, _ in seen] == ["main", "soon", "child", "later", "done"]
    assert {owner for _, owner in seen} == {process}
    assert current_node.get() is None


def test_no_line_of_crashed_process_runs(loop: SimLoop) -> None:
    log: list[str] = []

    async def steps() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            log.append("generator")

    async def main() -> None:
        loop.call_later(2, log.append, "timer")
        try:
            async for _ in steps():
                await asyncio.get_running_loop().create_future()
        except BaseException:
            log.append("except")
            raise
        finally:
            log.append("finally")
            await asyncio.sleep(0)

    async def test() -> None:
        process = loop.process("n1")
        task = start(loop, process, main())
        task.add_done_callback(lambda _: log.append("done"))
        await asyncio.sleep(1)
        loop.call_soon(log.append, "ready", context=process.context)
        loop.kill(process)
        loop.kill(process)
        del task
        gc.collect()
        loop.call_soon(log.append, "after death", context=process.context)
        await asyncio.sleep(10)
        assert log == []

    loop.run_until_complete(test())


def test_dead_processes_are_finalized_without_errors(loop: SimLoop, caplog: pytest.LogCaptureFixture) -> None:
    async def stubborn() -> None:
        while True:
            try:
                await loop.create_future()
            except GeneratorExit:
                break
            finally:
                await asyncio.sleep(0)

    async def test() -> None:
        process = loop.process("n1")
        for _ in range(3):
            start(loop, process, stubborn())
        await asyncio.sleep(1)
        loop.kill(process)

    loop.run_until_complete(test())
    loop.close()
    loop.close()
    gc.collect()
    assert caplog.text == ""


def test_caller_outside_process_is_notified_of_its_death(loop: SimLoop) -> None:
    told: list[Process | None] = []

    async def test() -> None:
        process = loop.process("n1")
        process.on_death.append(lambda: told.append(current_node.get()))
        loop.kill(process)
        await asyncio.sleep(0)
        assert told == [None]

    loop.run_until_complete(test())


def test_paused_process_later_does_what_it_would_have_done(loop: SimLoop) -> None:
    log: list[tuple[str, float]] = []

    async def ticks() -> None:
        for number in range(4):
            await asyncio.sleep(1)
            log.append((str(number), loop.time()))

    async def test() -> None:
        process = loop.process("n1")
        start(loop, process, ticks())
        await asyncio.sleep(1.5)
        loop.pause(process)
        loop.call_soon(lambda: log.append(("parked", loop.time())), context=process.context)
        await asyncio.sleep(10)
        assert log == [("0", 1.0)]
        loop.resume(process)
        await asyncio.sleep(10)
        assert log == [("0", 1.0), ("parked", 11.5), ("1", 11.5), ("2", 12.5), ("3", 13.5)]

    loop.run_until_complete(test())


def test_process_that_dies_while_paused_stays_dead(loop: SimLoop) -> None:
    async def test() -> None:
        process = loop.process("n1")
        loop.pause(process)
        loop.call_soon(pytest.fail, "it ran", context=process.context)
        loop.kill(process)
        loop.resume(process)
        await asyncio.sleep(1)

    loop.run_until_complete(test())


def test_deadlock_names_paused_process(loop: SimLoop) -> None:
    process = loop.process("n1")
    loop.pause(process)
    never_begun = asyncio.sleep(0)
    with pytest.raises(Deadlock, match="n1#1 paused"):
        loop.run_until_complete(start(loop, process, never_begun))
    never_begun.close()


def test_generator_awaitable_is_closed_with_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Closing the task ends at the generator's `asend`; everything below was finalized outside of any loop."""
    failures: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", failures.append)
    log: list[str] = []
    loop = SimLoop(Random(1))

    async def opens() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            log.append("closes")
            async with asyncio.timeout(1):  # requires a task
                await asyncio.sleep(1)

    async def resource() -> AsyncIterator[int]:
        await opens()
        yield 1

    async def main() -> None:
        async for _ in resource():
            break

    process = loop.process("n1")
    start(loop, process, main())
    loop.run_until_complete(asyncio.sleep(1))
    loop.kill(process)
    loop.close()
    gc.collect()
    assert log == ["closes"]
    assert failures == []
