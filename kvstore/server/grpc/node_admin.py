"""Answers to operators about one node alone: the levels of its log, its slow log, a
profile of its threads."""

from __future__ import annotations

from typing import Protocol

from kvstore.env import Env
from kvstore.env.log_output import Output
from kvstore.env.profiler import Profiler, name_of
from kvstore.env.slow_log import KEPT
from kvstore.errors import InvalidRequest
from kvstore.proto import admin_pb2


class NodeParts(Protocol):
    """The node: kvstore.server.app.Node."""

    log_output: Output

    @property
    def env(self) -> Env: ...


class NodeAdmin:
    """Raises StoreError."""

    def __init__(self, node: NodeParts) -> None:
        self._node = node
        self._profiler = Profiler()

    async def log_level(self, request: admin_pb2.LogLevelRequest) -> admin_pb2.LogLevelResponse:
        """Set a level, if a logger is named; the levels that hold from now on. Raises InvalidRequest."""
        output = self._node.log_output
        if request.logger:
            try:
                output.set_level(request.logger, request.level)
            except ValueError as error:
                raise InvalidRequest(str(error)) from None
        elif request.level:
            raise InvalidRequest(f"want a logger beside the level {request.level[:100]!r}, got none")
        return admin_pb2.LogLevelResponse(levels=output.levels())

    async def slow_log(self, request: admin_pb2.SlowLogRequest) -> admin_pb2.SlowLogResponse:
        """The last slow operations, the latest first."""
        slow = self._node.env.slow
        response = admin_pb2.SlowLogResponse(slow_ms=slow.slow_ms, total=slow.total)
        for each in slow.latest(request.count or KEPT, request.key):
            response.operations.add(
                date_ms=each.date_ms,
                at=each.at,
                operation=each.operation,
                key=each.key,
                partition=each.partition,
                took_ms=each.took_s * 1000,
                parts={name: seconds * 1000 for name, seconds in each.parts.items()},
                operations=each.operations,
                starved=each.starved,
            )
        return response

    async def profile(self, request: admin_pb2.ProfileRequest) -> admin_pb2.ProfileResponse:
        """Where this process's threads are for some seconds. Raises InvalidRequest, Overloaded."""
        profile = await self._profiler.take(request.seconds, request.rate)
        response = admin_pb2.ProfileResponse(looks=profile.looks, took_s=profile.took_s)
        places: dict[str, int] = {}
        for (thread, calls), seen in profile.stacks.items():
            frames = [places.setdefault(name_of(code), len(places)) for code in calls]
            response.stacks.add(thread=thread, frames=frames, looks=seen.looks, cpu_us=seen.cpu_ns // 1_000)
        response.frames.extend(places)
        return response
