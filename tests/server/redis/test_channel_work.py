"""The work of Pub/Sub is spread over turns of the event loop."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.server.redis.channel_work import TURN_WORK, ChannelWork


class Waiter:
    """Adds work whenever it is resumed, and waits again."""

    def __init__(self, work: ChannelWork, amount: int, times: int = 0) -> None:
        self.work, self.amount, self.times = work, amount, times
        self.resumed = 0

    def resume(self) -> None:
        self.resumed += 1
        self.work.add(self.amount)
        if self.resumed < self.times:
            self.work.wait(self)


async def turns_until_free(work: ChannelWork) -> int:
    turns = 0
    while work.is_busy:
        await asyncio.sleep(0)
        turns += 1
    return turns


async def test_work_keeps_later_work_waiting_for_as_many_turns_as_it_takes() -> None:
    work = ChannelWork()
    work.add(TURN_WORK - 1)
    assert not work.is_busy
    work.add(1 + 9 * TURN_WORK)
    assert 10 <= await turns_until_free(work) <= 11


async def test_job_runs_once_in_a_later_turn() -> None:
    work, ran = ChannelWork(), list[int]()

    def job() -> int:
        ran.append(1)
        return 20

    work.soon(job, 20)
    work.soon(job, 20)
    assert ran == []
    await asyncio.sleep(0)
    assert ran == [1]
    work.soon(job, 20)
    await asyncio.sleep(0)
    assert ran == [1, 1]


async def test_jobs_of_one_turn_have_a_bound_and_keep_their_order() -> None:
    work, ran = ChannelWork(), list[int]()

    def job(number: int) -> int:
        ran.append(number)
        return TURN_WORK // 10

    for number in range(100):
        work.soon(lambda number=number: job(number), TURN_WORK // 10)
    assert work.is_busy
    await asyncio.sleep(0)
    assert ran == list(range(10))
    await turns_until_free(work)
    assert len(ran) >= 90
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert ran == list(range(100))


async def test_waiters_take_turns() -> None:
    work = ChannelWork()
    work.add(TURN_WORK)
    waiters = [Waiter(work, TURN_WORK, times=3) for _ in range(4)]
    for each in waiters:
        work.wait(each)
    seen = []
    for _ in range(20):
        await asyncio.sleep(0)
        seen.append([each.resumed for each in waiters])
    assert max(max(each) - min(each) for each in seen) == 1
    assert seen[-1] == [3] * 4


async def test_waiter_that_is_forgotten_is_not_resumed() -> None:
    work = ChannelWork()
    work.add(TURN_WORK)
    waiter = Waiter(work, 1)
    work.wait(waiter)
    work.forget(waiter)
    await turns_until_free(work)
    await asyncio.sleep(0)
    assert waiter.resumed == 0


async def test_coroutine_waits_until_work_may_begin() -> None:
    work = ChannelWork()
    await work.wait_free()
    work.add(3 * TURN_WORK)
    await work.wait_free()
    assert not work.is_busy


async def test_cancelled_coroutine_does_not_stop_others() -> None:
    work = ChannelWork()
    work.add(3 * TURN_WORK)
    first, second = (asyncio.ensure_future(work.wait_free()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await second
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_failure_of_a_job_does_not_stop_others() -> None:
    work, ran, reported = ChannelWork(), list[int](), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context["exception"]))

    def bad() -> int:
        raise RuntimeError("broken")

    work.soon(bad, 20)
    work.soon(lambda: len(ran.__iadd__([1])), 20)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert ran == [1]
    assert len(reported) == 1
