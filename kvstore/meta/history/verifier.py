"""Decides whether a metadata store may be used, or holds an older copy of the metadata than was seen before.

    connected ──► verify ──► open ──► the connection ends, and is made again ──► verify …
                    └──────► older: a later copy, on another connection, is verified again

Before the first call of each connection it checks the node's high-water mark (kvstore.meta.history.high_water) and the
findings of other nodes (`/older-copy`). While the connection lasts it compares each version that is read with the
highest one seen of that path (kvstore.meta.history.seen). It publishes a lower mark to all nodes by `/older-copy`. It
keeps lower versions to itself, because it may have seen the higher ones in an older copy without knowing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from kvstore.env.events import wait_within
from kvstore.env.ports import Disk, Nursery
from kvstore.errors import (
    MetadataError,
    MetadataLost,
    MetadataUnavailable,
    NodeExists,
    NoSuchNode,
    OlderMetadata,
    VersionConflict,
)
from kvstore.meta import paths
from kvstore.meta.history.high_water import HighWater, agreed_by_a_majority
from kvstore.meta.history.seen import SeenVersions, Version
from kvstore.meta.layout import LayoutStore
from kvstore.meta.store import MetadataStore, SessionState, Stat

log = logging.getLogger(__name__)

RAISE_S = 3.0
"""Seconds from a change of the metadata to the next high-water mark, and from the mark to its confirmation. Each of
them costs the store two writes and a few reads, and the node's disk a sync. Unchanged metadata cost nothing."""
CONFIRM_ROUNDS = 3
"""Rounds for which a high-water mark is not raised again while other nodes may still confirm it."""
RETRY_S = 0.2
ADVICE = "restore a later copy (docs/how-to/back-up-and-restore-metadata.md)"


# docs/protocol.md B29
class Verifier:
    """Verifies one metadata store for one node. Calls `changed` when the store may be used, or may no longer be
    used."""

    def __init__(self, store: MetadataStore, disk: Disk, node: str, changed: Callable[[], None]) -> None:
        self.older = ""
        """Reason why the store is considered an older copy; empty if it is not."""
        self.news = self._marked_news = 0
        """Number of changes of the metadata that this process knows of, and their number when it last raised the
        high-water mark."""
        self.seen = SeenVersions()
        self.mark: HighWater | None = None
        """None while the store has no cluster."""
        self._store, self._disk, self._node, self._changed = store, disk, node, changed
        self._is_rung = False
        """True if a node may have raised its high-water mark, and waits until others do."""
        self._lower_path = ""
        """Path of the node for which a lower version was found last; empty if there is none."""
        self._waited = 0
        """Number of rounds since the last high-water mark in which it was not confirmed."""
        self._verified = -1
        """Number of the connection that was verified most recently."""
        self._wake = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """True if calls are allowed on the current connection."""
        return not self.older and self._verified == self._store.history.generation

    @property
    def has_news(self) -> bool:
        """True if something has changed since the high-water mark was raised."""
        return self.news != self._marked_news

    def check(self, path: str) -> None:
        """Raise OlderMetadata if the store is an older copy, or MetadataUnavailable while the connection is not
        verified."""
        if self.older:
            raise OlderMetadata(f"{path}: the metadata store is an older copy of itself: {self.older}; {ADVICE}")
        if not self.is_open:
            raise MetadataUnavailable(f"{path}: the connection with the metadata store is not verified yet")

    async def start(self, nursery: Nursery) -> None:
        """Verify the store now, and again for each later connection. Raises MetadataLost if it is an older copy,
        MetadataUnavailable, MetadataUnknown."""
        layout = LayoutStore(self._store)
        cluster = await layout.instance_id_seen()
        if cluster is None:
            await self._store.sync(paths.LEDGERS)
            cluster = await layout.instance_id_seen()
        if cluster is not None:
            self.mark = HighWater(self._store, self._disk, self._node, cluster)
        await self._verify()
        if self.older:
            raise MetadataLost(f"the metadata store is an older copy of itself: {self.older}; {ADVICE}")
        self._store.on_state(lambda _: self._doubt())
        self._store.watch(paths.OLDER_COPY, self._doubt)
        self._store.watch(paths.HIGH_WATER, self._ring)
        nursery.spawn(self._run(), name="metadata verification")

    async def judge(self, path: str) -> tuple[bytes, Stat]:
        """Read a node again that had a lower version than was seen before. The read returns a state that a majority
        of the servers has confirmed. Raises OlderMetadata if the version is still lower."""
        known, generation = self.seen.highest(path), self._store.history.generation
        await agreed_by_a_majority(self._store)
        data, stat = await self._store.get(path)
        if generation != self._store.history.generation:
            raise MetadataUnavailable(f"{path}: the connection broke while a lower version was looked into")
        if why := _why_lower(path, stat, known):
            self._lower_path = path
            self._refuse(why)
            self.check(path)
        self.seen.note(path, stat)
        return data, stat

    async def _run(self) -> None:
        while True:
            is_woken = await wait_within(self._wake, RAISE_S)
            self._wake.clear()
            try:
                if is_woken or not self.is_open:
                    await self._verify()
                elif self.mark is not None:
                    await self._raise(self.mark)
            except MetadataError as error:
                log.info("metadata store not verified: %r", error)
                if self._store.state is SessionState.CONNECTED:
                    await asyncio.sleep(RETRY_S)
                    self._wake.set()

    def _ring(self) -> None:
        self._is_rung = True

    def _doubt(self) -> None:
        """Verify again, because the connection changed or another process may have marked the store."""
        if not self.is_open:
            self._store.history.trust(False)
        self._changed()
        self._wake.set()

    async def _verify(self) -> None:
        """Decide if calls are allowed on the current connection. Raises MetadataError."""
        generation = self._store.history.generation
        if self._store.state is not SessionState.CONNECTED:
            return
        why, is_marked = await self._why_older()
        lower = "" if why else await self._why_still_lower()
        if generation != self._store.history.generation:
            self._wake.set()  # the finding is of a connection that is gone
        elif why:
            self._refuse(why)
            self.seen.forget()  # some versions are of this copy, and must not judge a later one
            if self.mark is not None:
                self.mark.forget()
            if not is_marked:  # a mark that an operator has removed meanwhile is not made again
                with suppress(NodeExists, MetadataError):
                    await self._store.create(paths.OLDER_COPY, why.encode())
        elif lower:
            self._refuse(lower)
        else:
            self._accept(generation)

    async def _why_older(self) -> tuple[str, bool]:
        """Return the reason why the store is an older copy, or an empty string. Also return True if another process
        has marked it."""
        with suppress(NoSuchNode):
            why, _ = await self._store.get(paths.OLDER_COPY)
            return why.decode(errors="replace"), True
        if self.mark is None:
            return "", False
        if await LayoutStore(self._store).instance_id_seen() != self.mark.cluster:
            return "", False  # not an older copy of this cluster's metadata; see G23
        return await self.mark.why_older(), False

    async def _why_still_lower(self) -> str:
        """Return the reason if the store still lacks the version that was found to be missing, or an empty string if
        it has the version now. Without this check, the node would use the same copy again after a moment."""
        if not self._lower_path:
            return ""
        with suppress(NoSuchNode):
            await agreed_by_a_majority(self._store)
            _, stat = await self._store.get(self._lower_path)
            if why := _why_lower(self._lower_path, stat, self.seen.highest(self._lower_path)):
                return why
        self._lower_path = ""
        return ""

    async def _raise(self, mark: HighWater) -> None:
        if mark.is_pending:
            try:
                await mark.confirm()
            except OSError as error:
                log.warning("high-water mark %d of the metadata is not on the disk: %s", mark.confirmed, error)
        self._waited = self._waited + 1 if mark.is_pending else 0
        may_be_rung, self._is_rung = self._is_rung, False
        is_rung = may_be_rung and await mark.is_rung()  # this node's own ring calls the watch, too
        if mark.is_pending and not is_rung and self._waited < CONFIRM_ROUNDS:
            return
        news, rings = self.news, self.has_news
        with suppress(VersionConflict, NodeExists):  # another process of this node has raised it
            if rings or is_rung:
                await mark.raise_it(rings=rings)
            self._marked_news = news

    def _accept(self, generation: int) -> None:
        if generation != self._verified and self.mark is not None:
            self.mark.forget()
        if self.older:
            log.warning("the metadata store has a later copy again: it is used")
        self.older, self._verified = "", generation
        self._store.history.trust(True)
        self._changed()

    def _refuse(self, why: str) -> None:
        """Stop using the store, and log why."""
        if not self.older:
            log.error("the metadata store is an older copy of itself: %s; %s", why, ADVICE)
        self.older = why
        self._store.history.trust(False)
        self._changed()


def _why_lower(path: str, stat: Stat, known: Version | None) -> str:
    """Return why this version of a node proves an older copy, or an empty string if it does not."""
    found = Version(stat.created, stat.version)
    if known is None or known <= found:
        return ""
    return f"{path} has version {found.number}, and version {known.number} was seen"
