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

T = TypeVar("T")


class TableFollower(ABC, Generic[T]):
    """From `open` to `close`. A subclass says what becomes of a table, and of one that cannot be understood."""

    def __init__(self, env: Env, table: TableStore[T, Any], *, what: str) -> None:
        self._table, self._what = table, what
        self._nursery = env.nursery.child(f"follow {what}")
        self._changed = asyncio.Event()
        self._watch: Watch | None = None
        self._is_failing = False

    @abstractmethod
    def take(self, table: T) -> None:
        """Called with each table that is read."""

    @abstractmethod
    def refuse(self, error: UndecodableNode) -> None:
        """Called instead where this build does not understand what is there."""

    def due_s(self) -> float | None:
        """Seconds until `do_due` is called, even if nothing changes meanwhile; None: only a change counts."""
        return None

    def do_due(self) -> None:
        """Called when they are over."""

    async def open(self) -> None:
        """Read the table for the first time. Raises MetadataUnavailable, MetadataUnknown."""
        self._watch = self._table.watch(self._changed.set)
        await self._read()
        self._nursery.spawn(self._follow(), name="follow")

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        await self._nursery.close()

    def look_again(self) -> None:
        """Have the table read again soon."""
        self._changed.set()

    async def _follow(self) -> None:
        while True:
            if not await wait_within(self._changed, self.due_s()):
                self.do_due()
                continue
            self._changed.clear()
            try:
                await self._read()
            except MetadataError as error:
                if not self._is_failing:  # once, however long it lasts
                    log.warning("the table of %s cannot be read; the last one holds: %s", self._what, error)
                self._is_failing = True
                await asyncio.sleep(RETRY_S)
                self._changed.set()
            else:
                self._is_failing = False

    async def _read(self) -> None:
        try:
            table = await self._table.read()
        except UndecodableNode as error:
            self.refuse(error)
            return
        self.take(table)
