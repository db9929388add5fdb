"""Whether a call may pass: asked before each method of a gRPC server that has a gate."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol


class Gate(Protocol):
    """Asks callers who they are, and says whether their calls may pass: kvstore.server.access.call_gate.CallGate."""

    @property
    def is_on(self) -> bool:
        """Whether it asks anybody now."""
        ...

    def passage(self, method: str, request: Any, context: Any, *, lasts: bool) -> AbstractAsyncContextManager[None]:
        """Let a call pass, or abort it; and abort one that `lasts` later if it may not go on. `request` is None where
        the client streams. The head of one that `lasts` is sent on the way."""
        ...


HEALTH = "/grpc.health.v1.Health/"


class Passage:
    """The gate as one method has it; without a gate everything passes."""

    def __init__(self, gate: Gate | None, method: str) -> None:
        self._gate, self._method = gate, method
        self.needs_no_user = method.startswith(HEALTH)
        """True if unauthenticated peers may call the method (kvstore/server/access/needs.py)."""

    @property
    def is_asked(self) -> bool:
        return self._gate is not None and self._gate.is_on

    def through(self, request: Any, context: Any) -> AbstractAsyncContextManager[None]:
        """Of one that is asked."""
        assert self._gate is not None, "nobody asks"
        return self._gate.passage(self._method, request, context, lasts=False)

    @asynccontextmanager
    async def lasting(self, request: Any, context: Any) -> AsyncIterator[None]:
        """Of calls that last: they are known to the gate also while it asks nobody. Their head goes out at once: it
        tells the client that what it sends from now on has been sent."""
        if self._gate is None:
            await context.send_initial_metadata(())
            yield
            return
        async with self._gate.passage(self._method, request, context, lasts=True):
            yield
