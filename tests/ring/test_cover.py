"""Ranges that cover all tokens once."""

import pytest

from kvstore.ring.cover import flaw
from kvstore.ring.hashing import TOKENS

LAST = TOKENS - 1


# docs/protocol.md K4
@pytest.mark.parametrize(
    ("owned", "wrong"),
    [
        ({"a": [(0, LAST)]}, ""),
        ({"a": [(0, 9), (20, LAST)], "b": [(10, 19)], "c": []}, ""),
        ({}, "nobody owns tokens 00000000 to ffffffff"),
        ({"a": [(1, LAST)]}, "nobody owns tokens 00000000 to 00000000"),
        ({"a": [(0, LAST - 1)]}, "nobody owns tokens ffffffff to ffffffff"),
        ({"a": [(0, 9)], "b": [(11, LAST)]}, "nobody owns tokens 0000000a to 0000000a"),
        ({"a": [(0, 10)], "b": [(10, LAST)]}, "a and b own token 0000000a"),
        ({"a": [(0, LAST)], "b": [(5, 7)]}, "a and b own token 00000005"),
    ],
)
def test_flaw_describes_gaps_and_overlaps(owned: dict[str, list[tuple[int, int]]], wrong: str) -> None:
    assert flaw(owned) == wrong
