"""Follows the cluster version, and refuses to continue if it exceeds what this build supports (docs/protocol.md V2)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvstore import versions
from kvstore.env import Env
from kvstore.env.events import wait_within
from kvstore.errors import ClusterTooNew, MetadataError, UndecodableNode
from kvstore.meta.store import MetadataStore, Watch
from kvstore.server.cluster.cluster_version import ClusterVersion, ClusterVersionStore
from kvstore.server.listeners import Listeners
from kvstore.types import ServerId

log = logging.getLogger(__name__)

RETRY_S = 0.5
"""Delay between attempts to read while the metadata store is unavailable. The last version stays in force, because it
never falls."""
REREAD_S = 10.0


class VersionFollower:
    """kvstore.versions.Versions of one server, from `open` to `close`."""

    def __init__(self, env: Env, store: MetadataStore, server: ServerId, can: int = versions.LATEST) -> None:
        self.can = can
        self.found = ClusterVersion()
        self.stored = versions.FIRST
        """The version in the metadata store at the last read. It is lower than `cluster` if the store holds an older
        copy."""
        self._listeners = Listeners()
        self._store, self._server = ClusterVersionStore(store), server
        self._nursery = env.nursery.child("cluster version")
        self._changed = asyncio.Event()
        self._watch: Watch | None = None

    @property
    def cluster(self) -> int:
        """The cluster version. The true version may be higher, because this one may be a moment old."""
        return self.found.version

    def on_rise(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed` each time a higher version has been read. Returns a function that removes the callback."""
        return self._listeners.add(changed)

    async def open(self) -> None:
        """Read the version before the server opens anything. Raises ClusterTooNew, MetadataUnavailable,
        MetadataUnknown, UndecodableNode."""
        self._watch = self._store.watch(self._changed.set)
        await self._read()
        self._nursery.spawn(self._follow(), name="follow")

    def poll(self) -> None:
        """Read the version again now. A server does so once it is registered, because before that no rise waits for
        it."""
        self._changed.set()

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        await self._nursery.close()

    async def _follow(self) -> None:
        is_logged = False
        while True:
            await wait_within(self._changed, REREAD_S)
            self._changed.clear()
            try:
                await self._read()
                is_logged = False
            except UndecodableNode as error:
                log.error("cannot decode the cluster version, it is at least %d: %s", self.cluster, error)
            except MetadataError as error:
                if not is_logged:  # log once per outage: the store is asked twice a second
                    log.info("cannot read the cluster version now, it is at least %d: %s", self.cluster, error)
                is_logged = True
                await asyncio.sleep(RETRY_S)
                self._changed.set()

    async def _read(self) -> None:
        found = await self._store.read()
        if found.version > self.can:
            wanted = versions.build_for(found.version, found.release)
            raise ClusterTooNew(
                f"server {self._server} supports cluster version {self.can} (kvstore {versions.RELEASES[self.can]}), "
                "but "
                f"the cluster is at version {found.version}; install {wanted} here"
            )
        self.stored, before = found.version, self.found.version
        if found.version >= before:
            self.found = found
        if found.version > before:
            log.info("cluster version=%d was raised by kvstore %s", found.version, found.release)
            self._listeners.notify()
