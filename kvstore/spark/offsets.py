"""How far a stream has read each partition, as Spark keeps it in JSON:
`{"@cluster": "0f3c…", "@hold": "spark-5d1e…", "p1": 120, "p2": {"ended": 77}}`.

Decides only. A number is the sequence up to which the partition's changes have been read; `ended`: it has left the
ring, and that was its last one. A partition that is not named has not been read at all: so one that has left is named
for good, or it could not be told from one that joined and left unread. `@cluster` is the identity of the cluster whose
logs these are: in another one the same numbers stand for other changes. `@hold` is the name under which the query
holds logs, where nobody has given it one: the next run moves that hold on, and does not leave one more. Offsets that
somebody writes by hand may be without both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.client.feed import PartitionFeed
from kvstore.errors import ConfigError, PositionTrimmed

Offset = dict[str, Any]
CLUSTER, HOLD = "@cluster", "@hold"
"""No partition is called so."""
GONE = -1
ANEW = "a stream goes on only with its own cluster; for this one begin a new query with another checkpointLocation"


@dataclass(frozen=True, slots=True)
class ChangeSpan:
    """Changes of one partition behind `after` and up to `until`."""

    partition: str
    after: int
    until: int
    servers: tuple[str, ...] = ()
    """Whom to ask, best first."""


def sequence_of(offset: Mapping[str, Any], partition: str) -> int:
    """Raises ConfigError for an offset that is none."""
    found = offset.get(partition, 0)
    if isinstance(found, dict):
        found = found.get("ended")
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise ConfigError(f'startingPosition: want {{"PARTITION": SEQUENCE, ...}}, got {offset[partition]!r}')
    return found


def partitions_of(offset: Mapping[str, Any]) -> list[str]:
    return sorted(each for each in offset if each not in (CLUSTER, HOLD))


def hold_of(offset: Mapping[str, Any]) -> str:
    """The name under which the query holds logs; empty if the offset has none."""
    found = offset.get(HOLD)
    return found if isinstance(found, str) else ""


def has_ended(offset: Mapping[str, Any], partition: str) -> bool:
    return isinstance(offset.get(partition), dict)


def oldest(feeds: Sequence[PartitionFeed]) -> Offset:
    """Before everything that can still be read."""
    return _signed(feeds) | {each.partition: {"ended": 0} if each.gone else each.oldest for each in feeds}


def latest(feeds: Sequence[PartitionFeed]) -> Offset:
    """Behind everything that was acknowledged."""
    return _signed(feeds) | {each.partition: {"ended": each.latest} if each.ended else each.latest for each in feeds}


def gone(feeds: Sequence[PartitionFeed]) -> set[str]:
    """Partitions that nobody can read any more."""
    return {each.partition for each in feeds if each.gone}


def _signed(feeds: Sequence[PartitionFeed]) -> Offset:
    """Begin an offset with the name of the cluster whose positions it has, if the servers tell."""
    return {CLUSTER: feeds[0].cluster} if feeds and feeds[0].cluster else {}


def advanced(start: Mapping[str, Any], ends: Mapping[str, int], feeds: Sequence[PartitionFeed]) -> Offset:
    """The offset at which partitions have been read up to `ends`; those that are not in it stay where they are."""
    offset = {**start, **_signed(feeds)}
    for each in feeds:
        until = max(ends.get(each.partition, 0), sequence_of(start, each.partition))
        offset[each.partition] = {"ended": until} if each.ended and until >= each.latest else until
    return offset


def lowest(one: Mapping[str, Any], other: Mapping[str, Any]) -> Offset:
    """Neither further than `one` nor than `other`."""
    return {
        partition: min(one[partition], other[partition], key=_number) if partition in other else one[partition]
        for partition in partitions_of(one)
    }


def _number(value: Any) -> int:
    return int(value["ended"] if isinstance(value, dict) else value)


def check_given(start: Mapping[str, Any], feeds: Sequence[PartitionFeed]) -> None:
    """Raises ConfigError for an offset that names what there is not: changes up to it would be passed over."""
    check_cluster(start, feeds)
    found = {each.partition: each for each in feeds}
    for partition in partitions_of(start):
        sequence = sequence_of(start, partition)
        if partition not in found:
            raise ConfigError(f"startingPosition: want some of {', '.join(found)}, got partition {partition!r}")
        if sequence > found[partition].latest and not found[partition].gone:
            raise ConfigError(
                f"startingPosition: want at most {found[partition].latest} for {partition}, got {sequence}"
            )
    missed = sorted(each for each in gone(feeds) if not has_ended(start, each))
    if missed:
        said = ", ".join(f'"{each}": {{"ended": 0}}' for each in missed)
        raise ConfigError(
            f"startingPosition: the logs of partitions that have left the ring are gone ({', '.join(missed)}); if you "
            f"have their changes, or want none, say so by {said}"
        )


def check_cluster(offset: Mapping[str, Any], feeds: Sequence[PartitionFeed]) -> None:
    """Raises ConfigError for an offset of another cluster: what it would be read as are other changes."""
    ours, found = _signed(feeds).get(CLUSTER), offset.get(CLUSTER)
    if ours and found and found != ours:
        raise ConfigError(f"the stream's position is of the cluster {found}, this one is {ours}: {ANEW}")


def check_readable(start: Mapping[str, Any], feeds: Sequence[PartitionFeed]) -> None:
    """Raises PositionTrimmed if changes behind `start` are gone, and ConfigError if the cluster never had them."""
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
    """As check_readable, of a micro-batch: a query that died in one reads it first, by the offsets that it had then."""
    check_cluster(end, feeds)
    after = {each: sequence_of(start, each) for each in partitions_of(end)}
    wanted = {each: seq for each, seq in after.items() if seq < sequence_of(end, each)}
    of_those = [each for each in feeds if each.partition in wanted]
    check_readable(wanted, of_those)
    for each in of_those:
        _check_reached(end, each)


def _check_reached(offset: Mapping[str, Any], feed: PartitionFeed) -> None:
    """Offsets without `@cluster` can be told by this only. A log that has ended may just be closing."""
    sequence = sequence_of(offset, feed.partition)
    if sequence > feed.latest and not feed.ended:
        raise ConfigError(
            f"the stream's position of partition {feed.partition} is {sequence}, and its log ends at {feed.latest}, so "
            f"it is another cluster's: {ANEW}"
        )


def spans(start: Mapping[str, Any], end: Mapping[str, Any], rows_max: int) -> list[ChangeSpan]:
    """Divide what lies between two offsets into portions of at most `rows_max` sequences."""
    found = []
    for partition in partitions_of(end):
        first, last = sequence_of(start, partition), sequence_of(end, partition)
        found += [
            ChangeSpan(partition, after, min(after + rows_max, last))
            for after in range(first, max(first, last), rows_max)
        ]
    return found


def tasks(spans: Sequence[ChangeSpan], rows_max: int) -> list[tuple[ChangeSpan, ...]]:
    """Give each task its portions: one span, or several that have no more than `rows_max` sequences together."""
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
    """An amount, spread evenly; nobody gets nothing."""
    return {each: max(1, amount // len(waiting)) for each in waiting}
