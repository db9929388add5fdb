"""The one place where tests wait for real time to pass: until something in another process has come true."""

import asyncio
import time
from collections.abc import Awaitable, Callable

POLL_S = 0.05
PATIENCE_S = 60.0
"""What a test waits for comes at once. Only a test that fails waits this long, or one whose machine stood still."""


async def wait_until(
    condition: Callable[[], Awaitable[object]], *, timeout_s: float = PATIENCE_S, what: str = ""
) -> None:
    """Return when `condition()` is truthy. TimeoutError names `what` was awaited."""
    deadline = time.monotonic() + timeout_s
    while not await condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s} s: {what or condition}")
        await asyncio.sleep(POLL_S)


def wait_until_blocking(condition: Callable[[], object], *, timeout_s: float = PATIENCE_S, what: str = "") -> None:
    """The same for code without an event loop."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s} s: {what or condition}")
        time.sleep(POLL_S)
