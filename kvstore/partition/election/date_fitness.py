"""Lets a replica lead only while its server's date is good enough, or nobody else leads (docs/protocol.md, P29)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvstore.env import Clock
from kvstore.env.events import wait_within
from kvstore.partition.election.role_events import Dated, Event

LOOK_S = 0.25
OFFER_AGAIN_S = 1.0
"""Between two attempts of a leader that is not sure of its date to hand over."""
UNLED_S = 10.0
"""Longer than a takeover takes: if nobody has led for so long, those with better dates cannot, and this one may."""


class DateFitness:
    """The fitness of one replica: `feed` takes what has happened, `is_led` says whether anybody is known to lead,
    `serves` whether this replica does, `offer` asks others to take the lead."""

    def __init__(
        self,
        clock: Clock,
        feed: Callable[[Event], None],
        is_led: Callable[[], bool],
        serves: Callable[[], bool],
        offer: Callable[[], Awaitable[None]],
    ) -> None:
        self._clock, self._feed, self._is_led = clock, feed, is_led
        self._serves, self._offer = serves, offer
        self._led_at = clock.now()
        self._might = True
        self._changed = asyncio.Event()

    def note_leader(self) -> None:
        """Note that another is known to lead, or nobody any more: until now, or from now on, somebody does."""
        self._led_at = self._clock.now()
        self._changed.set()

    def look(self) -> bool:
        """Whether the replica may lead now; it is told if that has changed."""
        now = self._clock.now()
        if self._is_led():
            self._led_at = now
        is_unled = now - self._led_at >= UNLED_S
        may_lead = self._clock.may_lead() or (is_unled and self._clock.has_date())
        if may_lead is not self._might:
            self._might = may_lead
            self._feed(Dated(may_lead))
        return may_lead

    async def run(self) -> None:
        """Look when the clock says that something has changed; while the lead should not be kept, look now and then,
        and offer it to others."""
        forget = self._clock.on_date_judged(self._changed.set)
        try:
            while True:
                self._changed.clear()
                may_lead = self.look()
                if may_lead:
                    await self._changed.wait()
                elif self._serves():
                    await self._offer()
                    await asyncio.sleep(OFFER_AGAIN_S)
                else:
                    await wait_within(self._changed, LOOK_S)
        finally:
            forget()
