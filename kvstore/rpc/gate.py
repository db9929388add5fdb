"""Decides whether a call may proceed, before each method of a gRPC server with access control."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol


class Gate(Protocol):
    """Authenticates callers and authorizes their calls. Implemented by kvstore.server.access.call_gate.CallGate."""

    @property
    def is_on(self) -> bool:
        """True if access control is on."""
        ...

    def passage(self, method: str, request: Any, context: Any, *, lasts: bool) -> AbstractAsyncContextManager[None]:
        """Let a call proceed or abort it, and abort a lasting call later if its permission ends. `request` is None if
        the client streams. The response headers of a lasting call are sent in between."""
        ...


HEALTH = "/grpc.health.v1.Health/"


class Passage:
    """The gate for one method. Without a gate every call proceeds."""

    def __init__(self, gate: Gate | None, method: str) -> None:
        self._gate, self._method = gate, method
        self.needs_no_user = method.startswith(HEALTH)
        """True if unauthenticated peers may call the method (kvstore/server/access/needs.py)."""

    @property
    def is_asked(self) -> bool:
        return self._gate is not None and self._gate.is_on

    def through(self, request: Any, context: Any) -> AbstractAsyncContextManager[None]:
        """Authorize a call. The gate must be asked."""
        assert self._gate is not None, "there is no gate"
        return self._gate.passage(self._method, request, context, lasts=False)

    @asynccontextmanager
    async def lasting(self, request: Any, context: Any) -> AsyncIterator[None]:
        """Authorize a lasting call. The gate knows lasting calls even while access control is off. Sends the response
        headers at once, which tell the client that what it sends from now on has arrived."""
        if self._gate is None:
            await context.send_initial_metadata(())
            yield
            return
        async with self._gate.passage(self._method, request, context, lasts=True):
            yield
