"""Reads and changes partitions' ledger lists in the metadata store."""

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
"""Maximum size of a list that gets another ledger: half of what ZooKeeper accepts."""
CROWDED_BYTES = LIST_BYTES_MAX // 2
"""Size above which a list is no longer rolled and takeovers are slowed down. The rest is reserved for takeovers."""
UNKNOWN_RETRY_S = 0.2
UNKNOWN_ATTEMPTS_MAX = 50


class PerhapsListed(VersionConflict):
    """Somebody else has written the list, and it may have contained an earlier write of this caller whose answer was
    lost (docs/protocol.md, G22)."""


class LedgerLists:
    """The ledger lists of all partitions. Calls raise MetadataUnavailable or MetadataUnknown besides the errors that
    they name."""

    def __init__(self, store: MetadataStore, on_read: Callable[[LedgerList], None] = lambda _: None) -> None:
        """`on_read` is called with each list that is read."""
        self._store = store
        self._on_read = on_read
        self._sizes: dict[PartitionId, int] = {}

    def size_of(self, partition: PartitionId) -> int:
        """Return the bytes that the list will take in the metadata store when it is written again; 0 if it was never
        read here."""
        return self._sizes.get(partition, 0)

    def is_crowded(self, partition: PartitionId) -> bool:
        """Return True if the list is so long that it must grow no faster than necessary (docs/protocol.md, G21)."""
        return self.size_of(partition) > CROWDED_BYTES

    async def read(self, partition: PartitionId, *, latest: bool = False) -> tuple[LedgerList, int]:
        """Return the list and its version; version -1 if the partition has no list yet. `latest`: as of now, instead of
        the last state known to the connected metadata server."""
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
        self._sizes[partition] = len(data) if len(data) <= CROWDED_BYTES else len(encode(listed))
        return listed, stat.version

    async def confirm(self, partition: PartitionId, version: int) -> None:
        """Raise VersionConflict if a majority of the metadata servers has another version of the list."""
        await agreed_by_a_majority(self._store)
        if (await self.read(partition))[1] != version:
            raise VersionConflict(f"partition {partition}: its list was changed meanwhile")

    async def make(self, partition: PartitionId) -> tuple[LedgerList, int]:
        """Return the list and its version, after creating an empty list if there is none. Raises VersionConflict if the
        list was removed meanwhile: a write without a version would overwrite somebody else's list."""
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
        give_up: Callable[[], bool] | None = None,
    ) -> int:
        """Compare-and-set the list, and return the new version. With `created`, write only if that ledger's metadata is
        still as it was created.

        Raises MetadataError if the list has grown too long for one more ledger, VersionConflict if somebody else wrote
        the list, and NoSuchNode if the ledger was deleted as an orphan. After a write of unknown outcome, it raises
        PerhapsListed instead of the last two. Then it also reads the list again, despite other errors, until the
        outcome is known: our own document in it is success. Raises MetadataUnknown if that takes too long.
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
        while attempts < UNKNOWN_ATTEMPTS_MAX if give_up is None else not give_up():
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
    """The lists for read-only users. The list of a partition that has left the ring is available as long as its log is
    kept."""

    async def read(self, partition: PartitionId, *, latest: bool = False) -> tuple[LedgerList, int]:
        """Return the list and its version; see LedgerLists. A kept list has version -1, because nobody may change
        it."""
        listed, version = await super().read(partition, latest=latest)
        if listed.ledgers:
            return listed, version
        path = paths.kept_log(partition)
        try:
            data, _ = await self._store.get(path)
        except NoSuchNode:
            return listed, version
        return decode(data, what=path), -1
