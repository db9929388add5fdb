"""Pages of a range, forwards and backwards; keys alone and counts, for which no record is read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain
from random import Random
from typing import Any

import pytest

from kvstore.errors import NotLeader
from kvstore.partition.leading import queries, range_reads
from kvstore.partition.leading.range_reads import COUNT_KEYS_MAX, PAGE_BYTES_MAX, READ_BYTES_MAX
from kvstore.partition.state.commands import Batch, Count, Flag, Level, Op, Put, Range, Scan, ScanTokens
from kvstore.partition.state.tokens import EVERYTHING, Tokens, TokenSpan
from kvstore.ring.hashing import TOKENS
from tests.partition.one_partition import Partition
from tests.ring import rings

RELATIVE = Flag.RELATIVE_TTL
BACK, BARE, COUNTED = Flag.REVERSE, Flag.BARE, Flag.COUNT_ONLY


@pytest.fixture
def p() -> Partition:
    return Partition().start()


def walk(p: Partition, start: bytes, end: bytes, limit: int, flags: int) -> list[list[bytes]]:
    """Return all pages of a range, as keys."""
    pages: list[list[bytes]] = []
    while True:
        items, following = p.do(Range(start, end, limit, flags))
        pages.append(list(items) if flags & BARE else [key for key, _ in items])
        if following is None:
            return pages
        start, end = (start, following) if flags & BACK else (following, end)


def read_of(p: Partition, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the bytes of each read of records from now on."""
    sizes: list[int] = []
    multi_get = p.state.engine.multi_get

    def counting(keys: list[bytes]) -> Any:
        rows = multi_get(keys)
        sizes.append(sum(len(row) for row in rows if row is not None))
        return rows

    monkeypatch.setattr(p.state.engine, "multi_get", counting)
    return sizes


@pytest.mark.parametrize("seed", range(12))
def test_range_pages_match_a_sorted_list(p: Partition, seed: int) -> None:
    random = Random(seed)
    keys = sorted({random.choice((b"a", b"b\xff", b"c")) + random.randbytes(random.randint(0, 2)) for _ in range(120)})
    p.do(*(Put(key, b"v" * random.randint(0, 9), 100 if random.random() < 0.2 else 0, RELATIVE) for key in keys))
    p.wait(0.2)
    there = {key for key, _ in walk_all(p)}
    for _ in range(12):
        start, end = random.choice((b"", b"a", b"b", *keys)), random.choice((b"", b"b", b"c", *keys))
        expected = [key for key in keys if key in there and key >= start and (not end or key < end)]
        limit = random.choice((1, 2, 7, 1000))
        for flags in (0, BARE, BACK, BACK | BARE, Flag.KEYS_ONLY | BACK):
            pages = walk(p, start, end, limit, flags)
            assert list(chain(*pages)) == (expected[::-1] if flags & BACK else expected), (start, end, limit, flags)
            assert max(map(len, pages)) <= limit
        assert p.do(Range(start, end, 0, COUNTED)) == (len(expected), None)


def walk_all(p: Partition) -> list[tuple[bytes, Any]]:
    items, following = p.do(Scan(b"", b"", 1000))
    assert following is None
    return list(items)


# docs/protocol.md P37
def test_keys_and_counts_read_no_records(p: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    p.do(*(Put(b"%04d" % number, b"v") for number in range(1500)))
    sizes = read_of(p, monkeypatch)
    keys, following = p.do(Range(b"", b"", 0, BARE))
    assert (len(keys), following, sizes) == (1000, b"1000", [])
    keys, following = p.do(Range(b"", b"", 0, BARE | BACK))
    assert (keys[0], len(keys), following) == (b"1499", 1000, b"0500")
    assert p.do(Range(b"01", b"02", 0, COUNTED)) == (100, None)
    assert sizes == []


def test_count_continues_and_yields_to_the_loop(p: Partition) -> None:
    p.do(*(Put(b"%05d" % number, b"") for number in range(COUNT_KEYS_MAX + 3)))
    op = Range(b"", b"", 0, COUNTED)
    work = queries.steps(p.state, op, p.state.record_time_ms, p.state.ownership.owned)
    turns = 0
    try:
        while True:
            next(work)
            turns += 1
    except StopIteration as ended:
        first, following = ended.value
    assert (first, turns) == (COUNT_KEYS_MAX, COUNT_KEYS_MAX // range_reads.ROWS_PER_STEP - 1)
    assert p.do(Range(following, b"", 0, COUNTED)) == (3, None)
    assert p.do(Range(b"", b"", 5, COUNTED))[0] < COUNT_KEYS_MAX, "the limit is rounded up to a whole step"


# docs/protocol.md P4 P37
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("flags", [BARE, BARE | BACK, COUNTED])
def test_expired_keys_are_deleted_before_keys_or_counts_omit_them(
    p: Partition, monkeypatch: pytest.MonkeyPatch, flags: int, many: bool
) -> None:
    """Another leader, whose clock is late, would show them again if their deletes were not logged."""
    if many:
        monkeypatch.setattr(range_reads, "OVERDUE_MAX", 3)
    p.do(*(Put(b"e%d" % number, b"v", 100, RELATIVE) for number in range(5)), Put(b"k", b"v"))
    p.wait(0.2)
    (token,) = p.submit(Range(b"", b"", 0, flags))
    assert p.result(token) == "waits"
    p.acknowledge()
    p.settle()
    items, following = p.result(token)
    assert (items, following) == (1 if flags & COUNTED else [b"k"], None)
    assert p.do(Count()) == 1, "the deletes are logged now"


def test_page_is_bounded_in_bytes_in_both_directions(p: Partition) -> None:
    p.do(*(Put(b"big%d" % number, b"v" * (1 << 19)) for number in range(5)))
    for flags in (0, BACK):
        assert [len(page) for page in walk(p, b"", b"", 0, flags)] == [2, 2, 1]
    p.do(*(Put(b"k%04d" % number + b"x" * 4000, b"") for number in range(600)))
    for flags in (BARE, BARE | BACK):
        pages = walk(p, b"k", b"", 0, flags)
        assert sum(map(len, pages)) == 600
        assert all(sum(map(len, page)) <= PAGE_BYTES_MAX for page in pages)


# docs/protocol.md P37
@pytest.mark.parametrize("op", [Scan(b"", b"", 0), Scan(b"", b"", 0, Flag.KEYS_ONLY), Range(b"", b"", 0, BACK)])
def test_large_values_are_not_read_in_vain(p: Partition, monkeypatch: pytest.MonkeyPatch, op: Op) -> None:
    """A page that reads a thousand values of a megabyte would stop all others for a second, whether or not the values
    are needed."""
    p.do(*(Put(b"%02d" % number, b"v" * (1 << 18)) for number in range(60)))
    sizes = read_of(p, monkeypatch)
    items, following = p.do(op)
    assert following is not None
    assert 4 <= len(items) < 60
    assert sum(sizes) <= READ_BYTES_MAX + 2 * sizes[0], "a record begun within the bound is completed"


def test_large_values_behind_small_ones_cause_no_stall(p: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    p.do(*(Put(b"a%02d" % number, b"") for number in range(56)))
    p.do(*(Put(b"b%02d" % number, b"v" * (1 << 18)) for number in range(64)))
    sizes = read_of(p, monkeypatch)
    items, following = p.do(Scan(b"", b"", 0))
    assert following is not None
    assert len(items) > 56
    assert sum(sizes) <= 2 * range_reads._KEYS_PER_READ_MAX * (1 << 18)


def test_scan_by_token_yields_to_the_loop_with_large_values(p: Partition) -> None:
    p.do(*(Put(b"{t}%02d" % number, b"v" * (1 << 20)) for number in range(12)))
    op = ScanTokens(0, 10, flags=int(Flag.KEYS_ONLY))
    turns = sum(1 for _ in queries.steps(p.state, op, p.state.record_time_ms, p.state.ownership.owned))
    assert turns == 3


def looked_at(p: Partition, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Record the rows that iterators return from now on."""
    seen: list[bytes] = []
    iterate = p.state.engine.iterate

    def noting(begin: bytes, end: bytes) -> Any:
        for row in iterate(begin, end):
            seen.append(row[0])
            yield row

    monkeypatch.setattr(p.state.engine, "iterate", noting)
    return seen


# docs/protocol.md P37
def test_scan_by_token_skips_tokens_that_are_not_owned(p: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    p.do(*(Put(b"%d" % number, b"v") for number in range(3000)))
    half = Tokens([TokenSpan(0, 1 << 30), TokenSpan(3 << 30, (1 << 32) - 1)])
    keys = {b"%d" % number for number in range(3000) if half.holds(rings.key_hash.token_of(b"%d" % number))}
    seen = looked_at(p, monkeypatch)
    found: list[bytes] = []
    token: Any = 0
    while token is not None:
        page: Any = queries.answer(p.state, ScanTokens(token, 100, Level.STALE), 0, half)
        found += [key for key, _ in page.items]
        token = page.next
    assert sorted(found) == sorted(keys)
    assert len(seen) <= len(keys) + 100, "one more row for each page"


# docs/protocol.md P37
def test_scan_by_token_in_several_turns_shows_one_moment(p: Partition) -> None:
    """The second range of tokens was read as it was when the scan came to it: with one write of a batch, and without
    keys that had moved away meanwhile."""
    token_of = rings.key_hash.token_of
    keys = sorted((b"%d" % number for number in range(900)), key=token_of)
    first, last = keys[0], keys[-1]
    p.do(*(Put(key, b"before") for key in keys))
    cut = TOKENS // 4 * 3
    apart = Tokens([TokenSpan(0, cut - 1 - rings.key_hash.unit), TokenSpan(cut, TOKENS - 1)])
    scan = queries.steps(p.state, ScanTokens(0, len(keys)), p.state.record_time_ms, apart)
    next(scan)
    p.do(Batch(first, (Put(first, b"after"), Put(last, b"after"))))
    page: Any = None

    def finish() -> Iterator[None]:
        nonlocal page
        page = yield from scan

    deque(finish(), maxlen=0)
    found = {key: record.value for key, record in page.items}
    assert (found[first], found[last]) == (b"before", b"before")


# docs/protocol.md P37
def test_token_with_many_keys_is_paged_by_the_leader(p: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that does not lead has one turn for an answer, during which no lease is renewed and no bookie
    answers."""
    monkeypatch.setattr(queries, "STEP_BYTES", 1000)
    p.do(*(Put(b"{t}%d" % number, b"v" * 1000) for number in range(100)), Put(b"k", b"v" * 1000))
    seen = looked_at(p, monkeypatch)
    token = rings.key_hash.token_of(b"{t}")
    with pytest.raises(NotLeader):
        queries.answer(p.state, ScanTokens(token, 1, Level.STALE, Flag.KEYS_ONLY), 0, EVERYTHING)
    assert len(seen) <= queries.STEPS_AT_ONCE + 1
    (asked,) = p.submit(ScanTokens(token, 1, flags=Flag.KEYS_ONLY))
    for _ in range(200):
        p.settle()
    page: Any = p.result(asked)
    assert len(page.items) == 100
    assert page.next in (rings.key_hash.token_of(b"k"), None)


# docs/protocol.md P37
def test_scan_by_token_over_expired_keys_ends_early(p: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "PAGE_ROWS_MAX", 500)
    p.do(*(Put(b"%d" % number, b"v", 100, RELATIVE) for number in range(2000)))
    p.wait(1)
    p.do(Put(b"live", b"v"))
    seen = looked_at(p, monkeypatch)
    token: Any = 0
    found: list[bytes] = []
    pages = 0
    while token is not None:
        page: Any = queries.answer(p.state, ScanTokens(token, 10, Level.STALE), p.state.record_time_ms, EVERYTHING)
        assert len(seen) <= 501
        seen.clear()
        found += [key for key, _ in page.items]
        token = page.next
        pages += 1
    assert (found, pages) == ([b"live"], 5)
