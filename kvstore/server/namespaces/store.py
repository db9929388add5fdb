"""The table of namespaces in the metadata store: one node, so that each change of it is whole."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvstore.errors import NodeExists, NoSuchNode, VersionConflict
from kvstore.meta import codec, paths
from kvstore.meta.store import MetadataStore, Watch
from kvstore.meta.update import update
from kvstore.namespaces import Change, NamespaceTable, NotThere, Remove, applied

_ABSENT = -1


class NamespaceStore:
    """Calls raise MetadataUnavailable or MetadataUnknown besides what they name."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def read(self) -> NamespaceTable:
        """The table; that of a cluster without one is empty. Raises UndecodableNode."""
        return (await self._read())[0]

    async def change(self, change: Change) -> NamespaceTable:
        """Carry out a change; returns the table after it. Raises InvalidRequest, UndecodableNode, VersionConflict."""
        is_tried = False

        def decide(table: NamespaceTable) -> NamespaceTable:
            nonlocal is_tried
            try:
                wanted = applied(table, change)
            except NotThere:
                if is_tried and isinstance(change, Remove):  # the attempt before this one may have removed it
                    return table
                raise
            is_tried = True
            return wanted

        return (await update(self._read, self._write, decide))[0]

    def watch(self, changed: Callable[[], None]) -> Watch:
        """Call `changed` soon after the table may have changed."""
        return self._store.watch(paths.NAMESPACES, changed)

    async def _read(self) -> tuple[NamespaceTable, int]:
        await self._store.sync(paths.NAMESPACES)
        try:
            data, stat = await self._store.get(paths.NAMESPACES)
        except NoSuchNode:
            return NamespaceTable(), _ABSENT
        return decoded(data), stat.version

    async def _write(self, table: NamespaceTable, version: int) -> int:
        data = codec.encode(table)
        if version != _ABSENT:
            return await self._store.set(paths.NAMESPACES, data, version)
        try:
            await self._store.create(paths.NAMESPACES, data)
        except NodeExists as error:
            raise VersionConflict(f"{paths.NAMESPACES} was made by another writer") from error
        return 0


class _Whole(msgspec.Struct):
    """A table with its one part. What does not say which namespaces there are must not be taken for none."""

    namespaces: list[msgspec.Raw]


def decoded(data: bytes) -> NamespaceTable:
    """Raises UndecodableNode."""
    codec.decode(_Whole, data, what=paths.NAMESPACES)
    return codec.decode(NamespaceTable, data, what=paths.NAMESPACES)
