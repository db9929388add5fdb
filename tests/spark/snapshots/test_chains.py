"""Which snapshot continues which, where chains are cut, and that pruning never breaks a chain."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import Corrupted, InvalidRequest
from kvstore.spark.snapshots.chains import (
    Cut,
    SnapshotRetention,
    chain_of,
    covering,
    in_order,
    kept,
    newest_or_none,
    prunable,
)
from kvstore.spark.snapshots.manifest import Manifest
from tests.spark.snapshots.made import EPOCH_MS, HOUR_MS, RANGES, manifest_of, places_of

Catalogue = dict[str, Manifest]


def at(sequence: int, hour: int) -> tuple:
    return tuple(replace(place, sequence=sequence, time_ms=EPOCH_MS + hour * HOUR_MS) for place in places_of([]))


def line(*parents: int | None) -> Catalogue:
    """Snapshot i, made in hour i, continues parents[i]."""
    made: list[Manifest] = []
    for number, parent in enumerate(parents):
        above = None if parent is None else made[parent]
        made.append(manifest_of(f"s{number:03d}", above, at(10 * (number + 1), number), hour=number))
    return {each.id: each for each in made}


@st.composite
def catalogues(draw: st.DrawFn) -> Catalogue:
    """Any history: each snapshot is a full one or continues an earlier one."""
    count = draw(st.integers(1, 24))
    hours = [draw(st.none() | st.integers(0, number - 1)) if number else None for number in range(count)]
    return line(*hours)


@given(catalogues(), *[st.integers(0, 3)] * 4, st.sets(st.integers(0, 23)))
def test_after_each_removal_of_a_pruning_every_chain_is_complete(
    catalogue: Catalogue, newest: int, days: int, weeks: int, months: int, held: set[int]
) -> None:
    if not (newest or days or weeks or months):
        return
    retention = SnapshotRetention(newest=newest, days=days, weeks=weeks, months=months)
    names = {f"s{number:03d}" for number in held}
    left = dict(catalogue)
    for manifest in prunable(catalogue, kept(catalogue, retention, names)):
        del left[manifest.id]
        for each in left:
            assert chain_of(left, each)[0].parent is None
    assert newest_or_none(left) == newest_or_none(catalogue)
    assert {each.id for each in in_order(catalogue)[::-1][:newest]} <= left.keys()
    assert names & catalogue.keys() <= left.keys()
    assert kept(catalogue, retention, names).keys() == kept(left, retention, names).keys() == left.keys()


def test_parents_of_a_kept_snapshot_stay() -> None:
    catalogue = line(None, 0, 1, None, 3)
    staying = kept(catalogue, SnapshotRetention(newest=1))
    assert [each.id for each in prunable(catalogue, staying)] == ["s002", "s001", "s000"]
    catalogue = line(None, 0, 1, 2)
    assert kept(catalogue, SnapshotRetention(newest=1)).keys() == catalogue.keys()


def test_newest_of_each_day_is_kept() -> None:
    catalogue = line(*[None] * 60)  # one per hour from 22:13, over four days
    staying = sorted(kept(catalogue, SnapshotRetention(days=3)))
    assert staying == ["s025", "s049", "s059"]


def test_newest_of_each_month_is_kept_with_its_tag() -> None:
    catalogue = line(None, None, None, 0)
    for number in range(4):  # one every 20 days from 14 November
        name = f"s{number:03d}"
        moved = tuple(replace(each, time_ms=EPOCH_MS + number * 20 * 24 * HOUR_MS) for each in at(10, 0))
        catalogue[name] = replace(catalogue[name], partitions=moved)
    found = kept(catalogue, SnapshotRetention(months=2))
    assert found == {"s003": ["monthly 2024-01"], "s002": ["monthly 2023-12"], "s000": ["needed by s003"]}


def test_legal_hold_keeps_a_chain_beyond_the_retention() -> None:
    catalogue = line(None, 0, None)
    rule = SnapshotRetention(newest=1)
    assert kept(catalogue, rule, {"s001", "elsewhere"}) == {
        "s002": ["newest"],
        "s001": ["legal hold"],
        "s000": ["needed by s001"],
    }


def test_wrong_date_of_the_machine_that_takes_snapshots_lets_none_go() -> None:
    """Seven hourly ones of invented days must not displace the real days."""
    catalogue = line(*[None] * 60)
    for number in range(53, 60):
        name = f"s{number:03d}"
        catalogue[name] = replace(catalogue[name], started_ms=EPOCH_MS + number * 400 * 24 * HOUR_MS)
    staying = sorted(kept(catalogue, SnapshotRetention(days=3, weeks=1)))
    assert staying == ["s025", "s049", "s059"]


def test_nothing_to_keep_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="--keep"):
        SnapshotRetention()


def test_chain_that_is_broken_already_is_not_pruned() -> None:
    catalogue = line(None, 0, 1)
    del catalogue["s000"]
    with pytest.raises(Corrupted, match="s001 continues s000"):
        kept(catalogue, SnapshotRetention(newest=1))


def test_missing_parent_is_named() -> None:
    catalogue = line(None, 0, 1)
    del catalogue["s001"]
    with pytest.raises(Corrupted, match="s002 continues s001, which is missing"):
        chain_of(catalogue, "s002")


def test_snapshot_that_continues_itself_is_refused() -> None:
    catalogue = line(None, 0, 1)
    catalogue["s001"] = replace(catalogue["s001"], parent="s002")
    with pytest.raises(Corrupted, match="continues itself"):
        chain_of(catalogue, "s002")


def test_child_behind_its_parent_is_refused() -> None:
    catalogue = line(None, 0)
    catalogue["s001"] = replace(catalogue["s001"], partitions=at(5, 1))
    with pytest.raises(Corrupted, match="partition p1 is at 5, in its parent at 10"):
        chain_of(catalogue, "s001")


def test_child_of_another_cluster_is_refused() -> None:
    catalogue = line(None, 0)
    catalogue["s001"] = replace(catalogue["s001"], cluster="cluster-2")
    with pytest.raises(Corrupted, match="cluster-2"):
        chain_of(catalogue, "s001")


def test_partition_that_has_left_may_be_missing_only_behind_its_end() -> None:
    catalogue = line(None, 0)
    whole = ((0, 2**32 - 1),)
    first, second = catalogue["s000"].partitions
    alone = replace(catalogue["s001"].partitions[0], ranges=whole)
    catalogue["s001"] = replace(catalogue["s001"], partitions=(alone,))
    with pytest.raises(Corrupted, match="partition p2 is missing"):
        chain_of(catalogue, "s001")
    joining = (replace(first, ranges=whole), replace(second, ranges=()))
    catalogue["s000"] = replace(catalogue["s000"], partitions=joining)
    with pytest.raises(Corrupted, match="partition p2 is missing"):
        chain_of(catalogue, "s001")
    ended = (replace(first, ranges=whole), replace(second, ledger=-1, entry=-1, ranges=()))
    catalogue["s000"] = replace(catalogue["s000"], partitions=ended)
    assert len(chain_of(catalogue, "s001")) == 2


@pytest.mark.parametrize(
    ("hour", "needed"),
    [
        (0, ["s000", "s001"]),
        (0.5, ["s000", "s001"]),
        (1, ["s000", "s001", "s002"]),
        (2.5, ["s000", "s001", "s002", "s003"]),
    ],
)
def test_moment_needs_the_chain_up_to_it(hour: float, needed: list[str]) -> None:
    cut = Cut(time_ms=EPOCH_MS + int(hour * HOUR_MS))
    assert [each.id for each in covering(line(None, 0, 1, 2), "s003", cut)] == needed


@pytest.mark.parametrize(("hours", "message"), [(-1, "is before snapshot s000"), (9, "is after snapshot s001")])
def test_moment_outside_is_refused(hours: int, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        covering(line(None, 0), "s001", Cut(time_ms=EPOCH_MS + hours * HOUR_MS))


@pytest.mark.parametrize(
    ("hours", "message"),
    [
        (-1, "is before snapshot s000, of"),
        (1.5, "is after snapshot s001, complete up to .* and before snapshot s002, of"),
        (9, "is after snapshot s002, complete up to"),
    ],
)
def test_moment_in_no_chain_is_refused_with_the_snapshots_around_it(hours: float, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        covering(line(None, 0, None), None, Cut(time_ms=EPOCH_MS + int(hours * HOUR_MS)))


def test_without_a_name_a_chain_that_reaches_the_time_is_used() -> None:
    catalogue = line(None, 0, None, 2)
    cut = Cut(time_ms=EPOCH_MS + HOUR_MS // 2)
    assert [each.id for each in covering(catalogue, None, cut)] == ["s000", "s001"]


@pytest.mark.parametrize(("sequence", "needed"), [(10, ["s000", "s001", "s002"]), (15, ["s000", "s001", "s002"])])
def test_sequence_cuts_its_partition_only(sequence: int, needed: list[str]) -> None:
    assert [each.id for each in covering(line(None, 0, 1), "s002", Cut(sequences={"p1": sequence}))] == needed


def test_sequences_of_all_partitions_cut_the_chain() -> None:
    cut = Cut(sequences=dict.fromkeys(RANGES, 20))
    assert [each.id for each in covering(line(None, 0, 1), "s002", cut)] == ["s000", "s001"]


@pytest.mark.parametrize("sequence", [9, 31])
def test_sequence_outside_is_refused(sequence: int) -> None:
    with pytest.raises(InvalidRequest, match=r"expected a sequence from 10 \(s000\) to 30 \(s002\)"):
        covering(line(None, 0, 1), "s002", Cut(sequences={"p1": sequence}))


def idle() -> Catalogue:
    """The second snapshot continues the first, and nothing has changed meanwhile."""
    first = manifest_of("s000", None, at(10, 0), hour=0)
    second = manifest_of("s001", first, at(10, 1), hour=1)
    return {each.id: each for each in (first, second, manifest_of("s002", second, at(20, 2), hour=2))}


def test_incremental_that_adds_nothing_cuts_no_chain() -> None:
    """`restore` stopped before it, and brought old values back; `verify` checked nothing after it."""
    assert [each.id for each in covering(idle(), "s002", Cut())] == ["s000", "s001", "s002"]
    assert [each.id for each in covering(idle(), "s002", Cut(sequences={"p1": 15}))] == ["s000", "s001", "s002"]
    later = Cut(time_ms=EPOCH_MS + 3 * HOUR_MS // 2)
    assert [each.id for each in covering(idle(), "s002", later)] == ["s000", "s001", "s002"]


def test_all_of_a_chain_is_its_last_one_too_where_that_adds_nothing() -> None:
    assert [each.id for each in covering(idle(), "s001", Cut())] == ["s000", "s001"]


def test_snapshot_clock_that_is_set_back_makes_no_snapshot_older() -> None:
    """The newest one was pruned."""
    catalogue = line(None, None)
    catalogue["s001"] = replace(catalogue["s001"], started_ms=EPOCH_MS - HOUR_MS)
    assert [each.id for each in in_order(catalogue)] == ["s000", "s001"]
    assert list(kept(catalogue, SnapshotRetention(newest=1))) == ["s001"]


def test_snapshot_clock_that_is_ahead_promises_no_restore_times() -> None:
    """Changes up to that time were not in it, and were restored as missing."""
    catalogue = line(None)
    catalogue["s000"] = replace(catalogue["s000"], started_ms=EPOCH_MS + 5 * HOUR_MS)
    with pytest.raises(InvalidRequest, match=r"is after snapshot s000, complete up to 2023-11-14T22:13:19\.999"):
        covering(catalogue, None, Cut(time_ms=EPOCH_MS + HOUR_MS))


def test_partition_that_left_long_ago_makes_no_snapshot_end_there() -> None:
    catalogue = line(None, 0)
    last = catalogue["s001"]
    left = replace(last.partitions[0], partition="p9", ledger=-1, entry=-1, time_ms=1, ranges=())
    catalogue["s001"] = replace(last, partitions=(*last.partitions, left))
    assert [each.id for each in covering(catalogue, None, Cut(time_ms=EPOCH_MS + HOUR_MS - 1))] == ["s000", "s001"]
    with pytest.raises(InvalidRequest, match="after snapshot s001"):  # more may have been written in that millisecond
        covering(catalogue, None, Cut(time_ms=EPOCH_MS + HOUR_MS))
