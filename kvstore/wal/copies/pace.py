"""Keeps the making of copies within a number of bytes per second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvstore.env.ports import Clock


class Pace:
    """Shared by all that copy on one node."""

    def __init__(self, clock: Clock, bytes_per_s: int) -> None:
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at = 0.0
        """When what was spent so far is within the rate."""

    async def spend(self, size: int) -> None:
        """Return when so many bytes more are within the rate."""
        now = self._clock.now()
        self._free_at = max(self._free_at, now) + size / self.bytes_per_s
        await asyncio.sleep(self._free_at - now)


class GuardedPace(Pace):
    """A share in another pace, for as long as `go_on` raises nothing."""

    def __init__(self, shared: Pace, go_on: Callable[[], None]) -> None:
        super().__init__(shared._clock, shared.bytes_per_s)
        self._shared, self._go_on = shared, go_on

    async def spend(self, size: int) -> None:
        """Raises what `go_on` does."""
        self._go_on()
        await self._shared.spend(size)
        self._go_on()
