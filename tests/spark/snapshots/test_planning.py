"""The parts of a full snapshot are the pinned store, every token once, and a task reads only its part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from kvstore.client.core.config import ClientConfig
from kvstore.client.feed import PartitionFeed
from kvstore.client.pinned.pins import PinnedPartition, PinnedStore, Split
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.ring.hashing import MURMUR3
from kvstore.spark.snapshots import compare, planning, tasks
from kvstore.spark.snapshots.manifest import Manifest, SnapshotKind, tiling_problem_or_none
from kvstore.spark.snapshots.planning import SnapshotRequest, left_places, plan_snapshot
from kvstore.spark.snapshots.tasks import JobContext
from kvstore.types import EntryId, LedgerId, Position
from tests.spark.snapshots.made import manifest_of, places_of

HALF = 1 << 31
CONFIG = ClientConfig(endpoints=("127.0.0.1:1",))


def pinned(name: str, spans: tuple[tuple[int, int], ...], split_tokens: tuple[int, ...]) -> PinnedPartition:
    return PinnedPartition(
        name, Position(LedgerId(3), EntryId(5)), 70, 9, spans, ("a:1", "b:1", "c:1"), 100, 1000, split_tokens, 1
    )


STORE = PinnedStore(
    "snapshot-x",
    1,
    4,
    (pinned("p1", ((0, HALF - 1),), (9, 1000)), pinned("p2", ((HALF, 2 * HALF - 1),), (HALF + 7,))),
    MURMUR3,
)


class Feeds:
    """The servers' answers about the logs of p1 and p2, which serve, and of p8, which had left."""

    found = (
        *(PartitionFeed(each, 0, 90, False, ("s:1",)) for each in ("p1", "p2")),
        PartitionFeed("p8", 0, 33, True, ()),
    )

    def __init__(self, _: object, identity: str = "c") -> None:
        assert identity == "c"

    def __enter__(self) -> Feeds:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def positions(self) -> list[PartitionFeed]:
        return list(self.found)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> planning.SnapshotPlan:
    monkeypatch.setattr(planning, "pin_store", lambda *_, **__: STORE)
    monkeypatch.setattr(planning, "FeedReader", Feeds)
    return plan_snapshot(SnapshotRequest(cluster=CONFIG, instance="c"), 1_700_000_000_000)


@pytest.mark.parametrize("parent", [None, manifest_of("s0", None, places_of([]))])
def test_interrupt_during_pinning_leaves_no_pin(monkeypatch: pytest.MonkeyPatch, parent: Manifest | None) -> None:
    pins: set[str] = set()

    def pin_store(_: object, *, id: str, **__: object) -> PinnedStore:
        pins.add(id)
        raise KeyboardInterrupt

    class Feed(Feeds):
        def hold(self, name: str, positions: dict[str, int], ttl_s: float, *, timeout_s: float | None = None) -> None:
            (pins.update if ttl_s else pins.difference_update)({f"{name} {each}" for each in positions})

    monkeypatch.setattr(planning, "pin_store", pin_store)
    monkeypatch.setattr(planning, "unpin", lambda _, id, **__: pins.discard(id))
    monkeypatch.setattr(planning, "FeedReader", Feed)
    with pytest.raises(KeyboardInterrupt):
        plan_snapshot(SnapshotRequest(cluster=CONFIG, instance="c", parent=parent), 1_700_000_000_000)
    assert pins == set()


def test_pieces_have_every_token_once(plan: planning.SnapshotPlan) -> None:
    spans = sorted((each.first, each.last) for each in plan.pieces)
    assert spans == [(0, 9), (10, 1000), (1001, HALF - 1), (HALF, HALF + 7), (HALF + 8, 2 * HALF - 1)]
    assert tiling_problem_or_none(plan.partitions) is None
    assert [each.name for each in plan.pieces] == ["p1-00000", "p1-00001", "p1-00002", "p2-00000", "p2-00001"]
    assert {each.partition: each.sequence for each in plan.partitions} == {"p1": 70, "p2": 70, "p8": 33}
    assert plan.ring_version == 4


def test_task_reads_its_part_at_the_pinned_position(
    plan: planning.SnapshotPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Split] = []

    def read(split: Split, **_: Any) -> Iterator[Any]:
        asked.append(split)
        return iter(())

    monkeypatch.setattr(tasks, "read_pinned", read)
    job = JobContext(
        attempts="/",
        kind=SnapshotKind.FULL,
        pin=plan.pin,
        positions={each.partition: each.position for each in plan.partitions},
        compression="zstd",
        cluster=CONFIG,
    )
    for piece in plan.pieces:
        assert list(tasks.batches(job, piece)) == []
    assert [(each.pin, each.partition, each.position) for each in asked] == [
        ("snapshot-x", piece.partition, Position(LedgerId(3), EntryId(5))) for piece in plan.pieces
    ]
    assert [(each.first, each.last) for each in asked] == [(each.first, each.last) for each in plan.pieces]
    assert asked[0].replicas == ("a:1", "b:1", "c:1")
    assert asked[1].replicas == ("b:1", "a:1", "c:1")


# docs/protocol.md Tx13
def test_incremental_has_what_the_intents_at_its_positions_write(
    monkeypatch: pytest.MonkeyPatch, plan: planning.SnapshotPlan
) -> None:
    asked: list[tuple[Split, bool]] = []

    class Feed(Feeds):
        def hold(self, *_: object, **__: object) -> None:
            pass

    def read(split: Split, *, intents_only: bool, **_: Any) -> Iterator[Any]:
        asked.append((split, intents_only))
        return iter(())

    p1, p2 = STORE.partitions
    monkeypatch.setattr(planning, "FeedReader", Feed)
    monkeypatch.setattr(planning, "pin_store", lambda *_, **__: replace(STORE, partitions=(p1, replace(p2, intents=3))))
    monkeypatch.setattr(tasks, "read_pinned", read)
    request = SnapshotRequest(cluster=CONFIG, instance="c", parent=parent_of(plan))
    found = plan_snapshot(request, 1_700_000_000_000)
    [piece] = found.pieces
    assert (piece.name, piece.rows, piece.intents_only) == ("p2-intents", 3, True), "the logs have nothing new"
    job = JobContext(
        attempts="/",
        kind=found.kind,
        pin=found.pin,
        positions={each.partition: each.position for each in found.partitions},
        compression="zstd",
        cluster=CONFIG,
    )
    assert list(tasks.batches(job, piece)) == []
    [(split, is_of_intents)] = asked
    assert (split.pin, split.partition, split.position) == ("snapshot-x", "p2", p2.position)
    assert (split.first, split.last, is_of_intents) == (0, 2 * HALF - 1, True)


def parent_of(plan: planning.SnapshotPlan) -> Manifest:
    return manifest_of("s0", None, plan.partitions)


def feeds_with(*ended: str) -> dict[str, PartitionFeed]:
    return {each.partition: each for each in Feeds.found} | {
        each: PartitionFeed(each, 0, 12, True, ()) for each in ended
    }


@pytest.mark.parametrize("is_gone", [False, True])
def test_partition_that_joined_and_left_since_the_parent_is_included(
    plan: planning.SnapshotPlan, is_gone: bool
) -> None:
    """Its changes were in no incremental, and `verify` reported no problem."""
    feeds = feeds_with("p9") | ({"p9": GONE} if is_gone else {})
    with pytest.raises(InvalidRequest, match=r"p9 has left the ring and is not in snapshot s0.*full snapshot"):
        list(left_places(parent_of(plan), STORE.partitions, feeds))


GONE = PartitionFeed("p9", 0, 0, True, (), "", True)
"""Servers know only that it has existed."""


def test_one_that_the_parent_saw_join_must_be_read_to_its_end(plan: planning.SnapshotPlan) -> None:
    """It owned nothing then, and was treated as one that had left."""
    joining = replace(parent_of(plan).partitions[0], partition="p9", sequence=5, ranges=())
    parent = manifest_of("s0", None, (*plan.partitions, joining))
    found = {each.partition: each for each in left_places(parent, STORE.partitions, feeds_with("p9"))}
    assert (found["p9"].sequence, found["p9"].has_left) == (12, True)
    with pytest.raises(InvalidRequest, match=r"p9 has left the ring and its log is gone.*full snapshot"):
        list(left_places(parent, STORE.partitions, feeds_with() | {"p9": GONE}))


def test_logs_after_a_snapshot_include_partitions_that_joined_since(plan: planning.SnapshotPlan) -> None:
    """The same for partitions that have left since: only a pin keeps such a log."""
    p1, p2, p8 = Feeds.found
    feeds = (p1, p2._replace(ended=True), p8, GONE, PartitionFeed("p10", 0, 3, False, ()))
    assert planning.behind(parent_of(plan), feeds) == {"p1": 70, "p2": 70, "p10": 0}
    assert planning.behind(parent_of(plan), [p2._replace(ended=True, gone=True)]) == {}


def test_full_snapshot_names_partitions_that_left_before_its_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes logged there after them would be in no snapshot."""
    ended = tuple(each._replace(ended=True) for each in Feeds.found)
    looks, seen = iter([Feeds.found, ended]), list[str]()

    def pin_store(*_: object, **__: object) -> PinnedStore:
        seen.append("pin")
        return replace(STORE, partitions=STORE.partitions[:1])

    def positions(_: Feeds) -> tuple[PartitionFeed, ...]:
        seen.append("positions")
        return next(looks)

    monkeypatch.setattr(planning, "AGAIN_S", 0.0)
    monkeypatch.setattr(planning, "pin_store", pin_store)
    monkeypatch.setattr(planning, "FeedReader", Feeds)
    monkeypatch.setattr(Feeds, "positions", positions)
    found = plan_snapshot(SnapshotRequest(cluster=CONFIG, instance="c"), 1_700_000_000_000)
    assert seen == ["positions", "pin", "positions", "pin"], "p2 had something and was not pinned"
    assert {each.partition: each.has_left for each in found.partitions} == {"p1": False, "p2": True, "p8": True}


@pytest.mark.parametrize("parent", [None, manifest_of("s0", None, places_of([]))])
def test_partition_that_owns_nothing_is_in_a_snapshot_too(
    monkeypatch: pytest.MonkeyPatch, parent: Manifest | None
) -> None:
    """Its ranges were moved away by hand: changes there since the parent were in no incremental, and when it owned
    some again, its old log entries undid deletes made elsewhere."""

    class Feed(Feeds):
        found = (*Feeds.found[:2], PartitionFeed("p7", 0, 55, False, ("s:1",)))

        def hold(self, *_: object, **__: object) -> None:
            pass

    empty = PinnedStore("snapshot-x", 1, 4, (*STORE.partitions, pinned("p7", (), ())), MURMUR3)
    monkeypatch.setattr(planning, "FeedReader", Feed)
    monkeypatch.setattr(planning, "pin_store", lambda *_, **__: empty)
    plan = plan_snapshot(SnapshotRequest(cluster=CONFIG, instance="c", parent=parent), 1_700_000_000_000)
    assert {each.partition: each.sequence for each in plan.partitions} == {"p1": 70, "p2": 70, "p7": 70}
    assert ("p7" in {each.partition for each in plan.pieces}) == (parent is not None)
    assert tiling_problem_or_none(plan.partitions) is None
    monkeypatch.setattr(planning, "SILENT_S", 0.0)
    monkeypatch.setattr(planning, "pin_store", lambda *_, **__: STORE)
    monkeypatch.setattr(planning, "unpin", lambda *_, **__: [])
    with pytest.raises(Unavailable, match="partition p7 has no leader at the moment"):
        plan_snapshot(SnapshotRequest(cluster=CONFIG, instance="c", parent=parent), 1_700_000_000_000)


def test_comparison_with_the_store_misses_no_partition_that_owns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log may have changes since the snapshot. Without a leader it is not pinned."""

    class Feed(Feeds):
        found = (*Feeds.found[:2], PartitionFeed("p7", 0, 55, False, ("s:1",)))

    class NoTables:
        def folded(self, _store: object, _chain: object, _cut: object, later: Sequence[partial[Any]]) -> None:
            changed.extend(each.args[1] for each in later)

        def __getattr__(self, _: str) -> Any:
            return lambda *_: None

    changed: list[str] = []
    made = iter([STORE, replace(STORE, partitions=(*STORE.partitions, pinned("p7", (), ())))])
    last = replace(manifest_of("s0", None, places_of([])), cluster="c")
    monkeypatch.setattr(compare, "FeedReader", Feed)
    monkeypatch.setattr(compare, "pin_store", lambda *_, **__: next(made))
    monkeypatch.setattr(compare, "release", lambda *_: None)
    monkeypatch.setattr(planning, "AGAIN_S", 0.0)
    tables: Any = NoTables()
    store: Any = None
    compare.against_origin(tables, store, [last], CONFIG, 0)
    assert sorted(changed) == ["p1", "p2", "p7"]


def test_partition_without_log_entries_is_not_missed(plan: planning.SnapshotPlan) -> None:
    never = {"p9": PartitionFeed("p9", 0, 0, True, ())}
    assert [each.partition for each in left_places(parent_of(plan), STORE.partitions, feeds_with() | never)] == ["p8"]


def test_partition_is_named_once_though_servers_differ_about_the_ring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planning, "pin_store", lambda *_, **__: STORE)
    monkeypatch.setattr(planning, "FeedReader", Feeds)
    monkeypatch.setattr(Feeds, "found", tuple(each._replace(ended=True) for each in Feeds.found))
    found = plan_snapshot(SnapshotRequest(cluster=CONFIG, instance="c"), 1_700_000_000_000)
    assert [(each.partition, each.has_left) for each in found.partitions] == [
        ("p1", False),
        ("p2", False),
        ("p8", True),
    ]


def test_one_that_had_left_before_the_parent_is_named_for_good(plan: planning.SnapshotPlan) -> None:
    parent = parent_of(plan)
    (named,) = left_places(parent, STORE.partitions, feeds_with())
    assert (named.partition, named.sequence, named.ranges) == ("p8", 33, ())
    places = (*(each for each in parent.partitions if each.ranges), named)
    assert list(planning.change_pieces(parent, places, feeds_with())) == []
    gone = feeds_with() | {"p8": PartitionFeed("p8", 0, 0, True, (), "", True)}
    assert list(left_places(parent, STORE.partitions, gone)) == [named]


def test_snapshot_that_is_ahead_of_the_log_is_not_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when an operator has made the cluster accept an older copy of its metadata: no chain could contain it."""

    class Holding(Feeds):
        found = Feeds.found[:2]

        def hold(self, *_: object) -> int:
            return 1

    released: list[object] = []
    monkeypatch.setattr(planning, "pin_store", lambda *_, **__: STORE)
    monkeypatch.setattr(planning, "FeedReader", Holding)
    monkeypatch.setattr(planning, "release_pin", lambda *given: released.append(given))
    before = manifest_of("s0", None, tuple(replace(each, sequence=71) for each in places_of([])))
    with pytest.raises(planning.NotContinuable, match="partition p1 is at 70, in snapshot s0 at 71"):
        plan_snapshot(SnapshotRequest(cluster=CONFIG, instance="c", parent=before), 1_700_000_000_000)
    assert len(released) == 1
