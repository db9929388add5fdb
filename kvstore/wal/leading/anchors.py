"""Notices that the metadata store, reached and up to date, has no more what a leader's log is anchored in.

That is the cluster's id, the partition's list of ledgers, and the metadata of the open ledger. Bookies have admitted
that ledger once and ask no more, so that without this a leader would go on acknowledging entries which no takeover
finds (docs/protocol.md G23). It costs an append nothing: three watches, and three reads now and then.
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
from kvstore.meta.layout import Identity
from kvstore.meta.store import MetadataStore, Watch
from kvstore.types import PartitionId, Position
from kvstore.wal.handle import LedgerHandle
from kvstore.wal.ledger_list import LedgerList

LOOK_AGAIN_S = 30.0
"""A watch is a hint; this finds what none was told of."""
PAUSE_S = 0.1
"""Between two looks: a leader's own roll changes its anchors several times."""
RETRY_S = 1.0
"""After a look of which the outcome is not known."""


class Anchored(Protocol):
    """The leader's log, as far as it is asked here."""

    partition: PartitionId
    version: int
    """Of its list, as this leader wrote it last."""
    listed: LedgerList
    lost: StoreError | None

    @property
    def handle(self) -> LedgerHandle: ...


class Anchors:
    """The anchors of one leader's log."""

    def __init__(
        self, log: Anchored, store: MetadataStore, identity: Identity, lose: Callable[[StoreError], None]
    ) -> None:
        """`lose` is called once an anchor is gone for sure."""
        self._log, self._lose = log, lose
        self._store = store
        self._identity = identity
        self._doubted: set[str] = set()
        """Paths of what has changed since it was looked at, or was never looked at."""
        self._doubt = asyncio.Event()
        """There are some."""

    # docs/protocol.md G23
    async def guard(self) -> None:
        """Watch the anchors. Ends with the log."""
        log = self._log
        with ExitStack() as watches:
            for path in (paths.INSTANCE_ID, paths.partition_log(log.partition)):
                watches.enter_context(self._watched(path))
            while log.lost is None:
                handle = log.handle
                with self._watched(paths.ledger(handle.ledger)):
                    while log.lost is None and log.handle is handle:
                        await self._look(handle)

    # docs/protocol.md G26
    def hear_applied(self, position: Position) -> bool:
        """See LeaderLog."""
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
        watch = self._store.watch(path, partial(self._tell, path))
        self._tell(path)  # what changed before the watch stood
        return closing(watch)

    def _tell(self, path: str) -> None:
        self._doubted.add(path)
        self._doubt.set()

    async def _look(self, handle: LedgerHandle) -> None:
        """Look at what is in doubt, now or when something is; now and then at all."""
        all_of_them = {paths.INSTANCE_ID, paths.partition_log(self._log.partition), paths.ledger(handle.ledger)}
        doubted = self._doubted & all_of_them if await wait_within(self._doubt, LOOK_AGAIN_S) else all_of_them
        self._doubted.clear()
        self._doubt.clear()
        try:
            await self._check(doubted)
        except (MetadataLost, OlderMetadata) as error:
            self._lose(error)
        except MetadataError:
            await asyncio.sleep(RETRY_S)
            for path in doubted:
                self._tell(path)
        else:
            await asyncio.sleep(PAUSE_S)

    async def _check(self, doubted: set[str]) -> None:
        """Raises MetadataLost for what is gone for sure; MetadataUnavailable, MetadataUnknown."""
        if paths.INSTANCE_ID in doubted:
            await self._identity.check()
        for path in sorted(doubted - {paths.INSTANCE_ID}):
            if await self._fault(path) is not None:
                await self._store.sync(path)  # the server that answered may lag
                if (fault := await self._fault(path)) is not None:
                    raise MetadataLost(f"partition {self._log.partition}: {fault}")

    async def _fault(self, path: str) -> str | None:
        """The complaint about an anchor, as far as the server that answers knows; None if it is in its place."""
        version = self._log.version
        try:
            _, stat = await self._store.get(path)
        except NoSuchNode:
            return f"{path} is gone from the metadata store"
        if path == paths.partition_log(self._log.partition) and stat.version < version:
            return f"{path} has version {stat.version} after {version}: it was made anew"
        return None
