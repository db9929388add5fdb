"""The progress of a move, computed from its target's state."""

from __future__ import annotations

import pytest

from kvstore.partition.moves.import_steps import copied_part
from kvstore.partition.moves.pages import RETRIES
from kvstore.partition.state.move_records import Drop, ImportBegin, ImportRows
from kvstore.partition.state.ownership import Ownership
from kvstore.partition.state.tokens import NOTHING, TokenSpan
from kvstore.ring.moves import Move, MoveId, MoveState
from kvstore.types import EntryId, LedgerId, PartitionId, Position

AT = Position(LedgerId(1), EntryId(1))
MOVE = Move(MoveId(7), PartitionId("p1"), PartitionId("p2"), 999, 1999, MoveState.COPYING, 1)
FIRST = Ownership(NOTHING, True).after(
    ImportBegin(7, 1, PartitionId("p1"), TokenSpan(MOVE.first, MOVE.end), AT), AT, 0, 0
)


def after_page(cursor: bytes) -> Ownership:
    return FIRST.after(ImportRows(MoveId(7), [], [], cursor, AT), AT, 0, 0)


@pytest.mark.parametrize(
    ("cursor", "part"),
    [
        (b"d" + (1000).to_bytes(4, "big") + b"key", 0.0),
        (b"d" + (1250).to_bytes(4, "big") + b"key", 0.25),
        (b"d" + (1999).to_bytes(4, "big"), 0.999),
        (RETRIES, 1.0),
        (RETRIES + b"client", 1.0),
        (b"", 1.0),
    ],
)
def test_copied_part_counts_tokens_and_is_complete_at_request_ids(cursor: bytes, part: float) -> None:
    assert copied_part(after_page(cursor), MOVE) == pytest.approx(part)


def test_copied_part_is_zero_before_the_start_and_after_a_cancel() -> None:
    assert copied_part(Ownership(NOTHING, True), MOVE) == 0
    assert copied_part(FIRST, MOVE) == 0
    assert copied_part(after_page(b"").after(Drop(7, b"d\0\0\x04\0"), AT, 0, 0), MOVE) == 0
