"""A full snapshot's pieces are the pinned store, every token of it once, and a task reads its piece and no other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.client.config import ClientConfig
from kvstore.client.pinned import PinnedPartition, PinnedStore, Split
from kvstore.spark.snapshots import planning, tasks
from kvstore.spark.snapshots.manifest import Kind, tiling_problem_or_none
from kvstore.spark.snapshots.planning import Wanted, plan_snapshot
from kvstore.spark.snapshots.tasks import Job
from kvstore.types import EntryId, LedgerId, Position

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
