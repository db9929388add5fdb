"""A full snapshot's pieces are the pinned store, every token of it once, and a task reads its piece and no other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.client.config import ClientConfig
from kvstore.client.feed import PartitionFeed
from kvstore.client.pinned import PinnedPartition, PinnedStore, Split
from kvstore.spark.snapshots import planning, tasks
from kvstore.spark.snapshots.manifest import Kind, Manifest, tiling_problem_or_none
from kvstore.spark.snapshots.planning import Wanted, plan_snapshot
from kvstore.spark.snapshots.tasks import Job
from kvstore.types import EntryId, LedgerId, Position
from tests.spark.snapshots.made import manifest_of, places_of

HALF = 1 << 31
CONFIG = ClientConfig(endpoints=("127.0.0.1:1",))


def pinned(name: str, spans: tuple[tuple[int, int], ...], split_tokens: tuple[int, ...]) -> PinnedPartition:
    return PinnedPartition(
        name, Position(LedgerId(3), EntryId(5)), 70, 9, spans, ("a:1", "b:1", "c:1"), 100, 1000, split_tokens, 1
    )


STORE = PinnedStore(
    "snapshot-x", 1, 4, (pinned("p1", ((0, HALF - 1),), (9, 1000)), pinned("p2", ((HALF, 2 * HALF - 1),), (HALF + 7,)))
)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> planning.Plan:
    monkeypatch.setattr(planning, "pin_store", lambda *_, **__: STORE)
    return plan_snapshot(Wanted(cluster=CONFIG, instance="c"), 1_700_000_000_000)


@pytest.mark.parametrize("parent", [None, manifest_of("s0", None, places_of([]))])
def test_what_is_interrupted_while_servers_pin_leaves_no_pin(
    monkeypatch: pytest.MonkeyPatch, parent: Manifest | None
) -> None:
    pins: set[str] = set()

    def pin_store(_: object, *, id: str, **__: object) -> PinnedStore:
        pins.add(id)
        raise KeyboardInterrupt

    class Feed:
        def __init__(self, _: object) -> None:
            pass

        def __enter__(self) -> Feed:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def positions(self) -> list[PartitionFeed]:
            return [PartitionFeed(each, 0, 90, False, ("s:1",)) for each in ("p1", "p2")]

        def hold(self, name: str, positions: dict[str, int], ttl_s: float, *, timeout_s: float | None = None) -> None:
            (pins.update if ttl_s else pins.difference_update)({f"{name} {each}" for each in positions})

    monkeypatch.setattr(planning, "pin_store", pin_store)
    monkeypatch.setattr(planning, "unpin", lambda _, id, **__: pins.discard(id))
    monkeypatch.setattr(planning, "FeedReader", Feed)
    with pytest.raises(KeyboardInterrupt):
        plan_snapshot(Wanted(cluster=CONFIG, instance="c", parent=parent), 1_700_000_000_000)
    assert pins == set()


def test_pieces_have_every_token_once(plan: planning.Plan) -> None:
    spans = sorted((each.first, each.last) for each in plan.pieces)
    assert spans == [(0, 9), (10, 1000), (1001, HALF - 1), (HALF, HALF + 7), (HALF + 8, 2 * HALF - 1)]
    assert tiling_problem_or_none(plan.partitions) is None
    assert [each.name for each in plan.pieces] == ["p1-00000", "p1-00001", "p1-00002", "p2-00000", "p2-00001"]
    assert {each.sequence for each in plan.partitions} == {70}
    assert plan.ring_version == 4


def test_a_task_reads_its_piece_at_the_pinned_position(plan: planning.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Split] = []

    def read(split: Split, **_: Any) -> Iterator[Any]:
        asked.append(split)
        return iter(())

    monkeypatch.setattr(tasks, "read_pinned", read)
    job = Job(
        attempts="/",
        kind=Kind.FULL,
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
