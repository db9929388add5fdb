"""Ends answers that nobody waits for any more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from kvstore.errors import OutcomeUnknown
from kvstore.types import PartitionId

ANSWER_S = 6.0
"""More than any caller waits for what needs an append. While an entry is stuck, as long as the bookies' disks are full,
each caller asks anew; the answers that it has given up would take the place of all calls between two servers."""


async def in_time(answer: Awaitable[bytes], partition: PartitionId, method: str) -> bytes:
    """Return what is answered within ANSWER_S. Raises OutcomeUnknown: what was appended for it may be acknowledged
    later."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return await answer
    except TimeoutError:
        raise OutcomeUnknown(f"partition {partition}: {method} was not through within {ANSWER_S:g} s") from None
