"""Finds nodes of the metadata store that cannot be decoded, of all kinds except ledgers, lists and the ring, which fsck
reads anyway."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable

from kvstore.errors import Corrupted, NoSuchNode
from kvstore.meta import codec, paths
from kvstore.meta.cookies import decode_cookie
from kvstore.meta.service_info import decode_service_info
from kvstore.meta.snapshots import SnapshotRecord
from kvstore.meta.store import MetadataStore
from kvstore.partition.election.ranking import Published
from kvstore.server.cluster.topology import Member
from kvstore.types import BookieId, PartitionId
from kvstore.wal.pins import Pin

Decode = Callable[[str, bytes], object]
"""Decodes a node, given its name and bytes."""


def _kinds(partitions: Iterable[PartitionId]) -> list[tuple[str, Decode]]:
    """Return the directories and the decoder of their nodes."""
    kinds: list[tuple[str, Decode]] = [
        (paths.SERVERS, lambda _, data: Member.decode(data)),
        (paths.AVAILABLE, lambda name, data: decode_service_info(BookieId(name), data)),
        (paths.READONLY, lambda name, data: decode_service_info(BookieId(name), data)),
        (paths.COOKIES, lambda name, data: decode_cookie(data, what=name)),
        (paths.SNAPSHOTS, lambda name, data: codec.decode(SnapshotRecord, data, what=name)),
    ]
    for partition in partitions:
        kinds.append((paths.partition_pins(partition), lambda name, data: codec.decode(Pin, data, what=name)))
        kinds.append((paths.partition_replicas(partition), lambda _, data: Published.decode(data)))
    return kinds


async def undecodable_nodes(
    store: MetadataStore, partitions: Iterable[PartitionId]
) -> AsyncIterator[tuple[str, Corrupted]]:
    """Yield the path and error of each undecodable node. Raises MetadataError if the metadata store cannot be read."""
    for directory, decode in _kinds(partitions):
        try:
            names = await store.children(directory)
        except NoSuchNode:
            continue
        for name in names:
            path = paths.join(directory, name)
            if path == paths.READONLY:
                continue
            try:
                decode(name, (await store.get(path))[0])
            except NoSuchNode:
                continue
            except Corrupted as error:
                yield path, error
