"""A table that is stored in one node of the metadata store, so that each change of the table is atomic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from kvstore.errors import InvalidRequest, NodeExists, NoSuchNode, NotThere, VersionConflict
from kvstore.meta import codec
from kvstore.meta.store import MetadataStore, Watch
from kvstore.meta.update import update

TABLE_BYTES_MAX = 512 << 10
"""Maximum size of a table in bytes, which is half the capacity of a ZooKeeper node."""
_ABSENT = -1

T = TypeVar("T")
C = TypeVar("C")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableKind(Generic[T, C]):
    """The description of a table: its path, its format, and its changes."""

    path: str
    what: str
    """Name of the table in messages, for example "the table of users and roles"."""
    empty: T
    """The table of a cluster without one."""
    whole: type[msgspec.Struct]
    """Parts that a table must have. A table without a part must not be taken for one where the part is empty."""
    applied: Callable[[T, C], T]
    """Function that returns the table after a change. Raises InvalidRequest, or NotThere if an item is not in the
    table."""
    removals: tuple[type, ...]
    """Types of changes that count as done if there is nothing to remove."""

    def decoded(self, data: bytes) -> T:
        """Decode a table. Raises UndecodableNode."""
        codec.decode(self.whole, data, what=self.path)
        return codec.decode(type(self.empty), data, what=self.path)


class TableStore(Generic[T, C]):
    """Reads and changes one table. Calls raise MetadataUnavailable or MetadataUnknown in addition to the errors that
    they name."""

    def __init__(self, store: MetadataStore, kind: TableKind[T, C]) -> None:
        self._store, self._kind = store, kind

    @property
    def empty(self) -> T:
        """The table of a cluster without one."""
        return self._kind.empty

    async def read(self) -> T:
        """Return the table, which is empty if the cluster has none. Raises UndecodableNode."""
        return (await self._read())[0]

    async def read_or_none(self) -> T | None:
        """Return the table, or None if the cluster has none. Raises UndecodableNode."""
        table, version = await self._read()
        return table if version != _ABSENT else None

    async def change(self, change: C) -> T:
        """Apply a change to the table and return the table after the change. Raises InvalidRequest, UndecodableNode,
        VersionConflict."""
        kind, is_tried = self._kind, False

        def decide(table: T) -> T:
            nonlocal is_tried
            try:
                wanted = kind.applied(table, change)
            except NotThere:
                if is_tried and isinstance(change, kind.removals):  # the previous attempt may have removed it
                    return table
                raise
            is_tried = True
            if len(codec.encode(wanted)) > TABLE_BYTES_MAX:
                raise InvalidRequest(f"{kind.what} would exceed {TABLE_BYTES_MAX} bytes; remove entries first")
            return wanted

        return (await update(self._read, self._write, decide))[0]

    def watch(self, changed: Callable[[], None]) -> Watch:
        """Call `changed` soon after the table may have changed."""
        return self._store.watch(self._kind.path, changed)

    async def _read(self) -> tuple[T, int]:
        await self._store.sync(self._kind.path)
        try:
            data, stat = await self._store.get(self._kind.path)
        except NoSuchNode:
            return self._kind.empty, _ABSENT
        return self._kind.decoded(data), stat.version

    async def _write(self, table: T, version: int) -> int:
        path, data = self._kind.path, codec.encode(table)
        if version != _ABSENT:
            return await self._store.set(path, data, version)
        try:
            await self._store.create(path, data)
        except NodeExists as error:
            raise VersionConflict(f"{path} was created by another writer") from error
        return 0
