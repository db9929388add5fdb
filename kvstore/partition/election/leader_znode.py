"""Reads and writes a partition's election znodes: the leader's, the term that guards it, and what each replica
publishes.

`/leader` is ephemeral, so its own version starts at 0 again each time. Therefore every claim is a multi that bumps
`/term`, and removing a stale leader checks the term at which it was read. A slow remover can then never remove the
leader's successor.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from kvstore.env import Nursery
from kvstore.errors import (
    MetadataUnknown,
    NodeExists,
    NoSuchNode,
    UndecodableNode,
    VersionConflict,
)
from kvstore.meta import codec, paths
from kvstore.meta.ephemeral import KeptEphemeral
from kvstore.meta.layout import get_unless_closed
from kvstore.meta.store import Change, Check, Create, Delete, MetadataStore, SetData, Watch, ensure_path
from kvstore.partition.election.jury import Trusted
from kvstore.partition.election.ranking import LeaderRecord, Published
from kvstore.types import PartitionId, ServerId


class Claims:
    """Reads and writes the election znodes of one partition. All methods raise MetadataUnavailable while there is no
    connection to the metadata store."""

    def __init__(self, store: MetadataStore, partition: PartitionId, server: ServerId) -> None:
        self._store = store
        self.leader_path = paths.partition_leader(partition)
        self._term = paths.partition_term(partition)
        self._replicas = paths.partition_replicas(partition)
        self._trusted = paths.partition_trusted(partition)
        # Only this server's processes write it, one at a time, so whatever is there was ours.
        self._published_path = paths.partition_replica(partition, server)
        self._mine = KeptEphemeral(store, self._published_path, is_our_former=lambda _: True)
        self._published: Published | None = None

    def start(self, nursery: Nursery) -> None:
        """Until the nursery ends, recreate the published znode whenever a session is lost."""
        self._mine.start(nursery)

    async def prepare(self) -> None:
        """Create the parent znodes if they are absent."""
        await ensure_path(self._store, self._term)
        await ensure_path(self._store, self._replicas)

    def watch_leader(self, changed: Callable[[], None]) -> Watch:
        """Call `changed` soon after the leader's znode may have changed."""
        return self._store.watch(self.leader_path, changed)

    async def leader(self) -> LeaderRecord | None:
        """Return the record in the leader's znode, or None if there is no znode."""
        return (await self.leader_seen(""))[0]

    async def leader_seen(self, nonce: str) -> tuple[LeaderRecord | None, bool]:
        """Return the record in the leader's znode, and True if the record is this process's own (it has this nonce) but
        belongs to a session that is lost."""
        try:
            data, stat = await self._store.get(self.leader_path)
        except NoSuchNode:
            return None, False
        try:
            record = LeaderRecord.decode(data)
        except UndecodableNode:
            if stat.owner:
                raise  # it goes with the session of its owner
            await self._remove_invalid(stat.version)
            return None, False
        return record, record.nonce == nonce and self._store.session not in (0, stat.owner)

    async def term(self) -> int:
        """Return the version of the term. It increases with each claim."""
        _, term = await self._store.get(self._term)
        return term.version

    # docs/protocol.md P24
    async def claim(self, record: LeaderRecord) -> bool:
        """Create the leader's znode, or recreate this process's own znode in the current session. Returns False if
        another replica was first. A claim whose outcome was unknown and that turns out to have succeeded also returns
        True."""
        return await self._become(record, await self.term(), []) or await self._claim_own(record)

    async def replace_leader(self, term: int, record: LeaderRecord) -> bool:
        """Replace the former leader's znode by `record`, as that leader requested when the term had version `term`.
        Returns False if any replica has claimed the znode since then. The leader's znode exists at every moment."""
        return await self._become(record, term, [Delete(self.leader_path, -1)])

    async def release(self, record: LeaderRecord) -> None:
        """Remove the leader's znode if it belongs to this process. Another process's znode is left alone."""
        await self._remove(record)

    async def withdraw(self, record: LeaderRecord) -> None:
        """Remove the leader znode and the published znode of a replica that has stopped, even if the outcome of its
        last claim is unknown."""
        await self._store.sync(self.leader_path)
        with suppress(NoSuchNode):
            await self._remove(record)
        with suppress(NoSuchNode):
            await self._store.delete(self._published_path, -1)

    async def remove_stale(self, record: LeaderRecord) -> None:
        """Remove the znode of a leader whose process is gone, unless the znode belongs to another process by now."""
        await self._remove(record)

    async def publish(self, mine: Published, *, always: bool = False) -> None:
        """Publish this replica's progress if it has changed, or in any case with `always`. Raises MetadataError if the
        write failed."""
        if always or mine != self._published:
            self._published = None
            await self._mine.publish(mine.encode())
            self._published = mine

    async def published(self) -> dict[ServerId, Published]:
        """Return the published progress of all replicas that are up."""
        found: dict[ServerId, Published] = {}
        for name in await self._store.children(self._replicas):
            published = await self.published_by(ServerId(name))
            if published is not None:
                found[ServerId(name)] = published
        return found

    async def published_by(self, server: ServerId) -> Published | None:
        """Return the replica's published progress. Returns None if the replica is not up, or publishes in a format that
        this release cannot rank, or for another user of the metadata store."""
        try:
            data, _ = await get_unless_closed(self._store, f"{self._replicas}/{server}")
            return Published.decode(data)
        except (NoSuchNode, UndecodableNode):
            return None

    async def trusted(self) -> Trusted | None:
        """Return the checksum that an operator has declared right, if any (docs/protocol.md, P35). Raises
        MetadataError."""
        await self._store.sync(self._trusted)
        try:
            data, _ = await self._store.get(self._trusted)
        except NoSuchNode:
            return None
        return codec.decode(Trusted, data, what=self._trusted)

    async def trust(self, trusted: Trusted) -> None:
        """Declare a checksum right. Raises MetadataError."""
        data = codec.encode(trusted)
        try:
            await self._store.create(self._trusted, data)
        except NodeExists:
            await self._store.set(self._trusted, data, -1)

    async def _claim_own(self, record: LeaderRecord) -> bool:
        """Claim over this process's own znode: of an earlier session, or from before the lead was offered to another
        replica. Bumping the term withdraws that offer."""
        term = await self.term()
        try:
            data, _ = await self._store.get(self.leader_path)
        except NoSuchNode:
            return False  # its owner has given it back: it is read again, and then claimed
        found = LeaderRecord.decode(data)
        if (found.server, found.nonce) != (record.server, record.nonce):
            return False
        return await self._become(record, term, [Delete(self.leader_path, -1)])

    async def _become(self, record: LeaderRecord, term: int, before: list[Change]) -> bool:
        change: list[Change] = [SetData(self._term, record.server.encode(), term), *before]
        try:
            await self._store.multi([*change, Create(self.leader_path, record.encode(), ephemeral=True)])
        except (NodeExists, NoSuchNode, VersionConflict):
            return False
        except MetadataUnknown:
            return await self._is_mine(record)
        return True

    async def _is_mine(self, record: LeaderRecord) -> bool:
        try:
            data, stat = await self._store.get(self.leader_path)
        except NoSuchNode:
            return False
        return data == record.encode() and stat.owner == self._store.session

    async def _remove_invalid(self, version: int) -> None:
        """Remove a znode that is in the leader's place but is neither ephemeral nor a leader's: no replica could ever
        claim."""
        with suppress(NoSuchNode, VersionConflict):
            await self._store.delete(self.leader_path, version)

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
