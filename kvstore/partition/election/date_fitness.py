"""Lets a replica lead only while its server's clock is good enough, or while no other replica leads (docs/protocol.md,
P29)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvstore.env import Clock
from kvstore.env.events import wait_within
from kvstore.partition.election.role_events import ClockJudged, Event

CHECK_S = 0.25
OFFER_AGAIN_S = 1.0
"""Seconds between two attempts of a leader with an uncertain clock to hand over."""
UNLED_S = 10.0
"""Seconds; longer than a takeover takes. If no replica has led for this long, those with better clocks cannot lead, and
this one may."""


class DateFitness:
    """Checks whether one replica's clock allows it to lead. `feed` takes events, `is_led` returns whether any leader is
    known, `serves` returns whether this replica leads, and `offer` asks other replicas to take over the lead."""

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
        self._could_lead = True
        self._changed = asyncio.Event()

    def note_leader(self) -> None:
        """Record that a leader has become known, or is no longer known."""
        self._led_at = self._clock.now()
        self._changed.set()

    def update(self) -> bool:
        """Return True if the replica may lead now. Feeds an event if that has changed."""
        now = self._clock.now()
        if self._is_led():
            self._led_at = now
        is_unled = now - self._led_at >= UNLED_S
        may_lead = self._clock.may_lead() or (is_unled and self._clock.has_date())
        if may_lead is not self._could_lead:
            self._could_lead = may_lead
            self._feed(ClockJudged(may_lead))
        return may_lead

    async def run(self) -> None:
        """Check when the clock reports a change. While this replica should not lead, check periodically and offer the
        lead to others."""
        forget = self._clock.on_date_judged(self._changed.set)
        try:
            while True:
                self._changed.clear()
                may_lead = self.update()
                if may_lead:
                    await self._changed.wait()
                elif self._serves():
                    await self._offer()
                    await asyncio.sleep(OFFER_AGAIN_S)
                else:
                    await wait_within(self._changed, CHECK_S)
        finally:
            forget()
