"""A gRPC server with kvstore's limits, health service and reflection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from kvstore.env.certificates import Certificates
from kvstore.env.networks import KnownNetworks
from kvstore.env.tls import Tls
from kvstore.rpc.channels import CONCURRENT_CALLS_MAX, CONNECTIONS_MAX, server_options
from kvstore.rpc.front import HOST, Front
from kvstore.rpc.gate import Gate
from kvstore.rpc.handshakes import Handshakes
from kvstore.rpc.health import SERVICE, Health
from kvstore.rpc.malformed import Guarded
from kvstore.rpc.reflection import add_reflection

Register = Callable[[grpc.aio.Server], None]


class GrpcServer:
    """Serves the registered services. `services` are their full names, which health and reflection report."""

    def __init__(
        self,
        services: Sequence[str],
        register: Sequence[Register],
        connections_max: int = CONNECTIONS_MAX,
        gate: Gate | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        known: KnownNetworks | None = None,
    ) -> None:
        """Without a gate no login is required. `interceptors` run before the gate. A connection from one of the
        `known` networks is only closed in favor of a connection from another known network."""
        self._services, self._register = tuple(services), register
        self._connections_max, self._gate, self._known = connections_max, gate, known
        self._interceptors = interceptors
        self._carried: dict[str, str] = {}
        self._front: Front | None = None
        self._server: grpc.aio.Server | None = None
        self._health = Health()

    async def start(self, address: str, tls: Tls | Certificates | None = None) -> int:
        """Listen on `address` (`host:port`) and return the bound port. The health status is NOT_SERVING until
        `set_serving` is called. If `tls` is a Certificates object, each handshake uses the newest certificates.
        Raises OSError."""
        await self.set_serving(False)
        # Behind a front, a connection that gave way may still count here for a moment.
        server = self._server = self._made(self._connections_max if tls is None else 2 * self._connections_max)
        try:
            port = await self._bind(server, address, tls)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from error
        if not port:
            raise OSError(f"cannot listen on {address}")
        await server.start()
        return port

    def _made(self, connections_max: int) -> grpc.aio.Server:
        server = grpc.aio.server(
            options=server_options(connections_max),
            maximum_concurrent_rpcs=CONCURRENT_CALLS_MAX,
            interceptors=self._interceptors,
        )
        guarded = cast("grpc.aio.Server", Guarded(server, self._gate, self._known, self._carried))
        for add in self._register:  # first, because gRPC asks the services in this order for each call
            add(guarded)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, guarded)
        add_reflection((*self._services, SERVICE), guarded)
        return server

    async def _bind(self, server: grpc.aio.Server, address: str, tls: Tls | Certificates | None) -> int:
        if tls is None:
            return server.add_insecure_port(address)
        newest = tls if isinstance(tls, Certificates) else Certificates(tls)
        credentials = Handshakes(newest).credentials()
        behind = f"{HOST}:0"
        with_tls = server.add_secure_port(behind, credentials)
        without = server.add_insecure_port(behind) if newest.tls.admits_plain else None
        self._front = Front(self._connections_max, newest.note_plain, self._known, self._carried)
        return await self._front.open(address, with_tls=with_tls, without=without)

    async def set_serving(self, serving: bool, *services: str) -> None:
        """Set the health status of the named services, or of all services if none is named."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in services or ("", *self._services):
            self._health.set(service, status)

    async def stop(self, grace_s: float) -> None:
        """Stop accepting calls, wait up to `grace_s` seconds for running calls, then cancel the remaining ones."""
        self._health.end()
        if self._front is not None:
            self._front.stop()
        if self._server is not None:
            await self._server.stop(grace_s)
        if self._front is not None:
            await self._front.close()
