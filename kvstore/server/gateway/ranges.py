"""Operations on ranges of keys across all partitions: counting the keys, and deleting them in parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from kvstore.client.core.scanning import Bounds
from kvstore.env import Clock
from kvstore.errors import OutcomeUnknown, Refused, StoreError
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Flag, Level, Range, Result, Sink
from kvstore.proto import kv_pb2
from kvstore.proto.page_token import PageToken
from kvstore.ring.ring import Ring
from kvstore.server.grpc.scan import RING, Ask, one_page
from kvstore.server.routing.ask import ask_session
from kvstore.server.routing.backend import Backend
from kvstore.server.routing.keys import with_one_ring
from kvstore.server.routing.scan_slots import ScanSlot

AT_ONCE = 100
"""Maximum number of deletes that one request has in flight at a time."""


class _DeleteSink(Sink):
    """The sink of a group of deletes. The caller waits for all of them."""

    def __init__(self, backend: Backend, keys: Sequence[bytes]) -> None:
        self.given: asyncio.Future[list[Result | StoreError]] = asyncio.get_running_loop().create_future()
        self._results: list[Result | StoreError] = [None] * len(keys)
        self._left = len(keys)
        for token, key in enumerate(keys):
            backend.submit((commands.Delete(key),), self, (token,))

    def complete(self, token: int, result: Result | StoreError) -> None:
        self._results[token] = result
        self._left -= 1
        if not self._left and not self.given.done():
            self.given.set_result(self._results)

    def flush(self) -> None:
        """Does nothing, because the last result wakes the caller."""


class RangeDeletion(NamedTuple):
    """The range that one request deletes, and how far it may go."""

    bounds: Bounds
    cursor: str
    """The position at which to start. Empty for the first key of the range."""
    keys_max: int


# docs/protocol.md M16
async def count_range(backend: Backend, ask: Ask, bounds: Bounds, level: int, token: Mapping[str, int]) -> int:
    """Return the number of keys in the range. Each partition counts its keys when it is asked, so the number is no
    snapshot. If the client knows a later ring than this server, the server reads that ring first. Raises StoreError."""
    known_ring = token.get(RING, 0)

    async def count(ring: Ring) -> int:
        total, ring_version = 0, known_ring if known_ring > ring.routed else 0
        for partition in ring.owners:
            start: bytes | None = bounds.start
            while start is not None:
                seen = token.get(partition, 0)
                op = Range(start, bounds.end, 0, int(Flag.COUNT_ONLY), level, seen)
                found, start = await ask(op, partition, ring_version)
                total += found
        return total

    return await with_one_ring(lambda: backend.topology.ring, count)


async def delete_range(
    backend: Backend, clock: Clock, wanted: RangeDeletion, place: ScanSlot, *, until: float, take: Callable[[int], None]
) -> tuple[int, str | None]:
    """Delete keys of the range until the range is finished, `keys_max` keys are deleted or the clock reaches `until`.
    Each key is deleted in the partition that owns it at that moment.

    Return the number of deleted keys and the cursor for the next request, None if the range is finished. `take` is
    called with the number of bytes that the deletion holds in memory. Raises StoreError, which is OutcomeUnknown if
    some keys may already be deleted.
    """
    deleted = 0
    request = kv_pb2.PageRequest(
        start=wanted.bounds.start,
        end=wanted.bounds.end,
        page_token=wanted.cursor,
        limit=wanted.keys_max,
        bare=True,
        level=Level.LINEARIZABLE.value,  # type: ignore[arg-type]  # the enum's number
    )
    try:
        page = await one_page(backend, partial(ask_session, backend), clock, request, place)
        take(sum(map(len, page.keys)))
        for first in range(0, len(page.keys), AT_ONCE):
            chunk = page.keys[first : first + AT_ONCE]
            results = await _DeleteSink(backend, chunk).given
            deleted += sum(not isinstance(each, StoreError) and each != 0 for each in results)
            errors = [each for each in results if isinstance(each, StoreError)]
            if errors:  # an unknown outcome before a refusal, which would mean that nothing was done
                raise next((each for each in errors if not isinstance(each, Refused)), errors[0])
            if clock.now() >= until and first + AT_ONCE < len(page.keys):
                return deleted, PageToken(chunk[-1] + b"\0", wanted.bounds.end).encode()
    except Refused as error:
        if not deleted:
            raise
        raise OutcomeUnknown(f"{deleted} keys were deleted, the rest were not: {error}") from error
    return deleted, page.page_token or None
