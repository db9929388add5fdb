"""When looks that come now and then are due."""

from __future__ import annotations

import asyncio

BEAT_S = 0.25


class Beat:
    """Lets each look come in its own time."""

    def delay_s(self, seconds: float) -> float:
        """The time until a look that is due in about so many seconds."""
        return seconds

    async def rest(self, seconds: float) -> None:
        await asyncio.sleep(self.delay_s(seconds))


class SharedBeat(Beat):
    """Lets them come together, BEAT_S apart. To wake a process up costs more than most looks do, and a node that has
    nothing to do would be woken for each of them. What is due sooner than that comes in its own time."""

    def __init__(self, phase_s: float) -> None:
        """The nodes of one machine differ in their phases: they are not all woken in the same moment."""
        self._phase_s = phase_s

    def delay_s(self, seconds: float) -> float:
        """Up to half a beat more or less at first; from one look to the next it is as many beats each time."""
        if seconds < BEAT_S:
            return seconds
        now = asyncio.get_running_loop().time() - self._phase_s
        return (now + seconds + BEAT_S / 2) // BEAT_S * BEAT_S - now
