"""Keeps this server's view of the cluster up to date. Watches are best effort, so the whole state is also read every
10 seconds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from kvstore.env import Env
from kvstore.env.events import wait_within
from kvstore.errors import MetadataError, NoSuchNode, UndecodableNode
from kvstore.meta import paths
from kvstore.meta.store import MetadataStore, Watch
from kvstore.ring.ring import Ring
from kvstore.server.cluster.announcement import Announcement
from kvstore.server.cluster.cluster_reader import ClusterReader
from kvstore.server.cluster.topology import ClusterTopology, Member
from kvstore.server.listeners import Listeners
from kvstore.types import PartitionId, ServerId

log = logging.getLogger(__name__)

REREAD_S = 10.0
RETRY_S = 0.2
DISBELIEF_S = 1.0
"""Time after a hint of a nonexistent ring version in which only watches cause this server to read the ring."""
SPREAD_S = 0.002
"""Delay per server of the cluster, so that servers do not all read a changed ring at once."""


class Membership:
    """One server's view of its cluster. `topology` is replaced as a whole at each change, and then the callbacks
    that were added with `on_topology` are called."""

    def __init__(self, env: Env, store: MetadataStore, member: Member) -> None:
        self._env, self._store = env, store
        self.announcement = Announcement(store, member)
        self._reader = ClusterReader(store)
        self._nursery = env.nursery.child("membership")
        self._topology: ClusterTopology | None = None
        self._listeners = Listeners()
        self._wanted: set[str] = set()
        """Paths that must be read again."""
        self._hint = asyncio.Event()
        self._watches: dict[str, Watch] = {}
        self._failed = False
        self._hinted = 0
        """The latest ring version that a hint has named and that was not checked yet."""
        self._disbelieves_until = 0.0
        self.false_hints = 0
        self.read_at = env.clock.now()
        """Time at which the whole state was last read, or at which the first read began."""

    @property
    def topology(self) -> ClusterTopology:
        assert self._topology is not None, "wait_ring has not returned yet"
        return self._topology

    def start(self) -> None:
        """Start reading the state and following its changes."""
        for path in (paths.RING, paths.SERVERS):
            self._watch(path)
        self._nursery.spawn(self._keep_fresh(), name="read")

    async def wait_ring(self) -> Ring:
        """Wait until there is a ring, and return it."""
        ready = asyncio.Event()
        forget = self.on_topology(ready.set)
        while self._topology is None:
            await ready.wait()
            ready.clear()
        forget()
        return self._topology.ring

    async def announce(self) -> None:
        """Register this server. If the metadata store is unavailable or another process with the same id is
        registered, the server is registered later. The registration survives lost sessions."""
        await self.announcement.publish(self._nursery)

    @property
    def undecodable_servers(self) -> list[ServerId]:
        """Servers whose registrations cannot be decoded."""
        return self._reader.undecodable_servers

    async def close(self) -> None:
        for watch in self._watches.values():
            watch.close()
        await self._nursery.close()

    def on_topology(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed` after each change of the topology. Returns a function that removes the callback."""
        return self._listeners.add(changed)

    def note_leader(self, partition: PartitionId, server: ServerId | None) -> None:
        """Record which server leads a partition. A local replica may learn this before the leader's znode exists:
        during a handover, operations may already wait at the new leader. The znode is read when it changes, and at
        once if `server` is None."""
        found = self._topology
        if found is not None and partition in found.ring.partitions:
            known = found.leaders.get(partition)
            if server is None or known is None or known[0] != server:
                epoch = known[1] if known else 0
                self._replace(found.with_leader(partition, None if server is None else (server, epoch)))
            elif server == self.announcement.member.id:
                self._listeners.notify()  # operations waiting here can proceed
        if server is None:
            self.suspect(partition)

    def suspect(self, partition: PartitionId) -> None:
        """Read the partition's leader again, because the known one no longer leads it."""
        self._want(paths.partition_leader(partition))

    @property
    def stored_ring(self) -> tuple[Ring, int] | None:
        """The known ring and the version of its znode, or None if that version is unknown."""
        ring, version = self.topology.ring, self._reader.stored
        return (ring, version[1]) if version[0] == ring.version else None

    # docs/protocol.md H9
    def note_written(self, ring: Ring, stored: int) -> None:
        """Record that this server has written a later ring. `stored` is the new version of its znode."""
        if ring.version > self._reader.stored[0]:
            self._reader.stored = ring.version, stored
        if self._topology is not None and ring.version > self._topology.ring.version:
            known = set(self._topology.ring.partitions)
            for partition in sorted(set(ring.partitions) - known):
                self._want(paths.partition_leader(partition))
            self._replace(replace(self._topology, ring=ring))
            self._unwatch(known - set(ring.partitions))

    async def reread_servers(self) -> None:
        """Read the registered servers again, because an operator's request may depend on a change that no watch has
        reported yet. Costs a round trip to the metadata store, and one for each server. Raises MetadataError."""
        await self._store.sync(paths.SERVERS)
        await self._read_some({paths.SERVERS})

    def suspect_ring(self) -> None:
        """Read the ring again, because a partition rejected a key that the known ring assigns to it."""
        self._want(paths.RING)

    def hint_ring(self, routed: int) -> bool:
        """Read the ring again at once, because an operation or an answer refers to the later version `routed`
        (docs/protocol.md H9). Return False if waiting is pointless: that version is already known, or a recent hint
        named a version that does not exist."""
        if self._topology is None or routed <= self._topology.ring.routed:
            return False
        if self._env.clock.now() < self._disbelieves_until:
            return False
        if routed > self._hinted:
            self._hinted = routed
            self._want(paths.RING)
        return True

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _watch(self, path: str) -> None:
        if path not in self._watches:
            changed = self._want_soon if path == paths.RING else self._want
            self._watches[path] = self._store.watch(path, lambda: changed(path))

    def _want(self, path: str) -> None:
        self._wanted.add(path)
        self._hint.set()

    def _want_soon(self, path: str) -> None:
        """Read the path again after a random delay, so that servers do not all read at once. An operation that was
        answered MOVED does not wait for it (docs/protocol.md H7)."""
        servers = len(self._topology.servers) if self._topology is not None else 0
        delay_s = self._env.random.random() * SPREAD_S * servers
        asyncio.get_running_loop().call_later(delay_s, self._want, path)

    async def _keep_fresh(self) -> None:
        everything, again_at = True, 0.0
        while True:
            wanted, self._wanted = self._wanted, set()
            self._hint.clear()
            try:
                if everything or self._topology is None:
                    if self._topology is not None:
                        self._wanted |= wanted  # read first
                    await self._read_all()
                    self.read_at = self._env.clock.now()
                    again_at = self._env.clock.now() + REREAD_S * (1 + self._env.random.random() / 4)
                else:
                    await self._read_some(wanted)
                self._failed = everything = False
            except MetadataError as error:
                if not self._failed:
                    log.warning("cannot read the cluster's state, using the last known state: %s", error)
                self._failed = True
                self._wanted.update(wanted)
                await asyncio.sleep(RETRY_S)
                continue
            left_s = again_at - self._env.clock.now()  # recalculated, because hints may arrive constantly
            everything = left_s <= 0 or not await wait_within(self._hint, left_s)

    async def _read_all(self) -> None:
        try:
            ring = await self._read_hinted_ring()  # covers a hint that arrived meanwhile
        except NoSuchNode:
            if self._topology is None:
                return  # the cluster is still being created
            raise
        except UndecodableNode as error:
            if self._topology is None:
                raise
            self._reader.pass_over(paths.RING, error)
            ring = self._topology.ring
        servers = await self._reader.servers(self._topology)
        if self._topology is not None:
            return await self._read_leaders(self._newer(ring), servers)
        leaders = {each: await self._read_leader(each) for each in sorted(ring.partitions)}
        known = {partition: leader for partition, leader in leaders.items() if leader is not None}
        self._replace(ClusterTopology(ring, known, servers))

    async def _read_some(self, wanted: set[str]) -> None:
        """Read what may have changed, and the leaders of new partitions. The leaders' paths are added to `wanted`,
        which is read again if this read fails halfway."""
        if paths.RING in wanted:
            known = self.topology.ring
            try:
                ring = await self._read_hinted_ring()
            except UndecodableNode as error:
                self._reader.pass_over(paths.RING, error)
                ring = known
            wanted |= {paths.partition_leader(each) for each in set(ring.partitions) - set(known.partitions)}
            self._replace(replace(self.topology, ring=self._newer(ring)))
            self._unwatch(set(known.partitions) - set(self.topology.ring.partitions))
        if paths.SERVERS in wanted:
            self._replace(replace(self.topology, servers=await self._reader.servers(self._topology)))
        for partition in sorted(self.topology.ring.partitions):
            if paths.partition_leader(partition) in wanted:
                leader = await self._read_leader(partition)
                self._replace(self.topology.with_leader(partition, leader))

    async def _read_hinted_ring(self) -> Ring:
        """Read the ring. If a hint named a later ring than the connected metadata server has, read the latest ring.
        If no such ring exists, ignore hints for DISBELIEF_S seconds."""
        ring = await self._reader.ring()
        hinted = self._hinted
        if ring.routed < hinted:
            await self._store.sync(paths.RING)
            ring = await self._reader.ring()
        if ring.routed < hinted:
            self.false_hints += 1
            self._disbelieves_until = self._env.clock.now() + DISBELIEF_S
            self._hinted = 0
        elif ring.routed >= self._hinted:
            self._hinted = 0
        else:
            self._want(paths.RING)  # another hint has named a later ring meanwhile
        return ring

    def _newer(self, ring: Ring) -> Ring:
        """Return the later of the ring that was read and the known one. The ring that was read is older if it comes
        from a metadata server that lags behind."""
        known = self._topology
        return ring if known is None or ring.version >= known.ring.version else known.ring

    def _unwatch(self, gone: Iterable[PartitionId]) -> None:
        for partition in sorted(gone):
            self._reader.undecodable.discard(paths.partition_leader(partition))
            watch = self._watches.pop(paths.partition_leader(partition), None)
            if watch is not None:
                watch.close()

    async def _read_leader(self, partition: PartitionId) -> tuple[ServerId, int] | None:
        self._watch(paths.partition_leader(partition))
        return await self._reader.leader(partition, self._topology)

    async def _read_leaders(self, ring: Ring, servers: dict[ServerId, Member]) -> None:
        """Apply the new ring and servers, and read the leaders.

        With many partitions or a slow metadata store this takes seconds. Paths that are known to have changed are read
        first, then partitions without a known leader, such as new ones, because operations wait for them.
        """
        known = self.topology
        gone = set(known.ring.partitions) - set(ring.partitions)
        leaders = {each: leader for each, leader in known.leaders.items() if each not in gone}
        self._replace(ClusterTopology(ring, leaders, servers))
        self._unwatch(gone)
        for partition in sorted(ring.partitions, key=lambda each: (each in leaders, each)):
            if self._wanted:
                wanted, self._wanted = self._wanted, set()
                self._hint.clear()
                try:
                    await self._read_some(wanted)
                except MetadataError:
                    self._wanted.update(wanted)
                    raise
            if partition in self.topology.ring.partitions:
                leader = await self._read_leader(partition)
                if leader != self.topology.leaders.get(partition):
                    self._replace(self.topology.with_leader(partition, leader))

    def _replace(self, topology: ClusterTopology) -> None:
        before, self._topology = self._topology, topology
        if before is not None and _same(before, topology):
            return
        self._listeners.notify()


def _same(one: ClusterTopology, other: ClusterTopology) -> bool:
    return one.ring.version == other.ring.version and one.leaders == other.leaders and one.servers == other.servers
