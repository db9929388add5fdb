"""Tells which bookies count as lost. Decides only (docs/protocol.md, A5, A6).

Each bookie counts for itself. Several that are away at once are more often a rack's power or a roll-out that overlaps
than disks that died together; so they have no less time to come back than one has, and nothing is copied for them
before. Apache's auditor does not wait for the second one.
"""

from __future__ import annotations

from collections.abc import Collection

from kvstore.types import BookieId

GAP_S = 30.0
"""After so long without a look nothing is known of those who were away: they may have been back meanwhile. An auditor
looks every ten seconds."""


class BookieAbsences:
    """A record of what one auditor has seen of who is away, since it took office or auto-recovery was switched on."""

    def __init__(self) -> None:
        self._since: dict[BookieId, float] = {}
        self._seen_at = 0.0
        self._is_anybody_there = False

    def seen(self, known: Collection[BookieId], present: Collection[BookieId], now: float) -> None:
        """Take in a full view. `known`: whom a cookie or an ensemble names; `present`: whoever is registered, read-only
        ones too."""
        if now - self._seen_at > GAP_S:
            self.forget()
        self._seen_at = now
        away = sorted(set(known).difference(present))
        self._since = {bookie: self._since.get(bookie, now) for bookie in away}
        self._is_anybody_there = bool(present)

    def forget(self) -> None:
        """Nothing is known any more: whoever is away has its whole time again."""
        self._since = {}

    def lost(self, delay_s: float, now: float) -> frozenset[BookieId]:
        """Those that have been away for the delay. None while nobody at all is registered: that tells of the metadata
        store rather than of bookies, and nobody could take a copy."""
        if not self._is_anybody_there:
            return frozenset()
        return frozenset(bookie for bookie, since in self._since.items() if now - since >= delay_s)

    def next_in_s(self, delay_s: float, now: float) -> float | None:
        """When the next one will be lost, if it stays away; None if none is waited for."""
        left = [since + delay_s - now for since in self._since.values() if now - since < delay_s]
        return min(left, default=None)
