"""Draws the marked ledgers that a worker takes next. Decides only; luck comes in as a seeded Random."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from kvstore.autorecovery.repair_machine import AttemptHistory
from kvstore.types import LedgerId

if TYPE_CHECKING:
    from random import Random

ROUND_MAX = 1_000
"""Ledgers taken between two looks at all marks."""
REMEMBERED_MAX = 100_000
"""Ledgers of which is remembered what became of earlier attempts."""
AGAIN_PER_S = 20
"""Ledgers that cannot be made whole are tried again at this rate, at most: there may be many, for weeks, and bookies
that come and go all the time."""


@dataclass(slots=True)
class _Known:
    past: AttemptHistory = field(default_factory=AttemptHistory)
    again_at: float = 0.0
    not_before: float = 0.0
    """Whatever happens meanwhile."""
    is_unreadable: bool = False
    call: int = 0
    """The calls of all that there had been when it was put off."""


class Backlog:
    """The backlog of one worker. A round sees every mark, and draws some of those that are due: at random, so that
    workers seldom want the same one. No call looks at all that is remembered: it may be a hundred thousand, and the
    event loop is others'."""

    def __init__(self, random: Random) -> None:
        self.marked = 0
        """Ledgers that were marked in the last round."""
        self.unreadable = 0
        """Ledgers with entries of which no good copy was found."""
        self._random = random
        self._known: dict[LedgerId, _Known] = {}
        """Those that the round has not seen yet, all of them between two rounds."""
        self._kept: dict[LedgerId, _Known] = {}
        """Those that it has seen."""
        self._calls = 0
        self._soonest = inf
        """When one is due that was put off, or earlier."""
        self._seen = self._due = 0
        self._drawn: list[LedgerId] = []

    @property
    def has_more(self) -> bool:
        """Whether more were due than were drawn."""
        return self._due > ROUND_MAX

    def begin(self) -> None:
        """A round begins."""
        self._known.update(self._kept)  # of one that was broken off
        self._kept = {}
        self._seen = self._due = 0
        self._soonest = inf
        self._drawn = []

    def see(self, ledger: LedgerId, now: float) -> None:
        """A ledger is marked."""
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
        """List what to take, once every mark was seen. Ledgers without a mark are forgotten."""
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
        """It is whole."""
        if (known := self._known.pop(ledger, None)) is not None:
            self.unreadable -= known.is_unreadable

    def later(self, ledger: LedgerId, now: float, again_s: float, *, is_unreadable: bool = False) -> None:
        """It is not, or others have it: it is due again after so long."""
        self.past(ledger)
        if (known := self._known.get(ledger)) is not None:
            known.not_before = now + len(self._known) / AGAIN_PER_S
            known.again_at, known.call = max(now + again_s, known.not_before), self._calls
            self._soonest = min(self._soonest, known.again_at)
            self.unreadable += is_unreadable - known.is_unreadable
            known.is_unreadable = is_unreadable

    def all_due(self) -> None:
        """Other bookies are there: what could not be done may be possible now. A round tells what is."""
        self._calls += 1

    def next_due_s(self, now: float, most: float) -> float:
        """Until one is due that was put off, or earlier; at most so long. What `all_due` has changed is known after the
        next round."""
        return min(most, max(0.0, self._soonest - now))

    def _again_at(self, known: _Known) -> float:
        return known.again_at if known.call == self._calls else min(known.again_at, known.not_before)
