"""gRPC's health service. Those who watch are told of each change when they can take it, and nobody waits for them: were
they told under a lock, one who reads nothing would keep the server from ever saying that it stops."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from kvstore.errors import InvalidRequest
from kvstore.rpc.status import abort

SERVICE = "grpc.health.v1.Health"
NAME_CHARACTERS_MAX = 256
"""Of a service: its name is kept for as long as it is watched."""

_Response = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """`grpc.health.v1.Health`."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {"": _Response.SERVING}
        self._changed = asyncio.Event()
        self._has_ended = False

    def set(self, service: str, status: int) -> None:
        """Set the answer from now on; nothing changes after `end`."""
        if not self._has_ended:
            self._set(service, status)

    def end(self) -> None:
        """No service serves any more."""
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
            await abort(context, InvalidRequest(f"want a service of at most {NAME_CHARACTERS_MAX} characters"))
        del request
        told = None
        while True:
            changed = self._changed  # before the look, so that no change falls in between
            status = self._statuses.get(service, _Response.SERVICE_UNKNOWN)
            if status != told:
                await context.write(_Response(status=status))
                told = status
            else:
                await changed.wait()
