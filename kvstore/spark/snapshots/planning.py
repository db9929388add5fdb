"""Cuts the work of a new snapshot into pieces: the store, which it pins, or what the logs say since the parent."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import uuid4

from kvstore.client.core.config import ClientConfig
from kvstore.client.feed import FeedReader, PartitionFeed
from kvstore.client.pinned.pins import PinnedPartition, PinnedStore, pin_store, unpin
from kvstore.errors import InvalidRequest, PositionTrimmed, StoreError, Unavailable
from kvstore.spark.snapshots.manifest import Manifest, PartitionPosition, SnapshotKind
from kvstore.spark.snapshots.work import SnapshotPart, SnapshotPlan

log = logging.getLogger(__name__)

PIN_TTL_S = 900.0
"""How long a job that was killed can be resumed."""
SPLIT_BYTES = 32 << 20
"""Some seconds of work at most: what a task that dies loses, and small enough for tasks to end together."""
CHANGES_PER_PIECE = 500_000
PIECES_PER_PARTITION_MAX = 64
SILENT_S, AGAIN_S = 15.0, 0.5
"""A partition that owns nothing may be without a leader for so long; how often it is asked."""
GIVE_BACK_S = 5.0
"""A command that has ended otherwise waits so long at most for servers that do not answer."""


class NotContinuable(InvalidRequest):
    """The changes since the parent are not in the logs any more: only a full snapshot can be taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRequest:
    """The request for a new snapshot."""

    cluster: ClientConfig
    instance: str
    """The cluster's instance id."""
    parent: Manifest | None = None
    """None: a full one."""
    compression: str = "zstd"
    split_bytes: int = SPLIT_BYTES
    pin_ttl_s: float = PIN_TTL_S
    bytes_per_s: float = 0.0
    """At most, of keys and values, in all tasks together; 0: as fast as it goes."""

    @property
    def kind(self) -> SnapshotKind:
        return SnapshotKind.INCREMENTAL if self.parent else SnapshotKind.FULL

    @property
    def parent_id(self) -> str | None:
        return self.parent.id if self.parent else None

    def fits(self, plan: SnapshotPlan) -> bool:
        """Whether a job that was killed was after the same thing."""
        return (plan.kind, plan.parent, plan.cluster) == (self.kind, self.parent_id, self.instance)


def pin_name(snapshot: str) -> str:
    """Under which the servers keep what a snapshot reads."""
    return f"snapshot-{snapshot}"


def plan_snapshot(wanted: SnapshotRequest, now_ms: int) -> SnapshotPlan:
    """Pin, and cut. Raises StoreError; for an incremental of which the logs do not hold everything any more,
    NotContinuable. Whatever it raises, nothing stays pinned that can be given back."""
    moment = datetime.fromtimestamp(now_ms / 1000, UTC).strftime("%Y%m%dT%H%M%SZ")
    name = f"{moment}-{'incr' if wanted.parent else 'full'}-{uuid4().hex[:4]}"
    held: set[str] = set()
    try:
        if wanted.parent is None:
            with FeedReader(wanted.cluster, wanted.instance) as feed:
                pinned, before = _pin(wanted, name, feed)
            left = [each for each in before if each.ended]  # who leaves later may still log something
            places, pieces = (*map(place_of, pinned.partitions), *_past(left, pinned)), tuple(_splits(pinned))
        else:
            pinned, places, pieces = _plan_changes(wanted, wanted.parent, name, held)
    except BaseException:  # also what a terminal interrupts: nobody can go on with a pin that no plan names
        give_back(wanted.cluster, name, held)
        raise
    return SnapshotPlan(
        id=name,
        kind=wanted.kind,
        parent=wanted.parent_id,
        cluster=wanted.instance,
        started_ms=now_ms,
        ring_version=pinned.ring_version,
        pin=pinned.id,
        partitions=tuple(sorted(places, key=lambda each: each.partition)),
        pieces=pieces,
        compression=wanted.compression,
    )


def _pin(wanted: SnapshotRequest, name: str, feed: FeedReader) -> tuple[PinnedStore, list[PartitionFeed]]:
    """A position in every partition that has logged anything, and what the feeds were before. One that owns nothing
    may not have been pinned, but keys have changed there, and it may own some again. Raises Unavailable."""
    until = time.monotonic() + SILENT_S
    while True:
        before = feed.positions()
        pinned = pin_store(
            wanted.cluster,
            ttl_s=wanted.pin_ttl_s,
            id=pin_name(name),
            split_bytes=wanted.split_bytes,
            identity=wanted.instance,
        )
        here = {each.partition for each in pinned.partitions}
        silent = [each.partition for each in before if each.latest and not each.ended and each.partition not in here]
        if not silent:
            return pinned, before
        if time.monotonic() >= until:
            raise _not_led(silent[0])
        time.sleep(AGAIN_S)


def _not_led(partition: str) -> Unavailable:
    return Unavailable(f"partition {partition} is not led just now (`kvstore partition list`): try again")


def place_of(pinned: PinnedPartition) -> PartitionPosition:
    """Where a partition stands in what is pinned."""
    return PartitionPosition(
        partition=pinned.partition,
        ledger=pinned.position.ledger,
        entry=pinned.position.entry,
        sequence=pinned.sequence,
        time_ms=pinned.time_ms,
        ranges=pinned.spans,
    )


def _past(left: Iterable[PartitionFeed], pinned: PinnedStore) -> Iterator[PartitionPosition]:
    """Partitions that had left the ring already: of those that leave later, one that is not named has joined since."""
    here = {each.partition for each in pinned.partitions}
    time_ms = min(each.time_ms for each in pinned.partitions)
    return (_place_of_left(each, time_ms) for each in left if each.partition not in here)


def _place_of_left(feed: PartitionFeed, time_ms: int) -> PartitionPosition:
    return PartitionPosition(
        partition=feed.partition, ledger=-1, entry=-1, sequence=feed.latest, time_ms=time_ms, ranges=()
    )


def _splits(pinned: PinnedStore) -> Iterator[SnapshotPart]:
    numbers: dict[str, int] = {}
    for split in pinned.splits():
        number = numbers[split.partition] = numbers.get(split.partition, -1) + 1
        yield SnapshotPart(
            name=f"{split.partition}-{number:05d}",
            partition=split.partition,
            first=split.first,
            last=split.last,
            servers=split.replicas,
            rows=split.rows,
        )


def _plan_changes(
    wanted: SnapshotRequest, parent: Manifest, name: str, held: set[str]
) -> tuple[PinnedStore, tuple[PartitionPosition, ...], tuple[SnapshotPart, ...]]:
    """`held` gets to know of which partitions logs are held."""
    with FeedReader(wanted.cluster, wanted.instance) as feed:
        feeds = {each.partition: each for each in feed.positions()}
        starts = behind(parent, feeds.values())
        held.update(starts)
        try:
            feed.hold(pin_name(name), starts, wanted.pin_ttl_s)
        except PositionTrimmed as error:
            raise NotContinuable(trimmed(parent, error)) from None
        pinned, _ = _pin(wanted, name, feed)
        feeds = {each.partition: each for each in feed.positions()}
    places = (*map(place_of, pinned.partitions), *left_places(parent, pinned.partitions, feeds))
    return pinned, places, tuple(change_pieces(parent, places, feeds))


def behind(manifest: Manifest, feeds: Iterable[PartitionFeed]) -> dict[str, int]:
    """Behind which sequences logs go on from a snapshot: of the ring's partitions, and of those that have left since.
    Of others there is nothing to hold."""
    places = manifest.places()
    return manifest.starts(
        each.partition
        for each in feeds
        if not each.ended or (not each.gone and each.partition in places and not places[each.partition].has_left)
    )


def give_back(cluster: ClientConfig, snapshot: str, held: Iterable[str]) -> None:
    """The pin, and what is held of these partitions' logs. What cannot be given back now ends by itself."""
    name, positions = pin_name(snapshot), dict.fromkeys(held, 0)  # only what they name is given back
    try:
        unpin(cluster, name, timeout_s=GIVE_BACK_S)
    except StoreError as error:
        log.warning("snapshot=%s its pin ends at its deadline: %s", snapshot, error)
    if not positions:
        return
    try:
        with FeedReader(cluster) as feed:
            feed.hold(name, positions, 0, timeout_s=GIVE_BACK_S)
    except StoreError as error:
        log.warning("snapshot=%s logs are held until its deadline: %s", snapshot, error)


def trimmed(parent: Manifest, error: PositionTrimmed) -> str:
    """For people."""
    return (
        f"the log does not reach back to snapshot {parent.id} ({error}): take a full snapshot; --hold-hours keeps the "
        "logs for the next incremental"
    )


def left_places(
    parent: Manifest, pinned: Sequence[PinnedPartition], feeds: Mapping[str, PartitionFeed]
) -> Iterator[PartitionPosition]:
    """Where the logs of partitions end that have left the ring. Raises NotContinuable if such a log is gone and the
    parent does not have it to its end, or if the parent does not name it; Unavailable if one that is in
    the ring was not pinned."""
    here = {each.partition for each in pinned}
    ended = {each for each, feed in feeds.items() if feed.ended and (feed.gone or feed.latest)}
    strangers = sorted(ended - here - parent.places().keys())
    if strangers:
        raise NotContinuable(
            f"partition {strangers[0]} has left the ring and is not named in snapshot {parent.id}, so keys may have "
            "changed there in between: take a full snapshot"
        )
    for before in parent.partitions:
        if before.partition in here:
            continue
        if before.has_left:
            yield before  # the parent has it up to its end, and whoever goes on from here must know that
            continue
        after = feeds.get(before.partition)
        if after is not None and not after.ended:
            raise _not_led(after.partition)
        if after is None or after.gone:
            raise NotContinuable(
                f"partition {before.partition} has left the ring and its log is gone, so what changed there since "
                f"snapshot {parent.id} is not known: take a full snapshot"
            )
        yield _place_of_left(after, before.time_ms)


def change_pieces(
    parent: Manifest, places: Sequence[PartitionPosition], feeds: Mapping[str, PartitionFeed]
) -> Iterator[SnapshotPart]:
    """The logs between two snapshots, cut into sequences that one task reads."""
    starts = parent.starts(each.partition for each in places)
    for place in places:
        start = starts[place.partition]
        count = place.sequence - start
        step = max(CHANGES_PER_PIECE, -(-count // PIECES_PER_PARTITION_MAX))
        servers = feeds[place.partition].servers if place.partition in feeds else ()
        for number, first in enumerate(range(start, place.sequence, step)):
            last = min(first + step, place.sequence)
            yield SnapshotPart(
                name=f"{place.partition}-{number:05d}",
                partition=place.partition,
                first=first,
                last=last,
                servers=servers,
                rows=last - first,
            )
