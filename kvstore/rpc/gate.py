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
        """Return a context in which an authorized call runs. Entering the context aborts a call that is not allowed.
        If `lasts` is True, entering it also sends the response headers, and the call is aborted later if its user
        loses the permission. `request` is None if the client streams."""
        ...


HEALTH = "/grpc.health.v1.Health/"


class Passage:
    """Authorizes the calls of one method. Without a gate every call proceeds."""

    def __init__(self, gate: Gate | None, method: str) -> None:
        self._gate, self._method = gate, method
        self.needs_no_user = method.startswith(HEALTH)
        """True if unauthenticated peers may call the method (kvstore/server/access/needs.py)."""

    @property
    def is_asked(self) -> bool:
        return self._gate is not None and self._gate.is_on

    def through(self, request: Any, context: Any) -> AbstractAsyncContextManager[None]:
        """Return a context in which the call runs if it is authorized. Call this only if `is_asked` is True."""
        assert self._gate is not None, "there is no gate"
        return self._gate.passage(self._method, request, context, lasts=False)

    @asynccontextmanager
    async def lasting(self, request: Any, context: Any) -> AsyncIterator[None]:
        """Authorize a long-lived call and run it in this context. The gate tracks such calls even while access
        control is off. The response headers are sent at once: they tell the client that the server receives what it
        sends from now on."""
        if self._gate is None:
            await context.send_initial_metadata(())
            yield
            return
        async with self._gate.passage(self._method, request, context, lasts=True):
            yield
