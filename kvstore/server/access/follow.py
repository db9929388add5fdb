"""Follows the access table and ends expired tokens, even while the metadata store is unavailable."""

from __future__ import annotations

import asyncio
import logging

from kvstore.access import AccessTable
from kvstore.env import Env
from kvstore.env.events import wait_within
from kvstore.errors import UndecodableNode
from kvstore.meta.store import MetadataStore
from kvstore.meta.tables.access import AccessStore
from kvstore.server.access.cluster_names import ClusterNamesReader
from kvstore.server.access.identities import Access
from kvstore.server.table_follower import TableFollower

log = logging.getLogger(__name__)

CHECK_MIN_S, CHECK_S = 0.01, 5.0
"""Minimum and maximum time in seconds between two checks of expiring tokens."""


class AccessFollower(TableFollower[AccessTable]):
    """Applies each new access table on one node. Open it before any listener."""

    def __init__(self, env: Env, store: MetadataStore, access: Access) -> None:
        super().__init__(env, AccessStore(store), what="users and roles")
        self._names = ClusterNamesReader(store)
        self._access, self._clock = access, env.clock
        self._was_on = False
        self._moved = asyncio.Event()
        """Set when a different token may be the next one to expire."""
        self._forget = access.on_change(self._moved.set)

    async def open(self) -> None:
        await super().open()
        self._nursery.spawn(self._end_tokens(), name="end tokens")

    async def _read(self, *, is_hinted: bool) -> None:
        """Read the table together with the names of nodes and bookies. The names are not read while there are no
        users."""
        await super()._read(is_hinted=is_hinted)
        if self._access.has_users:
            self._access.cluster_names.take(await self._names.read())

    async def close(self) -> None:
        self._forget()
        await super().close()

    def take(self, table: AccessTable) -> None:
        self._was_on = table.is_on
        self._access.take(table)
        if self._access.is_unfounded:
            log.warning("no client is served: %s", self._access.nobody.why_unknown)

    def refuse(self, error: UndecodableNode) -> None:
        log.error("refusing all clients, the access table cannot be decoded: %s", error)
        self._access.shut()

    def is_lost(self) -> bool:
        """Return True if the table has disappeared. This does not turn access control off: `kvstore access off`
        writes a table that says so."""
        return self._was_on

    async def _end_tokens(self) -> None:
        """End each token when it expires. This runs in its own task, because a read of the table may take long
        or fail for hours."""
        while True:
            await wait_within(self._moved, self._next_end_s())
            self._moved.clear()
            self._access.expire(self._clock.date_ms())

    def _next_end_s(self) -> float | None:
        """Return the seconds until the next token expires, at most CHECK_S, because a clock may be set in the
        meantime."""
        next_ms = self._access.next_expiry_ms()
        return None if next_ms is None else min(max((next_ms - self._clock.date_ms()) / 1000, CHECK_MIN_S), CHECK_S)
