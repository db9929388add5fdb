"""What operators ask of one node about itself alone: the levels of its log."""

from __future__ import annotations

from typing import Protocol

from kvstore.env.log_output import Output
from kvstore.errors import InvalidRequest
from kvstore.proto import admin_pb2


class NodeParts(Protocol):
    """The node: kvstore.server.app.Node."""

    log_output: Output


class NodeAdmin:
    """Raises StoreError."""

    def __init__(self, node: NodeParts) -> None:
        self._node = node

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
