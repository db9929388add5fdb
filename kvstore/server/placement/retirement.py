"""Removes the remains of retired partitions: their znodes at once, and their logs after feeds have had time to read
them. Every step is idempotent."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace

from kvstore.errors import NodeExists, NoSuchLedger, NoSuchNode, NotEmpty, UndecodableNode, VersionConflict
from kvstore.meta import paths
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.store import Change, Check, Create, MetadataStore, SetData, ensure_path
from kvstore.ring import Ring
from kvstore.ring import codec as codec_of_ring
from kvstore.types import LedgerId, PartitionId
from kvstore.wal import list_codec
from kvstore.wal.creator import owner_of
from kvstore.wal.ledger_list import LedgerList, Listed
from kvstore.wal.lists import LedgerLists
from kvstore.wal.pins import Pins

log = logging.getLogger(__name__)


# docs/protocol.md H5
async def set_apart(store: MetadataStore, partition: PartitionId, *, now_ms: int) -> bool:
    """Keep the log of a retired partition for readers, and end any leadership of the partition. Return True if that
    is done. Return False and change nothing if a replica is up, a pin holds the log, the ring has forgotten the
    partition, or another process leads the partition or changes the ring. Raises MetadataError."""
    if await _is_in_use(
        store, partition, now_ms
    ):  # check before reading the ring, because some logs are held for hours
        return False
    ring, ring_version = await _newest_ring(store)
    if partition not in ring.partitions:
        return False
    listed, version = await LedgerLists(store).read(partition, latest=True)
    try:
        await _set_apart(store, partition, listed, version, ring_version)
    except (NodeExists, VersionConflict):
        return False
    return True


async def remove_rest(store: MetadataStore, partition: PartitionId, made: Collection[LedgerId], *, now_ms: int) -> bool:
    """Delete the znodes of a partition whose log is kept, and those ledgers in `made` that no reader can reach.
    `drop_kept` deletes the other ledgers later. Return False without deleting the znodes if a pin holds the log by
    now. Raises MetadataError."""
    kept = {each.id for each in await _kept(store, partition)}
    removed = sorted(set(made) - kept)
    for ledger in removed:
        await LedgerStore(store).remove(ledger, -1)
    # A pin created since the first check has found its ledger in the list (docs/protocol.md G14).
    if await Pins(store, LedgerLists(store)).oldest(partition, now_ms) is not None:
        return False
    await _remove_tree(store, paths.partition(partition))
    log.info("partition=%s removed its znodes and %d ledgers, kept %d ledgers", partition, len(removed), len(kept))
    return True


async def _newest_ring(store: MetadataStore) -> tuple[Ring, int]:
    """Return the latest ring and the version of its znode."""
    await store.sync(paths.RING)
    data, stat = await store.get(paths.RING)
    return codec_of_ring.decode(data), stat.version


async def _set_apart(
    store: MetadataStore, partition: PartitionId, listed: LedgerList, version: int, ring_version: int
) -> None:
    """Copy the list for readers and empty the leader's list, which ends any leadership. Both happen in one step:
    between two steps a leader could add a ledger to the list that would be kept for no reader. A process that leads an
    emptied list starts another list, which is kept as well.

    Also done for a partition that never had a ledger: its empty list tells readers of the feed that they have missed
    nothing. It must therefore not be created after the log was dropped. Raises NodeExists or VersionConflict if the
    list, the kept list or the ring has changed.
    """
    await ensure_path(store, paths.KEPT)
    path = paths.kept_log(partition)
    change: list[Change] = [Check(paths.RING, ring_version)]
    try:
        data, stat = await store.get(path)
    except NoSuchNode:
        change.append(Create(path, list_codec.encode(listed)))
    else:  # from an earlier attempt
        if not listed.ledgers:
            return
        kept = list_codec.decode(data, what=path)
        more = (each for each in listed.ledgers if not kept.names(each.id))
        # The end before the last two ledgers belongs to other ledgers now (docs/protocol.md G25).
        both = replace(kept, epoch=listed.epoch, ledgers=(*kept.ledgers, *more), closed_end=None)
        change.append(SetData(path, list_codec.encode(both), stat.version))
    if listed.ledgers:
        change.append(SetData(paths.partition_log(partition), list_codec.encode(LedgerList()), version))
    await store.multi(change)


async def _kept(store: MetadataStore, partition: PartitionId) -> Sequence[Listed]:
    path = paths.kept_log(partition)
    try:
        data, _ = await store.get(path)
    except NoSuchNode:
        return ()
    return list_codec.decode(data, what=path).ledgers


async def kept_ledgers(store: MetadataStore) -> set[LedgerId]:
    """Return all kept ledgers of partitions that have left the ring. Raises MetadataError."""
    found: set[LedgerId] = set()
    for partition in await partitions_kept(store):
        found.update(each.id for each in await _kept(store, partition))
    return found


async def partitions_kept(store: MetadataStore) -> list[PartitionId]:
    """Return the partitions that have left the ring but whose logs are kept. Raises MetadataError."""
    try:
        return [PartitionId(name) for name in sorted(await store.children(paths.KEPT))]
    except NoSuchNode:
        return []


async def drop_kept(
    store: MetadataStore, *, now_ms: int, keep_ms: int, among: Collection[PartitionId] | None = None
) -> int:
    """Delete the logs of partitions that left the ring more than `keep_ms` ago, of all partitions or only of those in
    `among`. Returns the number of deleted logs. While the ring contains a partition, a missing log means that the
    partition never had one, so its log is deleted only after that. Raises MetadataError."""
    kept_here = await partitions_kept(store)
    here = (await _newest_ring(store))[0].partitions if kept_here else {}
    count = 0
    for partition in kept_here if among is None else sorted(set(kept_here) & set(among)):
        try:
            count += partition not in here and await _drop_if_old(store, partition, now_ms - keep_ms)
        except NoSuchNode:
            continue  # deleted by another server
        except UndecodableNode as error:
            log.warning("partition=%s keeping its log, which cannot be decoded: %s", partition, error)
    return count


async def _drop_if_old(store: MetadataStore, partition: PartitionId, before_ms: int) -> bool:
    _, stat = await store.get(paths.kept_log(partition))
    kept = await _kept(store, partition)
    if not kept or stat.modified_ms > before_ms:
        return False
    for each in kept:
        await LedgerStore(store).remove(each.id, -1)
    await store.delete(paths.kept_log(partition), -1)
    log.info("partition=%s left the ring long ago, removed its log", partition)
    return True


async def _is_in_use(store: MetadataStore, partition: PartitionId, now_ms: int) -> bool:
    if await Pins(store, LedgerLists(store)).oldest(partition, now_ms) is not None:
        return True
    with suppress(NoSuchNode):
        await store.get(paths.partition_leader(partition))
        return True
    with suppress(NoSuchNode):
        return bool(await store.children(paths.partition_replicas(partition)))
    return False


async def ledgers_made_for(
    store: MetadataStore, partitions: Collection[PartitionId]
) -> dict[PartitionId, list[LedgerId]]:
    """Return the ledgers of each partition, including ledgers that its list does not contain. Only for partitions whose
    log is kept, so that no new ledgers appear. Reads the metadata of all ledgers once, which takes minutes if there are
    many. Ledgers that cannot be decoded are skipped; fsck reports them. Raises MetadataError."""
    ledgers = LedgerStore(store)
    found: dict[PartitionId, list[LedgerId]] = {each: [] for each in partitions}
    for ledger in await ledgers.list_ids():
        with suppress(NoSuchLedger, UndecodableNode):
            metadata, _ = await ledgers.read(ledger)
            owner = owner_of(metadata)
            if owner in found:
                found[owner].append(ledger)
    return found


async def _remove_tree(store: MetadataStore, path: str) -> None:
    with suppress(NoSuchNode):
        for name in await store.children(path):
            await _remove_tree(store, paths.join(path, name))
        with suppress(NotEmpty):  # a replica has started; the next round removes the rest
            await store.delete(path, -1)
