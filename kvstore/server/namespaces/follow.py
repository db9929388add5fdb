"""Follows the table of namespaces in the metadata store: each change of it is in effect here a moment later."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvstore.env import Env
from kvstore.env.events import wait_within
from kvstore.errors import MetadataError, UndecodableNode
from kvstore.meta.store import MetadataStore, Watch
from kvstore.namespaces import NamespaceTable
from kvstore.server.namespaces.store import NamespaceStore

log = logging.getLogger(__name__)

RETRY_S = 0.5
"""Between two attempts to read while the metadata store is away. Until then the last table holds."""


class Follower:
    """From `open` to `close`. `take` is given each table."""

    def __init__(self, env: Env, store: MetadataStore, take: Callable[[NamespaceTable], None]) -> None:
        self._store, self._take = NamespaceStore(store), take
        self._nursery = env.nursery.child("namespaces")
        self._changed = asyncio.Event()
        self._watch: Watch | None = None

    async def open(self) -> None:
        """Read the table before anything is led here. Raises MetadataUnavailable, MetadataUnknown."""
        self._watch = self._store.watch(self._changed.set)
        await self._read()
        self._nursery.spawn(self._follow(), name="follow")

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        await self._nursery.close()

    async def _follow(self) -> None:
        while True:
            await wait_within(self._changed, None)
            self._changed.clear()
            try:
                await self._read()
            except MetadataError as error:
                log.warning("the table of namespaces cannot be read; the last one holds: %s", error)
                await asyncio.sleep(RETRY_S)
                self._changed.set()

    async def _read(self) -> None:
        try:
            table = await self._store.read()
        except UndecodableNode as error:  # a quota that is not known refuses nobody: it protects no data
            log.error("the table of namespaces cannot be read; the last one holds: %s", error)
            return
        self._take(table)
