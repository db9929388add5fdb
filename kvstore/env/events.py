"""Waiting for something to happen, but not for ever."""

from __future__ import annotations

import asyncio


async def wait_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Return when `event` is set, or after `seconds` (None: no bound); whether it was set."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
