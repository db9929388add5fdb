"""Stream offsets: the position in each partition's log up to which a stream has read. Spark stores an offset as JSON:
`{"@cluster": "0f3c…", "@hold": "spark-5d1e…", "p1": 120, "p2": {"ended": 77}}`. Decides only.

A number is the sequence up to which the partition's changes have been read. `ended` means that the partition has left
the ring, and gives the partition's last sequence. The entry of a partition that has left stays forever. A partition
without an entry counts as unread, so without its entry, the partition that has left would be taken for one that joined
and left before the stream read it.

`@cluster` is the id of the cluster with these logs: in another cluster, the same sequences are other changes. `@hold`
is the name under which the query retains logs, unless the user has set a name. The next run of the query moves this
hold instead of adding another. Offsets that users write may omit both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.client.feed import PartitionFeed
from kvstore.errors import ConfigError, PositionTrimmed

Offset = dict[str, Any]
CLUSTER, HOLD = "@cluster", "@hold"
"""Keys of an offset that are not partitions. No partition can have these names."""
GONE = -1
NEW_QUERY = (
    "a stream continues only with its own cluster; for this one, start a new query with another checkpointLocation"
)


@dataclass(frozen=True, slots=True)
class ChangeSpan:
    """The changes of one partition with sequences in (`after`, `until`]."""

    partition: str
    after: int
    until: int
    servers: tuple[str, ...] = ()
    """Servers to ask, best first."""


def sequence_of(offset: Mapping[str, Any], partition: str) -> int:
    """Return the sequence up to which a partition has been read; 0 if the offset does not list the partition. Raises
    ConfigError for an invalid offset."""
    found = offset.get(partition, 0)
    if isinstance(found, dict):
        found = found.get("ended")
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise ConfigError(f'startingPosition: expected {{"PARTITION": SEQUENCE, ...}}, got {offset[partition]!r}')
    return found


def partitions_of(offset: Mapping[str, Any]) -> list[str]:
    return sorted(each for each in offset if each not in (CLUSTER, HOLD))


def hold_of(offset: Mapping[str, Any]) -> str:
    """Return the name under which the query retains logs, or an empty string if the offset has no name."""
    found = offset.get(HOLD)
    return found if isinstance(found, str) else ""


def has_ended(offset: Mapping[str, Any], partition: str) -> bool:
    return isinstance(offset.get(partition), dict)


def oldest(feeds: Sequence[PartitionFeed]) -> Offset:
    """Return the offset from which a stream reads every change that the logs still have."""
    return _with_cluster(feeds) | {each.partition: {"ended": 0} if each.gone else each.oldest for each in feeds}


def latest(feeds: Sequence[PartitionFeed]) -> Offset:
    """Return the offset after the last acknowledged write of every partition."""
    return _with_cluster(feeds) | {
        each.partition: {"ended": each.latest} if each.ended else each.latest for each in feeds
    }


def gone(feeds: Sequence[PartitionFeed]) -> set[str]:
    """Return the partitions whose logs can no longer be read."""
    return {each.partition for each in feeds if each.gone}


def _with_cluster(feeds: Sequence[PartitionFeed]) -> Offset:
    """Return an offset that contains only the id of the cluster, or an empty offset if the servers do not report the
    id."""
    return {CLUSTER: feeds[0].cluster} if feeds and feeds[0].cluster else {}


def advanced(start: Mapping[str, Any], ends: Mapping[str, int], feeds: Sequence[PartitionFeed]) -> Offset:
    """Return the offset of a stream that continued from `start` and has read each partition up to its sequence in
    `ends`. Partitions that are not in `ends` keep their position."""
    offset = {**start, **_with_cluster(feeds)}
    for each in feeds:
        until = max(ends.get(each.partition, 0), sequence_of(start, each.partition))
        offset[each.partition] = {"ended": until} if each.ended and until >= each.latest else until
    return offset


def lowest(one: Mapping[str, Any], other: Mapping[str, Any]) -> Offset:
    """Return the lower of the two positions for each partition of `one`."""
    return {
        partition: min(one[partition], other[partition], key=_number) if partition in other else one[partition]
        for partition in partitions_of(one)
    }


def _number(value: Any) -> int:
    return int(value["ended"] if isinstance(value, dict) else value)


def check_given(start: Mapping[str, Any], feeds: Sequence[PartitionFeed]) -> None:
    """Check an offset that a user has given as `startingPosition`.

    Raises ConfigError if the offset names unknown partitions or positions after the end of a log, or if it omits a
    partition whose log is gone, because the stream would silently skip that partition's changes.
    """
    check_cluster(start, feeds)
    found = {each.partition: each for each in feeds}
    for partition in partitions_of(start):
        sequence = sequence_of(start, partition)
        if partition not in found:
            raise ConfigError(f"startingPosition: expected partitions {', '.join(found)}, got partition {partition!r}")
        if sequence > found[partition].latest and not found[partition].gone:
            raise ConfigError(
                f"startingPosition: expected at most {found[partition].latest} for {partition}, got {sequence}"
            )
    missed = sorted(each for each in gone(feeds) if not has_ended(start, each))
    if missed:
        entries = ", ".join(f'"{each}": {{"ended": 0}}' for each in missed)
        raise ConfigError(
            f"startingPosition: the logs of partitions that have left the ring are gone ({', '.join(missed)}); if you "
            f"already have their changes, or need none, add {entries}"
        )


def check_cluster(offset: Mapping[str, Any], feeds: Sequence[PartitionFeed]) -> None:
    """Raise ConfigError if the offset belongs to another cluster, where its positions are those of other changes."""
    ours, found = _with_cluster(feeds).get(CLUSTER), offset.get(CLUSTER)
    if ours and found and found != ours:
        raise ConfigError(f"the stream's position belongs to cluster {found}, this one is {ours}; {NEW_QUERY}")


def check_readable(start: Mapping[str, Any], feeds: Sequence[PartitionFeed]) -> None:
    """Check that a stream can continue from `start`. Raises PositionTrimmed if changes after `start` are no longer
    in the logs, and ConfigError if the cluster never had the positions of `start`."""
    check_cluster(start, feeds)
    readable = {each.partition for each in feeds} - gone(feeds)
    for partition in sorted({*partitions_of(start), *gone(feeds)}):
        if partition not in readable and not has_ended(start, partition):
            raise PositionTrimmed(partition, sequence_of(start, partition), GONE)
    for each in feeds:
        _check_reached(start, each)
        if sequence_of(start, each.partition) < each.oldest and not has_ended(start, each.partition):
            raise PositionTrimmed(each.partition, sequence_of(start, each.partition), each.oldest)


def check_batch(start: Mapping[str, Any], end: Mapping[str, Any], feeds: Sequence[PartitionFeed]) -> None:
    """Check that one micro-batch can be read, with the errors of `check_readable`. A query that died in a batch
    first reads that batch again, using the batch's old offsets."""
    check_cluster(end, feeds)
    after = {each: sequence_of(start, each) for each in partitions_of(end)}
    wanted = {each: seq for each, seq in after.items() if seq < sequence_of(end, each)}
    of_those = [each for each in feeds if each.partition in wanted]
    check_readable(wanted, of_those)
    for each in of_those:
        _check_reached(end, each)


def _check_reached(offset: Mapping[str, Any], feed: PartitionFeed) -> None:
    """Raise ConfigError if a position is after the end of the partition's log. This is the only check that finds
    another cluster's offset if the offset has no `@cluster`. Partitions that have ended are not checked, because
    their logs may still be closing."""
    sequence = sequence_of(offset, feed.partition)
    if sequence > feed.latest and not feed.ended:
        raise ConfigError(
            f"the stream's position of partition {feed.partition} is {sequence}, but its log ends at {feed.latest}, so "
            f"the position belongs to another cluster; {NEW_QUERY}"
        )


def spans(start: Mapping[str, Any], end: Mapping[str, Any], rows_max: int) -> list[ChangeSpan]:
    """Divide the changes between two offsets into spans of at most `rows_max` sequences each."""
    found = []
    for partition in partitions_of(end):
        first, last = sequence_of(start, partition), sequence_of(end, partition)
        found += [
            ChangeSpan(partition, after, min(after + rows_max, last))
            for after in range(first, max(first, last), rows_max)
        ]
    return found


def tasks(spans: Sequence[ChangeSpan], rows_max: int) -> list[tuple[ChangeSpan, ...]]:
    """Group spans into tasks: a task has one span, or several spans with at most `rows_max` sequences together."""
    found: list[list[ChangeSpan]] = []
    left = 0
    for span in spans:
        count = span.until - span.after
        if count > left:
            found.append([])
            left = rows_max
        found[-1].append(span)
        left -= count
    return list(map(tuple, found))


def shares(amount: int, waiting: Sequence[str]) -> dict[str, int]:
    """Divide an amount evenly among the waiting partitions. Every share is at least 1."""
    return {each: max(1, amount // len(waiting)) for each in waiting}
