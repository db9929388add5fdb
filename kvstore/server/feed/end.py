"""Asks the leader of a partition for its latest sequence, because the leader's followers may lag behind."""

from __future__ import annotations

import asyncio

from kvstore.env import Clock
from kvstore.errors import Moved, Unavailable
from kvstore.partition.state.commands import Flag, Level, Scan
from kvstore.server.routing.ask import ask
from kvstore.server.routing.backend import Backend
from kvstore.types import PartitionId

ANSWER_S = 1.5
"""Timeout of an answer. Clients give a server 2 s by default and then try the next one; they should have the error by
then."""


async def latest_of(clock: Clock, backend: Backend, partition: PartitionId) -> int:
    """Return a sequence that is at least as high as any sequence acknowledged before this call. The leader's answer
    to a read of a key guarantees that. Raises StoreError, and Unavailable after ANSWER_S seconds."""
    op = Scan(b"\0", b"\0\0", 1, int(Flag.KEYS_ONLY), int(Level.LINEARIZABLE), 0)
    deadline = clock.now() + ANSWER_S
    while True:
        try:
            async with asyncio.timeout(max(0.001, deadline - clock.now())):
                await ask(backend, op, partition)
            return backend.progress(partition)[0]
        except Moved:
            await asyncio.sleep(0.02)  # it is just taking over or releasing a range
        except TimeoutError:
            raise Unavailable(f"partition {partition}: its leader does not answer") from None
