"""Reads that no correct store gives are told from those that one may give."""

from __future__ import annotations

import pytest

from loadtest.expectations import Expectations, next_generation
from loadtest.values import Stamp, WrongValue, encode

KEY = b"key"


def ours(number: int, writer: int = 1) -> bytes:
    return encode(KEY, Stamp(writer, number), 60)


def test_an_older_version_than_was_acknowledged_is_wrong() -> None:
    mine = Expectations(1)
    mine.acknowledged(mine.begin(KEY), version=10)
    floor = mine.floor(KEY)
    mine.check(KEY, ours(1), floor, version=10)
    with pytest.raises(WrongValue, match="version 9, after version 10"):
        mine.check(KEY, ours(1), floor, version=9)


def test_an_older_version_than_was_read_is_wrong() -> None:
    mine = Expectations(1)
    mine.check(KEY, ours(4, writer=2), mine.floor(KEY), version=10)
    with pytest.raises(WrongValue, match="version 8"):
        mine.check(KEY, ours(3, writer=2), mine.floor(KEY), version=8)


def test_a_read_that_began_before_the_acknowledgement_may_give_the_older_version() -> None:
    mine = Expectations(1)
    mine.acknowledged(mine.begin(KEY), version=5)
    floor = mine.floor(KEY)
    mine.acknowledged(mine.begin(KEY), version=6)
    mine.check(KEY, ours(1), floor, version=5)


def test_reads_that_may_be_stale_by_choice_may_be_old() -> None:
    mine = Expectations(1, is_fresh=False)
    mine.acknowledged(mine.begin(KEY), version=10)
    mine.check(KEY, ours(1), mine.floor(KEY), version=9)


def test_only_reads_that_may_be_stale_may_come_before_a_key_was_written() -> None:
    """An insert that was acknowledged is read at once."""
    Expectations(1, is_fresh=False).not_found(KEY)
    with pytest.raises(WrongValue, match="is absent, but was written"):
        Expectations(1).not_found(KEY)


def test_without_versions_an_overwritten_value_of_ours_is_wrong() -> None:
    mine = Expectations(1)
    first = mine.begin(KEY)
    mine.acknowledged(first)
    second = mine.begin(KEY)
    mine.acknowledged(second)
    mine.check(KEY, ours(second.number), mine.floor(KEY))
    with pytest.raises(WrongValue, match="our write 1"):
        mine.check(KEY, ours(first.number), mine.floor(KEY))


def test_of_two_writes_under_way_together_either_may_be_the_last() -> None:
    mine = Expectations(1)
    first, second = mine.begin(KEY), mine.begin(KEY)
    mine.acknowledged(second)
    mine.acknowledged(first)
    for write in (first, second):
        mine.check(KEY, ours(write.number), mine.floor(KEY))


def test_a_write_of_unknown_outcome_may_show_later() -> None:
    mine = Expectations(1)
    unknown = mine.begin(KEY)
    later = mine.begin(KEY)
    mine.acknowledged(later)
    mine.check(KEY, ours(unknown.number), mine.floor(KEY))


def test_a_refused_write_hides_nothing() -> None:
    mine = Expectations(1)
    first = mine.begin(KEY)
    mine.acknowledged(first)
    mine.refused(mine.begin(KEY))
    last = mine.begin(KEY)
    mine.acknowledged(last)
    with pytest.raises(WrongValue, match="our write 1"):
        mine.check(KEY, ours(first.number), mine.floor(KEY))


def test_another_writers_numbers_say_nothing_about_ours() -> None:
    mine = Expectations(1)
    for _ in range(3):
        mine.acknowledged(mine.begin(KEY))
    mine.check(KEY, ours(1, writer=2), mine.floor(KEY))


def test_two_winners_of_one_generation_are_wrong() -> None:
    mine = Expectations(1)
    mine.won(KEY, 5)
    mine.won(b"other", 5)
    mine.won(KEY, 6)
    with pytest.raises(WrongValue, match="generation 5"):
        mine.won(KEY, 5)


def test_each_compare_and_set_makes_the_next_generation() -> None:
    first = next_generation(KEY, None)
    assert first == Stamp(0, 1)
    assert next_generation(KEY, encode(KEY, first, 0)) == Stamp(0, 2)


def test_a_counter_that_does_not_rise_is_wrong() -> None:
    mine = Expectations(1)
    early = mine.count_floor(KEY)
    mine.counted(KEY, 7, early)
    mine.counted(KEY, 6, early)
    with pytest.raises(WrongValue, match="incremented to 7"):
        mine.counted(KEY, 7, mine.count_floor(KEY))


def test_a_key_that_is_gone_is_told_with_what_was_known_of_it() -> None:
    mine = Expectations(1)
    mine.acknowledged(mine.begin(KEY), version=12)
    assert "version 12" in str(mine.absent(KEY))


def test_a_scan_that_passes_over_a_key_that_was_there_is_wrong() -> None:
    mine = Expectations(1)
    mine.check(KEY, ours(1, writer=2), mine.NO_FLOOR)
    for key in (b"a", b"key-2", b"z"):
        mine.acknowledged(mine.begin(key))
    mine.begin(b"b")  # may be there
    there = mine.there(b"a", b"z", 10)
    assert there == [b"a", KEY, b"key-2"]
    assert mine.there(b"b", b"z", 1) == [KEY]
    mine.scanned(there, {b"a", KEY, b"key-2", b"new"}, None)
    mine.scanned(there, {b"a", KEY}, KEY)
    for found, last in (({b"a", KEY}, None), ({b"a", b"key-2"}, b"key-2"), ({b"a"}, KEY)):
        with pytest.raises(WrongValue, match="a scan passed over b'key"):
            mine.scanned(there, found, last)


def test_scans_that_may_be_stale_may_lack_what_is_new() -> None:
    mine = Expectations(1, is_fresh=False)
    mine.acknowledged(mine.begin(KEY))
    assert mine.there(b"", b"z", 10) == []
