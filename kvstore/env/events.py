"""Waiting for something to happen, but not for ever; and whose cancellation it was that ended the wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

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


class Alarm:
    """Calls `ring` after a time; one that is set is not set again."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop, self._ring = loop, ring
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> bool:
        """Whether it was not set before."""
        if self._timer is not None:
            return False
        self._timer = self._loop.call_later(seconds, self._due)
        return True

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _due(self) -> None:
        self._timer = None
        self._ring()
