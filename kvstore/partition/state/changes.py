"""Reads an entry of a partition's log for readers of the change feed. Decides only.

A change is a put or a delete by a client, or a delete by expiry. Rows that arrive or leave with a move are not changes,
because they are already in the log of the partition that owned them when they were written. The feed reports where a
range arrived or left, so that a reader can continue at the other partition (docs/protocol.md, The change feed).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.partition.state import entry as entries
from kvstore.partition.state import move_records
from kvstore.partition.state.decisions import decision_of
from kvstore.partition.state.entry import (
    CREATE,
    DECISION,
    DELETE,
    NOTE,
    OF_TRANSACTIONS,
    OVERWRITE,
    RESOLVED,
    Entry,
    EntryKind,
)
from kvstore.partition.state.intents import resolved_of
from kvstore.partition.state.internal import Attempt
from kvstore.partition.state.move_records import Own, Release
from kvstore.partition.state.tokens import TokenSpan
from kvstore.proto import feed_pb2
from kvstore.types import PartitionId, Position, Seq
from kvstore.wal.ports import LogEntry

CREATED, OVERWRITTEN = int(feed_pb2.CREATED), int(feed_pb2.OVERWRITTEN)
DELETED, EXPIRED = int(feed_pb2.DELETED), int(feed_pb2.EXPIRED)
_OVERHEAD_BYTES = 64
"""Memory of one change besides key and value."""
_PLAIN_KINDS = bytes.maketrans(bytes((CREATE, OVERWRITE)), bytes((CREATED, OVERWRITTEN)))


class Handed(NamedTuple):
    """A change of ownership: the partition received a range of tokens, or gave it away."""

    is_owned: bool
    seq: Seq
    """The partition's last sequence before the change of owner."""
    peer: PartitionId
    peer_seq: Seq
    """If `is_owned`, the former owner's sequence when it gave the range away."""
    span: TokenSpan
    move: int


class TransactionPart(NamedTuple):
    """A part of a transaction over several partitions: what one DECISION or RESOLVED commits. The parts of a
    transaction are complete once their `keys` add up to `keys_of_all`. The partition and the sequence identify a part,
    for readers that receive it again."""

    attempt: Attempt
    sequence: Seq
    """The sequence of the DECISION or RESOLVED."""
    keys: int
    """Number of different keys that the part writes. Some of these writes may change nothing."""
    keys_of_all: int
    """Number of different keys that the transaction writes in all partitions."""


class FeedEntry:
    """A log entry as the change feed returns it. Its changes are stored in columns. All columns are empty if the entry
    changes nothing."""

    __slots__ = (
        "after",
        "before",
        "created",
        "expires_ms",
        "handed",
        "keys",
        "kinds",
        "part_of",
        "parts",
        "position",
        "sequences",
        "size",
        "time_ms",
        "values",
    )

    def __init__(self, position: Position, before: Seq, after: Seq, time_ms: int) -> None:
        self.position = position
        self.before, self.after = before, after
        """The partition's sequence before and after this entry."""
        self.time_ms = time_ms
        self.sequences: Sequence[int] = ()
        self.kinds = b""
        """One byte per change: CREATED to EXPIRED."""
        self.keys: Sequence[bytes] = ()
        self.values: Sequence[bytes] = ()
        """Empty for deletes."""
        self.created: Sequence[int] = ()
        """0 for deletes."""
        self.expires_ms: Sequence[int] = ()
        self.handed: Handed | None = None
        self.parts: Sequence[TransactionPart] = ()
        """The parts of transactions over several partitions that the entry commits."""
        self.part_of: bytes | Sequence[int] = b""
        """For each change, the index of its part in `parts` plus one, or 0. Empty if there are no parts."""
        self.size = _OVERHEAD_BYTES

    def is_behind(self, seq: int) -> bool:
        """Return True if a reader that has received everything up to sequence `seq` still needs this entry. An entry
        without changes has no sequence of its own, so a reader whose position is right before the entry receives it
        again."""
        return self.after > seq or self.before >= seq


# docs/protocol.md F1
def feed_entry_of(found: LogEntry) -> FeedEntry:
    """Convert a log entry to a feed entry. Raises Corrupted if the entry cannot be decoded."""
    entry = entries.decode(found.payload)
    made = FeedEntry(found.position, Seq(entry.first_seq - 1), entry.last_seq, entry.time_ms)
    if entry.is_control:
        _take_record(made, entry)
    elif entry.is_plain:
        _take_plain(made, entry)
    elif entry.kinds != _IMPORT:
        _take_all(made, entry)
    made.size += sum(map(len, made.keys)) + sum(map(len, made.values)) + _OVERHEAD_BYTES * len(made.keys)
    return made


# docs/protocol.md F2
def first_seq_of(payload: bytes) -> int:
    """Return the sequence of the entry's first mutation. If the entry has no mutation, return the next sequence of the
    log. Raises Corrupted."""
    return entries.decode(payload).first_seq


def time_of(payload: bytes) -> int:
    """Return an entry's record time. Raises Corrupted."""
    return entries.decode(payload).time_ms


_IMPORT = bytes((EntryKind.IMPORT,))


def _take_record(made: FeedEntry, entry: Entry) -> None:
    kind = entry.kinds[0]
    if kind not in (EntryKind.RELEASE_RANGE, EntryKind.OWN):
        return
    record = move_records.decode(kind, entry.control)
    if isinstance(record, Own):
        made.after = Seq(max(made.before, record.seq))
        if record.span is not None:
            made.handed = Handed(True, made.before, record.source, Seq(record.seq), record.span, record.move)
    elif isinstance(record, Release) and record.span is not None:
        made.handed = Handed(False, made.before, record.target, Seq(0), record.span, record.move)


def _take_plain(made: FeedEntry, entry: Entry) -> None:
    """Convert puts without expiries, which make up most entries."""
    first, count = entry.first_seq, len(entry.keys)
    made.sequences = created = range(first, first + count)
    made.keys, made.values = entry.keys, entry.values
    made.kinds = entry.kinds.translate(_PLAIN_KINDS)
    made.expires_ms = [0] * count
    if entry.ages:
        ages = iter(entry.ages)
        made.created = [
            seq - next(ages) if kind == OVERWRITE else seq for seq, kind in zip(created, entry.kinds, strict=True)
        ]
    else:
        made.created = created


def _take_all(made: FeedEntry, entry: Entry) -> None:
    kinds = bytearray()
    sequences, keys, values, created, expires = [], [], [], [], []
    for kind, seq, key, value, since, expires_ms, replaced_ms in entry.mutations():
        if kind == NOTE or kind in OF_TRANSACTIONS:
            continue
        if kind == DELETE:
            kinds.append(EXPIRED if 0 < replaced_ms <= entry.time_ms else DELETED)
            since = 0
        else:
            kinds.append(CREATED if kind == CREATE else OVERWRITTEN)
        sequences.append(seq)
        keys.append(key)
        values.append(value)
        created.append(since)
        expires.append(expires_ms)
    made.sequences, made.kinds, made.keys, made.values = sequences, bytes(kinds), keys, values
    made.created, made.expires_ms = created, expires
    if entry.transactions:
        _take_transactions(made, entry)


# docs/protocol.md F9
def _take_transactions(made: FeedEntry, entry: Entry) -> None:
    """Find the parts of transactions that the entry commits, and the changes that belong to them. A delete behind a
    RESOLVED is the transaction's, even if the key's expiry has passed since its intent."""
    parts: list[TransactionPart] = []
    part_of_seq: dict[int, int] = {}
    resolved_seqs: set[int] = set()
    for kind, seq, key, contents, *_ in entry.mutations():
        if kind == DECISION:
            decided = decision_of(key, seq, contents).record
            parts.append(TransactionPart(decided.attempt, seq, decided.part, decided.parts))
            part_of_seq.update(dict.fromkeys(range(seq - decided.mutations, seq), len(parts)))
        elif kind == RESOLVED:
            resolved = resolved_of(contents)
            if resolved.parts:
                parts.append(TransactionPart(resolved.attempt, seq, 1, resolved.parts))
                effect = range(seq + 1, seq + 1 + resolved.mutations)
                part_of_seq.update(dict.fromkeys(effect, len(parts)))
                resolved_seqs.update(effect)
    made.parts = parts
    if resolved_seqs and EXPIRED in made.kinds:
        made.kinds = bytes(
            DELETED if kind == EXPIRED and seq in resolved_seqs else kind
            for kind, seq in zip(made.kinds, made.sequences, strict=True)
        )
    if parts:
        made.part_of = [part_of_seq.get(seq, 0) for seq in made.sequences]


class Interest(NamedTuple):
    """A range of keys [start, end). An empty `end` means up to the last key."""

    start: bytes = b""
    end: bytes = b""

    @property
    def is_all(self) -> bool:
        return not self.start and not self.end

    @property
    def key(self) -> bytes | None:
        """The key, if the range is a single key; else None."""
        return self.start if self.end == self.start + b"\0" else None

    def meets(self, keys: Sequence[bytes]) -> bool:
        """Return True if one of the keys is in the range. `keys` must be sorted."""
        start, end = self
        first = bisect_left(keys, start)
        return first < len(keys) and (not end or keys[first] < end)

    def rows(self, entry: FeedEntry, after: int, until: int = 0) -> Sequence[int]:
        """Return the indexes of the entry's changes that are in the range and whose sequence is greater than `after`
        and at most `until`. An `until` of 0 means no upper bound."""
        start, end = self
        rows: Sequence[int] = range(len(entry.keys))
        if entry.before < after or (until and entry.after > until):
            sequences = entry.sequences
            rows = [row for row in rows if after < sequences[row] and (not until or sequences[row] <= until)]
        if self.is_all:
            return rows
        keys = entry.keys
        return [row for row in rows if keys[row] >= start and (not end or keys[row] < end)]
