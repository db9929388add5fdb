"""Bounds the time of answers to peers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from kvstore.errors import OutcomeUnknown
from kvstore.types import PartitionId

ANSWER_S = 6.0
"""Seconds; more than any caller waits for a request that needs an append. While an entry is stuck because the bookies'
disks are full, each caller retries; without this bound the abandoned answers would use up all calls between two
servers."""


async def in_time(answer: Awaitable[bytes], partition: PartitionId, method: str) -> bytes:
    """Return the answer if it comes within ANSWER_S. Raises OutcomeUnknown otherwise, because what was appended for it
    may be acknowledged later."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return await answer
    except TimeoutError:
        raise OutcomeUnknown(f"partition {partition}: {method} took longer than {ANSWER_S:g} s") from None
