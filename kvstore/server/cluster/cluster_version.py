"""The cluster version in the metadata store. It is stored in one znode and only rises (docs/protocol.md V1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvstore import versions
from kvstore.errors import NodeExists, NoSuchNode, VersionConflict
from kvstore.meta import codec, paths
from kvstore.meta.store import MetadataStore, Watch
from kvstore.meta.update import update

_ABSENT = -1


@dataclass(frozen=True, slots=True)
class ClusterVersion:
    """The cluster version."""

    version: int = versions.FIRST
    release: str = ""
    """The release that raised the version. Servers should run this release or a later one."""
    is_held: bool = False
    """True if an operator holds the version, so that nodes can still be downgraded."""


class ClusterVersionStore:
    """Reads and writes the cluster version. All methods raise MetadataUnavailable or MetadataUnknown, and
    UndecodableNode if the znode cannot be decoded."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def read(self) -> ClusterVersion:
        """Return the current version. That is the first version if it was never raised."""
        return (await self._read())[0]

    # docs/protocol.md V1
    async def rise(self, version: int, release: str) -> ClusterVersion:
        """Raise the version to `version`, unless the current one is held or at least as high. Return the resulting
        version. Raises VersionConflict."""

        def risen(found: ClusterVersion) -> ClusterVersion:
            if found.is_held or found.version >= version:
                return found
            return ClusterVersion(version, release)

        return (await update(self._read, self._write, risen))[0]

    # docs/protocol.md V1
    async def write_back(self, version: int, release: str) -> ClusterVersion:
        """Restore a version that the cluster has had before, even if it is held: the metadata store holds an older
        copy. Raises VersionConflict."""

        def risen(found: ClusterVersion) -> ClusterVersion:
            return found if found.version >= version else ClusterVersion(version, release, found.is_held)

        return (await update(self._read, self._write, risen))[0]

    async def hold(self, is_held: bool) -> ClusterVersion:
        """Hold the version, or allow it to rise again. Return the result. Raises VersionConflict."""
        return (await update(self._read, self._write, lambda found: replace(found, is_held=is_held)))[0]

    def watch(self, changed: Callable[[], None]) -> Watch:
        """Call `changed` soon after the version may have changed."""
        return self._store.watch(paths.VERSION, changed)

    async def _read(self) -> tuple[ClusterVersion, int]:
        await self._store.sync(paths.VERSION)
        try:
            data, stat = await self._store.get(paths.VERSION)
        except NoSuchNode:
            return ClusterVersion(), _ABSENT
        return decoded(data), stat.version

    async def _write(self, wanted: ClusterVersion, version: int) -> int:
        data = codec.encode(wanted)
        if version != _ABSENT:
            return await self._store.set(paths.VERSION, data, version)
        try:
            await self._store.create(paths.VERSION, data)
        except NodeExists as error:
            raise VersionConflict(f"{paths.VERSION} was created by another writer") from error
        return 0


def decoded(data: bytes) -> ClusterVersion:
    """Decode the version. Raises UndecodableNode."""
    return codec.decode(ClusterVersion, data, what=paths.VERSION)
