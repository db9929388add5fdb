"""A partition's znodes: the leader's, the term that guards it, and what each replica publishes.

`/leader` is an ephemeral, whose own version starts at 0 again each time; so every claim is a multi that bumps `/term`,
and removing a stale leader checks the term at which it was read. A slow remover can then never remove its successor.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.env import Nursery
from kvstore.errors import (
    Corrupted,
    MetadataUnknown,
    NodeExists,
    NoSuchNode,
    VersionConflict,
)
from kvstore.meta import paths
from kvstore.meta.ephemeral import KeptEphemeral
from kvstore.meta.store import Check, Create, Delete, MetadataStore, SetData, Watch, ensure_path
from kvstore.partition.election import LeaderRecord, Published
from kvstore.types import PartitionId, ServerId


class Claims:
    """Reads and writes one partition's election znodes. All methods raise MetadataUnavailable while there is no
    connection."""

    def __init__(self, store: MetadataStore, partition: PartitionId, server: ServerId) -> None:
        self._store = store
        self.leader_path = paths.partition_leader(partition)
        self._term = paths.partition_term(partition)
        self._replicas = paths.partition_replicas(partition)
        # Only this server's processes write it, one at a time, so whatever is there was ours.
        self._mine = KeptEphemeral(store, paths.partition_replica(partition, server), is_our_former=lambda _: True)

    def start(self, nursery: Nursery) -> None:
        """Keep what was published in place over lost sessions, until the nursery ends."""
        self._mine.start(nursery)

    async def prepare(self) -> None:
        """Create the parents where they are absent."""
        await ensure_path(self._store, self._term)
        await ensure_path(self._store, self._replicas)

    def watch_leader(self, changed: Callable[[], None]) -> Watch:
        """Call `changed` soon after the leader's znode may have changed."""
        return self._store.watch(self.leader_path, changed)

    async def leader(self) -> LeaderRecord | None:
        """Who holds the leader's znode; None if nobody."""
        try:
            data, _ = await self._store.get(self.leader_path)
        except NoSuchNode:
            return None
        return LeaderRecord.decode(data)

    async def claim(self, record: LeaderRecord) -> bool:
        """Create the leader's znode. False if another was first. True too if a claim of unknown outcome turns out to be
        one's own."""
        _, term = await self._store.get(self._term)
        create = Create(self.leader_path, record.encode(), ephemeral=True)
        try:
            await self._store.multi([SetData(self._term, record.server.encode(), term.version), create])
        except (NodeExists, VersionConflict):
            return False
        except MetadataUnknown:
            return await self._is_mine(record)
        return True

    async def release(self, record: LeaderRecord) -> None:
        """Remove one's own leader znode, if it is there. Another's is left alone."""
        await self._remove(record)

    async def remove_stale(self, record: LeaderRecord) -> None:
        """Remove the znode of a leader whose process is gone, unless the znode is no longer that process's."""
        await self._remove(record)

    async def publish(self, mine: Published) -> None:
        """Say how far this replica is. Raises MetadataError if that could not be written just now."""
        await self._mine.publish(mine.encode())

    async def published(self) -> dict[ServerId, Published]:
        """What the replicas that are up say of themselves."""
        found: dict[ServerId, Published] = {}
        for name in await self._store.children(self._replicas):
            try:
                data, _ = await self._store.get(f"{self._replicas}/{name}")
                found[ServerId(name)] = Published.decode(data)
            except (NoSuchNode, Corrupted):
                continue  # it went while we read; or it is of a version that we cannot rank
        return found

    async def _is_mine(self, record: LeaderRecord) -> bool:
        try:
            data, stat = await self._store.get(self.leader_path)
        except NoSuchNode:
            return False
        return data == record.encode() and stat.owner == self._store.session

    async def _remove(self, record: LeaderRecord) -> None:
        _, term = await self._store.get(self._term)
        try:
            data, _ = await self._store.get(self.leader_path)
            found = LeaderRecord.decode(data)
            if (found.server, found.nonce) != (record.server, record.nonce):
                return
            await self._store.multi([Check(self._term, term.version), Delete(self.leader_path, -1)])
        except (NoSuchNode, VersionConflict):
            return
