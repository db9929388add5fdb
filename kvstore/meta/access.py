"""The access table in the metadata store: one node, so that each change of it is whole (docs/design/0014)."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvstore.access import AccessTable, Change, applied
from kvstore.access.changes import NotThere
from kvstore.errors import InvalidRequest, NodeExists, NoSuchNode, VersionConflict
from kvstore.meta import codec, paths
from kvstore.meta.store import MetadataStore, Watch
from kvstore.meta.update import update

TABLE_BYTES_MAX = 512 << 10
_ABSENT = -1


class AccessStore:
    """Calls raise MetadataUnavailable or MetadataUnknown besides what they name."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def read(self) -> AccessTable:
        """The table; a cluster without one has never been told of a user. Raises UndecodableNode."""
        return (await self._read())[0]

    async def change(self, change: Change) -> AccessTable:
        """Carry out a change; returns the table after it. Raises InvalidRequest, UndecodableNode, VersionConflict."""
        is_tried = False

        def decide(table: AccessTable) -> AccessTable:
            nonlocal is_tried
            try:
                wanted = applied(table, change)
            except NotThere:
                if is_tried:  # the attempt before this one may have removed it
                    return table
                raise
            is_tried = True
            if len(codec.encode(wanted)) > TABLE_BYTES_MAX:
                raise InvalidRequest(f"the table of users and roles would be larger than {TABLE_BYTES_MAX} bytes")
            return wanted

        return (await update(self._read, self._write, decide))[0]

    def watch(self, changed: Callable[[], None]) -> Watch:
        """Call `changed` soon after the table may have changed."""
        return self._store.watch(paths.ACCESS, changed)

    async def _read(self) -> tuple[AccessTable, int]:
        await self._store.sync(paths.ACCESS)
        try:
            data, stat = await self._store.get(paths.ACCESS)
        except NoSuchNode:
            return AccessTable(), _ABSENT
        return decoded(data), stat.version

    async def _write(self, table: AccessTable, version: int) -> int:
        data = codec.encode(table)
        if version != _ABSENT:
            return await self._store.set(paths.ACCESS, data, version)
        try:
            await self._store.create(paths.ACCESS, data)
        except NodeExists as error:
            raise VersionConflict(f"{paths.ACCESS} was made by another writer") from error
        return 0


class _Whole(msgspec.Struct):
    """A table with all of its parts. One that does not say whether anybody is asked must not be taken for a no."""

    is_on: bool
    users: list[msgspec.Raw]
    roles: list[msgspec.Raw]


def decoded(data: bytes) -> AccessTable:
    """Raises UndecodableNode."""
    codec.decode(_Whole, data, what=paths.ACCESS)
    return codec.decode(AccessTable, data, what=paths.ACCESS)
