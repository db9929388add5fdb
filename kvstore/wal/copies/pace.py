"""Limits copying to a number of bytes per second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvstore.env.ports import Clock

IDLE_S = 1.0
"""Seconds after which an unused budget expires."""
CHECK_S = 1.0
"""Seconds between two calls of the `check` of a waiting caller."""


class CopyPace:
    """A rate limit that all copying on one node shares."""

    def __init__(self, clock: Clock, bytes_per_s: int) -> None:
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at = 0.0
        """Boot-time clock at which everything spent so far fits within the rate."""
        self.spent_bytes = 0
        self.busy_s = 0.0
        """Seconds in which there was something to spend; never less than the rate requires for `spent_bytes`."""
        self._waiting = 0
        self._seen_at = -IDLE_S

    async def spend(self, size: int) -> None:
        """Wait until `size` more bytes fit within the rate. If the caller is cancelled, its bytes are not counted."""
        await self.spend_while(size, lambda: None)

    async def spend_while(self, size: int, check: Callable[[], None]) -> None:
        """Wait until `size` more bytes fit within the rate. The wait may be long at a low rate, so `check` is called
        every second and may raise to end it."""
        now = self._clock.now()
        self._pass_to(now)
        takes_s = size / self.bytes_per_s
        self._free_at = max(self._free_at, now) + takes_s
        left_s = self._free_at - now
        self._waiting += 1
        try:
            check()
            while left_s > 0:
                step_s = min(left_s, CHECK_S)
                await asyncio.sleep(step_s)
                left_s -= step_s
                check()
            self.spent_bytes += size
        except BaseException:
            self._free_at -= takes_s
            raise
        finally:
            self._pass_to(self._clock.now())
            self._waiting -= 1

    def _pass_to(self, now: float) -> None:
        """Add the time since the last call to `busy_s`, unless there was nothing to spend."""
        if self._waiting or now - self._seen_at < IDLE_S:
            self.busy_s += now - self._seen_at
        self._seen_at = now


class GuardedCopyPace(CopyPace):
    """A rate limit that shares the budget of another one, and whose waits also end when its own `check` raises."""

    def __init__(self, shared: CopyPace, check: Callable[[], None]) -> None:
        super().__init__(shared._clock, shared.bytes_per_s)
        self._shared, self._check = shared, check

    async def spend_while(self, size: int, check: Callable[[], None]) -> None:
        """Wait until `size` more bytes fit within the rate. Raises the exception of either `check`."""

        def both() -> None:
            self._check()
            check()

        await self._shared.spend_while(size, both)
