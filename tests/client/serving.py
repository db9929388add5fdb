"""Real gRPC servers on loopback in front of a model cluster, in this event loop or in their own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from random import Random
from typing import Any, cast

from kvstore.devcluster.zookeeper import free_ports
from kvstore.env import Env, Stream, StreamHandler
from kvstore.env.clock import Unjudged
from kvstore.env.nursery import TaskNursery
from kvstore.env.transport import TcpTransport
from kvstore.proto import kv_pb2_grpc
from kvstore.rpc.server import GrpcServer
from kvstore.server.access.audit import AuditLog
from kvstore.server.access.call_gate import CallGate
from kvstore.server.access.identities import Access
from kvstore.server.access.logins import Logins
from kvstore.server.access.stream_authenticator import StreamAuthenticator
from kvstore.server.config import Limits
from kvstore.server.grpc.kv import KV
from kvstore.server.grpc.session import Sessions
from kvstore.server.grpc.stream import SessionStreams
from kvstore.server.redis.listener import RespServer
from kvstore.server.redis.plans import CommandError
from kvstore.types import ServerId
from tests.beside import beside
from tests.client.model import Endpoint, ModelCluster
from tests.waiting import PATIENCE_S

SERVICE = "kvstore.v1.KV"
PATIENT = f"?timeout={PATIENCE_S:g}s&connect_timeout={PATIENCE_S / 2:g}s"
"""Options of a client's URL with which a machine that pauses for seconds fails no call."""


def refuse_peers(words: list[bytes], stream: Stream, leave: Callable[[], None]) -> StreamHandler:
    raise CommandError("ERR no links here")


def env_of(nursery: TaskNursery) -> Env:
    """Return the ports that listeners use: time, tasks and connections."""
    nothing: Any = None
    return Env(ModelClock(), Random(1), TcpTransport(), nothing, nursery, cast(Callable[[str], None], nothing))


class ModelClock(Unjudged):
    """A clock that is always behind the model's own time."""

    def now(self) -> float:
        return 0.0

    def wall_ms(self) -> int:
        return 1


class HandClock(Unjudged):
    """A client's clock, which advances when the test says so."""

    def __init__(self) -> None:
        self.at = 1000.0

    def now(self) -> float:
        return self.at

    def wall_ms(self) -> int:
        return 0


class Servers:
    """The cluster's gRPC servers; each can be stopped and started again on its port."""

    def __init__(
        self, cluster: ModelCluster, *, has_streams: bool = True, access: Callable[[], Access] | None = None
    ) -> None:
        """`access` creates each server's table of users; without it no login is required."""
        self.cluster, self._has_streams = cluster, has_streams
        self._make_access = access or Access
        self.access: dict[ServerId, Access] = {}
        self.logins: dict[ServerId, Logins] = {}
        self._nursery = TaskNursery("servers")
        self._running: dict[ServerId, tuple[GrpcServer, KV, RespServer]] = {}
        self.streams: dict[ServerId, SessionStreams] = {}
        self.loop: asyncio.AbstractEventLoop
        """Set by `serving_in_a_thread`."""

    async def start(self, id: ServerId) -> None:
        """Listen, on the server's former port if it had one."""
        backend = next(server for server in self.cluster.servers if server.id == id)
        env = env_of(self._nursery)
        sessions = Sessions(backend, env.clock)
        access = self.access[id] = self._make_access()
        audit = AuditLog(env.clock.now, env.clock.wall_ms, env.audit)
        logins = self.logins[id] = Logins(env, access, audit)
        gate = CallGate(access, logins)
        service = KV(env, backend, id, sessions=sessions, guarded=gate.guarded, cluster=self.cluster.id)
        server = GrpcServer([SERVICE], [lambda grpc: kv_pb2_grpc.add_KVServicer_to_server(service, grpc)], gate=gate)
        known = self.cluster.endpoints.get(id) or Endpoint(*(f"127.0.0.1:{port}" for port in free_ports(2)))
        streams = self.streams[id] = SessionStreams(
            sessions, id, StreamAuthenticator(access, logins, self._nursery), self.cluster.id
        )
        redis = RespServer(env, backend, Limits(), streams.with_peers(refuse_peers), dict, access, logins)
        resp = await redis.open(known.resp) if self._has_streams else ""
        port = await server.start(known.grpc)
        await server.set_serving(True)
        self.cluster.endpoints[id] = Endpoint(f"127.0.0.1:{port}", resp)
        self._running[id] = server, service, redis
        self.cluster.changed()

    def service(self, id: ServerId) -> KV:
        return self._running[id][1]

    async def kill(self, id: ServerId) -> None:
        """Break every connection and stop listening."""
        server, service, redis = self._running.pop(id)
        service.close()
        await redis.close()
        await server.stop(0)

    def kill_from_outside(self, id: ServerId) -> None:
        """Do the same, called in another thread than the servers'."""
        asyncio.run_coroutine_threadsafe(self.kill(id), self.loop).result(PATIENCE_S)

    async def close(self) -> None:
        for id in sorted(self._running):
            await self.kill(id)
        for logins in self.logins.values():
            logins.close()
        await self._nursery.close()

    @property
    def url(self) -> str:
        return "kv://" + ",".join(endpoint.grpc for _, endpoint in sorted(self.cluster.endpoints.items()))

    @property
    def patient_url(self) -> str:
        return self.url + PATIENT


@asynccontextmanager
async def serving(
    cluster: ModelCluster, *, has_streams: bool = True, access: Callable[[], Access] | None = None
) -> AsyncIterator[Servers]:
    """With `has_streams` the servers have Redis ports for clients' sessions."""
    servers = Servers(cluster, has_streams=has_streams, access=access)
    try:
        for id in cluster.ids:
            await servers.start(id)
        yield servers
    finally:
        await servers.close()


@contextmanager
def serving_in_a_thread(cluster: ModelCluster, access: Callable[[], Access] | None = None) -> Iterator[Servers]:
    """Run the servers in their own event loop, for blocking clients."""
    ready, running = threading.Event(), list[Servers]()

    async def main(over: threading.Event) -> None:
        async with serving(cluster, access=access) as servers:
            servers.loop = asyncio.get_running_loop()
            running.append(servers)
            ready.set()
            await asyncio.to_thread(over.wait)

    with beside(lambda over: asyncio.run(main(over))):
        assert ready.wait(PATIENCE_S)
        yield running[0]
