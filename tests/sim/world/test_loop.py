"""The simulated loop is a correct asyncio loop in virtual time, with processes that crash and pause."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from itertools import count
from random import Random
from typing import Any

import pytest

from tests.sim.world import loop as sim
from tests.sim.world.loop import Deadlock, Livelock, NotSimulated, SimLoop

Work = Coroutine[Any, Any, Any]


@pytest.fixture
def loop() -> Iterator[SimLoop]:
    loop = SimLoop(Random(1))
    yield loop
    loop.close()


# Time


def test_sleeping_takes_no_real_time(loop: SimLoop) -> None:
    """It sleeps for eleven days: a run in real time would be noticed."""
    loop.run_until_complete(asyncio.sleep(1_000_000))
    assert loop.time() == 1_000_000


def test_time_stands_still_while_callbacks_are_ready(loop: SimLoop) -> None:
    async def work() -> None:
        loop.call_later(0.001, lambda: None)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert loop.time() == 0

    loop.run_until_complete(work())


def test_timers_fire_in_order_of_time_and_then_of_call(loop: SimLoop) -> None:
    fired: list[str] = []
    for name, delay in (("c", 2), ("a", 1), ("d", 2), ("b", 1), ("now", 0), ("past", -5)):
        loop.call_later(delay, fired.append, name)
    loop.run_until_complete(asyncio.sleep(3))
    assert fired == ["past", "now", "a", "b", "c", "d"]
    assert loop.time() == 3


def test_cancelled_timers_do_not_fire_nor_advance_time(loop: SimLoop) -> None:
    timers = [loop.call_later(delay, pytest.fail, "fired") for delay in range(1, 1000)]
    for timer in timers:
        timer.cancel()
        timer.cancel()
    loop.run_until_complete(asyncio.sleep(0.5))
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert loop.time() == 0.5
    assert len(loop._timers) < 500, "cancelled timers are swept"


def test_waiting_for_nothing_is_a_deadlock_that_names_waiting_tasks(loop: SimLoop) -> None:
    async def waiter() -> None:
        await asyncio.Event().wait()

    loop.create_task(waiter(), name="the waiter")
    with pytest.raises(Deadlock, match=r"the waiter waits at .*test_loop\.py"):
        loop.run_until_complete(waiter())


def test_spinning_without_time_is_a_livelock(loop: SimLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim, "HANDLES_PER_INSTANT_MAX", 1000)

    async def spin() -> None:
        for _ in count():
            await asyncio.sleep(0)

    with pytest.raises(Livelock, match="1001 callbacks at 0"):
        loop.run_until_complete(spin())


def test_timer_too_short_to_advance_time_is_a_livelock(loop: SimLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim, "HANDLES_PER_INSTANT_MAX", 1000)

    def again() -> None:
        loop.call_later(1e-20, again)

    loop.call_later(1, again)
    with pytest.raises(Livelock, match="1001 callbacks at 1"):
        loop.run_until_complete(asyncio.sleep(2))


# Promises of asyncio


def test_futures_tasks_and_results(loop: SimLoop) -> None:
    async def work() -> str:
        future: asyncio.Future[str] = loop.create_future()
        loop.call_soon(future.set_result, "result")
        task = loop.create_task(asyncio.wait_for(future, 1))
        with pytest.raises(ZeroDivisionError):
            await loop.create_task(divide())
        return str(await task)

    async def divide() -> float:
        return 1 / 0

    assert loop.run_until_complete(work()) == "result"


def test_timeouts(loop: SimLoop) -> None:
    async def work() -> None:
        for limited in (
            asyncio.wait_for(asyncio.sleep(10), 3),
            within(3, asyncio.sleep(10)),
            within(3, within(5, asyncio.sleep(10))),
        ):
            began = loop.time()
            with pytest.raises(TimeoutError):
                await limited
            assert loop.time() == began + 3
        await within(3, asyncio.sleep(2))
        assert loop.time() == 11

    async def within(seconds: float, inner: Work) -> None:
        async with asyncio.timeout(seconds):
            await inner

    loop.run_until_complete(work())


def test_events_locks_and_queues(loop: SimLoop) -> None:
    async def work() -> None:
        lock, event, queue, log = asyncio.Lock(), asyncio.Event(), asyncio.Queue[int](2), []

        async def producer() -> None:
            await event.wait()
            for number in range(5):
                await queue.put(number)

        async def holder(name: str) -> None:
            async with lock:
                log.append(name)
                await asyncio.sleep(1)
                log.append(name)

        tasks = [loop.create_task(producer()), *(loop.create_task(holder(name)) for name in "abc")]
        event.set()
        assert [await queue.get() for _ in range(5)] == list(range(5))
        for task in tasks:
            await task
        assert log == list("aabbcc")

    loop.run_until_complete(work())


def test_async_generators_are_closed_at_end(loop: SimLoop) -> None:
    closed: list[str] = []

    async def numbers(name: str) -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(1)
            closed.append(name)

    async def work() -> None:
        async for _ in numbers("dropped"):
            break
        gc.collect()
        await asyncio.sleep(2)
        assert closed == ["dropped"]
        generator = numbers("open")
        await anext(generator)
        held.append(generator)

    held: list[AsyncIterator[int]] = []
    loop.run_until_complete(work())
    loop.run_until_complete(loop.shutdown_asyncgens())
    assert closed == ["dropped", "open"]


def test_cancellation_runs_finally_blocks(loop: SimLoop) -> None:
    log: list[str] = []

    async def worker() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            log.append("cleaned up")

    async def work() -> None:
        task = loop.create_task(worker())
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    loop.run_until_complete(work())
    assert (log, loop.time()) == (["cleaned up"], 1)


def test_callbacks_from_same_thread_are_run(loop: SimLoop) -> None:
    loop.call_soon_threadsafe(loop.stop)
    loop.run_forever()


@pytest.mark.parametrize(
    "use",
    [
        lambda loop: loop.run_in_executor(None, print),
        lambda loop: loop.add_reader(0, print),
        lambda loop: loop.getaddrinfo("localhost", 80),
        lambda loop: loop.create_connection(asyncio.Protocol, "localhost", 80),
        lambda loop: loop.create_server(asyncio.Protocol, "localhost", 80),
        lambda loop: loop.subprocess_exec(asyncio.SubprocessProtocol, "true"),
        lambda loop: loop.sock_recv(None, 1),
        lambda loop: loop.add_signal_handler(1, print),
    ],
)
def test_unsupported_calls_are_refused(loop: SimLoop, use: Callable[[SimLoop], object]) -> None:
    with pytest.raises(NotSimulated, match="use the ports"):
        use(loop)


def test_error_in_callback_is_recorded_and_loop_continues(loop: SimLoop, caplog: pytest.LogCaptureFixture) -> None:
    process = loop.process("n1")
    loop.call_soon(lambda: 1 / 0, context=process.context)
    with caplog.at_level(logging.CRITICAL):
        loop.run_until_complete(asyncio.sleep(1))
    [(where, message, error)] = loop.errors
    assert (where, type(error)) == ("n1", ZeroDivisionError)
    assert "exception in callback" in message


# Interleaving


def interleaving(seed: int) -> list[str]:
    log: list[str] = []
    loop = SimLoop(Random(seed))
    for name in "abc":
        process = loop.process(name)
        for number in range(5):
            loop.call_soon(log.append, f"{name}{number}", context=process.context)
    loop.run_until_complete(asyncio.sleep(1))
    loop.close()
    return log


def test_process_runs_its_callbacks_in_order_whatever_the_seed() -> None:
    for seed in range(20):
        log = interleaving(seed)
        for name in "abc":
            assert [each for each in log if each[0] == name] == [f"{name}{number}" for number in range(5)]


def test_seeds_choose_among_processes_and_repeat() -> None:
    runs = [tuple(interleaving(seed)) for seed in range(20)]
    assert len(set(runs)) > 15
    assert runs == [tuple(interleaving(seed)) for seed in range(20)]
