"""A scan over all partitions in key order, for the Scan stream. A slow reader holds one page of each, not more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Protocol

from kvstore.client.scanning import Merge
from kvstore.errors import Moved
from kvstore.partition.commands import Code, Flag, Op, Record, Result
from kvstore.proto import kv_pb2
from kvstore.server.answers import MESSAGE_BYTES, record_message
from kvstore.server.backend import Backend
from kvstore.server.keys import MOVED_S


class Run(Protocol):
    """Runs one operation on a partition and returns its result. Raises StoreError."""

    async def run(self, op: Op, ring_version: int, partition: str | None = None) -> Result: ...


async def scan_pages(backend: Backend, calls: Run, request: kv_pb2.ScanRequest) -> AsyncIterator[kv_pb2.ScanResponse]:
    """The keys in [start, end) in order, some in each message. What was found with a ring that has changed meanwhile is
    looked for again."""
    flags = int(Flag.KEYS_ONLY) if request.keys_only else 0
    merge: Merge[Record] = Merge([], b"")
    rings, ring = 0, None
    while ring is None or not merge.is_done:
        if backend.topology.ring.routed != rings:
            ring = backend.topology.ring
            rings = ring.routed
            merge = merge.anew(sorted(ring.partitions), request.start, limit=request.limit)
        try:
            for partition, start, limit in merge.wanted():
                token = request.token.get(partition, 0)
                op = (Code.SCAN, start, request.end, limit, flags, request.level, token)
                items, next_start = await calls.run(op, 0, partition)
                merge.feed(partition, items, next_start)
        except Moved:
            await asyncio.sleep(MOVED_S)
            rings = 0
            continue
        if backend.topology.ring.routed == rings:
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
