"""Letting virtual time pass."""

from __future__ import annotations

import asyncio


async def pause(seconds: float) -> None:
    """Return after `seconds` of the simulated world; for tests whose subject is what does not happen meanwhile."""
    await asyncio.sleep(seconds)
