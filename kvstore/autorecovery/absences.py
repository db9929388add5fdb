"""Decides which bookies count as lost. Decides only (docs/protocol.md, A5, A6).

The delay runs for each bookie separately. When several bookies are away at once, the cause is more often a rack without
power or an overlapping rollout than disks that died together. They get the same time to come back as a single bookie,
and nothing is copied for them before. Apache's auditor does not wait for the second bookie.
"""

from __future__ import annotations

from collections.abc import Collection

from kvstore.types import BookieId

GAP_S = 30.0
"""If no view arrives for this long, nothing is known about absent bookies: they may have been back meanwhile. An
auditor reports a view every ten seconds."""


class BookieAbsences:
    """The absences that one auditor has seen since it was elected or auto-recovery was switched on."""

    def __init__(self) -> None:
        self._since: dict[BookieId, float] = {}
        self._seen_at = 0.0
        self._is_anybody_there = False

    def seen(self, known: Collection[BookieId], present: Collection[BookieId], now: float) -> None:
        """Record a complete view. `known`: bookies that have a cookie or that an ensemble names; `present`: registered
        bookies, including read-only ones."""
        if now - self._seen_at > GAP_S:
            self.forget()
        self._seen_at = now
        away = sorted(set(known).difference(present))
        self._since = {bookie: self._since.get(bookie, now) for bookie in away}
        self._is_anybody_there = bool(present)

    def forget(self) -> None:
        """Forget all absences. Every absent bookie gets the full delay again."""
        self._since = {}

    def lost(self, delay_s: float, now: float) -> frozenset[BookieId]:
        """Return the bookies that have been away for at least `delay_s` seconds. Return none while no bookie at all is
        registered, because that points to the metadata store rather than to the bookies, and nobody could take a copy.
        """
        if not self._is_anybody_there:
            return frozenset()
        return frozenset(bookie for bookie, since in self._since.items() if now - since >= delay_s)

    def next_in_s(self, delay_s: float, now: float) -> float | None:
        """Return the seconds until the next absent bookie counts as lost, or None if none is pending."""
        left = [since + delay_s - now for since in self._since.values() if now - since < delay_s]
        return min(left, default=None)
