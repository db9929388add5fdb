"""Remembers for which partitions ledgers were created, as far as the leaders of a node have read them. The owner of a
ledger never changes."""

from __future__ import annotations

import asyncio
from collections.abc import Container

from kvstore.types import LedgerId, PartitionId

OWNERS_MAX = 250_000
"""Maximum number of ledgers to remember, at about 130 bytes each. Further ledgers are read again at each sweep."""


class LedgerOwners:
    """The owners of ledgers. All leaders of a node share one instance, because each of them iterates over all ledgers
    of the cluster."""

    def __init__(self) -> None:
        self.sweeping = asyncio.Lock()
        """Held by one leader during its sweep. Without it, leaders that start together, for example after a restart,
        would all read the same metadata."""
        self._owners: dict[LedgerId, PartitionId | None] = {}
        self._names: dict[PartitionId | None, PartitionId | None] = {}
        """Maps each partition name to itself, so that equal names share one string."""

    def note(self, ledger: LedgerId, owner: PartitionId | None) -> None:
        """Remember the owner of a ledger, or with None that no partition owns it."""
        if len(self._owners) < OWNERS_MAX:
            self._owners[ledger] = self._names.setdefault(owner, owner)

    def is_anothers(self, ledger: LedgerId, partition: PartitionId) -> bool:
        """Return True if the ledger is known not to belong to `partition`."""
        return self._owners.get(ledger, partition) != partition

    def keep(self, ledgers: Container[LedgerId]) -> None:
        """If the memory is full, forget all ledgers except those in `ledgers`."""
        if len(self._owners) >= OWNERS_MAX:
            self._owners = {ledger: owner for ledger, owner in self._owners.items() if ledger in ledgers}
            self._names = {owner: owner for owner in self._owners.values()}
