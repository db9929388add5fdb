"""Log lines of nodes about moved ranges are combined correctly with the waits of callers."""

from pathlib import Path

import pytest

from kvstore.ring import MURMUR3
from loadtest.drills.ring_load import Keys, Wait
from loadtest.drills.ring_spans import Longest, hand_over_rows, hand_overs, longest_waits, quantile
from loadtest.drills.spans import read_logs

SOURCE = """2026-01-01 10:00:00,100 INFO kvstore.partition.moves.source partition=p1 move=7 frozen at Position(1, 5)
2026-01-01 10:00:01,100 INFO kvstore.partition.moves.source partition=p1 move=7 takes writes again
2026-01-01 10:00:02,000 INFO kvstore.partition.moves.source partition=p1 move=7 frozen at Position(1, 9)
2026-01-01 10:00:02,030 INFO kvstore.partition.moves.source partition=p1 move=7 released to p2
2026-01-01 10:00:03,000 INFO kvstore.partition.moves.source partition=p1 move=8 frozen at Position(1, 12)
"""
TARGET = """2026-01-01 10:00:02,036 INFO kvstore.partition.moves.import_driver partition=p2 move=7 owns the range
2026-01-01 10:00:02,050 INFO kvstore.partition.moves.import_driver partition=p2 move=7 the ring is flipped
"""


def at(folder: Path) -> float:
    """The time of the second freeze."""
    return next(event.at for event in read_logs(folder) if "(1, 9)" in event.what)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "n1.log").write_text(SOURCE)
    (tmp_path / "n2.log").write_text(TARGET)
    return tmp_path


def test_hand_over_begins_at_its_last_freeze_and_an_open_move_has_none(folder: Path) -> None:
    found = hand_overs(read_logs(folder))
    assert set(found) == {7}
    assert found[7].freezes == 2
    assert {row["part"]: row["longest_ms"] for row in hand_over_rows(found.values())} == {
        "freeze to release": 30,
        "release to own": 6,
        "own to flip": 14,
        "freeze to flip": 50,
    }


def test_only_waits_on_the_range_and_from_its_first_freeze_on_count(folder: Path) -> None:
    frozen = at(folder)
    waits = [
        Wait(frozen + 0.2, 0.11, True, 50),
        Wait(frozen + 0.2, 0.19, True, 51),
        Wait(frozen + 0.04, 0.01, False, 40),
        Wait(frozen - 1.0, 0.12, True, 45),
        Wait(frozen - 3.0, 0.9, False, 45),
        Wait(frozen + 9.0, 0.9, True, 45),
    ]
    found = hand_overs(read_logs(folder))
    assert longest_waits({7: (40, 50), 8: (0, 9)}, found, waits) == {7: Longest(0.12, 0.01)}
    assert longest_waits({7: (0, 9)}, found, waits) == {7: Longest(None, None)}


def test_quantile_is_a_value_that_so_many_do_not_exceed() -> None:
    assert quantile([], 0.5) == 0.0
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile(range(1, 1001), 0.999) == 999
    assert quantile(range(1, 101), 0.999) == 100


def test_keys_of_a_range_and_those_outside_are_all_there_are() -> None:
    names = [b"k%d" % number for number in range(500)]
    span = (1 << 30, 1 << 31)
    keys = Keys(names, MURMUR3.token_of)
    inside = keys.within(span, 1_000)
    assert inside == sorted((key for key in names if span[0] <= MURMUR3.token_of(key) <= span[1]), key=MURMUR3.token_of)
    assert set(keys.outside([span])) == set(names) - set(inside)
    assert keys.within(span, 3) == inside[:3]
