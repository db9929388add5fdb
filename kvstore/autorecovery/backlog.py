"""Draws the marked ledgers that a replication worker takes next. Decides only; randomness is passed in as a seeded
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
"""Maximum number of ledgers taken between two scans of all marks."""
REMEMBERED_MAX = 100_000
"""Maximum number of ledgers whose earlier attempts are remembered."""
AGAIN_PER_S = 20
"""Maximum rate at which ledgers that cannot be repaired are retried. There may be many of them for weeks, while bookies
come and go."""


@dataclass(slots=True)
class _Known:
    past: AttemptHistory = field(default_factory=AttemptHistory)
    again_at: float = 0.0
    not_before: float = 0.0
    """Earliest retry, even if bookies come or go meanwhile."""
    is_unreadable: bool = False
    call: int = 0
    """Value of `_calls` when the ledger was put off."""


class Backlog:
    """One worker's backlog. A round sees every mark and draws some of the due ledgers at random, so that workers seldom
    choose the same ledger. No call iterates over all remembered ledgers, because there may be 100,000 of them and the
    event loop is shared."""

    def __init__(self, random: Random) -> None:
        self.marked = 0
        """Number of ledgers that were marked in the last round."""
        self.unreadable = 0
        """Number of ledgers with entries of which no good copy was found."""
        self._random = random
        self._known: dict[LedgerId, _Known] = {}
        """Ledgers that the current round has not seen yet; all remembered ledgers between two rounds."""
        self._kept: dict[LedgerId, _Known] = {}
        """Ledgers that the current round has seen."""
        self._calls = 0
        self._soonest = inf
        """Time at which the first ledger that was put off is due, or earlier."""
        self._seen = self._due = 0
        self._drawn: list[LedgerId] = []

    @property
    def has_more(self) -> bool:
        """True if more ledgers were due than were drawn."""
        return self._due > ROUND_MAX

    def begin(self) -> None:
        """Begin a round."""
        self._known.update(self._kept)  # left over from a round that was aborted
        self._kept = {}
        self._seen = self._due = 0
        self._soonest = inf
        self._drawn = []

    def see(self, ledger: LedgerId, now: float) -> None:
        """Record that a ledger is marked."""
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
        """Return the ledgers to take, after every mark was seen. Ledgers without a mark are forgotten."""
        self.marked = self._seen
        if self._known:
            self.unreadable -= sum(each.is_unreadable for each in self._known.values())
        self._known, self._kept = self._kept, {}
        self._random.shuffle(self._drawn)
        return self._drawn

    def past(self, ledger: LedgerId) -> AttemptHistory:
        """Return what earlier attempts have left."""
        known = self._known.get(ledger)
        if known is None:
            known = _Known()
            if len(self._known) < REMEMBERED_MAX:
                self._known[ledger] = known
        return known.past

    def done(self, ledger: LedgerId) -> None:
        """Record that the ledger is repaired."""
        if (known := self._known.pop(ledger, None)) is not None:
            self.unreadable -= known.is_unreadable

    def later(self, ledger: LedgerId, now: float, again_s: float, *, is_unreadable: bool = False) -> None:
        """Put the ledger off for `again_s` seconds, because it is not repaired or another worker has it."""
        self.past(ledger)
        if (known := self._known.get(ledger)) is not None:
            known.not_before = now + len(self._known) / AGAIN_PER_S
            known.again_at, known.call = max(now + again_s, known.not_before), self._calls
            self._soonest = min(self._soonest, known.again_at)
            self.unreadable += is_unreadable - known.is_unreadable
            known.is_unreadable = is_unreadable

    def all_due(self) -> None:
        """Make all ledgers due, because other bookies are registered now. The next round checks what has become
        possible."""
        self._calls += 1

    def next_due_s(self, now: float, most: float) -> float:
        """Return the seconds, at most `most`, until a ledger that was put off is due; it may be less. Changes by
        `all_due` count from the next round on."""
        return min(most, max(0.0, self._soonest - now))

    def _again_at(self, known: _Known) -> float:
        return known.again_at if known.call == self._calls else min(known.again_at, known.not_before)
