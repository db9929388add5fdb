"""Compares a snapshot with its original store, with a restored store, or with another snapshot."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from kvstore.client.core.config import ClientConfig
from kvstore.client.feed import FeedReader
from kvstore.client.pinned.arrow import batch_of
from kvstore.client.pinned.pins import PinnedStore, Split, pin_store
from kvstore.client.pinned.read import read_pinned
from kvstore.errors import InvalidRequest, PositionTrimmed
from kvstore.spark.pins import kept_alive, release
from kvstore.spark.snapshots.chains import Cut
from kvstore.spark.snapshots.manifest import Manifest
from kvstore.spark.snapshots.planning import SPLIT_BYTES, change_pieces, left_places, pin_all, place_of
from kvstore.spark.snapshots.store import SnapshotStore
from kvstore.spark.snapshots.tables import CONTENT, EXACT, Differences, Read, Tables
from kvstore.spark.snapshots.tasks import PAGE_BYTES, PATIENCE_S, changes
from kvstore.spark.snapshots.work import SnapshotPart

T = TypeVar("T")
PIN_TTL_S = 300.0
"""Lifetime of the comparison's pin in seconds. The pin is renewed during the comparison, and a killed job leaves it
behind for this long."""


def against_origin(
    tables: Tables[T], store: SnapshotStore, chain: Sequence[Manifest], cluster: ClientConfig, examples: int
) -> Differences:
    """Compare the original store with the snapshot plus the later changes from the logs. Returns the counts of
    differences and at most `examples` keys. Raises InvalidRequest if the logs no longer reach back to the snapshot."""
    last = chain[-1]
    with _pinned(cluster, partial(_pin_with_logs, cluster, last.cluster)) as pinned:
        changes_of = partial(_changes_of, cluster, last.cluster)
        later = [*map(changes_of, _pieces_since(last, pinned, cluster)), *_committed_intents(pinned)]
        expected = tables.folded(store, chain, Cut(), later)
        return _differences(tables, expected, pinned, EXACT, examples)


def against_restored(
    tables: Tables[T],
    store: SnapshotStore,
    chain: Sequence[Manifest],
    cut: Cut,
    cluster: ClientConfig,
    examples: int,
) -> Differences:
    """Compare a restored store with the snapshot at `cut`. The store should have the keys, values and expiry times
    of the snapshot and nothing else. Returns the counts of differences and at most `examples` keys."""
    with _pinned(cluster, partial(_pin, cluster)) as pinned:
        return _differences(tables, tables.folded(store, chain, cut), pinned, CONTENT, examples)


def _differences(
    tables: Tables[T], expected: T, pinned: PinnedStore, columns: Sequence[str], examples: int
) -> Differences:
    """Compare a table with a pinned store. Ignores records that had expired at the pin, because a store may or may
    not have removed them yet."""
    horizon_ms = max(each.time_ms for each in pinned.partitions)
    found = tables.read(stored(pinned))
    return tables.differences(tables.living(expected, horizon_ms), tables.living(found, horizon_ms), columns, examples)


def stored(pinned: PinnedStore) -> list[Read]:
    """Return functions that read the records of a pinned store, one for each part."""
    return [partial(_records_of, split) for split in pinned.splits()]


# docs/protocol.md Tx13
def _committed_intents(pinned: PinnedStore) -> list[Read]:
    """Return functions that read what committed intents write at the pinned positions, which the logs lack."""
    partitions = {each.partition for each in pinned.partitions if each.intents}
    splits = [split for split in pinned.splits() if split.partition in partitions]
    return [partial(_records_of, split, intents_only=True) for split in splits]


def _records_of(split: Split, *, intents_only: bool = False) -> Iterator[Any]:
    for page in read_pinned(split, intents_only=intents_only, page_bytes=PAGE_BYTES, patience_s=PATIENCE_S):
        yield batch_of(page, split.partition)


def _changes_of(cluster: ClientConfig, instance: str, piece: SnapshotPart) -> Read:
    return partial(changes, cluster, piece.partition, piece.first, piece.last, piece.servers, instance=instance)


def _pieces_since(last: Manifest, pinned: PinnedStore, cluster: ClientConfig) -> list[SnapshotPart]:
    """Return the parts of the logs with the changes since a snapshot. Raises InvalidRequest if the logs no longer
    have these changes."""
    with FeedReader(cluster, last.cluster) as feed:
        feeds = {each.partition: each for each in feed.positions()}
    places = (*map(place_of, pinned.partitions), *left_places(last, pinned.partitions, feeds))
    pieces = list(change_pieces(last, places, feeds))
    for piece in pieces:
        oldest = feeds[piece.partition].oldest if piece.partition in feeds else 0
        if piece.first < oldest:
            trimmed = PositionTrimmed(piece.partition, piece.first, oldest)
            raise InvalidRequest(
                f"the log does not reach back to snapshot {last.id} ({trimmed}); verify it without --store"
            )
    return pieces


def _pin(cluster: ClientConfig, name: str, instance: str = "") -> PinnedStore:
    return pin_store(cluster, ttl_s=PIN_TTL_S, id=name, split_bytes=SPLIT_BYTES, identity=instance)


def _pin_with_logs(cluster: ClientConfig, instance: str, name: str) -> PinnedStore:
    """Pin every partition that has logged anything, because its log may have changes since a snapshot. Raises
    Unavailable if one of them stays without a leader."""
    with FeedReader(cluster, instance) as feed:
        return pin_all(feed, partial(_pin, cluster, name, instance))[0]


@contextmanager
def _pinned(cluster: ClientConfig, pin: Callable[[str], PinnedStore]) -> Iterator[PinnedStore]:
    """Pin the store with `pin`, which gets the name of the pin, and release the pin at the end."""
    name = f"verify-{uuid4().hex[:12]}"
    try:
        pinned = pin(name)
        with kept_alive(cluster, name, PIN_TTL_S, pinned_at=time.time()):
            yield pinned
    finally:  # also after an interrupt while servers pin
        release(cluster, name)
