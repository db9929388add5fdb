"""Reads the metadata of ledgers from the metadata store. No answer is older than its request."""

from __future__ import annotations

from kvstore.errors import NoSuchLedger
from kvstore.meta import paths
from kvstore.meta.layout import ClusterIdentity
from kvstore.meta.ledger_ids import LedgerIdCount, LedgerIdGenerator, former_counts
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.store import MetadataStore
from kvstore.types import LedgerId, LedgerMetadata


class MetadataAuthority:
    """The metadata store as the source of the up-to-date metadata of ledgers. All methods raise MetadataError."""

    def __init__(self, store: MetadataStore, identity: ClusterIdentity) -> None:
        """`identity` is that of the cluster to which the bookie belongs."""
        self._store = store
        self._identity = identity
        self._ledgers = LedgerStore(store)
        self._ids = LedgerIdGenerator(store)

    async def metadata(self, ledger: LedgerId) -> LedgerMetadata | None:
        """Return the ledger's metadata, or None if the ledger does not exist. Raises Corrupted. Syncs first, because a
        lagging server may not know yet that a ledger is open, or no longer open."""
        await self._store.sync(paths.ledger(ledger))
        try:
            found, _ = await self._ledgers.read(ledger)
        except NoSuchLedger:
            return None
        return found

    # docs/protocol.md B10
    async def ledgers(self) -> list[LedgerId]:
        """Return the ledgers of the bookie's own cluster. Raises an error if the store belongs to another cluster,
        because ledgers that another cluster does not have must not be deleted."""
        await self._identity.check()
        return await self._ledgers.list_ids()

    # docs/protocol.md B29
    async def mark_older(self, why: str) -> None:
        """Record that the metadata store was restored from an older copy, for the reason `why`."""
        await self._identity.mark_older(why)

    # docs/protocol.md B29
    async def counted(self) -> LedgerIdCount:
        """Return the range of allocated ids. This allocates an id, because the counter cannot be read in another way;
        no ledger gets that id."""
        counted_to = await self._ids.next_id()
        return LedgerIdCount(counted_to, await former_counts(self._store))
