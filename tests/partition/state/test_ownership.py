"""Sets of tokens, and how records change them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.partition.state import move_records
from kvstore.partition.state.entry import EntryKind
from kvstore.partition.state.move_records import Founded, Freeze, ImportBegin, ImportRows, Release
from kvstore.partition.state.ownership import Ownership
from kvstore.partition.state.tokens import EVERYTHING, PART, WHOLE, Tokens, TokenSpan, spans_of
from kvstore.ring.hashing import TOKENS
from kvstore.types import EntryId, LedgerId, PartitionId, Position, ServerId
from tests.ring.rings import new_ring

pytestmark = pytest.mark.usefixtures("key_hash")

AT = Position(LedgerId(3), EntryId(7))
edges = st.lists(st.integers(0, TOKENS - 1), min_size=2, max_size=12, unique=True).map(sorted)


def spans(bounds: list[int]) -> list[TokenSpan]:
    return [TokenSpan(first, last) for first, last in zip(bounds[::2], bounds[1::2], strict=False)]


@given(edges, st.integers(0, TOKENS - 1))
def test_tokens_hold_exactly_their_ranges(bounds: list[int], token: int) -> None:
    given_spans = spans(bounds)
    tokens = Tokens(given_spans)
    for each in (token, *bounds, *(bound + 1 for bound in bounds if bound + 1 < TOKENS)):
        expected = any(span.holds(each) for span in given_spans)
        row_key = b"d" + each.to_bytes(4, "big") + b"key"
        assert tokens.holds(each) == tokens.holds_row(row_key) == expected
        slice_ = tokens.slices[row_key[1]]
        assert (slice_ == WHOLE or (slice_ == PART and tokens.holds_row(row_key))) == expected


@given(edges, edges)
def test_removing_and_adding_a_span_restores_the_tokens(bounds: list[int], others: list[int]) -> None:
    tokens, other = Tokens(spans(bounds)), spans(others)[0]
    left = tokens.without(other)
    assert not left.meets(other)
    assert not any(left.holds(each) for each in other)
    for bound in bounds:
        assert left.holds(bound) == (tokens.holds(bound) and not other.holds(bound))
    if tokens.covers(other):
        assert left.with_(other) == tokens


def test_ring_gives_each_token_to_one_partition() -> None:
    ring = new_ring([PartitionId(f"p{number}") for number in range(5)], {ServerId("n1"): ""}, 1)
    given = sorted(span for partition in ring.partitions for span in spans_of(ring, partition))
    assert given[0].first == 0
    assert given[-1].last == TOKENS - 1
    assert all(one.last + 1 == other.first for one, other in pairwise(given))
    assert all(ring.owner_of(span.last) == p for p in ring.partitions for span in spans_of(ring, p))


def test_ownership_round_trips() -> None:
    half = TokenSpan(0, TOKENS // 2 - 1)
    ownership = Ownership().after(Founded((half,)), AT, 0, 0)
    quarter, rest = TokenSpan(0, TOKENS // 4 - 1), TokenSpan(TOKENS // 4, TOKENS // 2 - 1)
    ownership = ownership.after(Freeze(1, PartitionId("p2"), quarter), AT, 5, 6)
    ownership = ownership.after(Release(1, AT, 10), AT, 7, 8)
    ownership = ownership.after(Freeze(2, PartitionId("p2"), rest), AT, 9, 10)
    begun = ImportBegin(3, 1, PartitionId("p3"), TokenSpan(TOKENS // 2, TOKENS - 1), AT)
    ownership = ownership.after(begun, AT, 11, 12)
    assert Ownership.decode(ownership.encode()) == ownership
    assert ownership.owned.spans == (rest,)
    assert ownership.writable.spans == ()
    assert ownership.encode().hex() == (
        "01959192ce40000000ce7fffffff919a"
        "0301a2703392ce80000000ceffffffff920307c40164920307c0c2c400"
        "919402a2703292ce40000000ce7fffffff920307"
        "919801a270329200ce3fffffff9203079203070708c40000"
    )
    before_what_came_was_noted = bytes.fromhex("01" + "94" + ownership.encode().hex()[4:-2])
    assert Ownership.decode(before_what_came_was_noted) == ownership
    before_drops_were_noted = bytes.fromhex(
        "01949192ce40000000ce7fffffff9199"
        "0301a2703392ce80000000ceffffffff920307c40164920307c0c2"
        "919402a2703292ce40000000ce7fffffff920307"
        "919701a270329200ce3fffffff9203079203070708"
    )
    assert Ownership.decode(before_drops_were_noted) == ownership


def test_move_records_have_golden_bytes() -> None:
    assert move_records.encode(Freeze(1, PartitionId("p2"), TokenSpan(0, 9))).hex() == "9301a27032920009"
    rows = ImportRows(2, [b"d\0\0\0\1k"], [b""], b"", AT)
    assert move_records.decode(EntryKind.IMPORT, move_records.encode(rows)) == rows
    assert move_records.encode(rows).hex() == "950291c40664000000016b91c400c400920307"


def test_log_without_ownership_owns_everything() -> None:
    assert Ownership().owned == EVERYTHING
    assert not Ownership().is_founded
