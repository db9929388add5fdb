"""The gRPC port of a node, with the services KV, Feed, Data and Admin, health and reflection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, cast

import grpc

from kvstore.env import Env
from kvstore.env.certificates import Certificates
from kvstore.env.histogram import Histogram
from kvstore.env.tls import Tls
from kvstore.proto import admin_pb2_grpc, data_pb2_grpc, feed_pb2_grpc, kv_pb2_grpc
from kvstore.rpc.server import GrpcServer
from kvstore.server.access.audit import AuditLog
from kvstore.server.access.call_gate import CallGate
from kvstore.server.access.changes import AdminChanges
from kvstore.server.access.identities import Access
from kvstore.server.access.logins import Logins
from kvstore.server.feed.feeds import Feeds
from kvstore.server.grpc.admin import Admin, AdminSource
from kvstore.server.grpc.audit import Audited
from kvstore.server.grpc.data import Data, DataSource
from kvstore.server.grpc.feed_service import FeedService
from kvstore.server.grpc.kv import KV
from kvstore.server.grpc.stream import SessionStreams
from kvstore.server.routing.backend import Backend
from kvstore.server.routing.scan_slots import ScanSlots
from kvstore.server.tracing.open import traced_calls

KV_SERVICE = "kvstore.v1.KV"
FEED_SERVICE = "kvstore.v1.Feed"
DATA_SERVICE = "kvstore.v1.Data"
ADMIN_SERVICE = "kvstore.v1.Admin"
GRACE_S = 1.0
"""Seconds for which a stop waits for calls in flight. Sessions do not end by themselves; their clients reconnect to
other servers."""


class NodeSource(AdminSource, DataSource, Protocol):
    """The node behind the services."""

    feeds: Feeds
    streams: SessionStreams
    access: Access
    logins: Logins
    audit: AuditLog
    changes: AdminChanges
    scans: ScanSlots


class GrpcListener:
    """The gRPC port of one node. Open it when operations can be accepted, and close it before the dispatcher."""

    def __init__(self, env: Env, backend: Backend, server: str, source: NodeSource, connections_max: int) -> None:
        self._gate = gate = CallGate(source.access, source.logins)
        interceptors, backend_of_call = traced_calls(env.traces)

        def guarded(backend: Backend) -> Backend:
            return gate.guarded(backend_of_call(backend))

        of_call = guarded if interceptors else gate.guarded
        sessions, cluster, scans = source.streams.sessions, source.cluster, source.scans
        self._kv = KV(env, backend, server, source.feeds, sessions, of_call, cluster, scans, gate.user)
        self._feed = FeedService(env, backend, source.feeds, source.store, gate.user)
        self._data = Data(env, source, gate.user)
        admin = Admin(env, source, backend)

        def audited(server: grpc.aio.Server) -> grpc.aio.Server:
            return cast(
                "grpc.aio.Server", Audited(server, env.clock.now, source.audit, source.changes, self._gate.caller)
            )

        self._server = GrpcServer(
            (KV_SERVICE, FEED_SERVICE, DATA_SERVICE, ADMIN_SERVICE),
            (
                lambda server: kv_pb2_grpc.add_KVServicer_to_server(self._kv, server),
                lambda server: feed_pb2_grpc.add_FeedServicer_to_server(self._feed, server),
                lambda server: data_pb2_grpc.add_DataServicer_to_server(self._data, server),
                lambda server: admin_pb2_grpc.add_AdminServicer_to_server(admin, audited(server)),
            ),
            connections_max,
            self._gate,
            interceptors,
            env.known,
        )

    async def open(self, address: str, tls: Tls | Certificates | None = None) -> int:
        """Listen on `address` (`host:port`) and return the bound port. Raises OSError."""
        port = await self._server.start(address, tls)
        await self._server.set_serving(True)
        return port

    async def set_serving(self, serving: bool) -> None:
        """Set the status that health checks report."""
        await self._server.set_serving(serving)

    def histograms(self) -> dict[str, Mapping[str, Histogram]]:
        return {"grpc_call_s": self._kv.histograms}

    async def close(self) -> None:
        self._gate.close()
        self._kv.close()
        self._feed.close()
        await self._server.stop(GRACE_S)
        await self._data.close()
