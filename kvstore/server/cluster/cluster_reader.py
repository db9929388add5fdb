"""Reads the state of the cluster from the metadata store: the ring, the servers and the leaders.

A znode that cannot be decoded is skipped: its last known content stays in use, and the other znodes are read.
"""

from __future__ import annotations

import logging

from kvstore.errors import NoSuchNode, UndecodableNode
from kvstore.meta import paths
from kvstore.meta.layout import get_unless_closed
from kvstore.meta.store import MetadataStore
from kvstore.partition.election.ranking import LeaderRecord
from kvstore.ring import codec
from kvstore.ring.hashing import KeyHash
from kvstore.ring.ring import Ring
from kvstore.server.cluster.topology import ClusterTopology, Member
from kvstore.types import PartitionId, ServerId

log = logging.getLogger(__name__)


class ClusterReader:
    """Reads single znodes. Each method raises MetadataError."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self.undecodable: set[str] = set()
        """Znodes that could not be decoded when they were last read."""
        self._hash: KeyHash | None = None
        self.stored = 0, 0
        """The version of a ring, and the version of the znode from which it was read."""

    async def ring(self) -> Ring:
        """Read the ring. Raises NoSuchNode, and UndecodableNode, also if the key hash has changed, by which
        this server's replicas have stored their keys."""
        data, stat = await self._store.get(paths.RING)
        ring = codec.decode(data)
        if self._hash is not None and ring.hash is not self._hash:
            raise UndecodableNode(f"ring: expected key hash {self._hash.name}, got {ring.hash.name}")
        self._hash = ring.hash
        self.undecodable.discard(paths.RING)
        if ring.version > self.stored[0]:
            self.stored = ring.version, stat.version
        return ring

    async def leader(self, partition: PartitionId, known: ClusterTopology | None) -> tuple[ServerId, int] | None:
        """Return the leader of a partition and its epoch, or None if there is no leader."""
        path = paths.partition_leader(partition)
        try:
            data, _ = await get_unless_closed(self._store, path)
            record = LeaderRecord.decode(data)
        except NoSuchNode:
            self.undecodable.discard(path)
            return None
        except UndecodableNode as error:
            self.pass_over(path, error)
            return known.leaders.get(partition) if known is not None else None
        self.undecodable.discard(path)
        return record.server, record.epoch

    async def servers(self, known: ClusterTopology | None) -> dict[ServerId, Member]:
        """Return all registered servers."""
        found: dict[ServerId, Member] = {}
        try:
            names = await self._store.children(paths.SERVERS)
        except NoSuchNode:
            return found
        self.undecodable -= {paths.server(each) for each in self.undecodable_servers if each not in names}
        for name in names:
            server = ServerId(name)
            try:
                data, _ = await get_unless_closed(self._store, paths.server(server))
                found[server] = Member.decode(data)
                self.undecodable.discard(paths.server(server))
            except NoSuchNode:
                continue
            except UndecodableNode as error:
                self.pass_over(paths.server(server), error)
                if known is not None and server in known.servers:
                    found[server] = known.servers[server]
        return found

    @property
    def undecodable_servers(self) -> list[ServerId]:
        """Servers whose znodes could not be decoded when they were last read."""
        below = paths.server(ServerId(""))
        return sorted(ServerId(each.removeprefix(below)) for each in self.undecodable if each.startswith(below))

    def pass_over(self, path: str, error: UndecodableNode) -> None:
        """Keep using the last known content of a znode, and log the error once."""
        if path not in self.undecodable:
            log.error("cannot decode %s, using its last known content: %s", path, error)
        self.undecodable.add(path)
