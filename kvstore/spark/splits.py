"""Divides a pinned store into parts for tasks, and encodes a pinned store as text for the option `pin`. Decides
only."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from kvstore.client.pinned.pins import PinnedPartition, PinnedStore, Split
from kvstore.env.tls import Tls
from kvstore.errors import ConfigError
from kvstore.ring.hashing import hash_named
from kvstore.spark.options import KeyRange, prefix_range
from kvstore.types import EntryId, LedgerId, Position

POINTS = 100
"""Maximum number of individual keys that one task looks up."""
FORMAT = 1


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """The rows that a data frame wants."""

    keys: KeyRange
    exactly: frozenset[bytes] | None = None
    """Read only these keys of the range; None means all keys."""
    partition: str | None = None
    """Read only rows of this partition; None means all partitions."""

    def point_keys(self) -> list[bytes] | None:
        """Return the individual keys to look up, sorted, or None if the request reads a range."""
        if self.exactly is None:
            return None
        return sorted(key for key in self.exactly if contains(self.keys, key))


def contains(keys: KeyRange, key: bytes) -> bool:
    return keys.start <= key and (not keys.end or key < keys.end)


def after(key: bytes) -> bytes:
    """Return the smallest key that is greater than `key`."""
    return key + b"\0"


@dataclass(frozen=True, slots=True)
class SplitPart:
    """The keys of a split that are read with one request."""

    split: Split
    keys: KeyRange


Work = tuple[SplitPart, ...]
"""The parts that one task reads, in order."""


def plan(store: PinnedStore, wanted: ReadRequest) -> list[Work]:
    """Divide the wanted rows among tasks. Every wanted row is in exactly one part. Raises ConfigError for an unknown
    partition."""
    names = [each.partition for each in store.partitions]
    if wanted.partition is not None and wanted.partition not in names:
        raise ConfigError(f"partition: no {wanted.partition!r}; expected one of {', '.join(sorted(names))}")
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
    """Return the split that contains the key's token, reduced to that token. The list is empty if `splits` does not
    include the token, because the key's partition is not wanted."""
    token = store.hash.token_of(key)
    owner = next((each.partition for each in store.partitions if _owns(each, token)), None)
    return [
        replace(split, first=token, last=token)
        for split in splits
        if split.partition == owner and split.first <= token <= split.last
    ]


def _owns(pinned: PinnedPartition, token: int) -> bool:
    return any(first <= token <= last for first, last in pinned.spans)


def _shared_tag(keys: KeyRange) -> bytes | None:
    """Return a prefix with a hash tag that gives all keys of the range the same token, or None if there is no such
    prefix."""
    for length in range(len(keys.start), 0, -1):
        prefix = keys.start[:length]
        opened = prefix.find(b"{")
        if opened < 0 or prefix.find(b"}", opened + 2) < 0 or prefix[opened + 1 : opened + 2] == b"}":
            return None
        if prefix_range(prefix) & keys == keys:
            return prefix
    return None


# ── text form, for the option `pin` ──


def encode(store: PinnedStore) -> str:
    """Encode a pin as text. The text has no TLS files, because the reader sets its own."""
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
            "hash": store.hash.name,
            "partitions": parts,
        }
    )


def decode(text: str, tls: Tls | None) -> PinnedStore:
    """Decode the text of a pin; `tls` are the reader's TLS files. Raises ConfigError if the text is not a pin."""
    try:
        document = json.loads(text)
        if document["format"] != FORMAT:
            raise ConfigError(f"pin: expected a pin of format {FORMAT}, got {document['format']}")
        partitions = tuple(_partition_of(each) for each in document["partitions"])
        hash = hash_named(document.get("hash", ""))
        return PinnedStore(document["id"], document["deadline_ms"], document["ring_version"], partitions, hash, tls)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"pin: expected the option `pin` of kvstore.spark.pins.hold ({error!r})") from None


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
