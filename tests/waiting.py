"""The one place where tests wait for real time to pass: until something in another process has come true."""

import asyncio
import time
from collections.abc import Awaitable, Callable

POLL_S, POLL_S_MAX = 0.05, 1.0
RESTS = 3
"""How many times as long as a look took there is none: looks share the processors with what they wait for."""
PATIENCE_S = 60.0
"""Time limit of a wait. The condition usually holds at once; only a failing test, or one on a stalled machine, waits so
long."""


async def wait_until(
    condition: Callable[[], Awaitable[object]], *, timeout_s: float = PATIENCE_S, what: str = ""
) -> None:
    """Return when `condition()` is truthy. TimeoutError names `what` was awaited."""
    since = time.monotonic()
    deadline = since + timeout_s
    while not await condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s} s: {what or condition}")
        await asyncio.sleep(_rest_s(since))
        since = time.monotonic()


def wait_until_blocking(condition: Callable[[], object], *, timeout_s: float = PATIENCE_S, what: str = "") -> None:
    """The same for code without an event loop."""
    since = time.monotonic()
    deadline = since + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s} s: {what or condition}")
        time.sleep(_rest_s(since))
        since = time.monotonic()


def _rest_s(since: float) -> float:
    return min(POLL_S_MAX, max(POLL_S, RESTS * (time.monotonic() - since)))
