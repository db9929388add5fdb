"""Reads that no correct store returns are distinguished from those that it can return."""

from __future__ import annotations

import pytest

from kvstore.client import Level
from kvstore.loadtest.generator.expectations import NO_FLOOR, UNKNOWN_MAX, Expectations, KeyHistory, next_generation
from kvstore.loadtest.generator.values import Stamp, WrongValue, encode, writer_of

KEY = b"key"
EARLIER = writer_of(7, 1)


def ours(number: int, writer: int = 1) -> bytes:
    return encode(KEY, Stamp(writer, number), 60)


def write(mine: Expectations, version: int | None = None) -> int:
    """Make an acknowledged write and return its number."""
    begun = mine.begin(KEY)
    mine.acknowledged(begun, version)
    return begun.number


def test_older_version_than_was_acknowledged_is_wrong() -> None:
    mine = Expectations(1)
    mine.acknowledged(mine.begin(KEY), version=10)
    floor = mine.floor(KEY)
    mine.check(KEY, ours(1), floor, version=10)
    with pytest.raises(WrongValue, match="version 9 after version 10"):
        mine.check(KEY, ours(1), floor, version=9)


def test_older_version_than_was_read_is_wrong() -> None:
    mine = Expectations(1)
    mine.check(KEY, ours(4, writer=2), mine.floor(KEY), version=10)
    with pytest.raises(WrongValue, match="version 8"):
        mine.check(KEY, ours(3, writer=2), mine.floor(KEY), version=8)


def test_read_that_began_before_the_acknowledgement_may_be_older() -> None:
    mine = Expectations(1)
    mine.acknowledged(mine.begin(KEY), version=5)
    floor = mine.floor(KEY)
    mine.acknowledged(mine.begin(KEY), version=6)
    mine.check(KEY, ours(1), floor, version=5)


def test_write_gets_a_newer_version_than_any_read_before_it_began() -> None:
    for version in (9, 10):
        mine = Expectations(1)
        write(mine, version=10)
        with pytest.raises(WrongValue, match=f"written as version {version} after version 10"):
            write(mine, version=version)


def test_of_two_concurrent_writes_either_may_have_the_newer_version() -> None:
    mine = Expectations(1)
    first, second = mine.begin(KEY), mine.begin(KEY)
    mine.acknowledged(second, version=6)
    mine.acknowledged(first, version=5)
    assert mine.floor(KEY).version == 6


def test_reads_that_may_be_stale_by_choice_may_be_old() -> None:
    mine = Expectations(1)
    first = write(mine, version=10)
    write(mine, version=11)
    floor = mine.floor(KEY, Level.STALE)
    mine.check(KEY, ours(first), floor, version=10)
    mine.check(KEY, ours(1, writer=EARLIER), floor, version=1)


def test_allowed_stale_reads_excuse_no_others() -> None:
    mine = Expectations(1)
    first = write(mine, version=10)
    write(mine, version=11)
    mine.check(KEY, ours(first), mine.floor(KEY, Level.STALE), version=10)
    with pytest.raises(WrongValue, match="our write 1"):
        mine.check(KEY, ours(first), mine.floor(KEY))


def test_session_records_only_values_that_came_with_a_version() -> None:
    """Versions are returned only through gRPC, to the single client of this process."""
    mine = Expectations(1)
    first = write(mine)
    write(mine)
    mine.check(KEY, ours(first), mine.floor(KEY, Level.SESSION), version=5)
    mine.check(KEY, ours(1, writer=EARLIER), mine.floor(KEY, Level.SESSION), version=5)
    with pytest.raises(WrongValue, match="version 4 after version 5"):
        mine.check(KEY, ours(first), mine.floor(KEY, Level.SESSION), version=4)


def test_only_reads_that_may_be_stale_may_come_before_a_key_was_written() -> None:
    """A record that was inserted and acknowledged can be read at once."""
    mine = Expectations(1)
    write(mine)
    mine.not_found(KEY, mine.floor(KEY, Level.STALE))
    mine.not_found(KEY, mine.floor(KEY, Level.SESSION))
    with pytest.raises(WrongValue, match="is absent, but was written"):
        mine.not_found(KEY, mine.floor(KEY))
    mine.saw(KEY, 3)
    with pytest.raises(WrongValue, match="version 3"):
        mine.not_found(KEY, mine.floor(KEY, Level.SESSION))


def test_once_a_write_was_acknowledged_no_value_of_an_earlier_run_is_left() -> None:
    """The same holds for inserts of the preload, which have their own numbers."""
    mine = Expectations(writer_of(8, 1))
    mine.check(KEY, ours(1, writer=EARLIER), mine.floor(KEY))
    mine.refused(mine.begin(KEY))
    mine.unknown(mine.begin(KEY))
    mine.check(KEY, ours(1, writer=EARLIER), mine.floor(KEY))
    floor = mine.floor(KEY)
    write(mine)
    mine.check(KEY, ours(1, writer=EARLIER), floor)
    mine.check(KEY, ours(1, writer=writer_of(8, 2)), mine.floor(KEY))
    with pytest.raises(WrongValue, match="an earlier run"):
        mine.check(KEY, ours(1, writer=EARLIER), mine.floor(KEY))


def test_without_versions_an_overwritten_value_of_ours_is_wrong() -> None:
    mine = Expectations(1)
    first = mine.begin(KEY)
    mine.acknowledged(first)
    second = mine.begin(KEY)
    mine.acknowledged(second)
    mine.check(KEY, ours(second.number), mine.floor(KEY))
    with pytest.raises(WrongValue, match="our write 1"):
        mine.check(KEY, ours(first.number), mine.floor(KEY))


def test_of_two_concurrent_writes_either_may_be_the_last() -> None:
    mine = Expectations(1)
    first, second = mine.begin(KEY), mine.begin(KEY)
    mine.acknowledged(second)
    mine.acknowledged(first)
    for write in (first, second):
        mine.check(KEY, ours(write.number), mine.floor(KEY))


def test_write_of_unknown_outcome_may_appear_later() -> None:
    mine = Expectations(1)
    unknown = mine.begin(KEY)
    write(mine)
    mine.unknown(unknown)
    write(mine)
    mine.check(KEY, ours(unknown.number), mine.floor(KEY))


def test_write_of_unknown_outcome_excuses_no_other() -> None:
    mine = Expectations(1)
    first = write(mine)
    mine.unknown(mine.begin(KEY))
    second = write(mine)
    write(mine)
    for number in (first, second):
        with pytest.raises(WrongValue, match=f"our write {number}"):
            mine.check(KEY, ours(number), mine.floor(KEY))


def test_no_write_of_unknown_outcome_is_called_wrong_once_there_were_many() -> None:
    mine = Expectations(1)
    unknown = [mine.begin(KEY) for _ in range(3 * UNKNOWN_MAX)]
    for each in reversed(unknown):
        mine.unknown(each)
    write(mine)
    last = write(mine)
    for each in unknown:
        mine.check(KEY, ours(each.number), mine.floor(KEY))
    with pytest.raises(WrongValue, match=f"our write {last - 1}"):
        mine.check(KEY, ours(last - 1), mine.floor(KEY))


def test_limited_number_of_unknown_outcomes_is_kept() -> None:
    known = KeyHistory()
    for number in range(2 * UNKNOWN_MAX):
        known.note_unknown(number)
    assert known.unknown == list(range(UNKNOWN_MAX, 2 * UNKNOWN_MAX))
    assert known.unknown_up_to == UNKNOWN_MAX - 1


def test_of_more_keys_than_are_remembered_nothing_is_expected() -> None:
    mine = Expectations(1, keys_max=1)
    mine.acknowledged(mine.begin(b"first"))
    write(mine, version=5)
    second = write(mine, version=6)
    mine.unknown(mine.begin(KEY))
    assert mine.floor(KEY)[1:] == (0, 0)
    mine.check(KEY, ours(second - 1), mine.floor(KEY), version=5)
    assert list(mine.there(b"", b"z", 10)) == [b"first"]
    assert mine.floor(b"first").number == 1


def test_refused_write_hides_nothing() -> None:
    mine = Expectations(1)
    first = mine.begin(KEY)
    mine.acknowledged(first)
    mine.refused(mine.begin(KEY))
    last = mine.begin(KEY)
    mine.acknowledged(last)
    with pytest.raises(WrongValue, match="our write 1"):
        mine.check(KEY, ours(first.number), mine.floor(KEY))


def test_numbers_of_another_writer_are_independent() -> None:
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


def test_counter_that_does_not_rise_is_wrong() -> None:
    mine = Expectations(1)
    early = mine.count_floor(KEY)
    mine.counted(KEY, 7, early)
    mine.counted(KEY, 6, early)
    with pytest.raises(WrongValue, match="incremented to 7"):
        mine.counted(KEY, 7, mine.count_floor(KEY))


def test_two_increments_with_the_same_result_are_wrong() -> None:
    """Although they were concurrent: one of the two is lost."""
    mine = Expectations(1)
    early = mine.count_floor(KEY)
    mine.counted(KEY, 6, early)
    mine.counted(b"other", 6, early)
    with pytest.raises(WrongValue, match="two increments both returned 6"):
        mine.counted(KEY, 6, early)


def test_lost_key_is_reported_with_its_history() -> None:
    mine = Expectations(1)
    mine.acknowledged(mine.begin(KEY), version=12)
    assert "version 12" in str(mine.absent(KEY))


def test_scan_that_passes_over_a_key_that_was_there_is_wrong() -> None:
    mine = Expectations(1)
    mine.check(KEY, ours(1, writer=2), NO_FLOOR)
    for key in (b"a", b"key-2", b"z"):
        mine.acknowledged(mine.begin(key))
    mine.begin(b"b")  # may be there
    there = mine.there(b"a", b"z", 10)
    assert list(there) == [b"a", KEY, b"key-2"]
    assert list(mine.there(b"b", b"z", 1)) == [KEY]
    mine.scanned(there, {b"a", KEY, b"key-2", b"new"}, None)
    mine.scanned(there, {b"a", KEY}, KEY)
    for found, last in (({b"a", KEY}, None), ({b"a", b"key-2"}, b"key-2"), ({b"a"}, KEY)):
        with pytest.raises(WrongValue, match="a scan missed b'key"):
            mine.scanned(there, found, last)


def test_scans_that_may_be_stale_may_lack_what_is_new() -> None:
    mine = Expectations(1)
    write(mine)
    mine.acknowledged(mine.begin(b"told"), version=4)
    assert mine.there(b"", b"z", 10, Level.STALE) == {}
    assert list(mine.there(b"", b"z", 10, Level.SESSION)) == [b"told"]


def test_scan_gives_no_older_values_than_were_known_before_it_began() -> None:
    mine = Expectations(1)
    first = write(mine, version=5)
    write(mine, version=6)
    there = mine.there(b"", b"z", 10)
    assert there == {KEY: mine.floor(KEY)}
    with pytest.raises(WrongValue, match="our write 1"):
        mine.check(KEY, ours(first), there[KEY])
