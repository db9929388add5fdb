"""Reads of pinned views, and the points at which they are split."""

from itertools import pairwise
from random import Random

import pytest

from kvstore.partition.state import rows
from kvstore.partition.state.pinned_scan import FEW_KEYS, SAMPLE_ROWS, PinnedScan, sample, stretches
from kvstore.partition.state.pinned_scan import sizes as sizes_of
from kvstore.partition.state.pinned_views import PinnedView
from kvstore.partition.state.tokens import EVERYTHING, Tokens, TokenSpan
from kvstore.proto import data_pb2, pinned_page
from kvstore.proto.pinned_page import PinnedRow
from kvstore.ring.hashing import MURMUR3, TOKENS
from kvstore.types import EntryId, LedgerId, Position, Seq
from tests.partition.state.engine_memory import MemoryEngine

token_of = MURMUR3.token_of

ALL = TokenSpan(0, TOKENS - 1)


def held_of(values: dict[bytes, bytes], owned: Tokens = EVERYTHING) -> PinnedView:
    engine = MemoryEngine()
    batch = engine.batch()
    for number, (key, value) in enumerate(values.items()):
        batch.put(rows.data_key(MURMUR3, key), rows.encode_record(value, number + 1, number + 1, 1, 0))
        batch.put(rows.ORDER + key, b"")
    engine.write(batch)
    view = engine.view((rows.ALL_DATA, rows.ALL_ORDER))
    return PinnedView("pin", 1, Position(LedgerId(1), EntryId(1)), Seq(1), 1, owned, len(values), view, MURMUR3, False)


def values_of(count: int, seed: int = 1) -> dict[bytes, bytes]:
    random = Random(seed)
    return {b"key%d" % number: random.randbytes(random.randrange(200)) for number in range(count)}


def pages(
    held: PinnedView, span: TokenSpan = ALL, page_bytes: int = 2_000, **options: bytes | bool
) -> list[data_pb2.PinnedPage]:
    scan = PinnedScan(held, span, page_bytes=page_bytes, **options)  # type: ignore[arg-type]
    found: list[data_pb2.PinnedPage] = []
    while not found or not found[-1].ends:
        while not scan.step():
            pass
        found.append(scan.page())
    return found


def sizes(held: PinnedView, split_bytes: int) -> tuple[int, list[int]]:
    return sizes_of(held, [sample(held.view, span) for span in stretches(held)], split_bytes)


def rows_of(found: list[data_pb2.PinnedPage]) -> list[PinnedRow]:
    return [row for page in found for row in pinned_page.rows_of(pinned_page.columns_of(page))]


def in_order(values: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    return sorted(values.items(), key=lambda pair: rows.data_key(MURMUR3, pair[0]))


def test_scan_returns_records_in_token_and_key_order() -> None:
    values = values_of(1_000)
    found = pages(held_of(values))
    assert [(row.key, row.value) for row in rows_of(found)] == in_order(values)
    assert len(found) > 20
    assert max(len(page.rows) for page in found) < 2_300


def test_pinned_scan_continues_behind_any_page() -> None:
    held = held_of(values_of(300))
    whole = pages(held)
    for place, page in enumerate(whole[:-1]):
        assert rows_of(pages(held, after=page.last)) == rows_of(whole[place + 1 :])
    assert rows_of(pages(held, after=whole[-1].last)) == []


def test_scan_reads_only_owned_and_requested_records() -> None:
    values = values_of(500)
    owned = Tokens([TokenSpan(1 << 28, 1 << 29), TokenSpan(1 << 30, 3 << 30)])
    span = TokenSpan(3 << 27, 2 << 30)
    wanted = {key: value for key, value in values.items() if owned.holds(token_of(key)) and span.holds(token_of(key))}
    assert 50 < len(wanted) < 400
    assert [row.key for row in rows_of(pages(held_of(values, owned), span))] == [key for key, _ in in_order(wanted)]


@pytest.mark.parametrize("number", range(5))
def test_last_token_of_a_split_belongs_to_it(number: int) -> None:
    values = values_of(200)
    held, token = held_of(values), token_of(b"key%d" % number)
    before, behind = (rows_of(pages(held, span)) for span in (TokenSpan(0, token), TokenSpan(token + 1, TOKENS - 1)))
    assert before[-1].key == b"key%d" % number
    assert [(row.key, row.value) for row in before + behind] == in_order(values)
    owned = held_of(values, Tokens([TokenSpan(0, token)]))
    assert rows_of(pages(owned)) == before


@pytest.mark.parametrize(
    ("start", "end"), [(b"key5", b""), (b"", b"key5"), (b"key42", b"key43"), (b"zzz", b""), (b"key7", b"key70")]
)
def test_keys_outside_the_bounds_are_left_out(start: bytes, end: bytes) -> None:
    values = values_of(3_000)
    wanted = {key: value for key, value in values.items() if start <= key and (not end or key < end)}
    held = held_of(values)
    found = pages(held, start=start, end=end)
    assert [(row.key, row.value) for row in rows_of(found)] == in_order(wanted)
    if len(found) > 2:
        assert rows_of(pages(held, start=start, end=end, after=found[1].last)) == rows_of(found[2:])


def test_few_keys_within_the_bounds_are_looked_up() -> None:
    values = values_of(900)
    owned, span = Tokens([TokenSpan(1 << 28, 3 << 30)]), TokenSpan(1 << 29, TOKENS - 1)
    wanted = {key: value for key, value in values.items() if owned.holds(token_of(key)) and span.holds(token_of(key))}
    assert [row.key for row in rows_of(pages(held_of(values, owned), span, start=b"key"))] == [
        key for key, _ in in_order(wanted)
    ]


def test_sparse_scan_reports_its_progress() -> None:
    values = {b"k%d" % number: b"" for number in range(40_000)}
    wanted = [key for key in values if b"k38" <= key < b"k391"]
    assert FEW_KEYS < len(wanted) < 2_000
    found = pages(held_of(values), start=b"k38", end=b"k391", page_bytes=1 << 20)
    assert len(found) >= 2
    assert sum(page.count for page in found) == len(wanted)
    assert found[0].last < found[1].last


def test_row_without_value_is_its_header() -> None:
    values = values_of(100)
    found = rows_of(pages(held_of(values), keys_only=True))
    assert [(row.key, row.value) for row in found] == [(key, b"") for key, _ in in_order(values)]
    assert all(row.version for row in found)


def test_page_may_hold_a_larger_value() -> None:
    values = {b"a": b"x" * 1_000_000, b"b": b"y" * 1_000_000, b"c": b""}
    found = pages(held_of(values), page_bytes=4_096)
    assert [(row.key, row.value) for row in rows_of(found)] == in_order(values)
    assert all(len(page.rows) < 1_100_000 for page in found)


def test_sizes_estimate_keys_and_values() -> None:
    values = {b"key%06d" % number: b"x" * 91 for number in range(5_000)}
    total, _ = sizes(held_of(values), 0)
    assert total == 5_000 * 100


@pytest.mark.parametrize("spans", [[ALL], [TokenSpan(0, 1 << 30), TokenSpan(5 << 28, 3 << 30)]])
def test_splits_have_similar_sizes(spans: list[TokenSpan]) -> None:
    owned = Tokens(spans)
    values = {key: value for key, value in values_of(20_000).items() if owned.holds(token_of(key))}
    held = held_of(values, owned)
    total, ends = sizes(held, 200_000)
    assert abs(total / sum(len(key) + len(value) for key, value in values.items()) - 1) < 0.1
    bounds = [-1, *ends, TOKENS - 1]
    parts = [
        sum(len(key) + len(value) for key, value in values.items() if low < token_of(key) <= high)
        for low, high in pairwise(bounds)
    ]
    assert len(parts) == -(-total // 200_000)
    assert max(parts) < 2 * sum(parts) / len(parts)


def test_dense_tokens_get_more_splits() -> None:
    crowd = [key for number in range(60_000) if token_of(key := b"k%d" % number) < 1 << 28]
    values = dict.fromkeys(crowd, b"x" * 100) | dict.fromkeys((b"other%d" % number for number in range(300)), b"x")
    _, ends = sizes(held_of(values), 50_000)
    assert len(ends) > 4
    assert sum(end < 1 << 28 for end in ends) > len(ends) / 2


@pytest.mark.parametrize("count", [0, 1, SAMPLE_ROWS])
def test_small_state_is_one_split(count: int) -> None:
    assert sizes(held_of(values_of(count)), 1 << 20)[1] == []
    assert sizes(held_of(values_of(count), Tokens([])), 1)[1] == []
