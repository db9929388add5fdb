"""How far a partition has come, as its leader says: whoever follows its log may not know yet."""

from __future__ import annotations

import asyncio

from kvstore.env import Clock
from kvstore.errors import Moved, Unavailable
from kvstore.partition.state.commands import Code, Flag, Level
from kvstore.server.routing.ask import ask
from kvstore.server.routing.backend import Backend
from kvstore.types import PartitionId

ANSWER_S = 1.5
"""Clients give a server 2 s by default, and go on to the next one: by then they shall know what does not answer."""


async def latest_of(clock: Clock, backend: Backend, partition: PartitionId) -> int:
    """No less than any sequence acknowledged before: a read of a key tells, once its leader has answered.
    Raises StoreError, Unavailable after a while."""
    op = (Code.SCAN, b"\0", b"\0\0", 1, int(Flag.KEYS_ONLY), int(Level.LINEARIZABLE), 0)
    deadline = clock.now() + ANSWER_S
    while True:
        try:
            async with asyncio.timeout(max(0.001, deadline - clock.now())):
                await ask(backend, op, partition)
            return backend.progress(partition)[0]
        except Moved:
            await asyncio.sleep(0.02)  # it is just getting or giving away a range
        except TimeoutError:
            raise Unavailable(f"partition {partition}: its leader does not answer") from None
