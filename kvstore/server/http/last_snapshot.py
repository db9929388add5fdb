"""Provides the age of the last completed snapshot that this node knows, for an alert when snapshots stop."""

from __future__ import annotations

import asyncio
import logging

from kvstore.env import Env
from kvstore.env.events import wait_within
from kvstore.errors import StoreError
from kvstore.meta import paths
from kvstore.meta.snapshots import SnapshotRecord, last_snapshot_or_none
from kvstore.meta.store import MetadataStore

log = logging.getLogger(__name__)

CHECK_S = 30.0


class LastSnapshot:
    """Reads the record of the last snapshot between `start` and `close`: when a watch reports a change, and
    periodically."""

    def __init__(self, env: Env, store: MetadataStore) -> None:
        self._env, self._store = env, store
        self._nursery = env.nursery.child("snapshots")
        self._changed = asyncio.Event()
        self._watch = store.watch(paths.SNAPSHOTS, self._changed.set)
        self._last: SnapshotRecord | None = None
        self.is_read = False
        """True once it is known whether there is a snapshot."""

    def start(self) -> None:
        self._nursery.spawn(self._check_periodically(), name="check")

    async def close(self) -> None:
        self._watch.close()
        await self._nursery.close()

    def statistics(self) -> dict[str, float]:
        """Return the numbers of the last snapshot. Empty while there is no snapshot, because an alert must not
        mistake that for a recent snapshot."""
        last = self._last
        if last is None:
            return {}
        age_s = max(0.0, (self._env.clock.date_ms() - last.started_ms) / 1000)
        return {"snapshot_age_s": age_s, "snapshot_rows": last.rows, "snapshot_bytes": last.size_bytes}

    async def _check_periodically(self) -> None:
        while True:
            self._changed.clear()
            try:
                self._last = await last_snapshot_or_none(self._store)
                self.is_read = True
            except StoreError as error:
                log.warning("cannot read the last snapshot, keeping the previous record: %s", error)
            await wait_within(self._changed, CHECK_S)
