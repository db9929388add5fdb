"""Lets a replica lead only while its server's date is good enough (docs/protocol.md, P29)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvstore.env import Clock
from kvstore.partition.steps import Dated, Event

LOOK_S = 0.25


class Standing:
    """Of one replica: `feed` takes what has happened, `serves` says whether it leads, `resign` ends that."""

    def __init__(
        self,
        clock: Clock,
        feed: Callable[[Event], None],
        serves: Callable[[], bool],
        resign: Callable[[], Awaitable[None]],
    ) -> None:
        self._clock, self._feed, self._serves, self._resign = clock, feed, serves, resign
        self._might = True

    def look(self) -> bool:
        """Whether the replica may lead now; it is told if that has changed."""
        may_lead = self._clock.may_lead()
        if may_lead is not self._might:
            self._might = may_lead
            self._feed(Dated(may_lead))
        return may_lead

    async def run(self) -> None:
        """Look now and then; let the lead go if it must not be kept."""
        while True:
            if not self.look() and self._serves():
                await self._resign()
            await asyncio.sleep(LOOK_S)
