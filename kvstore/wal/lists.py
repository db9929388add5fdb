"""Reads and writes partitions' ledger lists in the metadata store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from kvstore.errors import MetadataError, MetadataUnknown, NodeExists, NoSuchNode, VersionConflict
from kvstore.meta import paths
from kvstore.meta.history.high_water import agreed_by_a_majority
from kvstore.meta.store import Change, Check, MetadataStore, SetData, ensure_path
from kvstore.meta.update import until_known
from kvstore.types import LedgerId, PartitionId
from kvstore.wal.ledger_list import LedgerList
from kvstore.wal.list_codec import decode, encode

LIST_BYTES_MAX = 512 << 10
"""Maximum size in bytes of a list when a ledger is added: half of what ZooKeeper accepts."""
LONG_LIST_BYTES = LIST_BYTES_MAX // 2
"""Size in bytes above which leaders no longer roll ledgers and takeovers are delayed. The remaining space is reserved
for takeovers."""
UNKNOWN_RETRY_S = 0.2
UNKNOWN_ATTEMPTS_MAX = 50


class PerhapsListed(VersionConflict):
    """Another process has written the list. That process may have read an earlier write of this caller whose answer was
    lost (docs/protocol.md, G22), so the caller's ledger may be listed."""


class LedgerLists:
    """The ledger lists of all partitions. Calls raise MetadataUnavailable or MetadataUnknown in addition to the errors
    that they name."""

    def __init__(self, store: MetadataStore, on_read: Callable[[LedgerList], None] = lambda _: None) -> None:
        """`on_read` is called with every list that is read."""
        self._store = store
        self._on_read = on_read
        self._sizes: dict[PartitionId, int] = {}

    def size_of(self, partition: PartitionId) -> int:
        """Return the number of bytes that the list will occupy in the metadata store when it is next written, or 0 if
        this process has not read the list."""
        return self._sizes.get(partition, 0)

    def is_long(self, partition: PartitionId) -> bool:
        """Return True if the list is so long that it should grow only when necessary (docs/protocol.md, G21)."""
        return self.size_of(partition) > LONG_LIST_BYTES

    async def read(self, partition: PartitionId, *, latest: bool = False) -> tuple[LedgerList, int]:
        """Return the list and its version, or an empty list and version -1 if the partition has no list. With `latest`,
        the result includes every change made before the call; otherwise it is the last state that the connected
        metadata server knows."""
        path = paths.partition_log(partition)
        if latest:
            await self._store.sync(paths.PARTITIONS)
        try:
            data, stat = await self._store.get(path)
        except NoSuchNode:
            return LedgerList(), -1
        listed = decode(data, what=path)
        self._on_read(listed)
        # A list that an older version wrote uncompressed gets smaller when it is written again.
        self._sizes[partition] = len(data) if len(data) <= LONG_LIST_BYTES else len(encode(listed))
        return listed, stat.version

    async def confirm(self, partition: PartitionId, version: int) -> None:
        """Raise VersionConflict unless a majority of the metadata servers agrees that the list still has `version`."""
        await agreed_by_a_majority(self._store)
        if (await self.read(partition))[1] != version:
            raise VersionConflict(f"partition {partition}: its list was changed meanwhile")

    async def make(self, partition: PartitionId) -> tuple[LedgerList, int]:
        """Return the list and its version, and create an empty list if there is none. Raises VersionConflict if the
        list is removed right after its creation, because a write without a version could overwrite the list of another
        process."""
        path = paths.partition_log(partition)
        listed, version = await self.read(partition, latest=True)
        if version >= 0:
            return listed, version
        await ensure_path(self._store, paths.parent(path))
        with suppress(NodeExists):
            await until_known(lambda: self._store.create(path, encode(listed)))
        listed, version = await self.read(partition)
        if version < 0:
            raise VersionConflict(f"partition {partition}: its list was removed right after it was created")
        return listed, version

    # docs/protocol.md G12
    async def write(
        self,
        partition: PartitionId,
        listed: LedgerList,
        version: int,
        *,
        created: LedgerId | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> int:
        """Write the list if its version is still `version`, and return the new version. With `created`, write only if
        that ledger's metadata has not changed since its creation.

        Raises MetadataError if the list has grown too long for one more ledger, VersionConflict if another process
        wrote the list, and NoSuchNode if the ledger was deleted as an orphan. If the outcome of a write is unknown, the
        method reads the list again until the outcome is known, despite other errors. Finding its own document counts as
        success. PerhapsListed then replaces VersionConflict and NoSuchNode. Raises MetadataUnknown if the outcome stays
        unknown for too long or `should_stop` returns True.
        """
        path, data = paths.partition_log(partition), encode(listed)
        if created is not None and len(data) > LIST_BYTES_MAX:
            raise MetadataError(
                f"{path}: {len(listed.ledgers)} ledgers take {len(data)} bytes, expected at most {LIST_BYTES_MAX}"
            )
        change: list[Change] = [SetData(path, data, version)]
        if created is not None:
            change.insert(0, Check(paths.ledger(created), 0))
        is_unknown = has_conflict = False
        attempts = 0
        while attempts < UNKNOWN_ATTEMPTS_MAX if should_stop is None else not should_stop():
            attempts += 1
            try:
                if is_unknown:
                    await self._store.sync(paths.PARTITIONS)
                    found, stat = await self._store.get(path)
                    if found == data and stat.version == version + 1:
                        self._sizes[partition] = len(data)
                        return stat.version
                    if stat.version != version or has_conflict:
                        raise VersionConflict(path)
                await self._store.multi(change)
                self._sizes[partition] = len(data)
                return version + 1
            except MetadataUnknown:
                is_unknown = True
            except (VersionConflict, NoSuchNode) as error:
                if not is_unknown:
                    raise
                if has_conflict or isinstance(error, NoSuchNode):
                    raise PerhapsListed(path) from error
                has_conflict = True  # perhaps with our own earlier write
                continue
            except MetadataError:  # an error now proves nothing about the earlier write
                if not is_unknown:
                    raise
            await asyncio.sleep(UNKNOWN_RETRY_S)
        raise MetadataUnknown(f"{path}: cannot find out whether this process wrote version {version + 1}")


class ReadersLists(LedgerLists):
    """The ledger lists for processes that only read logs. The list of a partition that has left the ring stays
    available as long as its log is kept."""

    async def read(self, partition: PartitionId, *, latest: bool = False) -> tuple[LedgerList, int]:
        """Return the list and its version; see LedgerLists.read. The version of a kept list is -1, because it must not
        be changed."""
        listed, version = await super().read(partition, latest=latest)
        if listed.ledgers:
            return listed, version
        path = paths.kept_log(partition)
        try:
            data, _ = await self._store.get(path)
        except NoSuchNode:
            return listed, version
        return decode(data, what=path), -1
