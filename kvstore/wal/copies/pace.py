"""Limits copying to a number of bytes per second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvstore.env.ports import Clock

IDLE_S = 1.0
"""After this many seconds without spending, no unused budget is left."""
LOOK_S = 1.0
"""Seconds between two checks whether a waiting caller may continue."""


class CopyPace:
    """A rate limit shared by everything that copies on one node."""

    def __init__(self, clock: Clock, bytes_per_s: int) -> None:
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at = 0.0
        """When everything spent so far fits within the rate."""
        self.spent_bytes = 0
        self.busy_s = 0.0
        """Seconds in which there was something to spend; never less than the rate requires for `spent_bytes`."""
        self._waiting = 0
        self._seen_at = -IDLE_S

    async def spend(self, size: int) -> None:
        """Return when `size` more bytes fit within the rate. A cancelled caller releases its turn."""
        await self.spend_while(size, lambda: None)

    async def spend_while(self, size: int, check: Callable[[], None]) -> None:
        """Return when `size` more bytes fit within the rate. `check` is called every second and may raise, because the
        wait may be long at a low rate."""
        now = self._clock.now()
        self._pass_to(now)
        takes_s = size / self.bytes_per_s
        self._free_at = max(self._free_at, now) + takes_s
        left_s = self._free_at - now
        self._waiting += 1
        try:
            check()
            while left_s > 0:
                step_s = min(left_s, LOOK_S)
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
        """Count the time since the last call, unless there was nothing to spend."""
        if self._waiting or now - self._seen_at < IDLE_S:
            self.busy_s += now - self._seen_at
        self._seen_at = now


class GuardedCopyPace(CopyPace):
    """A pace that shares the rate of another one, and that ends waits when `check` raises."""

    def __init__(self, shared: CopyPace, check: Callable[[], None]) -> None:
        super().__init__(shared._clock, shared.bytes_per_s)
        self._shared, self._check = shared, check

    async def spend_while(self, size: int, check: Callable[[], None]) -> None:
        """Return when `size` more bytes fit within the rate. Raises what either `check` raises."""

        def both() -> None:
            self._check()
            check()

        await self._shared.spend_while(size, both)
