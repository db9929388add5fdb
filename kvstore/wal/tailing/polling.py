"""Chooses the bookie for a tail's long poll: the nearest one that receives the adds. Decides only (docs/protocol.md,
T5).

A bookie of the ensemble may answer although it receives no adds, because the writer treats it as failed or cannot reach
it. Such a bookie learns nothing new as long as the ledger is open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstore.types import BookieId, EntryId

CHECK_S = 30.0
"""Seconds between two checks whether a bookie has caught up."""
FIRST_CHECK_S = 1.0
"""Seconds until the first such check after a bookie was found to be behind. The bookie may be behind only for a moment,
for example at the beginning of a ledger. Following a more distant bookie costs both nodes as much again as an entry
does."""


class PollChoice:
    """Chooses the bookie to poll for the tail of one open ledger."""

    def __init__(self) -> None:
        self._behind: dict[BookieId, float] = {}
        """Bookies that should not be polled, and since when."""

    def first(self, order: Sequence[BookieId]) -> BookieId:
        """Return the first bookie of `order` (nearest first) that is not behind. If all are behind, return the one that
        has been behind longest."""
        good = next((bookie for bookie in order if bookie not in self._behind), None)
        return good if good is not None else min(order, key=self._behind.__getitem__)

    def failed(self, bookie: BookieId, now: float) -> None:
        """Record that the bookie did not answer a long poll."""
        self._behind[bookie] = now

    def compare(self, lacs: Mapping[BookieId, EntryId], now: float) -> EntryId:
        """Compare the last-add-confirmed that several bookies reported at about the same time, and return the highest.
        Bookies with a lower one count as behind. Call it after a long poll has returned nothing new."""
        most = max(lacs.values())
        for bookie, lac in lacs.items():
            if lac < most:
                self._behind[bookie] = now - CHECK_S + FIRST_CHECK_S
        return most

    def due(self, now: float) -> list[BookieId]:
        """Return the bookies that are behind and must be checked now. Each of them is due again CHECK_S seconds
        later."""
        found = sorted(bookie for bookie, since in self._behind.items() if now - since >= CHECK_S)
        self._behind.update(dict.fromkeys(found, now))
        return found

    def caught_up(self, bookie: BookieId) -> None:
        """Record that the bookie is no longer behind."""
        self._behind.pop(bookie, None)
