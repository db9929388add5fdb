"""Bounds the time that a request from a peer may take."""

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
    """Await the answer to a peer's request and return it. Raises OutcomeUnknown if it takes longer than ANSWER_S,
    because a record that was appended for the request may still be acknowledged later."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return await answer
    except TimeoutError:
        raise OutcomeUnknown(f"partition {partition}: {method} took longer than {ANSWER_S:g} s") from None
