"""A scan over all partitions in key order, for the Scan stream. A slow reader holds one page of each, not more."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from kvstore.client.core.scanning import Merge
from kvstore.partition.state.commands import Code, Flag, Record, Result
from kvstore.proto import kv_pb2
from kvstore.ring.ring import Ring
from kvstore.server.grpc.encode import MESSAGE_BYTES, record_message
from kvstore.server.routing.backend import Backend
from kvstore.server.routing.keys import Ask, with_one_ring
from kvstore.types import PartitionId


async def scan_pages(backend: Backend, ask: Ask, request: kv_pb2.ScanRequest) -> AsyncIterator[kv_pb2.ScanResponse]:
    """The keys in [start, end) in order, some in each message. What was found with a ring that has changed meanwhile is
    looked for again. Raises StoreError."""
    flags = Flag.KEYS_ONLY * request.keys_only | Flag.REVERSE * request.reverse
    code = Code.RANGE if request.reverse else Code.SCAN
    routed = backend.topology.ring.routed
    merge: Merge[Record] = Merge(
        backend.topology.ring.owners, request.start, request.end, limit=request.limit, backwards=request.reverse
    )

    async def ask_all(ring: Ring) -> tuple[int, Merge[Record], list[tuple[str, Result]]]:
        asked = merge if ring.routed == routed else merge.anew(ring.owners)
        pages = []
        for partition, start, limit, end in asked.wanted():
            op = (code, start, end, limit, flags, request.level, request.token.get(partition, 0))
            pages.append((partition, await ask(op, PartitionId(partition))))
        return ring.routed, asked, pages

    while not merge.is_done:
        routed, merge, pages = await with_one_ring(lambda: backend.topology.ring, ask_all)
        for partition, (items, next_start) in pages:
            merge.feed(partition, items, next_start)
        for message in _messages(merge.take()):
            yield message


def _messages(items: list[tuple[bytes, Record]]) -> Iterator[kv_pb2.ScanResponse]:
    message, size = kv_pb2.ScanResponse(), 0
    for key, record in items:
        message.keys.append(key)
        message.records.append(record_message(record))
        size += len(key) + len(record[0])
        if size >= MESSAGE_BYTES:
            yield message
            message, size = kv_pb2.ScanResponse(), 0
    if message.keys:
        yield message
