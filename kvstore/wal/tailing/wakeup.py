"""Lets one reader sleep until there may be something new to read."""

from __future__ import annotations

import asyncio

TIMER_MIN_S = 0.001
"""Minimum duration of a timer in seconds. A shorter timer is useless, and may have no duration on the event loop's
clock."""


class ReaderWakeup:
    """The wake-up of one reader. The reader calls `forget` before it checks for entries, and `wait` if it has found
    none."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_here = False
        self._waiting: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self._wait_until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def forget(self) -> None:
        """Forget earlier notifications."""
        self._is_here = False

    def notify(self) -> None:
        """Notify the reader that there may be something new."""
        self._is_here = True
        self._wake_up()

    def fail(self, error: Exception) -> None:
        """Raise `error` from the `wait` in progress."""
        self._failure = error
        self._wake_up()

    async def wait(self, seconds: float) -> None:
        """Wait until notified, or until `seconds` have passed. One timer serves many waits, and is set again only if it
        fired too early."""
        if self._is_here:
            return
        self._wait_until = self._loop.time() + seconds
        if self._timer is None or self._timer.when() > self._wait_until:
            self._set_timer()
        self._waiting = self._loop.create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Notify nobody any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._wait_until, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._loop.time() + TIMER_MIN_S < self._wait_until:
            self._set_timer()
        else:
            self._wake_up()

    def _wake_up(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
