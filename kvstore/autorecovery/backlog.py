"""Selects the marked ledgers that a replication worker repairs next. Decides only; randomness is passed in as a seeded
Random."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from kvstore.autorecovery.repair_machine import AttemptHistory
from kvstore.types import LedgerId

if TYPE_CHECKING:
    from random import Random

ROUND_MAX = 1_000
"""Maximum number of ledgers selected in one round, that is, between two scans of all marks."""
REMEMBERED_MAX = 100_000
"""Maximum number of ledgers whose past attempts are remembered."""
AGAIN_PER_S = 20
"""Maximum number of retries per second of ledgers that cannot be repaired. There may be many such ledgers for weeks,
while bookies come and go."""


@dataclass(slots=True)
class _Known:
    past: AttemptHistory = field(default_factory=AttemptHistory)
    again_at: float = 0.0
    not_before: float = 0.0
    """Time of the earliest retry, even if bookies come or go before that."""
    is_unreadable: bool = False
    call: int = 0
    """Value of `_calls` when the last attempt began."""


class Backlog:
    """One worker's backlog of marked ledgers. A round sees every mark and selects some of the due ledgers at random, so
    that two workers seldom choose the same ledger. No call iterates over all remembered ledgers, because there may be
    100,000 of them and other tasks share the event loop."""

    def __init__(self, random: Random) -> None:
        self.marked = 0
        """Number of marked ledgers in the last complete round."""
        self.unreadable = 0
        """Number of ledgers that have entries without any good copy."""
        self._random = random
        self._known: dict[LedgerId, _Known] = {}
        """Ledgers that the current round has not seen yet. Between two rounds, all remembered ledgers."""
        self._kept: dict[LedgerId, _Known] = {}
        """Ledgers that the current round has seen."""
        self._calls = 0
        self._soonest = inf
        """Lower bound of the time at which the first postponed ledger is due."""
        self._seen = self._due = 0
        self._drawn: list[LedgerId] = []

    @property
    def has_more(self) -> bool:
        """True if the round found more due ledgers than it could select."""
        return self._due > ROUND_MAX

    def begin(self) -> None:
        """Begin a round. Call `see` for each mark next, then `drawn` once."""
        self._known.update(self._kept)  # left over from a round that was aborted
        self._kept = {}
        self._seen = self._due = 0
        self._soonest = inf
        self._drawn = []

    def see(self, ledger: LedgerId, now: float) -> None:
        """Record in the current round that a ledger is marked."""
        self._seen += 1
        known = self._known.pop(ledger, None)
        if known is not None:
            self._kept[ledger] = known
            if (again_at := self._again_at(known)) > now:
                self._soonest = min(self._soonest, again_at)
                return
        self._due += 1
        if len(self._drawn) < ROUND_MAX:
            self._drawn.append(ledger)
        elif (at := self._random.randrange(self._due)) < ROUND_MAX:
            self._drawn[at] = ledger

    def drawn(self) -> list[LedgerId]:
        """End the round, and return at most ROUND_MAX ledgers to repair, in random order. Ledgers that are no longer
        marked are forgotten."""
        self.marked = self._seen
        if self._known:
            self.unreadable -= sum(each.is_unreadable for each in self._known.values())
        self._known, self._kept = self._kept, {}
        self._random.shuffle(self._drawn)
        return self._drawn

    def begun(self, ledger: LedgerId) -> AttemptHistory:
        """Record that an attempt at the ledger begins, and return the history of earlier attempts. The delays between
        attempts are short again after a call of `all_due`."""
        known = self._remembered(ledger)
        if known.call != self._calls:
            known.call, known.past.tries = self._calls, 0
        return known.past

    def _remembered(self, ledger: LedgerId) -> _Known:
        known = self._known.get(ledger)
        if known is None:
            known = _Known(call=self._calls)
            if len(self._known) < REMEMBERED_MAX:
                self._known[ledger] = known
        return known

    def done(self, ledger: LedgerId) -> None:
        """Record that the ledger is repaired."""
        if (known := self._known.pop(ledger, None)) is not None:
            self.unreadable -= known.is_unreadable

    def later(self, ledger: LedgerId, now: float, again_s: float, *, is_unreadable: bool = False) -> None:
        """Postpone the ledger for at least `again_s` seconds, because the attempt failed or another worker has it
        locked."""
        known = self._remembered(ledger)
        if ledger in self._known:
            known.not_before = now + len(self._known) / AGAIN_PER_S
            known.again_at = max(now + again_s, known.not_before)
            self._soonest = min(self._soonest, self._again_at(known))
            self.unreadable += is_unreadable - known.is_unreadable
            known.is_unreadable = is_unreadable

    def all_due(self) -> None:
        """Make all ledgers due and reset their delays, because the registered bookies or the settings of auto-recovery
        have changed. The next round then retries ledgers that may have become repairable."""
        self._calls += 1

    def next_due_s(self, now: float, most: float) -> float:
        """Return a lower bound of the seconds until a postponed ledger is due, at most `most`. A call of `all_due`
        counts from the next round on."""
        return min(most, max(0.0, self._soonest - now))

    def _again_at(self, known: _Known) -> float:
        return known.again_at if known.call == self._calls else min(known.again_at, known.not_before)
