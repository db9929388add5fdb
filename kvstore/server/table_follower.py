"""Follows a table in the metadata store, so that this server applies each change soon."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from kvstore.env import Env
from kvstore.env.events import wait_within
from kvstore.errors import MetadataError, UndecodableNode
from kvstore.meta.store import Watch
from kvstore.meta.tables.table import TableStore

log = logging.getLogger(__name__)

RETRY_S = 0.5
"""Delay between attempts to read while the metadata store is unavailable. The last table stays in force."""
REREAD_S = 10.0
"""Interval in seconds of reads without a watch event. Watches are best effort, and a missed change may have
withdrawn a user's right."""

T = TypeVar("T")


class TableFollower(ABC, Generic[T]):
    """Follows one table, from `open` to `close`. A subclass applies the table and decides how to handle a table that
    it cannot decode."""

    def __init__(self, env: Env, table: TableStore[T, Any], *, what: str) -> None:
        self._table, self._what = table, what
        self._nursery, self._clock_now = env.nursery.child(f"follow {what}"), env.clock.now
        self._changed = asyncio.Event()
        self._watch: Watch | None = None
        self._is_failing = False
        self._taken: T | None = None
        """The last applied table. None if a later table was refused."""

    @abstractmethod
    def take(self, table: T) -> None:
        """Apply a table that was read. Implemented by the subclass."""

    @abstractmethod
    def refuse(self, error: UndecodableNode) -> None:
        """Handle a table that this build cannot decode. Called instead of `take`."""

    def is_lost(self) -> bool:
        """Return True if the table is missing although it existed before, so that it must not count as empty."""
        return False

    async def open(self) -> None:
        """Read and apply the table for the first time. Raises MetadataUnavailable, MetadataUnknown."""
        self._watch = self._table.watch(self._changed.set)
        await self._read(is_hinted=True)
        self._nursery.spawn(self._follow(), name="follow")

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        await self._nursery.close()

    def reread(self) -> None:
        """Schedule another read of the table."""
        self._changed.set()

    async def _follow(self) -> None:
        read_at = self._clock_now()
        while True:
            left_s = max(0.0, read_at + REREAD_S - self._clock_now())
            is_hinted = await wait_within(self._changed, left_s)
            self._changed.clear()
            try:
                read_at = self._clock_now()
                await self._read(is_hinted=is_hinted)
            except MetadataError as error:
                if not self._is_failing:  # log only once per outage
                    log.warning("cannot read the table of %s, the last one stays in force: %s", self._what, error)
                self._is_failing = True
                await asyncio.sleep(RETRY_S)
                self._changed.set()
            else:
                self._is_failing = False

    async def _read(self, *, is_hinted: bool) -> None:
        """Read the table and apply it. `is_hinted` is True after a watch event. An unchanged table is applied again
        only in that case."""
        try:
            table = await self._table.read_or_none()
            if table is None:
                if self.is_lost():
                    raise UndecodableNode(f"the table of {self._what} has disappeared from the metadata store")
                table = self._table.empty
        except UndecodableNode as error:
            if is_hinted or self._taken is not None:
                self.refuse(error)
            self._taken = None
            return
        if is_hinted or table != self._taken:
            self._taken = table
            self.take(table)
