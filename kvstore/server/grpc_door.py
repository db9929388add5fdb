"""The gRPC door of a node: KV and Admin, health and reflection on one port."""

from __future__ import annotations

from kvstore.env import Env
from kvstore.env.tls import Tls
from kvstore.proto import admin_pb2_grpc, kv_pb2_grpc
from kvstore.rpc.server import GrpcServer
from kvstore.server.admin import Admin, AdminSource
from kvstore.server.backend import Backend
from kvstore.server.kv import KV

KV_SERVICE = "kvstore.v1.KV"
ADMIN_SERVICE = "kvstore.v1.Admin"
GRACE_S = 1.0
"""What calls under way get at a stop. Sessions do not end by themselves; their clients go elsewhere."""


class GrpcDoor:
    """Open it when operations can be taken; close it before the dispatcher."""

    def __init__(self, env: Env, backend: Backend, server: str, source: AdminSource) -> None:
        self._kv = KV(env, backend, server)
        admin = Admin(env, source, backend)
        self._server = GrpcServer(
            (KV_SERVICE, ADMIN_SERVICE),
            (
                lambda server: kv_pb2_grpc.add_KVServicer_to_server(self._kv, server),
                lambda server: admin_pb2_grpc.add_AdminServicer_to_server(admin, server),
            ),
        )

    async def open(self, address: str, tls: Tls | None = None) -> int:
        """Listen on `host:port`; returns the port. Raises OSError."""
        port = await self._server.start(address, tls)
        await self._server.set_serving(True)
        return port

    async def set_serving(self, serving: bool) -> None:
        """What health answers."""
        await self._server.set_serving(serving)

    async def close(self) -> None:
        self._kv.close()
        await self._server.stop(GRACE_S)
