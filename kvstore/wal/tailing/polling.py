"""Chooses the bookie that a tail's long poll goes to: the nearest that gets the adds. Decides only (docs/protocol.md,
T5).

A bookie of the ensemble may get no adds and answer all the same: the writer has given it up, or cannot reach it. It
then knows of nothing new, for as long as the ledger is open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstore.types import BookieId, EntryId

CHECK_S = 30.0
"""So long after a bookie was asked whether it has caught up it is asked again."""
FIRST_CHECK_S = 1.0
"""So long after it was seen behind it is asked for the first time: it may have been so for a moment only, as when a
ledger begins just then, and to follow another one costs both nodes as much again as an entry does."""


class PollChoice:
    """Chooses for the tail of one open ledger."""

    def __init__(self) -> None:
        self._behind: dict[BookieId, float] = {}
        """Bookies that are not worth a long poll, and since when."""

    def first(self, order: Sequence[BookieId]) -> BookieId:
        """The first of `order` (nearest first) that is not behind; of those behind, who has been so for longest."""
        good = next((bookie for bookie in order if bookie not in self._behind), None)
        return good if good is not None else min(order, key=self._behind.__getitem__)

    def failed(self, bookie: BookieId, now: float) -> None:
        """It did not answer a long poll."""
        self._behind[bookie] = now

    def compare(self, lacs: Mapping[BookieId, EntryId], now: float) -> EntryId:
        """Compare what bookies know as last add confirmed at about the same time, when one long poll has brought
        nothing; returns the highest. Who knows less is behind."""
        most = max(lacs.values())
        for bookie, lac in lacs.items():
            if lac < most:
                self._behind[bookie] = now - CHECK_S + FIRST_CHECK_S
        return most

    def due(self, now: float) -> list[BookieId]:
        """Those behind who are to be asked again; each is due again CHECK_S later."""
        found = sorted(bookie for bookie, since in self._behind.items() if now - since >= CHECK_S)
        self._behind.update(dict.fromkeys(found, now))
        return found

    def caught_up(self, bookie: BookieId) -> None:
        """It knows what others know."""
        self._behind.pop(bookie, None)
