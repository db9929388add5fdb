"""A pinned store and what is wanted of it → what each task reads; a pinned store as text. Decides only."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from kvstore.client.pinned.pins import PinnedPartition, PinnedStore, Split
from kvstore.env.tls import Tls
from kvstore.errors import ConfigError
from kvstore.ring.hashing import token_of
from kvstore.spark.options import KeyRange, prefix_range
from kvstore.types import EntryId, LedgerId, Position

POINTS = 100
"""Keys that one task looks for one by one."""
FORMAT = 1


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Rows that are asked for."""

    keys: KeyRange
    exactly: frozenset[bytes] | None = None
    """None: all keys of the range."""
    partition: str | None = None
    """None: all."""

    def point_keys(self) -> list[bytes] | None:
        """The keys to look for, sorted; None: a range of them."""
        if self.exactly is None:
            return None
        return sorted(key for key in self.exactly if contains(self.keys, key))


def contains(keys: KeyRange, key: bytes) -> bool:
    return keys.start <= key and (not keys.end or key < keys.end)


def after(key: bytes) -> bytes:
    """The next possible key."""
    return key + b"\0"


@dataclass(frozen=True, slots=True)
class SplitPart:
    """Keys of a split that are read in one go."""

    split: Split
    keys: KeyRange


Work = tuple[SplitPart, ...]
"""What one task reads, piece by piece."""


def plan(store: PinnedStore, wanted: ReadRequest) -> list[Work]:
    """Every wanted row of the store is in exactly one piece. Raises ConfigError if it has no such partition."""
    names = [each.partition for each in store.partitions]
    if wanted.partition is not None and wanted.partition not in names:
        raise ConfigError(f"partition: there is no {wanted.partition!r}; there are {', '.join(sorted(names))}")
    if wanted.keys.is_empty:
        return []
    points = wanted.point_keys()
    splits = [split for split in store.splits() if wanted.partition in (None, split.partition)]
    if points is not None:
        pieces = [SplitPart(split, KeyRange(key, after(key))) for key in points for split in _at(splits, store, key)]
        return [tuple(pieces[first : first + POINTS]) for first in range(0, len(pieces), POINTS)]
    tagged = _shared_tag(wanted.keys)
    if tagged is not None:
        splits = _at(splits, store, tagged)
    return [(SplitPart(split, wanted.keys),) for split in splits]


def _at(splits: list[Split], store: PinnedStore, key: bytes) -> list[Split]:
    """Find the split that has the key's token: one, or none if its partition is not wanted."""
    token = token_of(key)
    owner = next((each.partition for each in store.partitions if _owns(each, token)), None)
    return [
        replace(split, first=token, last=token)
        for split in splits
        if split.partition == owner and split.first <= token <= split.last
    ]


def _owns(pinned: PinnedPartition, token: int) -> bool:
    return any(first <= token <= last for first, last in pinned.spans)


def _shared_tag(keys: KeyRange) -> bytes | None:
    """A prefix that gives all keys of the range one token; None if there is no such."""
    for length in range(len(keys.start), 0, -1):
        prefix = keys.start[:length]
        opened = prefix.find(b"{")
        if opened < 0 or prefix.find(b"}", opened + 2) < 0 or prefix[opened + 1 : opened + 2] == b"}":
            return None
        if prefix_range(prefix) & keys == keys:
            return prefix
    return None


# ── as text, for the option `pin` ──


def encode(store: PinnedStore) -> str:
    """Without the TLS files: who reads it says how."""
    parts = [
        {
            "partition": each.partition,
            "position": list(each.position),
            "sequence": each.sequence,
            "time_ms": each.time_ms,
            "spans": [list(span) for span in each.spans],
            "replicas": list(each.replicas),
            "rows": each.rows,
            "bytes": each.bytes,
            "split_tokens": list(each.split_tokens),
            "deadline_ms": each.deadline_ms,
        }
        for each in store.partitions
    ]
    return json.dumps(
        {
            "format": FORMAT,
            "id": store.id,
            "deadline_ms": store.deadline_ms,
            "ring_version": store.ring_version,
            "partitions": parts,
        }
    )


def decode(text: str, tls: Tls | None) -> PinnedStore:
    """Raises ConfigError."""
    try:
        document = json.loads(text)
        if document["format"] != FORMAT:
            raise ConfigError(f"pin: this program reads pins of format {FORMAT}, got {document['format']}")
        partitions = tuple(_partition_of(each) for each in document["partitions"])
        return PinnedStore(document["id"], document["deadline_ms"], document["ring_version"], partitions, tls)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"pin: want the `option` of a pin that kvstore.spark.pins.hold gave ({error!r})") from None


def _partition_of(document: dict[str, Any]) -> PinnedPartition:
    ledger, entry = document["position"]
    return PinnedPartition(
        document["partition"],
        Position(LedgerId(ledger), EntryId(entry)),
        document["sequence"],
        document["time_ms"],
        tuple((first, last) for first, last in document["spans"]),
        tuple(document["replicas"]),
        document["rows"],
        document["bytes"],
        tuple(document["split_tokens"]),
        document["deadline_ms"],
    )
