"""Plans a new snapshot: pins the store, and divides the pinned store, or the logs since the parent, into parts for
tasks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import uuid4

from kvstore.client.core.config import ClientConfig
from kvstore.client.feed import FeedReader, PartitionFeed
from kvstore.client.pinned.pins import PinnedPartition, PinnedStore, pin_store, unpin
from kvstore.errors import InvalidRequest, PositionTrimmed, StoreError, Unavailable
from kvstore.spark.snapshots.manifest import INTENTS, TOKEN_MAX, Manifest, PartitionPosition, SnapshotKind
from kvstore.spark.snapshots.work import SnapshotPart, SnapshotPlan

log = logging.getLogger(__name__)

PIN_TTL_S = 900.0
"""Lifetime of the snapshot's pin in seconds. A killed job can be resumed within this time."""
SPLIT_BYTES = 32 << 20
"""Bytes per part. A part takes a few seconds at most, so that little work is lost if a task dies, and all tasks end
at about the same time."""
CHANGES_PER_PIECE = 500_000
PIECES_PER_PARTITION_MAX = 64
SILENT_S, AGAIN_S = 15.0, 0.5
"""Seconds for which a partition that owns no tokens may be without a leader, and seconds between the checks."""
GIVE_BACK_S = 5.0
"""Maximum seconds that a finished command waits for servers to release its pin and its logs."""


class NotContinuable(InvalidRequest):
    """The logs no longer have all changes since the parent, so only a full snapshot is possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRequest:
    """The parameters of a new snapshot."""

    cluster: ClientConfig
    instance: str
    """The cluster's instance id."""
    parent: Manifest | None = None
    """The snapshot to continue; None for a full snapshot."""
    compression: str = "zstd"
    split_bytes: int = SPLIT_BYTES
    pin_ttl_s: float = PIN_TTL_S
    bytes_per_s: float = 0.0
    """Maximum bytes of keys and values per second, over all tasks together; 0 means no limit."""

    @property
    def kind(self) -> SnapshotKind:
        return SnapshotKind.INCREMENTAL if self.parent else SnapshotKind.FULL

    @property
    def parent_id(self) -> str | None:
        return self.parent.id if self.parent else None

    def fits(self, plan: SnapshotPlan) -> bool:
        """Return True if a killed job with this plan had the same request, so that its work can be continued."""
        return (plan.kind, plan.parent, plan.cluster) == (self.kind, self.parent_id, self.instance)


def pin_name(snapshot: str) -> str:
    """Return the name of the pin for a snapshot."""
    return f"snapshot-{snapshot}"


def plan_snapshot(wanted: SnapshotRequest, now_ms: int) -> SnapshotPlan:
    """Pin the store and divide the snapshot into parts; `now_ms` is its start time.

    Raises StoreError, in particular NotContinuable if the logs no longer have all changes for an incremental snapshot.
    After an error, the function releases everything that it has pinned. A pin that cannot be released expires.
    """
    moment = datetime.fromtimestamp(now_ms / 1000, UTC).strftime("%Y%m%dT%H%M%SZ")
    name = f"{moment}-{'incr' if wanted.parent else 'full'}-{uuid4().hex[:4]}"
    held: set[str] = set()
    try:
        if wanted.parent is None:
            with FeedReader(wanted.cluster, wanted.instance) as feed:
                pinned, before = _pin(wanted, name, feed)
            left = [each for each in before if each.ended]  # a partition that leaves later may still log changes
            places, pieces = (*map(place_of, pinned.partitions), *_past(left, pinned)), tuple(_splits(pinned))
        else:
            pinned, places, pieces = _plan_changes(wanted, wanted.parent, name, held)
    except BaseException:  # also interrupts: nobody can continue a pin that no plan names
        release_pin(wanted.cluster, name, held)
        raise
    return SnapshotPlan(
        id=name,
        kind=wanted.kind,
        parent=wanted.parent_id,
        cluster=wanted.instance,
        started_ms=now_ms,
        ring_version=pinned.ring_version,
        hash=pinned.hash.name,
        pin=pinned.id,
        partitions=tuple(sorted(places, key=lambda each: each.partition)),
        pieces=pieces,
        compression=wanted.compression,
    )


def _pin(wanted: SnapshotRequest, name: str, feed: FeedReader) -> tuple[PinnedStore, list[PartitionFeed]]:
    def pin() -> PinnedStore:
        return pin_store(
            wanted.cluster,
            ttl_s=wanted.pin_ttl_s,
            id=pin_name(name),
            split_bytes=wanted.split_bytes,
            identity=wanted.instance,
        )

    return pin_all(feed, pin)


def pin_all(feed: FeedReader, pin: Callable[[], PinnedStore]) -> tuple[PinnedStore, list[PartitionFeed]]:
    """Pin a position in every partition that has logged anything, with a repeatable call of `pin`. Returns the pin, and
    the feeds as they were before the pin.

    A partition that owns no tokens may fail to be pinned. It cannot be skipped, because its keys have changed and it
    may own tokens again, so the function raises Unavailable.
    """
    until = time.monotonic() + SILENT_S
    while True:
        before = feed.positions()
        pinned = pin()
        here = {each.partition for each in pinned.partitions}
        silent = [each.partition for each in before if each.latest and not each.ended and each.partition not in here]
        if not silent:
            return pinned, before
        if time.monotonic() >= until:
            raise _no_leader(silent[0])
        time.sleep(AGAIN_S)


def _no_leader(partition: str) -> Unavailable:
    return Unavailable(f"partition {partition} has no leader at the moment; see `kvstore partition list`, and retry")


def place_of(pinned: PinnedPartition) -> PartitionPosition:
    """Return the pinned position of a partition."""
    return PartitionPosition(
        partition=pinned.partition,
        ledger=pinned.position.ledger,
        entry=pinned.position.entry,
        sequence=pinned.sequence,
        time_ms=pinned.time_ms,
        ranges=pinned.spans,
    )


def _past(left: Iterable[PartitionFeed], pinned: PinnedStore) -> Iterator[PartitionPosition]:
    """Yield the positions of partitions that had left the ring before the pin. A partition that is neither pinned
    nor yielded joined later."""
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
    """Plan an incremental snapshot. Adds the partitions whose logs are retained to `held`."""
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
    _check_reached(parent, places)
    return pinned, places, (*change_pieces(parent, places, feeds), *intent_pieces(pinned))


def behind(manifest: Manifest, feeds: Iterable[PartitionFeed]) -> dict[str, int]:
    """Return the sequence after which each partition's log continues a snapshot, for partitions in the ring and
    partitions that have left it since. Other partitions have no logs to retain."""
    places = manifest.places()
    return manifest.starts(
        each.partition
        for each in feeds
        if not each.ended or (not each.gone and each.partition in places and not places[each.partition].has_left)
    )


def release_pin(cluster: ClientConfig, snapshot: str, held: Iterable[str]) -> None:
    """Release the snapshot's pin and the retained logs of these partitions. A pin or log that cannot be released now
    expires."""
    name, positions = pin_name(snapshot), dict.fromkeys(held, 0)  # only named partitions are released
    try:
        unpin(cluster, name, timeout_s=GIVE_BACK_S)
    except StoreError as error:
        log.warning("snapshot=%s its pin expires at its deadline: %s", snapshot, error)
    if not positions:
        return
    try:
        with FeedReader(cluster) as feed:
            feed.hold(name, positions, 0, timeout_s=GIVE_BACK_S)
    except StoreError as error:
        log.warning("snapshot=%s logs are retained until its deadline: %s", snapshot, error)


def trimmed(parent: Manifest, error: PositionTrimmed) -> str:
    """Return the error message for logs that no longer reach back to the parent snapshot."""
    return (
        f"the log does not reach back to snapshot {parent.id} ({error}); take a full snapshot; --hold-hours retains "
        "the "
        "logs for the next incremental one"
    )


def left_places(
    parent: Manifest, pinned: Sequence[PinnedPartition], feeds: Mapping[str, PartitionFeed]
) -> Iterator[PartitionPosition]:
    """Yield the last positions of partitions that have left the ring.

    Raises NotContinuable if the parent does not list such a partition, or if the partition's log is gone and the parent
    does not include its end. Raises Unavailable if a partition in the ring was not pinned.
    """
    here = {each.partition for each in pinned}
    ended = {each for each, feed in feeds.items() if feed.ended and (feed.gone or feed.latest)}
    unknown = sorted(ended - here - parent.places().keys())
    if unknown:
        raise NotContinuable(
            f"partition {unknown[0]} has left the ring and is not in snapshot {parent.id}, so changes of its keys "
            "may "
            "be missing; take a full snapshot"
        )
    for before in parent.partitions:
        if before.partition in here:
            continue
        if before.has_left:
            yield before  # the parent has its whole log, and the next snapshot must know that
            continue
        after = feeds.get(before.partition)
        if after is not None and not after.ended:
            raise _no_leader(after.partition)
        if after is None or after.gone:
            raise NotContinuable(
                f"partition {before.partition} has left the ring and its log is gone, so its changes since snapshot "
                f"{parent.id} are unknown; take a full snapshot"
            )
        yield _place_of_left(after, before.time_ms)


def _check_reached(parent: Manifest, places: Sequence[PartitionPosition]) -> None:
    """Raise NotContinuable if a log ends before the parent, because no chain could contain the new snapshot."""
    starts = parent.starts(each.partition for each in places)
    for each in places:
        if each.sequence < starts[each.partition]:
            raise NotContinuable(
                f"partition {each.partition} is at {each.sequence}, in snapshot {parent.id} at "
                f"{starts[each.partition]}, so the cluster has lost changes; take a full snapshot"
            )


def change_pieces(
    parent: Manifest, places: Sequence[PartitionPosition], feeds: Mapping[str, PartitionFeed]
) -> Iterator[SnapshotPart]:
    """Divide the logs between the parent's positions and the new positions into parts for tasks."""
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


# docs/protocol.md Tx13
def intent_pieces(pinned: PinnedStore) -> Iterator[SnapshotPart]:
    """Return the parts with what committed intents write at the pinned positions, which the logs up to there lack."""
    for each in pinned.partitions:
        if each.intents:
            yield SnapshotPart(
                name=f"{each.partition}-{INTENTS}",
                partition=each.partition,
                first=0,
                last=TOKEN_MAX,
                servers=each.replicas,
                rows=each.intents,
                intents_only=True,
            )
