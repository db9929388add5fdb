"""The Scan stream over partitions between which keys move."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.errors import Moved, Overloaded, Unavailable
from kvstore.partition.state.commands import Flag, Level, Op, Range, Record, Scan
from kvstore.proto import kv_pb2
from kvstore.ring.ring import PartitionState, Ring
from kvstore.server.grpc.scan import PAGE_S, RING, one_page, scan_pages
from kvstore.server.routing import scan_slots
from kvstore.server.routing.keys import MOVED_MAX, count_keys
from kvstore.server.routing.scan_slots import ScanSlot, ScanSlots
from kvstore.types import PartitionId, ServerId
from tests.ring.rings import new_ring

P1, P2, P3 = PartitionId("p1"), PartitionId("p2"), PartitionId("p3")
KEYS = [b"a", b"b", b"c"]


class Partitions:
    """Two partitions and the ring by which they are asked."""

    def __init__(self) -> None:
        self.ring = new_ring([P1, P2], {ServerId("n1"): ""}, 1)
        self.held: dict[str, list[bytes]] = {P1: [], P2: list(KEYS)}
        self.moves_before_question = -1
        self.asked = 0

    @property
    def topology(self) -> Any:
        return SimpleNamespace(ring=self.ring)

    async def count(self, op: Op, partition: PartitionId) -> int:
        return len(self.held[partition])

    async def ask(self, op: Scan | Range, partition: PartitionId, ring_version: int) -> Any:
        if ring_version > self.ring.routed:
            self.ring = next_ring(self.ring)
            raise Moved("", self.ring.routed)
        if self.asked == self.moves_before_question:
            self.held = {P1: self.held[P2], P2: self.held[P1]}
            self.ring = next_ring(self.ring)
        self.asked += 1
        start, end, limit, flags = op.key, op.end, op.limit, op.flags
        rest = [key for key in self.held[partition] if key >= start and (not end or key < end)]
        back = bool(flags & Flag.REVERSE)
        rest = rest[::-1] if back else rest
        page = rest[: min(limit, 2)] if limit else rest[:2]
        following = rest[len(page) - back] if len(rest) > len(page) else None
        return [(key, Record(b"v", 1, 1, 0, 0)) for key in page], following


class NeverHere(Partitions):
    """Every partition replies that the keys are elsewhere."""

    async def ask(self, op: Scan | Range, partition: PartitionId, ring_version: int) -> Any:
        self.asked += 1
        raise Moved("", 0)


def next_ring(ring: Ring) -> Ring:
    return replace(ring, version=ring.version + 1, routed=0)


def a_place() -> ScanSlot:
    return ScanSlot(lambda: 0.0, {})


async def keys_of(partitions: Any, request: kv_pb2.ScanRequest) -> list[bytes]:
    return [key async for message in scan_pages(partitions, partitions.ask, request, a_place()) for key in message.keys]


# docs/protocol.md M14
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("moment", range(-1, 5))
async def test_keys_that_move_during_a_scan_are_returned_once(moment: int, reverse: bool) -> None:
    partitions = Partitions()
    partitions.moves_before_question = moment
    found = await keys_of(partitions, kv_pb2.ScanRequest(reverse=reverse))
    assert found == (KEYS[::-1] if reverse else KEYS)


async def test_page_ends_in_time_with_the_keys_found() -> None:
    partitions = Partitions()
    times = iter([0.0, 0.0, PAGE_S + 1])
    clock: Any = SimpleNamespace(now=lambda: next(times))
    page = await one_page(cast("Any", partitions), partitions.ask, clock, kv_pb2.PageRequest(reverse=True), a_place())
    assert list(page.keys) == KEYS[:0:-1]
    rest = kv_pb2.PageRequest(page_token=page.page_token)
    clock = SimpleNamespace(now=lambda: 0.0)
    assert list((await one_page(cast("Any", partitions), partitions.ask, clock, rest, a_place())).keys) == KEYS[:1]


async def test_limit_holds_when_the_ring_changes() -> None:
    partitions = Partitions()
    partitions.moves_before_question = 3
    assert await keys_of(partitions, kv_pb2.ScanRequest(start=b"a", limit=3)) == KEYS
    assert await keys_of(partitions, kv_pb2.ScanRequest(start=b"b", limit=1)) == [b"b"]


async def test_scan_of_keys_that_keep_moving_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.server.routing.keys.MOVED_S", 0.0)
    partitions = NeverHere()
    with pytest.raises(Unavailable):
        await keys_of(partitions, kv_pb2.ScanRequest())
    assert partitions.asked == MOVED_MAX


async def test_partition_without_tokens_is_not_asked() -> None:
    partitions = Partitions()
    member = partitions.ring.partitions[P1]
    partitions.ring = replace(
        partitions.ring,
        partitions={**partitions.ring.partitions, P3: replace(member, id=P3, state=PartitionState.JOINING)},
    )
    assert await keys_of(partitions, kv_pb2.ScanRequest()) == KEYS, "p3 has no leader: to ask it would be an error"
    assert await count_keys(partitions.count, lambda: partitions.ring) == len(KEYS)


# docs/protocol.md M16
@pytest.mark.parametrize("level", [Level.LINEARIZABLE, Level.SESSION])
async def test_scan_uses_the_later_ring_of_its_client(level: Level) -> None:
    """By the ring known here, keys that the client has seen may be in a partition that is not asked."""
    partitions = Partitions()
    partitions.held = {P1: [], P2: KEYS[:1]}
    later = partitions.ring.routed + 1
    request = kv_pb2.ScanRequest(level=int(level), token={RING: later})
    assert await keys_of(partitions, request) == KEYS[:1]
    assert partitions.ring.routed == later
    assert await keys_of(partitions, kv_pb2.ScanRequest(level=int(level), token={RING: later - 1})) == KEYS[:1]


# docs/protocol.md P37
async def test_bytes_held_by_scans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each scan holds a page of every partition while its reader is slow."""
    monkeypatch.setattr(scan_slots, "HELD_BYTES_MAX", 3)
    slots = ScanSlots(lambda: 0.0)
    async with slots.place("", "n") as first, slots.place("", "n") as second:
        pages = scan_pages(cast("Any", Partitions()), Partitions().ask, kv_pb2.ScanRequest(), first)
        assert len((await anext(pages)).keys) == 2, "one alone may hold more than the bound"
        assert first.held_bytes == 2 * len(b"av")
        clock: Any = SimpleNamespace(now=lambda: 0.0)
        with pytest.raises(Overloaded, match="hold 8 bytes, more than the limit of 3"):
            await one_page(cast("Any", Partitions()), Partitions().ask, clock, kv_pb2.PageRequest(), second)
        assert [page async for page in pages], "it goes on: it holds no more than before"
        assert first.held_bytes <= 4
    async with slots.place("", "n") as third:
        await one_page(cast("Any", Partitions()), Partitions().ask, clock, kv_pb2.PageRequest(), third)
