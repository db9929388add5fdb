"""The changes that an incremental reads from a log: each change after its parent once, including deletes, page by
page."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.client.feed import PartitionFeed
from kvstore.errors import Unavailable
from kvstore.proto import feed_pb2
from kvstore.spark.snapshots import tasks
from kvstore.spark.snapshots.manifest import PartitionPosition
from kvstore.spark.snapshots.planning import CHANGES_PER_PIECE, PIECES_PER_PARTITION_MAX, change_pieces
from tests.spark.feeds import CONFIG, OpenedFeed
from tests.spark.snapshots.made import manifest_of

PAGE_ROWS = 3
KINDS = (feed_pb2.CREATED, feed_pb2.OVERWRITTEN, feed_pb2.DELETED, feed_pb2.EXPIRED)


class Feed(OpenedFeed):
    """A log in which every change has the next sequence, in small pages. It is readable up to `end`."""

    end = 20

    def changes(self, partition: str, after: int, *, until: int, **_: Any) -> feed_pb2.ChangesResponse:
        sequences = range(after + 1, min(after + PAGE_ROWS, until, self.end) + 1)
        kinds = [KINDS[each % 4] for each in sequences]
        return feed_pb2.ChangesResponse(
            sequences=sequences,
            keys=[b"k%d" % each for each in sequences],
            values=[b"v" if kind in KINDS[:2] else b"" for kind in kinds],
            kinds=bytes(kinds),
            created=[0 for _ in sequences],
            times_ms=[each * 1000 for each in sequences],
            expires_ms=[each % 2 for each in sequences],
            next=max([after, *sequences]),
        )


@pytest.fixture(autouse=True)
def feed(monkeypatch: pytest.MonkeyPatch) -> type[Feed]:
    monkeypatch.setattr(tasks, "FeedReader", Feed)
    return Feed


def test_every_change_between_two_sequences_occurs_once() -> None:
    rows = [row for batch in tasks.changes(CONFIG, "p1", 4, 17) for row in batch.to_pylist()]
    assert [row["version"] for row in rows] == list(range(5, 18))
    assert [row["value"] for row in rows] == [b"v" if each % 4 < 2 else None for each in range(5, 18)]
    assert [row["expires_at"] is None for row in rows] == [each % 2 == 0 for each in range(5, 18)]
    assert {row["partition"] for row in rows} == {"p1"}


def test_log_that_cannot_be_read_to_its_end_is_an_error(feed: type[Feed], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "end", 10)
    monkeypatch.setattr(tasks, "PATIENCE_S", 0.05)
    with pytest.raises(Unavailable, match="no server returned its log from 10 to 17"):
        list(tasks.changes(CONFIG, "p1", 4, 17))


def place(partition: str, sequence: int) -> PartitionPosition:
    return PartitionPosition(partition=partition, ledger=1, entry=1, sequence=sequence, time_ms=1, ranges=((0, 9),))


def test_parts_begin_where_the_parent_ended_and_do_not_overlap() -> None:
    count = PIECES_PER_PARTITION_MAX * CHANGES_PER_PIECE + 5
    feeds = {"p1": PartitionFeed("p1", 0, 90, False, ("s:1",))}
    places = (place("p1", 90), place("p2", 7 + count), place("new", 3), place("still", 5))
    parent = manifest_of("parent", None, (place("p1", 40), place("p2", 7), place("still", 5)))
    pieces = list(change_pieces(parent, places, feeds))
    spans = {name: [(each.first, each.last) for each in pieces if each.partition == name] for name in ("p1", "new")}
    assert spans == {"p1": [(40, 90)], "new": [(0, 3)]}
    large = [each for each in pieces if each.partition == "p2"]
    assert [each.first for each in large] == [7, *(each.last for each in large[:-1])]
    assert (large[-1].last, len(large)) == (7 + count, PIECES_PER_PARTITION_MAX)
    assert [each.servers for each in pieces if each.partition == "p1"] == [("s:1",)]
    assert not [each for each in pieces if each.partition == "still"]
