"""Scans and counts of all partitions belong to one ring, and start over with the next one."""

from __future__ import annotations

import pytest

from kvstore.client.core.fanout import RangeCount, RangeScan
from kvstore.client.core.routing import PartitionRoute, Routing
from kvstore.client.core.scanning import Bounds
from kvstore.client.core.values import Item, Level
from kvstore.errors import Moved

MOVED = Moved("", 0)


def routing_of(version: int, *partitions: str) -> Routing:
    return Routing(
        ring_version=version, partitions={each: PartitionRoute() for each in partitions}, owners=list(partitions)
    )


def learn(routing: Routing, version: int, *partitions: str) -> None:
    routing.ring_version = version
    routing.partitions = {each: PartitionRoute() for each in partitions}
    routing.owners = list(partitions)


def scan_of(routing: Routing, *, limit: int = 0) -> RangeScan:
    return RangeScan(routing, Bounds(b"a", b""), limit=limit, level=Level.LINEARIZABLE)


def page(*keys: bytes, then: bytes | None = None) -> tuple[list[tuple[bytes, Item]], bytes | None]:
    return [(key, Item(b"v", 1, 1, 0, 0)) for key in keys], then


def keys_of(found: list[tuple[bytes, Item]]) -> list[bytes]:
    return [key for key, _ in found]


def test_empty_pages_of_two_rings_are_not_the_end() -> None:
    """p1 answered before a key came to it, p2 after the key had gone."""
    routing = routing_of(1, "p1", "p2")
    scan = scan_of(routing)
    scan.wanted()
    learn(routing, 2, "p1", "p2")
    assert scan.take([page(), page()]) == []
    assert not scan.is_done
    scan.wanted()
    assert keys_of(scan.take([page(b"k"), page()])) == [b"k"]
    assert scan.is_done


def test_scan_continues_with_the_next_ring_behind_its_last_key() -> None:
    routing = routing_of(1, "p1", "p2")
    scan = scan_of(routing, limit=5)
    scan.wanted()
    assert keys_of(scan.take([page(b"a", b"c", then=b"e"), page(b"b")])) == [b"a", b"b", b"c"]
    scan.wanted()
    learn(routing, 2, "p1", "p3")
    assert scan.take(MOVED) == []
    asked = scan.wanted()
    assert [(each.partition, each.key) for each in asked] == [("p1", b"c\0"), ("p3", b"c\0")]
    assert [each.options.limit for each in asked if each.options is not None] == [2, 2]


def test_scan_without_returned_keys_starts_over() -> None:
    routing = routing_of(1, "p1")
    scan = scan_of(routing)
    scan.wanted()
    learn(routing, 2, "p1", "p2")
    scan.take(MOVED)
    assert [each.key for each in scan.wanted()] == [b"a", b"a"]


def test_moved_is_an_error_when_no_newer_ring_is_known() -> None:
    scan, count = scan_of(routing_of(1, "p1")), RangeCount(routing_of(1, "p1"), Level.LINEARIZABLE)
    scan.wanted()
    count.wanted()
    with pytest.raises(Moved):
        scan.take(MOVED)
    with pytest.raises(Moved):
        count.take(MOVED)


def test_partition_without_a_range_is_not_asked() -> None:
    """A partition that joins, or that has lost all its ranges, need not have a leader."""
    routing = routing_of(1, "p1", "p2", "p3")
    routing.owners = ["p1", "p3"]
    assert [each.partition for each in scan_of(routing).wanted()] == ["p1", "p3"]
    assert [each.partition for each in RangeCount(routing, Level.LINEARIZABLE).wanted()] == ["p1", "p3"]
    scan = scan_of(routing)
    scan.wanted()
    learn(routing, 2, "p1", "p2", "p3")
    routing.owners = ["p2"]
    scan.take(MOVED)
    assert [each.partition for each in scan.wanted()] == ["p2"]


def test_count_belongs_to_one_ring() -> None:
    routing = routing_of(1, "p1", "p2")
    count = RangeCount(routing, Level.LINEARIZABLE)
    assert [each.partition for each in count.wanted()] == ["p1", "p2"]
    learn(routing, 2, "p2", "p3")
    count.take([3, 4])
    assert count.total is None
    assert [each.partition for each in count.wanted()] == ["p2", "p3"]
    count.take([5, 0])
    assert count.total == 5
