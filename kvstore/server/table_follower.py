"""Follows a table in the metadata store: each change of it is in effect here a moment later."""

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
"""Between two attempts to read while the metadata store is away. Until then the last table holds."""
REREAD_S = 10.0
"""A watch is only a hint: this often the table is read without one. Somebody may have lost a right."""

T = TypeVar("T")


class TableFollower(ABC, Generic[T]):
    """Follows one table, from `open` to `close`. A subclass says what becomes of a table, and of one that cannot be
    understood."""

    def __init__(self, env: Env, table: TableStore[T, Any], *, what: str) -> None:
        self._table, self._what = table, what
        self._nursery, self._clock_now = env.nursery.child(f"follow {what}"), env.clock.now
        self._changed = asyncio.Event()
        self._watch: Watch | None = None
        self._is_failing = False
        self._taken: T | None = None
        """What was taken last; None if what is there was refused since."""

    @abstractmethod
    def take(self, table: T) -> None:
        """Called with each table that is read."""

    @abstractmethod
    def refuse(self, error: UndecodableNode) -> None:
        """Called instead where this build does not understand what is there."""

    def is_lost(self) -> bool:
        """Whether a table that is not there has been there, and must not be taken for an empty one."""
        return False

    async def open(self) -> None:
        """Read the table for the first time. Raises MetadataUnavailable, MetadataUnknown."""
        self._watch = self._table.watch(self._changed.set)
        await self._read(is_hinted=True)
        self._nursery.spawn(self._follow(), name="follow")

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        await self._nursery.close()

    def reread(self) -> None:
        """Have the table read again soon."""
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
                if not self._is_failing:  # once, however long it lasts
                    log.warning("the table of %s cannot be read; the last one holds: %s", self._what, error)
                self._is_failing = True
                await asyncio.sleep(RETRY_S)
                self._changed.set()
            else:
                self._is_failing = False

    async def _read(self, *, is_hinted: bool) -> None:
        """Read it; what is as it was is news only to whoever was told to look."""
        try:
            table = await self._table.read_or_none()
            if table is None:
                if self.is_lost():
                    raise UndecodableNode(f"the table of {self._what} is not in the metadata store any more")
                table = self._table.empty
        except UndecodableNode as error:
            if is_hinted or self._taken is not None:
                self.refuse(error)
            self._taken = None
            return
        if is_hinted or table != self._taken:
            self._taken = table
            self.take(table)
