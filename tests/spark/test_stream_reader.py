"""The bounds of a stream's reads: in each batch each change once, at both ends, without Spark or a cluster."""

from __future__ import annotations

import json
import traceback
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows

from kvstore.client.feed import PartitionFeed
from kvstore.errors import ConfigError, Overloaded, PositionTrimmed
from kvstore.proto import feed_pb2
from kvstore.spark import stream
from kvstore.spark.columns import CHANGES, COLUMNS
from kvstore.spark.options import stream_options
from kvstore.spark.stream import ChangeReader
from tests.spark.feeds import CONFIG, OpenedFeed

PAGE_ROWS = 3
Log = dict[str, list[int]]
"""The sequences of each partition's changes; between them can be others that a feed does not return."""
LOG: Log = {"p1": [1, 2, 3, 4, 5, 6, 7, 20, 21, 22, 40], "p2": [9], "p3": []}


class Feed(OpenedFeed):
    """Replaces the servers: pages of a few changes each."""

    log: ClassVar[Log] = {}
    cluster: ClassVar[str] = "c1"
    oldest: ClassVar[int] = 0
    held: ClassVar[list[dict[str, int]]] = []
    names: ClassVar[list[str]] = []
    looks: ClassVar[int] = 0

    def positions(self, **_: Any) -> list[PartitionFeed]:
        return [
            PartitionFeed(each, self.oldest, max(log, default=0), False, (), self.cluster)
            for each, log in self.log.items()
        ]

    def hold(self, name: str, positions: dict[str, int], ttl_s: float) -> int:
        self.held.append(positions)
        self.names.append(name)
        return 0

    def changes(
        self, partition: str, after: int, *, until: int = 0, rows_max: int = 0, **_: Any
    ) -> feed_pb2.ChangesResponse:
        until = until or max(self.log[partition])
        left = [each for each in self.log[partition] if after < each <= until]
        page = left[: rows_max or PAGE_ROWS]
        return feed_pb2.ChangesResponse(
            sequences=page,
            keys=[b"%d" % each for each in page],
            values=[b"v" for _ in page],
            kinds=bytes([feed_pb2.CREATED] * len(page)),
            created=page,
            times_ms=[1 for _ in page],
            expires_ms=[0 for _ in page],
            next=page[-1] if len(page) < len(left) else until,
        )


@pytest.fixture(autouse=True)
def feed(monkeypatch: pytest.MonkeyPatch) -> type[Feed]:
    monkeypatch.setattr(stream, "FeedReader", Feed)
    monkeypatch.setattr(stream, "TASK_ROWS", 5)
    monkeypatch.setattr(Feed, "log", LOG)
    monkeypatch.setattr(Feed, "held", [])
    monkeypatch.setattr(Feed, "names", [])
    monkeypatch.setattr(Feed, "cluster", "c1")
    monkeypatch.setattr(Feed, "oldest", 0)
    return Feed


def reader(**options: str) -> ChangeReader:
    return ChangeReader(CONFIG, stream_options(options, tuple(CHANGES), tuple(COLUMNS)))


def rows(found: ChangeReader, start: dict[str, Any], end: dict[str, Any]) -> list[tuple[str, int]]:
    """Partition and sequence of the changes that the tasks of a micro-batch read."""
    return [
        (row["partition"], row["version"])
        for task in found.partitions(start, end)
        for batch in found.read(task)
        for row in batch.to_pylist()
    ]


def every(log: Log) -> list[tuple[str, int]]:
    return [(partition, sequence) for partition, changes in log.items() for sequence in changes]


def read_all(found: ChangeReader, limit: ReadLimit) -> list[list[tuple[str, int]]]:
    """Read micro-batch by micro-batch, until there is none."""
    start, batches = found.initialOffset(), []
    while (end := found.latestOffset(start, limit)) != start:
        batches.append(rows(found, start, end))
        start = end
    return batches


@pytest.mark.parametrize("limit", [ReadAllAvailable(), ReadMaxRows(1), ReadMaxRows(4), ReadMaxBytes(8)])
def test_every_change_is_in_one_micro_batch(limit: ReadLimit) -> None:
    batches = read_all(reader(startingPosition="earliest"), limit)
    assert sorted(row for batch in batches for row in batch) == sorted(every(LOG))


@given(st.sets(st.integers(1, 30)), st.sets(st.integers(1, 30)), st.integers(1, 9))
def test_every_change_of_any_log_is_in_one_micro_batch_of_any_size(one: set[int], other: set[int], most: int) -> None:
    Feed.log = {"p1": sorted(one), "p2": sorted(other)}
    batches = read_all(reader(startingPosition="earliest"), ReadMaxRows(most))
    assert sorted(row for batch in batches for row in batch) == sorted(every(Feed.log))
    assert max(map(len, batches), default=0) <= max(2, most)


def test_stream_of_new_changes_begins_after_the_existing_rows() -> None:
    found = reader()
    start = found.initialOffset()
    assert found.latestOffset(start, ReadAllAvailable()) == start
    Feed.log = LOG | {"p1": [*LOG["p1"], 41], "p3": [1]}
    end = found.latestOffset(start, ReadAllAvailable())
    assert rows(found, start, end) == [("p1", 41), ("p3", 1)]


def test_offset_is_the_last_change_that_was_read() -> None:
    found = reader(startingPosition='{"p1": 6, "p2": 9}')
    start = found.initialOffset()
    end = found.latestOffset(start, ReadAllAvailable())
    assert rows(found, start, end) == [("p1", each) for each in (7, 20, 21, 22, 40)]
    assert rows(found, {"p1": 19}, {"p1": 21}) == [("p1", 20), ("p1", 21)]


def test_available_now_query_ends_at_the_log_ends_of_its_start() -> None:
    found = reader(startingPosition="earliest")
    found.prepareForTriggerAvailableNow()
    Feed.log = LOG | {"p1": [*LOG["p1"], 41], "p4": [1]}
    batches = read_all(found, ReadMaxRows(6))
    assert sorted(row for batch in batches for row in batch) == sorted(every(LOG))


@pytest.mark.parametrize("limit", [ReadMaxRows(6), ReadMaxBytes(8)])
def test_query_does_not_end_early_because_a_replica_is_behind(
    monkeypatch: pytest.MonkeyPatch, limit: ReadLimit
) -> None:
    """Spark ends an AvailableNow query at the first empty micro-batch."""
    found = reader(startingPosition="earliest")
    found.prepareForTriggerAvailableNow()
    seen = Feed.changes

    def behind(feed: Feed, partition: str, after: int, **asked: Any) -> feed_pb2.ChangesResponse:
        """Two reads of three reach a replica that has nothing after the position, however long it waits."""
        Feed.looks += 1
        return feed_pb2.ChangesResponse(next=after) if Feed.looks % 3 else seen(feed, partition, after, **asked)

    monkeypatch.setattr(Feed, "looks", 0)
    monkeypatch.setattr(Feed, "changes", behind)
    batches = read_all(found, limit)
    assert sorted(row for batch in batches for row in batch) == sorted(every(LOG))


def test_logs_are_held_from_the_micro_batch_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query that dies reads its last micro-batch again."""
    monkeypatch.setattr(stream, "HOLD_SHARES", 1e12)  # at every micro-batch
    read_all(reader(startingPosition="earliest"), ReadMaxRows(4))
    starts = [each["p1"] for each in Feed.held]
    assert starts[0] == starts[1] == 0
    assert starts == sorted(starts)
    assert 0 < starts[-1] < 40


def test_next_run_of_a_query_moves_the_hold_of_the_one_before() -> None:
    """Otherwise each run leaves one more hold, and their number is limited: then no logs can be held."""
    first = reader(startingPosition="earliest")
    end = first.latestOffset(first.initialOffset(), ReadMaxRows(4))
    again = json.loads(json.dumps(first.latestOffset(end, ReadMaxRows(4))))
    reader(startingPosition="earliest").latestOffset(again, ReadMaxRows(4))
    first_name, second_name = Feed.names
    assert first_name == second_name == again["@hold"]
    other = reader(startingPosition=json.dumps(again))  # another query, which begins at the position of the first
    other.latestOffset(other.initialOffset(), ReadMaxRows(4))
    given = reader(holdName="given")
    assert "@hold" not in given.latestOffset({"p1": 0, "p2": 0, "p3": 0}, ReadMaxRows(4))
    assert len({*Feed.names}) == 3
    assert Feed.names[-1] == "given"


def test_refused_hold_is_not_requested_in_each_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would wait for its full time."""
    asked: list[str] = []

    def refused(_: Feed, name: str, *__: Any) -> int:
        asked.append(name)
        raise Overloaded("256 names of holds")

    monkeypatch.setattr(Feed, "hold", refused)
    read_all(reader(startingPosition="earliest"), ReadMaxRows(4))
    assert len(asked) == 1


def test_range_without_keys_has_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for reading; a server refuses such bounds."""
    monkeypatch.setattr(Feed, "changes", None)
    found = reader(prefix="b", start="c", startingPosition="earliest")
    assert rows(found, {"p1": 0, "p2": 0}, {"p1": 40, "p2": 9}) == []


def test_checkpoint_of_another_cluster_is_refused(feed: type[Feed]) -> None:
    """Also in a run that begins with the micro-batch in which the previous one died: Spark requests no other."""
    found = reader(startingPosition="earliest")
    start = found.initialOffset()
    end = found.latestOffset(start, ReadMaxRows(6))
    feed.cluster = "c2"
    for again in (reader(), reader()):
        with pytest.raises(ConfigError, match=r"position belongs to cluster c1, this one is c2; .* checkpointLocation"):
            again.latestOffset(end, ReadAllAvailable())
        with pytest.raises(ConfigError, match="position belongs to cluster c1, this one is c2"):
            again.partitions(start, end)
    with pytest.raises(ConfigError, match="position belongs to cluster c1"):
        reader(startingPosition=json.dumps(end)).initialOffset()


def test_checkpoint_of_a_former_version_is_read_and_gets_the_cluster() -> None:
    end = reader().latestOffset({"p1": 40, "p2": 9, "p3": 0}, ReadAllAvailable())
    assert end.pop("@hold").startswith("spark-")
    assert end == {"@cluster": "c1", "p1": 40, "p2": 9, "p3": 0}
    assert rows(reader(), {"p1": 39, "p2": 9}, {"p1": 40, "p2": 9}) == [("p1", 40)]
    with pytest.raises(ConfigError, match="its log ends at 40"):
        reader().latestOffset({"p1": 41}, ReadAllAvailable())
    with pytest.raises(ConfigError, match="its log ends at 40"):
        reader().partitions({"p1": 39}, {"p1": 41})


def test_query_down_for_too_long_gets_a_one_line_remedy(feed: type[Feed]) -> None:
    """Also if it would begin with the micro-batch in which it died. docs/reference/spark.md names the error."""
    feed.oldest = 3
    for call in (
        lambda: reader().latestOffset({"p1": 2}, ReadAllAvailable()),
        lambda: reader().partitions({"p1": 2}, {"p1": 5}),
    ):
        with pytest.raises(PositionTrimmed) as caught:
            call()
        line = traceback.format_exception_only(caught.value)
        assert len(line) == 1
        assert line[0].startswith("kvstore.errors.PositionTrimmed: partition p1: changes after 2 were trimmed; ")
        assert "start a new query with another checkpointLocation" in line[0]
    assert reader().partitions({"p1": 5, "p2": 0}, {"p1": 9, "p2": 0})  # nothing of p2 is wanted
