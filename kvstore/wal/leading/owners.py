"""The partitions that ledgers were created for, as far as the leaders of a node have read them. They never change."""

from __future__ import annotations

import asyncio
from collections.abc import Container

from kvstore.types import LedgerId, PartitionId

OWNERS_MAX = 250_000
"""Maximum number of ledgers that are remembered, about 130 bytes each. Others are read again at each sweep."""


class Owners:
    """The owners of ledgers, shared by all leaders of a node, because each of them looks at all ledgers of the
    cluster."""

    def __init__(self) -> None:
        self.sweeping = asyncio.Lock()
        """Held by one leader during its sweep. Otherwise leaders that start together, as after a restart, would all
        read everything."""
        self._owners: dict[LedgerId, PartitionId | None] = {}
        self._names: dict[PartitionId | None, PartitionId | None] = {}
        """Each name once, to share the strings."""

    def note(self, ledger: LedgerId, owner: PartitionId | None) -> None:
        """Remember the owner of a ledger; None for an unknown owner."""
        if len(self._owners) < OWNERS_MAX:
            self._owners[ledger] = self._names.setdefault(owner, owner)

    def is_anothers(self, ledger: LedgerId, partition: PartitionId) -> bool:
        """Return True if the ledger is known to belong to another partition."""
        return self._owners.get(ledger, partition) != partition

    def keep(self, ledgers: Container[LedgerId]) -> None:
        """Forget all ledgers but these, if no more fit."""
        if len(self._owners) >= OWNERS_MAX:
            self._owners = {ledger: owner for ledger, owner in self._owners.items() if ledger in ledgers}
            self._names = {owner: owner for owner in self._owners.values()}
