"""The only place where tests wait in real time: until a condition in another process holds."""

import asyncio
import time
from collections.abc import Awaitable, Callable

POLL_S, POLL_S_MAX = 0.05, 1.0
RESTS = 3
"""The pause between checks of a condition, as a multiple of the duration of a check: checks share the processors with
the processes that they wait for."""
PATIENCE_S = 60.0
"""Time limit of a wait. The condition usually holds at once; only a failing test, or one on a stalled machine, waits so
long."""


async def wait_until(
    condition: Callable[[], Awaitable[object]], *, timeout_s: float = PATIENCE_S, what: str = ""
) -> None:
    """Wait until `condition()` is truthy. Raises TimeoutError, which names `what` was awaited."""
    since = time.monotonic()
    deadline = since + timeout_s
    while not await condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s} s: {what or condition}")
        await asyncio.sleep(_rest_s(since))
        since = time.monotonic()


def wait_until_blocking(condition: Callable[[], object], *, timeout_s: float = PATIENCE_S, what: str = "") -> None:
    """Do the same as `wait_until`, for code without an event loop."""
    since = time.monotonic()
    deadline = since + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s} s: {what or condition}")
        time.sleep(_rest_s(since))
        since = time.monotonic()


def _rest_s(since: float) -> float:
    return min(POLL_S_MAX, max(POLL_S, RESTS * (time.monotonic() - since)))
