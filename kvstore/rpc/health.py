"""gRPC's health service. A watcher receives each change as soon as it can accept one, and the server waits for no
watcher. If watchers were notified under a lock, a watcher that reads nothing could prevent the server from reporting
that it stops."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from kvstore.errors import InvalidRequest
from kvstore.rpc.status import abort

SERVICE = "grpc.health.v1.Health"
NAME_CHARACTERS_MAX = 256
"""Maximum length of a service name, because names are kept while they are watched."""

_Response = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The gRPC service `grpc.health.v1.Health`."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {"": _Response.SERVING}
        self._changed = asyncio.Event()
        self._has_ended = False

    def set(self, service: str, status: int) -> None:
        """Set the status of a service. Has no effect after `end`."""
        if not self._has_ended:
            self._set(service, status)

    def end(self) -> None:
        """Set all services to NOT_SERVING for good."""
        self._has_ended = True
        for service in list(self._statuses):
            self._set(service, _Response.NOT_SERVING)

    def _set(self, service: str, status: int) -> None:
        self._statuses[service] = status
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: Any, context: Any) -> Any:
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return _Response(status=status)

    async def Watch(self, request: Any, context: Any) -> None:
        service = request.service
        if len(service) > NAME_CHARACTERS_MAX:
            await abort(
                context,
                InvalidRequest(f"expected a service name of at most {NAME_CHARACTERS_MAX} characters"),
            )
        del request
        sent = None
        while True:
            changed = self._changed  # read first, so that no change is missed
            status = self._statuses.get(service, _Response.SERVICE_UNKNOWN)
            if status != sent:
                await context.write(_Response(status=status))
                sent = status
            else:
                await changed.wait()
