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
"""A list that would take more is not given another ledger: half of what ZooKeeper takes."""
CROWDED_BYTES = LIST_BYTES_MAX // 2
"""A list that takes more is rolled no further, and taken over slowly: what is left is for takeovers."""
UNKNOWN_RETRY_S = 0.2
UNKNOWN_ATTEMPTS_MAX = 50


class PerhapsListed(VersionConflict):
    """Somebody else has written the list; what this caller wrote before, with an answer that was lost, may have been in
    it (docs/protocol.md, G22)."""


class LedgerLists:
    """Calls raise MetadataUnavailable or MetadataUnknown besides what they name."""

    def __init__(self, store: MetadataStore, on_read: Callable[[LedgerList], None] = lambda _: None) -> None:
        """`on_read` is called with each list that is read."""
        self._store = store
        self._on_read = on_read
        self._sizes: dict[PartitionId, int] = {}

    def size_of(self, partition: PartitionId) -> int:
        """Bytes that the list takes in the metadata store once it is written again; 0 if it was never read here."""
        return self._sizes.get(partition, 0)

    def is_crowded(self, partition: PartitionId) -> bool:
        """It is so long that it must grow no faster than need be (docs/protocol.md, G21)."""
        return self.size_of(partition) > CROWDED_BYTES

    async def read(self, partition: PartitionId, *, latest: bool = False) -> tuple[LedgerList, int]:
        """The list and its version; -1 for a partition that has none yet. `latest`: as of now, not as of this server's
        last news."""
        path = paths.partition_log(partition)
        if latest:
            await self._store.sync(paths.PARTITIONS)
        try:
            data, stat = await self._store.get(path)
        except NoSuchNode:
            return LedgerList(), -1
        listed = decode(data, what=path)
        self._on_read(listed)
        # One that an older build has written out takes less once it is written again.
        self._sizes[partition] = len(data) if len(data) <= CROWDED_BYTES else len(encode(listed))
        return listed, stat.version

    async def confirm(self, partition: PartitionId, version: int) -> None:
        """Raise VersionConflict if the list has another version by now, as a majority of the store's servers has it."""
        await agreed_by_a_majority(self._store)
        if (await self.read(partition))[1] != version:
            raise VersionConflict(f"partition {partition}: its list has changed meanwhile")

    async def make(self, partition: PartitionId) -> tuple[LedgerList, int]:
        """The list and its version, created empty if there was none. Raises VersionConflict if it was removed right
        then: no version would be written over whatever somebody else had made."""
        path = paths.partition_log(partition)
        listed, version = await self.read(partition, latest=True)
        if version >= 0:
            return listed, version
        await ensure_path(self._store, paths.parent(path))
        with suppress(NodeExists):
            await until_known(lambda: self._store.create(path, encode(listed)))
        listed, version = await self.read(partition)
        if version < 0:
            raise VersionConflict(f"partition {partition}: its list was removed as soon as it was there")
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
        """Compare-and-set; returns the new version. With `created`, only if that ledger's metadata is still as it was
        created.

        Raises MetadataError if it has grown too long for one more ledger, VersionConflict if somebody else wrote,
        NoSuchNode if the ledger was swept; PerhapsListed instead of these two after a write of unknown outcome. After
        such a write the list is read again until it is known, whatever error comes meanwhile: our own document in it is
        success. Raises MetadataUnknown if that takes too long.
        """
        path, data = paths.partition_log(partition), encode(listed)
        if created is not None and len(data) > LIST_BYTES_MAX:
            raise MetadataError(
                f"{path}: {len(listed.ledgers)} ledgers would take {len(data)} of {LIST_BYTES_MAX} bytes"
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
            except MetadataError:  # a store that refuses now says nothing of what went before
                if not is_unknown:
                    raise
            await asyncio.sleep(UNKNOWN_RETRY_S)
        raise MetadataUnknown(f"{path}: whether version {version + 1} is ours could not be learnt")


class ReadersLists(LedgerLists):
    """The lists as those see them who only read: a partition that has left the ring has one as long as its log is
    kept."""

    async def read(self, partition: PartitionId, *, latest: bool = False) -> tuple[LedgerList, int]:
        """As the leaders' list; see LedgerLists. A kept one has version -1: nobody may change it."""
        listed, version = await super().read(partition, latest=latest)
        if listed.ledgers:
            return listed, version
        path = paths.kept_log(partition)
        try:
            data, _ = await self._store.get(path)
        except NoSuchNode:
            return listed, version
        return decode(data, what=path), -1
