"""Tasks have an owner that outlives them, on the real loops and in the simulation."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
from collections.abc import Callable

import pytest

from kvstore.env.nursery import TaskNursery, shielded
from tests.env.runners import LOOPS, Work

Perform = Callable[[Work], None]


@pytest.fixture(params=LOOPS)
def perform(request: pytest.FixtureRequest) -> Perform:
    return LOOPS[request.param]


async def forever(log: list[str], name: str) -> None:
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        log.append(name)


def test_close_cancels_in_order_and_waits(perform: Perform) -> None:
    async def work() -> None:
        log: list[str] = []
        nursery = TaskNursery("n")
        nursery.spawn(forever(log, "a"), name="a")
        child = nursery.child("c")
        child.spawn(forever(log, "c1"), name="1")
        nursery.spawn(forever(log, "b"), name="b")
        child.spawn(forever(log, "c2"), name="2")
        await asyncio.sleep(0)
        await nursery.close()
        assert log == ["a", "c1", "c2", "b"]

    perform(work)


def test_close_waits_for_tasks_that_end_slowly(perform: Perform) -> None:
    async def work() -> None:
        log: list[str] = []

        async def slow() -> None:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                for _ in range(5):
                    await asyncio.sleep(0)
                log.append("ended")

        nursery = TaskNursery("n")
        nursery.spawn(slow(), name="slow")
        await asyncio.sleep(0)
        await nursery.close()
        assert log == ["ended"]

    perform(work)


def test_closed_nursery_starts_nothing(perform: Perform) -> None:
    async def work() -> None:
        nursery = TaskNursery("n")
        child = nursery.child("c")
        await nursery.close()
        await nursery.close()
        for closed in (nursery, child):
            with pytest.raises(RuntimeError, match="is closed"):
                closed.spawn(asyncio.sleep(0), name="late")
            with pytest.raises(RuntimeError, match="is closed"):
                closed.child("late")

    perform(work)


def test_error_is_logged_with_the_task_name_and_affects_no_other_task(
    perform: Perform, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        reports: list[tuple[str, BaseException]] = []
        nursery = TaskNursery("n", on_error=lambda name, error: reports.append((name, error)))
        log: list[str] = []
        nursery.spawn(forever(log, "other"), name="other")
        error = ValueError("wrong")

        async def fail() -> None:
            raise error

        nursery.child("c").spawn(fail(), name="failing")
        for _ in range(3):
            await asyncio.sleep(0)
        assert reports == [("n/c/failing", error)]
        assert log == []
        await nursery.close()

    with caplog.at_level(logging.ERROR):
        perform(work)
    assert "n/c/failing" in caplog.text


def test_task_can_be_awaited_and_cancelled(perform: Perform) -> None:
    async def work() -> None:
        nursery = TaskNursery("n")

        async def answer() -> int:
            return 7

        assert await nursery.spawn(answer(), name="answer") == 7
        task = nursery.spawn(forever([], "x"), name="x")
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.done()
        await nursery.close()

    perform(work)


def test_task_may_close_its_own_nursery(perform: Perform) -> None:
    async def work() -> None:
        log: list[str] = []
        nursery = TaskNursery("n")
        nursery.spawn(forever(log, "other"), name="other")

        async def end_all() -> None:
            await nursery.close()
            log.append("closed")

        await nursery.spawn(end_all(), name="last")
        assert log == ["other", "closed"]

    perform(work)


def test_cancelled_close_can_be_repeated(perform: Perform) -> None:
    async def work() -> None:
        released = asyncio.Event()
        nursery = TaskNursery("n")

        async def stubborn() -> None:
            while not released.is_set():
                try:
                    await released.wait()
                except asyncio.CancelledError:
                    continue

        nursery.spawn(stubborn(), name="stubborn")
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await nursery.close()
        released.set()
        await nursery.close()

    perform(work)


def test_task_referenced_only_by_its_own_future_is_not_collected(perform: Perform) -> None:
    async def work() -> None:
        log: list[str] = []
        nursery = TaskNursery("n")
        nursery.spawn(forever(log, "alive"), name="alive")
        await asyncio.sleep(0)
        gc.collect()
        assert log == []
        await nursery.close()

    perform(work)


def test_ended_children_and_tasks_are_forgotten(perform: Perform) -> None:
    async def work() -> None:
        nursery = TaskNursery("n")
        for number in range(10):
            child = nursery.child(str(number))
            child.spawn(asyncio.sleep(0), name="brief")
            await child.close()
        await nursery.spawn(asyncio.sleep(0), name="brief")
        await asyncio.sleep(0)
        assert not nursery._members

    perform(work)


def test_tasks_run_in_copies_of_the_given_context(perform: Perform) -> None:
    variable = contextvars.ContextVar("variable", default="none")

    async def work() -> None:
        context = contextvars.copy_context()
        context.run(variable.set, "given")
        nursery = TaskNursery("n", context=context)
        seen: list[str] = []

        async def look() -> None:
            seen.append(variable.get())
            variable.set("changed")

        for nursery_or_child in (nursery, nursery.child("c"), nursery):
            await nursery_or_child.spawn(look(), name="look")
        assert seen == ["given", "given", "given"]
        assert variable.get() == "none"
        await nursery.close()

    perform(work)


def test_shielded_work_returns_its_result_or_error(perform: Perform) -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        done, failed, late = (loop.create_future() for _ in range(3))
        done.set_result(1)
        failed.set_exception(ValueError("wrong"))
        loop.call_soon(late.set_result, 2)
        assert await shielded(done) == 1
        with pytest.raises(ValueError, match="wrong"):
            await shielded(failed)
        assert await shielded(late) == 2

    perform(work)


@pytest.mark.parametrize("ends", ["result", "error", "cancelled"])
def test_shielded_work_continues_without_its_caller_and_ends_silently(
    perform: Perform, ends: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        heard: list[dict[str, object]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: heard.append(context))
        future: asyncio.Future[int] = loop.create_future()
        caller = loop.create_task(shielded(future))
        await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert not future.done()
        if ends == "result":
            future.set_result(1)
        elif ends == "error":
            future.set_exception(ValueError("wrong"))
        else:
            future.cancel()
        await asyncio.sleep(0)
        del future, caller
        gc.collect()
        assert heard == []

    perform(work)
    assert caplog.text == ""
