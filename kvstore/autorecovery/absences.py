"""Decides which bookies count as lost. Decides only (docs/protocol.md, A5, A6).

The delay runs for each bookie separately. When several bookies are away at once, a rack without power or an overlapping
rollout is a more likely cause than disks that died together. Each of them gets the same time to come back as a single
absent bookie, and nothing is copied before that. Apache BookKeeper's auditor, in contrast, does not wait for the second
bookie.
"""

from __future__ import annotations

from collections.abc import Collection

from kvstore.types import BookieId

GAP_S = 30.0
"""Seconds without a view after which all absences are forgotten, because the bookies may have been back in the
meantime. An auditor reports a view every ten seconds."""


class BookieAbsences:
    """The times since when bookies have been absent, as seen by one auditor since it was elected or auto-recovery was
    enabled."""

    def __init__(self) -> None:
        self._since: dict[BookieId, float] = {}
        self._seen_at = 0.0
        self._is_anybody_there = False

    def seen(self, known: Collection[BookieId], present: Collection[BookieId], now: float) -> None:
        """Record a complete view at time `now`. `known` are the bookies that have a cookie or that an ensemble names;
        `present` are the registered bookies, including read-only ones."""
        if now - self._seen_at > GAP_S:
            self.forget()
        self._seen_at = now
        away = sorted(set(known).difference(present))
        self._since = {bookie: self._since.get(bookie, now) for bookie in away}
        self._is_anybody_there = bool(present)

    def forget(self) -> None:
        """Forget all absences. Every absent bookie then gets the full delay again."""
        self._since = {}

    def lost(self, delay_s: float, now: float) -> frozenset[BookieId]:
        """Return the bookies that have been away for at least `delay_s` seconds. While no bookie at all is registered,
        return none: the cause is then more likely the metadata store, and no bookie could take a copy."""
        if not self._is_anybody_there:
            return frozenset()
        return frozenset(bookie for bookie, since in self._since.items() if now - since >= delay_s)

    def next_in_s(self, delay_s: float, now: float) -> float | None:
        """Return the number of seconds until the next absent bookie counts as lost, or None if no absence is shorter
        than `delay_s`."""
        left = [since + delay_s - now for since in self._since.values() if now - since < delay_s]
        return min(left, default=None)
