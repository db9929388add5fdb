"""The partitions that ledgers were made for, as far as the leaders of a node have read them. That never changes."""

from __future__ import annotations

import asyncio
from collections.abc import Container

from kvstore.types import LedgerId, PartitionId

OWNERS_MAX = 250_000
"""Ledgers that are remembered, some 130 bytes each. What is beyond is read again at each sweep."""


class Owners:
    """Shared by all leaders of a node: each of them looks at all ledgers of the cluster."""

    def __init__(self) -> None:
        self.sweeping = asyncio.Lock()
        """Held while one of them does: those that began together, as after a restart, would all read everything."""
        self._owners: dict[LedgerId, PartitionId | None] = {}
        self._names: dict[PartitionId | None, PartitionId | None] = {}
        """Each name once."""

    def note(self, ledger: LedgerId, owner: PartitionId | None) -> None:
        """`owner`: None for nobody that we know."""
        if len(self._owners) < OWNERS_MAX:
            self._owners[ledger] = self._names.setdefault(owner, owner)

    def is_anothers(self, ledger: LedgerId, partition: PartitionId) -> bool:
        """Whether the ledger is known, and not to be this partition's."""
        return self._owners.get(ledger, partition) != partition

    def keep(self, ledgers: Container[LedgerId]) -> None:
        """Forget all but these, if there is no room for more."""
        if len(self._owners) >= OWNERS_MAX:
            self._owners = {ledger: owner for ledger, owner in self._owners.items() if ledger in ledgers}
            self._names = {owner: owner for owner in self._owners.values()}
