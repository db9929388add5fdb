"""Pauses in virtual time."""

from __future__ import annotations

import asyncio


async def pause(seconds: float) -> None:
    """Return after `seconds` of virtual time, for tests that check that nothing happens meanwhile."""
    await asyncio.sleep(seconds)
