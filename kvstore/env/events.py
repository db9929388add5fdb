"""Waits with time limits, and helpers that tell whose cancellation ended a wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvstore.env.ports import Task


async def wait_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait until `event` is set, for at most `seconds` (None means no limit). Returns True if the event was set."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


def is_cancelled() -> bool:
    """Return True if the running task is being cancelled. A CancelledError alone does not prove that: it may come from
    the awaited object."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def end_task(task: Task) -> None:
    """Cancel a task and wait until it has ended. Raises CancelledError only if the caller is cancelled, too."""
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        if is_cancelled():
            raise


class Alarm:
    """Calls `ring` after a time. Setting it again while it is set does nothing."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop, self._ring = loop, ring
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> bool:
        """Set the alarm. Returns False if it was set before."""
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
