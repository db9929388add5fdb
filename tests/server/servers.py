"""Several servers in one process: real dispatchers and links over loopback, given leaders, and state in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import redis.asyncio as redis

from kvstore.devcluster.zookeeper import free_port
from kvstore.env.ports import Env
from kvstore.env.real import real_env
from kvstore.env.secret import ClusterSecret
from kvstore.env.traces import Traces
from kvstore.errors import NoSuchNode
from kvstore.meta import paths
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.meta.store import ensure_path
from kvstore.partition.election.ranking import LeaderRecord
from kvstore.ring import codec
from kvstore.server.cluster.membership import Membership
from kvstore.server.cluster.topology import Member
from kvstore.server.config import Limits
from kvstore.server.peer.links import PeerLinks
from kvstore.server.peer.proof import NONCE_BYTES, PURPOSE, CallingSide, Credentials
from kvstore.server.peer.server import PeerServer
from kvstore.server.redis.listener import RespServer
from kvstore.server.routing.dispatch import Dispatcher
from kvstore.types import PartitionId, ServerId
from kvstore.versions import LINK_FIRST
from tests.ring.rings import new_ring
from tests.server.backends import Collector, LedPartition
from tests.server.redis.resp_port import Raw
from tests.waiting import wait_until


class Server:
    """One of the servers."""

    def __init__(self, cluster: Servers, name: str, root: Path, limits: Limits) -> None:
        self.id = ServerId(name)
        self.cluster = cluster
        env = real_env(root, name=name)
        self.env = replace(env, traces=cluster.traces_of(name, env))
        self.store = MemoryStore(cluster.tree)
        self.sink = Collector()
        self.limits = limits
        self.hosted: dict[PartitionId, LedPartition] = {}

    async def open(self) -> None:
        limits = self.limits
        address = self.cluster.addresses.get(self.id) or f"127.0.0.1:{free_port()}"
        member = Member(id=self.id, resp=address)
        self.membership = Membership(self.env, self.store, member)
        self.membership.start()
        await self.membership.wait_ring()
        self.dispatcher = Dispatcher(self.env, self.id, self.membership, limits)
        keys = self.cluster.secret.derive_all(PURPOSE)
        nonce = partial(self.env.random.randbytes, NONCE_BYTES)
        self.credentials = Credentials(self.id, self.cluster.instance, keys, nonce)
        self.peers = PeerServer(self.env, self.credentials, self.dispatcher, 2 * limits.forwarded_max)
        self.links = PeerLinks(self.env, self.credentials, self.dispatcher, limits.forwarded_max, self.peers.answer)
        self.dispatcher.use_links(self.links)
        self.resp = RespServer(self.env, self.dispatcher, limits, self.peers.accept, dict)
        self.cluster.addresses[self.id] = await self.resp.open(address)
        self.membership.announcement.member = Member(id=self.id, resp=self.cluster.addresses[self.id])
        await self.membership.announce()

    async def close(self) -> None:
        """Break every connection, like a process that ends."""
        await self.resp.close()
        await self.peers.close()
        await self.links.close()
        self.dispatcher.close()
        await self.membership.close()
        for replica in self.hosted.values():
            replica.stop()
        await self.store.close()
        await self.env.nursery.close()

    async def introduce(self, raw: Raw, to: str, version: int = LINK_FIRST) -> None:
        """Prove on a new connection to another server that it comes from this one."""
        caller = CallingSide(self.credentials, ServerId(to), version)
        raw.writer.write(caller.hello())
        proof, _ = caller.take(await raw.read_line())
        raw.writer.write(proof)
        caller.take(await raw.read_line())
        assert caller.is_proven

    def redis(self) -> redis.Redis:
        host, _, port = self.cluster.addresses[self.id].rpartition(":")
        return redis.Redis(host=host, port=int(port))

    async def knows(self, leaders: dict[str, str]) -> bool:
        return {each: found[0] for each, found in self.dispatcher.topology.leaders.items()} == leaders


class Servers:
    """The cluster."""

    def __init__(self) -> None:
        self.traces_of: Callable[[str, Env], Traces] = lambda name, env: Traces()
        self.tree = MemoryTree()
        self.secret = ClusterSecret((bytes(range(32)),))
        self.instance = "the cluster"
        self.addresses: dict[ServerId, str] = {}
        self.servers: dict[str, Server] = {}
        self.leaders: dict[str, str] = {}
        self._store = MemoryStore(self.tree)
        self._epoch = 0

    def __getitem__(self, name: str) -> Server:
        return self.servers[name]

    async def found(self, names: list[str], partitions: int) -> None:
        ids = [PartitionId(f"p{number}") for number in range(1, partitions + 1)]
        self.ring = new_ring(ids, {ServerId(name): "" for name in names}, len(names))
        await self._store.create(paths.RING, codec.encode(self.ring))
        await ensure_path(self._store, paths.SERVERS)
        for partition in ids:
            await ensure_path(self._store, paths.partition(partition))

    async def announce_leader(self, partition: str, server: str) -> None:
        """Write the partition's leader znode, whichever server serves."""
        path = paths.partition_leader(PartitionId(partition))
        self._epoch += 1
        try:
            _, stat = await self._store.get(path)
            await self._store.delete(path, stat.version)
        except NoSuchNode:
            pass
        await self._store.create(path, LeaderRecord(ServerId(server), self._epoch, "").encode())
        self.leaders[partition] = server

    async def lead(self, partition: str, server: str) -> LedPartition:
        """Let `server` lead and serve the partition with an empty state, and let all servers know it."""
        replica = await self.host(partition, server)
        await self.announce_leader(partition, server)
        for each in self.servers.values():
            await wait_until(lambda each=each: each.knows(self.leaders), what=f"{each.id} knows the leaders")
        return replica

    async def host(self, partition: str, server: str) -> LedPartition:
        """Let a replica serve, whatever the znode says."""
        there = self.servers[server]
        replica = LedPartition(there.env, PartitionId(partition), self.ring.hash)
        await replica.leader.start()
        there.hosted[PartitionId(partition)] = replica
        there.dispatcher.host(PartitionId(partition), replica)
        return replica

    def key_of(self, partition: str, number: int = 0) -> bytes:
        """Return the `number`th of many keys that the partition owns."""
        owned = (key for i in range(10_000) if self.ring.partition_of(key := b"key-%d" % i) == partition)
        return next(key for place, key in enumerate(owned) if place == number)


@asynccontextmanager
async def servers(
    root: Path,
    names: list[str],
    *,
    partitions: int = 1,
    limits: Limits | None = None,
    traces_of: Callable[[str, Env], Traces] = lambda name, env: Traces(),
) -> AsyncIterator[Servers]:
    """Run servers that know each other. Nobody leads yet. `traces_of`: the traces of the server with a name."""
    cluster = Servers()
    cluster.traces_of = traces_of
    await cluster.found(names, partitions)
    async with AsyncExitStack() as stack:
        for name in names:
            server = cluster.servers[name] = Server(cluster, name, root / name, limits or Limits())
            await server.open()
            stack.push_async_callback(server.close)
        for server in cluster.servers.values():
            await wait_until(lambda server=server: _knows_all(server, names), what="the servers know each other")
        yield cluster


async def _knows_all(server: Server, names: list[str]) -> bool:
    return sorted(server.dispatcher.topology.servers) == sorted(names)
