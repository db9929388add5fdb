"""A wait ends with what is waited for, or with the time."""

import asyncio

import pytest

from kvstore.env.events import end_task, wait_within


async def test_what_has_happened_is_told_at_once() -> None:
    event = asyncio.Event()
    event.set()
    assert await wait_within(event, 0)


async def test_what_does_not_happen_is_told_after_the_time() -> None:
    assert not await wait_within(asyncio.Event(), 0)


async def test_without_a_bound_the_wait_ends_with_the_event() -> None:
    event = asyncio.Event()
    asyncio.get_running_loop().call_soon(event.set)
    assert await wait_within(event, None)


async def test_a_cancel_is_no_end_of_the_time() -> None:
    waiting = asyncio.ensure_future(wait_within(asyncio.Event(), 60))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()


async def test_whoever_ends_a_task_goes_on_and_is_cancelled_only_itself() -> None:
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
