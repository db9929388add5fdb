"""The layout of a cluster's metadata, and its identity: the nodes LAYOUT and INSTANCEID, and the making of a new
cluster."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import NamedTuple

from kvstore.errors import ConfigError, MetadataLost, NodeExists, NoSuchNode
from kvstore.meta import marks, paths
from kvstore.meta.store import Create, MetadataStore
from kvstore.meta.update import until_known


class Layout(NamedTuple):
    """The LAYOUT node: the manager that arranges the ledgers' nodes, and its version."""

    factory: str
    """The class of Apache BookKeeper that arranges ledgers so."""
    version: int


LAYOUT_FORMAT = 2
HIERARCHICAL = Layout("org.apache.bookkeeper.meta.HierarchicalLedgerManagerFactory", 1)
"""The one layout that we read and write: ledgers in trees of four digits per level, short and long ids side by side."""


def encode_layout(layout: Layout) -> bytes:
    return f"{LAYOUT_FORMAT}\n{layout.factory}:{layout.version}".encode()


def decode_layout(data: bytes) -> Layout:
    """Raises ConfigError for what we cannot work with."""
    lines = data.decode(errors="replace").strip().split("\n")
    if lines[0] != str(LAYOUT_FORMAT) or len(lines) != 2:
        raise ConfigError(f"{paths.LAYOUT} has layout format {lines[0]!r}; this build reads {LAYOUT_FORMAT}")
    factory, _, version = lines[1].rpartition(":")
    if not re.fullmatch(r"[0-9]{1,9}", version):
        raise ConfigError(f"{paths.LAYOUT} is {lines[1]!r}, want a class and its version with a colon between")
    return Layout(factory, int(version))


class LayoutStore:
    """Reads and makes a cluster's layout. Calls raise MetadataUnavailable or MetadataUnknown besides what they name."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def initialise(self, instance_id: str) -> None:
        """Make a new cluster called `instance_id`, a random UUID. Raises NodeExists if there is one under this
        chroot."""
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
        """The cluster's instance id, after making the cluster as `instance_id` if there is none yet.

        Raises ConfigError if the cluster that is there has a layout which this build does not understand.
        """
        try:
            await self.initialise(instance_id)
        except NodeExists:
            await self.check()
        return await self.instance_id()

    async def check(self) -> None:
        """Raise ConfigError unless the cluster has the layout that we work with."""
        try:
            data, _ = await self._store.get(paths.LAYOUT)
        except NoSuchNode:
            raise ConfigError(f"{paths.LAYOUT} is missing, although {paths.LEDGERS} is there") from None
        layout = decode_layout(data)
        if layout != HIERARCHICAL:
            raise ConfigError(f"{paths.LAYOUT} is {layout}; this build works with {HIERARCHICAL}")

    async def instance_id(self) -> str:
        """Raises ConfigError if there is no cluster under this chroot."""
        await self._store.sync(paths.LEDGERS)
        found = await self.instance_id_seen()
        if found is None:
            raise ConfigError(f"{paths.INSTANCE_ID} is missing: the metadata store holds no cluster under this chroot")
        return found

    async def instance_id_seen(self) -> str | None:
        """As the server that answers knows it, which may lag; None if there is none."""
        try:
            data, _ = await self._store.get(paths.INSTANCE_ID)
        except NoSuchNode:
            return None
        return data.decode(errors="replace")


class Identity:
    """The cluster that this process belongs to: the one that the metadata store held first."""

    def __init__(self, store: MetadataStore, instance_id: str | None = None) -> None:
        """`instance_id`: if it is known already."""
        self._store = store
        self._layout = LayoutStore(store)
        self._known = instance_id

    # docs/protocol.md B29
    async def mark_older(self, why: str) -> None:
        """Tell all that come that this is an older copy of the metadata; nothing but a later copy takes that back.
        Raises MetadataUnavailable, MetadataUnknown."""
        with suppress(NodeExists):
            await self._store.create(paths.OLDER_COPY, why.encode())

    # docs/protocol.md B29
    async def _refuse_older(self) -> None:
        with suppress(NoSuchNode):
            why, _ = await self._store.get(paths.OLDER_COPY)
            raise MetadataLost(
                f"the metadata store is an older copy of itself: {why.decode(errors='replace')}; want a later one "
                "(docs/how-to/back-up-and-restore-metadata.md)"
            )

    # docs/protocol.md G23
    async def check(self) -> None:
        """Raise MetadataLost if that cluster is not there any more, for sure: what looks so is read again up to date;
        or if it is marked as an older copy.

        Raises MetadataUnavailable, MetadataUnknown too.
        """
        await self._refuse_older()
        if self._known is not None and await self._layout.instance_id_seen() == self._known:
            return
        try:
            found = await self._layout.instance_id()
        except ConfigError as error:
            raise MetadataLost(str(error)) from error
        if self._known not in (None, found):
            raise MetadataLost(f"{paths.INSTANCE_ID} is {found}, want {self._known}: another cluster was founded there")
        self._known = found
