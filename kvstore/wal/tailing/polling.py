"""Chooses the bookie for a tail's long poll: the nearest one that gets the adds. Decides only (docs/protocol.md, T5).

A bookie of the ensemble may get no adds and still answer: the writer treats it as failed, or cannot reach it. Then it
knows nothing new as long as the ledger is open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstore.types import BookieId, EntryId

CHECK_S = 30.0
"""Seconds between two questions whether a bookie has caught up."""
FIRST_CHECK_S = 1.0
"""Seconds until the first such question after a bookie was seen behind. It may be behind only for a moment, for example
when a ledger has just begun, and following a more distant bookie costs both nodes as much again as an entry does."""


class PollChoice:
    """The choice for the tail of one open ledger."""

    def __init__(self) -> None:
        self._behind: dict[BookieId, float] = {}
        """Bookies that are not worth a long poll, and since when."""

    def first(self, order: Sequence[BookieId]) -> BookieId:
        """Return the first bookie of `order` (nearest first) that is not behind; if all are behind, the one that has
        been behind longest."""
        good = next((bookie for bookie in order if bookie not in self._behind), None)
        return good if good is not None else min(order, key=self._behind.__getitem__)

    def failed(self, bookie: BookieId, now: float) -> None:
        """Record that the bookie did not answer a long poll."""
        self._behind[bookie] = now

    def compare(self, lacs: Mapping[BookieId, EntryId], now: float) -> EntryId:
        """Compare the last-add-confirmed of several bookies at about the same time, after a long poll has returned
        nothing new. Return the highest. Bookies with a lower one are behind."""
        most = max(lacs.values())
        for bookie, lac in lacs.items():
            if lac < most:
                self._behind[bookie] = now - CHECK_S + FIRST_CHECK_S
        return most

    def due(self, now: float) -> list[BookieId]:
        """Return the bookies behind that must be asked again. Each is due again CHECK_S later."""
        found = sorted(bookie for bookie, since in self._behind.items() if now - since >= CHECK_S)
        self._behind.update(dict.fromkeys(found, now))
        return found

    def caught_up(self, bookie: BookieId) -> None:
        """Record that the bookie has caught up."""
        self._behind.pop(bookie, None)
