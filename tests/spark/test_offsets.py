"""The offsets of a stream: the read position of each partition, including those that join and leave."""

import json

import pytest

from kvstore.client.feed import PartitionFeed
from kvstore.errors import ConfigError, PositionTrimmed
from kvstore.spark.offsets import (
    ChangeSpan,
    advanced,
    check_batch,
    check_given,
    check_readable,
    latest,
    lowest,
    oldest,
    sequence_of,
    shares,
    spans,
)


def feed(partition: str, oldest: int, latest: int, *, ended: bool = False, cluster: str = "") -> PartitionFeed:
    return PartitionFeed(partition, oldest, latest, ended, (), cluster)


FEEDS = [feed("p1", 5, 20), feed("p2", 0, 7, ended=True)]


def test_stream_may_begin_before_everything_or_behind_it() -> None:
    assert oldest(FEEDS) == {"p1": 5, "p2": 0}
    assert latest(FEEDS) == {"p1": 20, "p2": {"ended": 7}}
    assert json.loads(json.dumps(latest(FEEDS))) == latest(FEEDS)


def test_offset_advances_and_never_goes_back() -> None:
    assert advanced({"p1": 9}, {"p1": 12, "p2": 3}, FEEDS) == {"p1": 12, "p2": 3}
    assert advanced({"p1": 9}, {"p1": 8}, FEEDS[:1]) == {"p1": 9}
    assert advanced({"p0": 3}, {"p1": 6}, FEEDS[:1]) == {"p0": 3, "p1": 6}


def test_partition_that_was_read_to_its_last_change_has_ended() -> None:
    end = advanced({"p1": 9}, {"p1": 12, "p2": 7}, FEEDS)
    assert end == {"p1": 12, "p2": {"ended": 7}}
    assert advanced(end, {"p1": 12, "p2": 7}, FEEDS) == end


def test_range_between_two_offsets_is_split_into_portions() -> None:
    start, end = {"p1": 10, "p2": 3}, {"p1": 35, "p2": {"ended": 7}, "p3": 4}
    assert spans(start, end, 10) == [
        ChangeSpan("p1", 10, 20),
        ChangeSpan("p1", 20, 30),
        ChangeSpan("p1", 30, 35),
        ChangeSpan("p2", 3, 7),
        ChangeSpan("p3", 0, 4),
    ]
    assert spans(end, end, 10) == []


def test_trimmed_position_is_an_error() -> None:
    check_readable({"p1": 5}, FEEDS)
    with pytest.raises(PositionTrimmed, match=r"changes after 4 were trimmed; the oldest .* is 5"):
        check_readable({"p1": 4}, FEEDS)


def test_new_partition_is_read_from_its_beginning_or_not_at_all() -> None:
    check_readable({}, [feed("p9", 0, 3)])
    with pytest.raises(PositionTrimmed):
        check_readable({}, [feed("p9", 1, 3)])


def test_partition_whose_log_is_gone_must_have_been_read_to_its_end() -> None:
    check_readable({"p1": 5, "p2": {"ended": 7}}, FEEDS[:1])
    check_readable({"p1": 5, "p2": {"ended": 7}}, [feed("p1", 5, 6), feed("p2", 9, 9, ended=True)])
    with pytest.raises(PositionTrimmed, match="p2: changes after 6 were trimmed; its log is gone, because"):
        check_readable({"p1": 5, "p2": 6}, FEEDS[:1])


GONE = PartitionFeed("p8", 0, 0, True, (), "", True)
"""Servers know only that it has existed."""


def test_partition_that_joined_and_left_between_reads_is_included() -> None:
    """Its changes were in no micro-batch, and no error reported it."""
    with pytest.raises(PositionTrimmed, match="p8: changes after 0 were trimmed; its log is gone"):
        check_readable({"p1": 9, "p2": {"ended": 7}}, [*FEEDS, GONE])
    with pytest.raises(PositionTrimmed, match="p8: changes after 6 were trimmed; its log is gone"):
        check_readable({"p1": 9, "p2": {"ended": 7}, "p8": 6}, [*FEEDS, GONE])
    check_readable({"p1": 9, "p2": {"ended": 7}, "p8": {"ended": 8}}, [*FEEDS, GONE])


@pytest.mark.parametrize("start", [oldest([*FEEDS, GONE]), latest([*FEEDS, GONE])])
def test_stream_that_begins_now_misses_no_deletion(start: dict[str, object]) -> None:
    assert start["p8"] == {"ended": 0}
    check_readable(start, [*FEEDS, GONE])
    assert advanced(start, {"p1": 20, "p2": 7, "p8": 0}, [*FEEDS, GONE]) == {
        "p1": 20,
        "p2": {"ended": 7},
        "p8": {"ended": 0},
    }


def test_custom_start_positions_must_cover_removed_logs() -> None:
    for missing in ({"p1": 20}, {"p1": 20, "p8": 3}):
        with pytest.raises(ConfigError, match=r'left the ring are gone \(p8\).*"p8": {"ended": 0}'):
            check_given(missing, [*FEEDS, GONE])
    check_given({"p1": 20, "p8": {"ended": 3}}, [*FEEDS, GONE])


@pytest.mark.parametrize("wrong", [-1, "7", None, True, {"ended": "x"}, {}, [7]])
def test_malformed_sequence_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="startingPosition: expected"):
        sequence_of({"p1": wrong}, "p1")


def test_stream_begins_with_the_existing_rows() -> None:
    check_given({"p1": 20, "p2": {"ended": 7}}, FEEDS)
    with pytest.raises(ConfigError, match="startingPosition: expected at most 20 for p1, got 21"):
        check_given({"p1": 21}, FEEDS)
    with pytest.raises(ConfigError, match="startingPosition: expected partitions p1, p2, got partition 'p3'"):
        check_given({"p3": 0}, FEEDS)


OURS = [feed("p1", 5, 20, cluster="c1"), feed("p2", 0, 7, ended=True, cluster="c1")]


def test_offset_names_its_cluster() -> None:
    assert oldest(OURS) == {"@cluster": "c1", "p1": 5, "p2": 0}
    assert latest(OURS) == {"@cluster": "c1", "p1": 20, "p2": {"ended": 7}}
    assert advanced({"p1": 9}, {"p1": 12}, OURS[:1]) == {"@cluster": "c1", "p1": 12}
    assert advanced({"@cluster": "c1", "p1": 9}, {"p1": 12}, FEEDS[:1]) == {"@cluster": "c1", "p1": 12}
    assert lowest(latest(OURS), oldest(OURS)) == {"p1": 5, "p2": 0}
    assert spans(oldest(OURS), latest(OURS), 100) == [ChangeSpan("p1", 5, 20), ChangeSpan("p2", 0, 7)]


def test_offset_of_another_cluster_is_refused_everywhere() -> None:
    for theirs in ({"@cluster": "c2", "p1": 6}, {"@cluster": "c2", "p1": 600}, {"@cluster": "c2", "p9": 6}):
        for check in (check_given, check_readable, lambda offset, feeds: check_batch(offset, offset, feeds)):
            with pytest.raises(ConfigError, match=r"position belongs to cluster c2, this one is c1; .* with another"):
                check(theirs, OURS)
    check_readable({"@cluster": "c1", "p1": 6}, OURS)
    check_readable({"@cluster": "c2", "p1": 6}, FEEDS)  # servers that do not report it


def test_position_behind_the_end_of_its_log_is_another_clusters() -> None:
    """So are offsets that do not name their cluster. A log that is just closing may appear shorter than it is."""
    check_readable({"p1": 20, "p2": 8}, FEEDS)
    with pytest.raises(
        ConfigError, match="position of partition p1 is 21, but its log ends at 20, so the position belongs to another"
    ):
        check_readable({"p1": 21}, FEEDS)


def test_micro_batch_of_an_earlier_run_is_checked_too() -> None:
    check_batch({"p1": 5}, {"p1": 20, "p2": {"ended": 7}}, FEEDS)
    check_batch({"p1": 5, "p9": 3}, {"p1": 20, "p9": {"ended": 3}}, FEEDS)  # p9 has nothing to read
    with pytest.raises(ConfigError, match="its log ends at 20"):
        check_batch({"p1": 5}, {"p1": 21}, FEEDS)
    with pytest.raises(PositionTrimmed, match=r"changes after 4 were trimmed"):
        check_batch({"p1": 4}, {"p1": 9}, FEEDS)
    with pytest.raises(PositionTrimmed):
        check_batch({"p9": 3}, {"p9": {"ended": 4}}, FEEDS)


def test_hold_reaches_back_to_the_batch_before() -> None:
    assert lowest({"p1": 3, "p2": 4}, {"p1": 5, "p2": {"ended": 7}, "p3": 9}) == {"p1": 3, "p2": 4}


def test_total_is_divided_and_no_share_is_zero() -> None:
    assert shares(10, ["p1", "p2", "p3"]) == {"p1": 3, "p2": 3, "p3": 3}
    assert shares(1, ["p1", "p2"]) == {"p1": 1, "p2": 1}
