"""Redis's glob patterns, and the iteration over the ring."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from kvstore.errors import InvalidRequest, NotLeader
from kvstore.partition.state.commands import Count, Level, Op, Scan, ScanTokens
from kvstore.ring import builder
from kvstore.ring.hashing import SLOTS_HASH, TOKENS, slot_of
from kvstore.ring.ring import Ring
from kvstore.server.routing import keys
from kvstore.server.routing.keys import (
    ALL_KEYS,
    Spans,
    _piece,
    all_keys,
    count_keys,
    literal_prefix,
    matcher,
    matching,
    range_at,
    scan,
    scan_shown,
    within,
)
from kvstore.types import PartitionId, ServerId
from tests.ring.rings import new_ring


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        (b"*", [b"", b"a", b"\n"], []),
        (b"", [b""], [b"a"]),
        (b"h?llo", [b"hello", b"h\nllo"], [b"hllo", b"heello"]),
        (b"h*llo", [b"hllo", b"heeello", b"h*llo"], [b"hell", b"ahllo", b"hlloo"]),
        (b"h[ae]llo", [b"hello", b"hallo"], [b"hillo", b"h[llo"]),
        (b"h[^e]llo", [b"hallo", b"h^llo"], [b"hello", b"hllo"]),
        (b"h[a-b]llo", [b"hallo", b"hbllo"], [b"hcllo", b"h-llo"]),
        (b"h[b-a]llo", [b"hallo", b"hbllo"], [b"hcllo"]),
        (b"a\\*b", [b"a*b"], [b"aXb"]),
        (b"[a\\]b]", [b"a", b"]", b"b"], [b"\\"]),
        (b"a[", [], [b"a", b"a["]),
        (b"*a*b*", [b"ab", b"xaxbx"], [b"ba", b"a", b"b"]),
        (b"ab*ab", [b"abab", b"abxab"], [b"ab", b"abx"]),
        (b"*aab", [b"aaab", b"aab"], [b"aaba"]),
        (b"a.b", [b"a.b"], [b"aXb"]),
        (b"*[0-9]", [b"key1", b"1"], [b"key", b""]),
    ],
)
def test_patterns_match_as_in_redis(pattern: bytes, matching: list[bytes], others: list[bytes]) -> None:
    matches = matcher(pattern)
    assert [key for key in matching if not matches(key)] == []
    assert [key for key in others if matches(key)] == []


def test_character_class_stays_short() -> None:
    """A pattern of a kilobyte used to take half a second to compile when every matching byte was written out."""
    for written in (b"[^a]", b"[\x00-\xff]", b"[^a-b]"):
        piece, end = _piece(written, 0)
        assert piece is not None
        assert (len(piece) <= 32, end) == (True, len(written))


@pytest.mark.parametrize(
    ("pattern", "prefix"),
    [
        (b"*", b""),
        (b"a*", b"a"),
        (b"user:?", b"user:"),
        (b"a[bc]", b"a"),
        (b"a\\*b", b"a"),
        (b"all", b"all"),
        (b"", b""),
    ],
)
def test_literal_prefix_ends_before_first_special_byte(pattern: bytes, prefix: bytes) -> None:
    assert literal_prefix(pattern) == prefix


@pytest.mark.parametrize(
    ("spans", "prefix", "found"),
    [
        (ALL_KEYS, b"", [(b"", None)]),
        (ALL_KEYS, b"a", [(b"a", b"b")]),
        (ALL_KEYS, b"\xff", [(b"\xff", None)]),
        ([(b"t/", b"t0")], b"", [(b"t/", b"t0")]),
        ([(b"t/", b"t0")], b"t/x", [(b"t/x", b"t/y")]),
        ([(b"t/", b"t0")], b"t", [(b"t/", b"t0")]),
        ([(b"t/", b"t0"), (b"v", b"w")], b"u", []),
    ],
)
def test_ranges_within_a_prefix_are_intersections(spans: Spans, prefix: bytes, found: Spans) -> None:
    assert list(within(spans, prefix)) == list(found)


async def test_keys_in_ranges_are_found_without_reading_others() -> None:
    ring = new_ring([PartitionId(f"p{i}") for i in range(3)], {ServerId("n1"): ""}, 1)
    mine = [b"t/%d" % number for number in range(50)]
    cluster = Keys(ring, [*mine, *(b"other%d" % number for number in range(1_000))])
    limits = {"keys_max": 100, "bytes_max": 1_000}
    found, is_complete = await keys.keys_in(cluster.ask, lambda: ring, [(b"t/", b"t0")], **limits)
    assert (sorted(found), is_complete, cluster.told) == (sorted(mine), True, 50)
    for fewer in ({"keys_max": 49}, {"bytes_max": 100}):
        assert not (await keys.keys_in(cluster.ask, lambda: ring, [(b"t/", b"t0")], **{**limits, **fewer}))[1]


# docs/protocol.md P37
@pytest.mark.parametrize("walk", [scan, partial(scan_shown, shown=lambda key: True)])
async def test_page_referred_to_the_leader_is_read_there(walk: Any) -> None:
    ring = new_ring([PartitionId("p1")], {ServerId("n1"): ""}, 1)
    levels: list[int] = []

    async def ask(op: Op, partition: PartitionId) -> Any:
        levels.append(level := op.level)
        if level != Level.LINEARIZABLE:
            raise NotLeader("p1")
        return [(b"k", None)], None

    cursor, found = await walk(ask, lambda: ring, 0, 10, Level.STALE)
    assert (cursor, set(found)) == (0, {b"k"})
    assert levels == [Level.STALE, Level.LINEARIZABLE] * (len(levels) // 2)


async def test_pages_of_a_slot_end_at_its_last_token() -> None:
    """Neighbouring slots belong to the same partition, and a slot may need several pages."""
    ring = builder.new_ring([PartitionId("p1")], {ServerId("n1"): ""}, 1, SLOTS_HASH)
    stored = [b"key%d" % number for number in range(200_000)]
    slot = slot_of(stored[0])
    mine = {key for key in stored if slot_of(key) == slot}
    stored += [b"{%b}%d" % (stored[0], number) for number in range(keys.PAGE_KEYS_MAX + 1)]
    mine.update(stored[200_000:])
    cluster = Keys(ring, stored)
    assert await keys.count_slot(cluster.ask, lambda: ring, slot) == len(mine)
    assert cluster.asked > 1
    found = await keys.keys_of_slot(cluster.ask, lambda: ring, slot, most=9_999, bytes_max=1 << 20)
    assert sorted(found) == sorted(mine)
    with pytest.raises(InvalidRequest):
        await keys.keys_of_slot(cluster.ask, lambda: ring, slot, most=9_999, bytes_max=1_000)


async def test_event_loop_yields_during_matching() -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    others = asyncio.create_task(count_turns())
    assert len(await matching([b"a" * 4096] * 256, matcher(b"*a*"))) == 256
    others.cancel()
    assert turns >= 15


def test_no_pattern_takes_long() -> None:
    key = b"a" * 4096
    assert not matcher(b"*a" * 60 + b"*b")(key)
    assert not matcher(b"a*" * 500 + b"b")(key)


async def test_scan_makes_a_bounded_number_of_requests() -> None:
    """A user may have 2,048 prefixes. A search for each in each partition takes longer than a client waits."""
    ring = new_ring([PartitionId(f"p{i}") for i in range(3)], {ServerId("n1"): ""}, 1)
    cluster = Keys(ring, [b"other%d" % number for number in range(1_000)])
    spans = [(b"t/%04d/" % number, b"t/%04d0" % number) for number in range(2_048)]
    await scan_shown(cluster.ask, lambda: ring, 0, 10, shown=lambda key: False, spans=spans)
    assert cluster.asked <= keys.RANGES_MAX


class Keys:
    """Partitions that hold keys, requested as a server requests them."""

    def __init__(self, ring: Ring, keys: list[bytes]) -> None:
        self.ring = ring
        self.keys = {
            partition: sorted((ring.hash.token_of(key), key) for key in keys if ring.partition_of(key) == partition)
            for partition in ring.partitions
        }
        self.asked = self.told = 0

    async def ask(self, op: Op, partition: PartitionId) -> Any:
        self.asked += 1
        held = self.keys[partition]
        if isinstance(op, Count):
            return len(held)
        if isinstance(op, Scan):
            inside = sorted(key for _, key in held if op.key <= key and (not op.end or key < op.end))
            self.told += len(page := inside[: op.limit])
            return [(key, None) for key in page], inside[op.limit] if len(inside) > op.limit else None
        assert isinstance(op, ScanTokens)
        start, limit = op.token, op.limit
        page = [(token, key) for token, key in held if token >= start]
        if len(page) <= limit:
            return [(key, None) for _, key in page], None
        last = page[limit - 1][0]
        items = [(key, None) for token, key in page if token <= last]
        return items, last + 1


@pytest.mark.parametrize("partitions", [1, 3, 10])
@pytest.mark.parametrize("count", [1, 10, 1000])
async def test_scan_returns_every_key_once(partitions: int, count: int) -> None:
    ids = [PartitionId(f"p{i}") for i in range(partitions)]
    ring = new_ring(ids, {ServerId("n1"): ""}, 1)
    wanted = [b"key-%d" % i for i in range(300)]
    cluster = Keys(ring, wanted)
    found: list[bytes] = []
    cursor, calls = 0, 0
    while calls == 0 or cursor:
        cursor, some = await scan(cluster.ask, lambda: ring, cursor, count)
        assert 0 <= cursor < TOKENS
        found += some
        calls += 1
    assert sorted(found) == sorted(wanted)
    assert sorted(await all_keys(cluster.ask, lambda: ring, bytes_max=1 << 20)) == sorted(wanted)
    assert await count_keys(cluster.ask, lambda: ring) == 300


async def test_traversal_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = new_ring([PartitionId("p1"), PartitionId("p2")], {ServerId("n1"): ""}, 1)
    wanted = [b"%03d" % i + b"k" * 997 for i in range(200)]
    cluster = Keys(ring, wanted)
    monkeypatch.setattr(keys, "PAGE_KEYS_MAX", 5)
    monkeypatch.setattr(keys, "SCAN_BYTES_MAX", 20_000)
    cursor, found = await scan(cluster.ask, lambda: ring, 0, 200)
    assert cursor, "there is more"
    assert 20_000 <= len(b"".join(found)) <= 25_000
    with pytest.raises(InvalidRequest, match="use SCAN"):
        await all_keys(cluster.ask, lambda: ring, bytes_max=199_000)
    matches = matcher(b"00*")
    assert len(await all_keys(cluster.ask, lambda: ring, matches=matches, bytes_max=10_000)) == 10


def test_every_token_is_in_the_range_of_its_owner() -> None:
    ring = new_ring([PartitionId("p1"), PartitionId("p2")], {ServerId("n1"): ""}, 1)
    token, seen = 0, set()
    while token < TOKENS:
        owner, end = range_at(ring, token)
        assert end >= token
        assert ring.owner_of(end) == owner == ring.owner_of(token)
        seen.add(owner)
        token = end + 1
    assert seen == {"p1", "p2"}
