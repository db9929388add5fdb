"""Follows the access table in the metadata store: each change of it is in effect here a moment later, and so is the end
of each token, whether that store is there or not."""

from __future__ import annotations

import asyncio
import logging

from kvstore.env import Env
from kvstore.env.events import wait_within
from kvstore.errors import MetadataError, UndecodableNode
from kvstore.meta.access import AccessStore
from kvstore.meta.store import MetadataStore, Watch
from kvstore.server.access.identities import Access

log = logging.getLogger(__name__)

RETRY_S = 0.5
"""Between two attempts to read while the metadata store is away. Until then the last table holds."""
LOOK_MIN_S, LOOK_S = 0.01, 5.0
"""Between two looks at the tokens that expire."""


class Follower:
    """From `open` to `close`."""

    def __init__(self, env: Env, store: MetadataStore, access: Access) -> None:
        self._store, self._access = AccessStore(store), access
        self._nursery, self._clock = env.nursery.child("access"), env.clock
        self._changed = asyncio.Event()
        self._watch: Watch | None = None

    async def open(self) -> None:
        """Read the table before any door opens. Raises MetadataUnavailable, MetadataUnknown."""
        self._watch = self._store.watch(self._changed.set)
        await self._read()
        self._nursery.spawn(self._follow(), name="follow")

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        await self._nursery.close()

    async def _follow(self) -> None:
        while True:
            if not await wait_within(self._changed, self._until_expiry_s()):
                self._access.expire(self._clock.date_ms())
                continue
            self._changed.clear()
            try:
                await self._read()
            except MetadataError as error:
                log.warning("the access table cannot be read; the last one holds: %s", error)
                await asyncio.sleep(RETRY_S)
                self._changed.set()

    def _until_expiry_s(self) -> float | None:
        """Until the next token expires, or LOOK_S if that is sooner: a clock may be set meanwhile."""
        next_ms = self._access.next_expiry_ms()
        return None if next_ms is None else min(max((next_ms - self._clock.date_ms()) / 1000, LOOK_MIN_S), LOOK_S)

    async def _read(self) -> None:
        try:
            table = await self._store.read()
        except UndecodableNode as error:
            log.error("nobody is let in: %s", error)
            self._access.shut()
            return
        self._access.take(table)
        if self._access.is_unfounded:
            log.warning("nobody is served: %s", self._access.nobody.why_unknown)
