"""Scans all partitions in key order, for the RangeScan stream and for pages. A slow reader holds at most one page of
each partition."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

from kvstore.client.core.fanout import PAGE_LIMIT_MAX
from kvstore.client.core.scanning import Bounds, Merge
from kvstore.env import Clock
from kvstore.errors import InvalidRequest
from kvstore.partition.state.commands import Flag, Op, Range, Record, Result, Scan
from kvstore.proto import kv_pb2
from kvstore.proto.page_token import PageToken
from kvstore.ring.ring import Ring
from kvstore.server.grpc.encode import MESSAGE_BYTES, record_message
from kvstore.server.routing.backend import Backend
from kvstore.server.routing.keys import with_one_ring
from kvstore.server.routing.scan_slots import ScanSlot
from kvstore.types import PartitionId

PAGE_LIMIT = 100
PAGE_S = 2.0
"""Seconds after which a page is returned with the keys found so far."""

RING = ""
"""The name under which a token has the version of its client's ring."""

Found = list[tuple[bytes, Record | None]]
Ask = Callable[[Op, PartitionId, int], Awaitable[Any]]
"""Executes an operation on a partition on behalf of a client that knows this version of the ring; 0 if the version
is unknown."""


class KeyOrderScan:
    """One scan. If the ring changes during the scan, the keys that were found with the previous ring are searched
    again (docs/protocol.md M14)."""

    def __init__(
        self,
        backend: Backend,
        ask: Ask,
        bounds: Bounds,
        *,
        limit: int,
        flags: int,
        level: int,
        token: Mapping[str, int],
    ) -> None:
        self._backend, self._ask, self._level, self._token = backend, ask, level, token
        self._flags, self._kind = flags, Range if flags & ~Flag.KEYS_ONLY else Scan
        ring = backend.topology.ring
        self._routed = ring.routed
        self.merge: Merge[Record | None] = Merge(
            ring.owners, *bounds, limit=limit, backwards=bool(flags & Flag.REVERSE)
        )
        self.held_bytes = 0
        """Bytes of the keys and values that were read and have not been sent."""

    async def more(self) -> Found:
        """Return the next keys that may be sent. There may be none yet. Raises StoreError."""
        routed, asked, pages = await with_one_ring(lambda: self._backend.topology.ring, self._ask_all)
        if asked is not self.merge:
            self._routed, self.merge, self.held_bytes = routed, asked, 0
        for partition, (items, following) in pages:
            found = [(key, None) for key in items] if self._flags & Flag.BARE else items
            self.merge.feed(partition, found, following)
            self.held_bytes += _bytes_of(found)
        taken = self.merge.take()
        self.held_bytes -= _bytes_of(taken)
        return taken

    # docs/protocol.md M16
    async def _ask_all(self, ring: Ring) -> tuple[int, Merge[Record | None], list[tuple[str, Result]]]:
        """Request the next page of each partition. If the client knows a later ring, the server reads that ring
        first, because an older ring does not show which partitions have what the client has seen."""
        asked = self.merge if ring.routed == self._routed else self.merge.restarted(ring.owners)
        known_ring = self._token.get(RING, 0)
        pages = []
        for partition, start, limit, end in asked.wanted():
            op = self._kind(start, end, limit, self._flags, self._level, self._token.get(partition, 0))
            ring_version = known_ring if known_ring > ring.routed else 0
            pages.append((partition, await self._ask(op, PartitionId(partition), ring_version)))
        return ring.routed, asked, pages


async def scan_pages(
    backend: Backend, ask: Ask, request: kv_pb2.ScanRequest, place: ScanSlot
) -> AsyncIterator[kv_pb2.ScanResponse]:
    """Yield messages with the keys in [start, end), in order. Raises StoreError, which is Overloaded if `place`
    cannot hold as much as the scan needs."""
    flags = Flag.KEYS_ONLY * request.keys_only | Flag.REVERSE * request.reverse
    bounds = Bounds(request.start, request.end)
    scan = KeyOrderScan(
        backend, ask, bounds, limit=request.limit, flags=flags, level=request.level, token=request.token
    )
    while not scan.merge.is_done:
        found = await scan.more()
        place.hold(scan.held_bytes + _bytes_of(found))
        for message in _messages(found):
            yield message


# docs/protocol.md P37
async def one_page(
    backend: Backend, ask: Ask, clock: Clock, request: kv_pb2.PageRequest, place: ScanSlot
) -> kv_pb2.PageResponse:
    """Return one page of a range. It begins at the start of the range or at the position of a page token. Raises the
    same errors as `scan_pages`."""
    bounds, is_reverse = Bounds.of(request.start, request.end, request.prefix), request.reverse
    if request.limit > PAGE_LIMIT_MAX:
        raise InvalidRequest(f"expected a limit of 1 to {PAGE_LIMIT_MAX} keys in a page, got {request.limit}")
    if request.page_token:
        *rest, is_reverse = bounds.rest(request.page_token)
        bounds = Bounds(*rest)
    flags = Flag.KEYS_ONLY * request.keys_only | Flag.BARE * request.bare | Flag.REVERSE * is_reverse
    limit = request.limit or PAGE_LIMIT
    scan = KeyOrderScan(backend, ask, bounds, limit=limit, flags=flags, level=request.level, token=request.token)
    response, size, until = kv_pb2.PageResponse(), 0, clock.now() + PAGE_S
    while not scan.merge.is_done and size < MESSAGE_BYTES and clock.now() < until:
        found = await scan.more()
        place.hold(scan.held_bytes + _bytes_of(found))
        for key, record in found:
            if size >= MESSAGE_BYTES:
                return _sealed(response, scan.merge.behind(response.keys[-1]), is_reverse)
            size += _add(response, key, record)
    return _sealed(response, scan.merge.rest, is_reverse)


def _sealed(response: kv_pb2.PageResponse, rest: tuple[bytes, bytes] | None, reverse: bool) -> kv_pb2.PageResponse:
    if rest is not None:
        response.page_token = PageToken(*rest, reverse).encode()
    return response


def _bytes_of(items: Found) -> int:
    return sum(len(key) + (len(record[0]) if record is not None else 0) for key, record in items)


def _messages(items: Found) -> Iterator[kv_pb2.ScanResponse]:
    message, size = kv_pb2.ScanResponse(), 0
    for key, record in items:
        size += _add(message, key, record)
        if size >= MESSAGE_BYTES:
            yield message
            message, size = kv_pb2.ScanResponse(), 0
    if message.keys:
        yield message


def _add(message: kv_pb2.ScanResponse | kv_pb2.PageResponse, key: bytes, record: Record | None) -> int:
    """Add a key and its record to the message. Return the number of added bytes."""
    message.keys.append(key)
    if record is None:
        return len(key)
    message.records.append(record_message(record))
    return len(key) + len(record[0])
