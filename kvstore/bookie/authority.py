"""Asks the metadata store about ledgers; no answer is older than its question."""

from __future__ import annotations

from kvstore.errors import NoSuchLedger
from kvstore.meta import paths
from kvstore.meta.layout import ClusterIdentity
from kvstore.meta.ledger_ids import LedgerIdCount, LedgerIdGenerator, former_counts
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.store import MetadataStore
from kvstore.types import LedgerId, LedgerMetadata


class MetadataAuthority:
    """The Authority of kvstore.bookie.admission on a metadata store."""

    def __init__(self, store: MetadataStore, identity: ClusterIdentity) -> None:
        """`identity`: of the cluster that the bookie belongs to."""
        self._store = store
        self._identity = identity
        self._ledgers = LedgerStore(store)
        self._ids = LedgerIdGenerator(store)

    async def metadata(self, ledger: LedgerId) -> LedgerMetadata | None:
        """The store is asked to catch up first: a server of it that lags may not know yet that a ledger is open, or is
        open no more."""
        await self._store.sync(paths.ledger(ledger))
        try:
            found, _ = await self._ledgers.read(ledger)
        except NoSuchLedger:
            return None
        return found

    # docs/protocol.md B10
    async def ledgers(self) -> list[LedgerId]:
        """Of the bookie's own cluster only: what another one lacks is not deleted."""
        await self._identity.check()
        return await self._ledgers.list_ids()

    # docs/protocol.md B29
    async def mark_older(self, why: str) -> None:
        await self._identity.mark_older(why)

    # docs/protocol.md B29
    async def counted(self) -> LedgerIdCount:
        """By taking an id, since the counter cannot be read otherwise; nobody else gets it."""
        counted_to = await self._ids.next_id()
        return LedgerIdCount(counted_to, await former_counts(self._store))
