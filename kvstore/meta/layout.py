"""The layout and the identity of a cluster's metadata (the nodes LAYOUT and INSTANCEID), and the creation of a
cluster's metadata."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

from kvstore.errors import ConfigError, MetadataDenied, MetadataLost, NodeExists, NoSuchNode, UndecodableNode
from kvstore.meta import marks, paths
from kvstore.meta.store import Create, MetadataStore, Stat
from kvstore.meta.update import until_known


class LedgerLayout(NamedTuple):
    """The contents of the LAYOUT node: the manager class that arranges the ledgers' nodes, and its version."""

    factory: str
    """Name of the Apache BookKeeper class that arranges ledgers this way."""
    version: int


LAYOUT_FORMAT = 2
HIERARCHICAL = LedgerLayout("org.apache.bookkeeper.meta.HierarchicalLedgerManagerFactory", 1)
"""The only layout that we read and write: ledgers in trees with four digits per level, short and long ids side
by side."""


def encode_layout(layout: LedgerLayout) -> bytes:
    return f"{LAYOUT_FORMAT}\n{layout.factory}:{layout.version}".encode()


def decode_layout(data: bytes) -> LedgerLayout:
    """Decode the LAYOUT node. Raises ConfigError if the layout is not supported."""
    lines = data.decode(errors="replace").strip().split("\n")
    if lines[0] != str(LAYOUT_FORMAT) or len(lines) != 2:
        raise ConfigError(f"{paths.LAYOUT} has layout format {lines[0]!r}; this build reads {LAYOUT_FORMAT}")
    factory, _, version = lines[1].rpartition(":")
    if not re.fullmatch(r"[0-9]{1,9}", version):
        raise ConfigError(f"{paths.LAYOUT}: expected a class and its version, separated by a colon, got {lines[1]!r}")
    return LedgerLayout(factory, int(version))


# docs/protocol.md P34
async def get_unless_closed(store: MetadataStore, path: str) -> tuple[bytes, Stat]:
    """Return the data and the stat of a node. Raises NoSuchNode, MetadataDenied, and UndecodableNode as
    `unless_closed` does."""
    async with unless_closed(store, path):
        return await store.get(path)


@asynccontextmanager
async def unless_closed(store: MetadataStore, path: str) -> AsyncIterator[None]:
    """Raise UndecodableNode if the body is denied because another user of the store has created the node at `path` for
    itself only. If the store refuses our user everywhere, MetadataDenied is raised, and callers must not skip one node
    after the other."""
    try:
        yield
    except MetadataDenied as denied:
        try:
            await store.get(paths.LAYOUT)
        except (MetadataDenied, NoSuchNode):
            raise denied from None
        raise UndecodableNode(f"{path} is closed to our user of the metadata store: {denied}") from None


class LayoutStore:
    """Reads and creates a cluster's layout. Calls raise MetadataUnavailable or MetadataUnknown in addition to the
    errors that they name."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def initialise(self, instance_id: str) -> None:
        """Create the metadata of a new cluster. `instance_id` must be a random UUID. Raises NodeExists if the chroot
        already has a cluster."""
        await until_known(lambda: self._initialise(instance_id))

    async def _initialise(self, instance_id: str) -> None:
        directories = (paths.LEDGERS, paths.AVAILABLE, paths.READONLY, paths.COOKIES, paths.IDGEN)
        of_repair = (paths.UNDERREPLICATION, paths.MARKS, paths.MARK_LOCKS, paths.AUDITOR_VOTES)
        contents = {
            paths.LAYOUT: encode_layout(HIERARCHICAL),
            paths.INSTANCE_ID: instance_id.encode(),
            paths.MARKS_LAYOUT: marks.encode_layout(),
        }
        empty = map(Create, (*directories, *of_repair))
        try:
            await self._store.multi([*empty, *(Create(path, data) for path, data in contents.items())])
        except NodeExists:
            if await self.instance_id_seen() != instance_id:
                raise

    async def ensure(self, instance_id: str) -> str:
        """Return the cluster's instance id. If there is no cluster, create one with `instance_id` first.

        Raises ConfigError if the existing cluster has an unsupported layout.
        """
        try:
            await self.initialise(instance_id)
        except NodeExists:
            await self.check()
        return await self.instance_id()

    async def check(self) -> None:
        """Raise ConfigError unless the cluster has the supported layout."""
        try:
            data, _ = await self._store.get(paths.LAYOUT)
        except NoSuchNode:
            raise ConfigError(f"{paths.LAYOUT} is missing, although {paths.LEDGERS} exists") from None
        layout = decode_layout(data)
        if layout != HIERARCHICAL:
            raise ConfigError(f"{paths.LAYOUT} is {layout}; this build works with {HIERARCHICAL}")

    async def instance_id(self) -> str:
        """Return the current instance id, by an up-to-date read. Raises ConfigError if there is no cluster under
        this chroot."""
        await self._store.sync(paths.LEDGERS)
        found = await self.instance_id_seen()
        if found is None:
            raise ConfigError(f"{paths.INSTANCE_ID} is missing: the metadata store holds no cluster under this chroot")
        return found

    async def instance_id_seen(self) -> str | None:
        """Return the instance id as the connected server knows it, or None if there is none. The server may lag."""
        try:
            data, _ = await self._store.get(paths.INSTANCE_ID)
        except NoSuchNode:
            return None
        return data.decode(errors="replace")


class ClusterIdentity:
    """The identity of the cluster to which this process belongs: the first cluster that it found in the metadata
    store."""

    def __init__(self, store: MetadataStore, instance_id: str | None = None) -> None:
        """`instance_id` is the cluster's id, if it is already known."""
        self._store = store
        self._layout = LayoutStore(store)
        self._known = instance_id

    # docs/protocol.md B29
    async def mark_older(self, why: str) -> None:
        """Mark the store as an older copy of the metadata, for all nodes that read it. Only restoring a later copy
        removes the mark. Raises MetadataUnavailable, MetadataUnknown."""
        with suppress(NodeExists):
            await self._store.create(paths.OLDER_COPY, why.encode())

    # docs/protocol.md B29
    async def _refuse_older(self) -> None:
        with suppress(NoSuchNode):
            why, _ = await self._store.get(paths.OLDER_COPY)
            raise MetadataLost(
                f"the metadata store is an older copy of itself: {why.decode(errors='replace')}; restore a "
                "later one (docs/how-to/back-up-and-restore-metadata.md)"
            )

    # docs/protocol.md G23
    async def check(self) -> None:
        """Raise MetadataLost if an up-to-date read confirms that the cluster no longer exists in the store, or if the
        store is marked as an older copy.

        Also raises MetadataUnavailable, MetadataUnknown.
        """
        await self._refuse_older()
        if self._known is not None and await self._layout.instance_id_seen() == self._known:
            return
        try:
            found = await self._layout.instance_id()
        except ConfigError as error:
            raise MetadataLost(str(error)) from error
        if self._known not in (None, found):
            raise MetadataLost(
                f"{paths.INSTANCE_ID}: expected {self._known}, got {found}: another cluster was founded there"
            )
        self._known = found
