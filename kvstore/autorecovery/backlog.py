"""Draws the marked ledgers that a worker takes next. Decides only; luck comes in as a seeded Random."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.autorecovery.mending import Past
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
    past: Past = field(default_factory=Past)
    again_at: float = 0.0
    not_before: float = 0.0
    """Whatever happens meanwhile."""
    is_unreadable: bool = False
    round: int = 0


class Backlog:
    """One worker's. A round sees every mark, and draws some of those that are due: at random, so that workers seldom
    want the same one."""

    def __init__(self, random: Random) -> None:
        self.marked = 0
        """Ledgers that were marked in the last round."""
        self._random = random
        self._known: dict[LedgerId, _Known] = {}
        self._round = 0
        self._seen = self._due = 0
        self._drawn: list[LedgerId] = []

    @property
    def has_more(self) -> bool:
        """Whether more were due than were drawn."""
        return self._due > ROUND_MAX

    @property
    def unreadable(self) -> int:
        """Ledgers with entries of which no good copy was found."""
        return sum(each.is_unreadable for each in self._known.values())

    def begin(self) -> None:
        """A round begins."""
        self._round += 1
        self._seen = self._due = 0
        self._drawn = []

    def see(self, ledger: LedgerId, now: float) -> None:
        """A ledger is marked."""
        self._seen += 1
        known = self._known.get(ledger)
        if known is not None:
            known.round = self._round
            if known.again_at > now:
                return
        self._due += 1
        if len(self._drawn) < ROUND_MAX:
            self._drawn.append(ledger)
        elif (at := self._random.randrange(self._due)) < ROUND_MAX:
            self._drawn[at] = ledger

    def drawn(self) -> list[LedgerId]:
        """List what to take, once every mark was seen. Ledgers without a mark are forgotten."""
        self.marked = self._seen
        self._known = {ledger: each for ledger, each in self._known.items() if each.round == self._round}
        self._random.shuffle(self._drawn)
        return self._drawn

    def past(self, ledger: LedgerId) -> Past:
        """Return what earlier attempts have left."""
        known = self._known.get(ledger)
        if known is None:
            known = _Known(round=self._round)
            if len(self._known) < REMEMBERED_MAX:
                self._known[ledger] = known
        return known.past

    def done(self, ledger: LedgerId) -> None:
        """It is whole."""
        self._known.pop(ledger, None)

    def later(self, ledger: LedgerId, now: float, again_s: float, *, is_unreadable: bool = False) -> None:
        """It is not, or others have it: it is due again after so long."""
        self.past(ledger)
        if (known := self._known.get(ledger)) is not None:
            known.not_before = now + len(self._known) / AGAIN_PER_S
            known.again_at, known.is_unreadable = max(now + again_s, known.not_before), is_unreadable

    def all_due(self) -> None:
        """Other bookies are there: what could not be done may be possible now."""
        for each in self._known.values():
            each.again_at = min(each.again_at, each.not_before)

    def next_due_s(self, now: float, most: float) -> float:
        """Until one is due that was put off, at most so long."""
        waits = (max(0.0, each.again_at - now) for each in self._known.values() if each.again_at)
        return min(most, min(waits, default=most))
