"""A bounded wait ends with the event or with the time."""

import asyncio

import pytest

from kvstore.env.events import end_task, wait_within


async def test_set_event_ends_the_wait_at_once() -> None:
    event = asyncio.Event()
    event.set()
    assert await wait_within(event, 0)


async def test_unset_event_ends_the_wait_after_the_time() -> None:
    assert not await wait_within(asyncio.Event(), 0)


async def test_unbounded_wait_ends_with_the_event() -> None:
    event = asyncio.Event()
    asyncio.get_running_loop().call_soon(event.set)
    assert await wait_within(event, None)


async def test_cancellation_is_not_a_timeout() -> None:
    waiting = asyncio.ensure_future(wait_within(asyncio.Event(), 60))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()


async def test_caller_that_ends_a_task_is_cancelled_only_itself() -> None:
    async def ends_slowly() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)

    for is_cancelled in (False, True):
        task = asyncio.ensure_future(ends_slowly())
        await asyncio.sleep(0)
        ending = asyncio.ensure_future(end_task(task))
        await asyncio.sleep(0)
        if is_cancelled:
            ending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await ending
        else:
            await ending
        assert task.cancelled()
