"""Keeps the making of copies within a number of bytes per second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvstore.env.ports import Clock

IDLE_S = 1.0
"""Who spends nothing for so long has nothing to spend."""
LOOK_S = 1.0
"""How often whoever waits looks whether it may still go on."""


class CopyPace:
    """Shared by all that copy on one node."""

    def __init__(self, clock: Clock, bytes_per_s: int) -> None:
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at = 0.0
        """When what was spent so far is within the rate."""
        self.spent_bytes = 0
        self.busy_s = 0.0
        """Seconds in which there was something to spend; never shorter than the rate allows for `spent_bytes`."""
        self._waiting = 0
        self._seen_at = -IDLE_S

    async def spend(self, size: int) -> None:
        """Return when so many bytes more are within the rate. A caller that is cancelled leaves its turn to others."""
        await self.spend_while(size, lambda: None)

    async def spend_while(self, size: int, check: Callable[[], None]) -> None:
        """The same, for as long as `check` raises nothing, which is asked every second: at a low rate this takes
        long."""
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
        """Count the time since it was last looked at, unless there was nothing to spend then."""
        if self._waiting or now - self._seen_at < IDLE_S:
            self.busy_s += now - self._seen_at
        self._seen_at = now


class GuardedCopyPace(CopyPace):
    """A share in another pace, for as long as `check` raises nothing."""

    def __init__(self, shared: CopyPace, check: Callable[[], None]) -> None:
        super().__init__(shared._clock, shared.bytes_per_s)
        self._shared, self._check = shared, check

    async def spend_while(self, size: int, check: Callable[[], None]) -> None:
        """Raises what either `check` does."""

        def both() -> None:
            self._check()
            check()

        await self._shared.spend_while(size, both)
