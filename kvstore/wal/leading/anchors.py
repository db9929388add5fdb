"""Detects that an up-to-date metadata store no longer has the nodes that a leader's log depends on: its anchors.

The anchors are the cluster's id, the partition's list of ledgers, and the metadata of the open ledger. Bookies admit
that ledger once and do not read its metadata again. Without this check, a leader would therefore keep acknowledging
entries that no takeover finds (docs/protocol.md G23). The check adds no cost to an append: it takes three watches, and
three reads every 30 seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import Protocol

from kvstore.env.events import wait_within
from kvstore.errors import MetadataError, MetadataLost, NoSuchNode, OlderMetadata, StoreError
from kvstore.meta import paths
from kvstore.meta.layout import ClusterIdentity
from kvstore.meta.store import MetadataStore, Watch
from kvstore.types import PartitionId, Position
from kvstore.wal.handle import LedgerHandle
from kvstore.wal.ledger_list import LedgerList

CHECK_S = 30.0
"""Seconds between two polls for changes that watches missed; watches are best effort."""
PAUSE_S = 0.1
"""Seconds between two checks, because a leader's own roll changes its anchors several times."""
RETRY_S = 1.0
"""Seconds until the next check after one of unknown outcome."""


class Anchored(Protocol):
    """The part of the leader's log that the check of its anchors needs."""

    partition: PartitionId
    version: int
    """Version of the list as this leader last wrote it."""
    listed: LedgerList
    lost: StoreError | None

    @property
    def handle(self) -> LedgerHandle: ...


class Anchors:
    """The anchors of one leader's log, and the watches on them."""

    def __init__(
        self, log: Anchored, store: MetadataStore, identity: ClusterIdentity, lose: Callable[[StoreError], None]
    ) -> None:
        """`lose` is called once if an anchor is certainly gone."""
        self._log, self._lose = log, lose
        self._store = store
        self._identity = identity
        self._doubted: set[str] = set()
        """Paths that have changed since they were checked, or were never checked."""
        self._doubt = asyncio.Event()
        """Set if there are such paths."""

    # docs/protocol.md G23
    async def guard(self) -> None:
        """Watch the anchors, and return when the log is lost."""
        log = self._log
        with ExitStack() as watches:
            for path in (paths.INSTANCE_ID, paths.partition_log(log.partition)):
                watches.enter_context(self._watched(path))
            while log.lost is None:
                handle = log.handle
                with self._watched(paths.ledger(handle.ledger)):
                    while log.lost is None and log.handle is handle:
                        await self._check_when_due(handle)

    # docs/protocol.md G26
    def report_applied(self, position: Position) -> bool:
        """Handle a report that another replica has applied the entry at `position` but cannot find its ledger in the
        list. If this leader does not know that ledger either, its own list comes from an older copy of the metadata
        store. The log is then lost, and the method returns True."""
        partition, listed = self._log.partition, self._log.listed
        if listed.explains(position):
            return False
        self._lose(
            MetadataLost(
                f"partition {partition}: another replica has applied entry {position.entry} of ledger "
                f"{position.ledger}, which is not in the log's list: the metadata store is an older copy of itself "
                "(docs/how-to/back-up-and-restore-metadata.md)"
            )
        )
        return True

    def _watched(self, path: str) -> closing[Watch]:
        watch = self._store.watch(path, partial(self._doubt_node, path))
        self._doubt_node(path)  # it may have changed before the watch was set
        return closing(watch)

    def _doubt_node(self, path: str) -> None:
        self._doubted.add(path)
        self._doubt.set()

    async def _check_when_due(self, handle: LedgerHandle) -> None:
        """Wait until an anchor has changed or CHECK_S has passed, then check the anchors."""
        all_of_them = {paths.INSTANCE_ID, paths.partition_log(self._log.partition), paths.ledger(handle.ledger)}
        doubted = self._doubted & all_of_them if await wait_within(self._doubt, CHECK_S) else all_of_them
        self._doubted.clear()
        self._doubt.clear()
        try:
            await self._check(doubted)
        except (MetadataLost, OlderMetadata) as error:
            self._lose(error)
        except MetadataError:
            await asyncio.sleep(RETRY_S)
            for path in doubted:
                self._doubt_node(path)
        else:
            await asyncio.sleep(PAUSE_S)

    async def _check(self, doubted: set[str]) -> None:
        """Check the anchors. Raises MetadataLost if one is certainly gone, and MetadataUnavailable or MetadataUnknown
        if the metadata store does not answer."""
        if paths.INSTANCE_ID in doubted:
            await self._identity.check()
        for path in sorted(doubted - {paths.INSTANCE_ID}):
            if await self._fault(path) is not None:
                await self._store.sync(path)  # the server that answered may lag
                if (fault := await self._fault(path)) is not None:
                    raise MetadataLost(f"partition {self._log.partition}: {fault}")

    async def _fault(self, path: str) -> str | None:
        """Return a description of the fault of an anchor, or None if the answering metadata server sees no fault."""
        version = self._log.version
        try:
            _, stat = await self._store.get(path)
        except NoSuchNode:
            return f"{path} is gone from the metadata store"
        if path == paths.partition_log(self._log.partition) and stat.version < version:
            return f"{path} has version {stat.version} after version {version}, so it was created again"
        return None
