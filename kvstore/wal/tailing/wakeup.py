"""Lets one reader sleep until there may be something new."""

from __future__ import annotations

import asyncio

TIMER_MIN_S = 0.001
"""Less than this is not worth a timer, and may be nothing at all on the event loop's clock."""


class ReaderWakeup:
    """The news for one reader, which asks `forget` before it looks and `wait` when it has found nothing."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_here = False
        self._waiting: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self._wait_until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def forget(self) -> None:
        """Forget what was told: from now on all is news."""
        self._is_here = False

    def tell(self) -> None:
        """There may be something new."""
        self._is_here = True
        self._wake_up()

    def fail(self, error: Exception) -> None:
        """Raise it from the wait that is under way."""
        self._failure = error
        self._wake_up()

    async def wait(self, seconds: float) -> None:
        """Return when there is news, or after so long. One timer serves many waits: it is set again only when it has
        fired early."""
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
        """Wake nobody any more."""
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
