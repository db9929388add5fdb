"""Decides when periodic work is due."""

from __future__ import annotations

import asyncio

BEAT_S = 0.25


class Beat:
    """Lets each periodic job run at its own time."""

    def delay_s(self, seconds: float) -> float:
        """Return the delay of work that is due in about this many seconds."""
        return seconds

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(self.delay_s(seconds))


class SharedBeat(Beat):
    """Aligns periodic jobs to common times, BEAT_S apart. Waking a process costs more than most jobs do, and an idle
    node would be woken for each of them. Shorter delays are not aligned."""

    def __init__(self, phase_s: float) -> None:
        """`phase_s` differs between the nodes of one machine, so that they are not all woken at the same moment."""
        self._phase_s = phase_s

    def delay_s(self, seconds: float) -> float:
        """Return a delay that is up to half a beat longer or shorter. Equal intervals give equal numbers of beats."""
        if seconds < BEAT_S:
            return seconds
        now = asyncio.get_running_loop().time() - self._phase_s
        return (now + seconds + BEAT_S / 2) // BEAT_S * BEAT_S - now
