"""Waiting for something to happen, but not for ever; and whose cancellation it was that ended the wait."""

from __future__ import annotations

import asyncio

from kvstore.env.ports import Task


async def wait_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Return when `event` is set, or after `seconds` (None: no bound); whether it was set."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


def is_cancelled() -> bool:
    """Whether the running task is to end. A CancelledError alone does not say so: it may be of what was waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def end_task(task: Task) -> None:
    """Cancel a task, and return once it has ended. Raises CancelledError only if the caller is cancelled too."""
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        if is_cancelled():
            raise
