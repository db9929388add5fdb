"""The types of the log: immutable, comparable values without I/O."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import NamedTuple, NewType

LedgerId = NewType("LedgerId", int)
EntryId = NewType("EntryId", int)
BookieId = NewType("BookieId", str)
"""A bookie's id as ensembles name it: `<name>-<incarnation>`, or an id that the operator sets."""
ServerId = NewType("ServerId", str)
"""A node's id, for example `n1`; `n1.2` is the second process of the machine `n1`."""
PartitionId = NewType("PartitionId", str)
"""A partition's id, for example `p1`."""
Seq = NewType("Seq", int)
"""Sequence number of a mutation in its partition's log. It starts at 1 and rises by one per mutation, across ledgers
and leaders."""

NO_ENTRY = EntryId(-1)
"""The id before the first entry."""
NO_LEDGER = LedgerId(-1)
"""The id before the first ledger."""
_PROCESS = re.compile(r"(.+)\.[1-9][0-9]*")


# docs/protocol.md H15
def machine_of(node: str) -> str:
    """Return the machine that a node is a process of: `n1` for `n1` and for `n1.2`."""
    match = _PROCESS.fullmatch(node)
    return match[1] if match else node


# docs/protocol.md G7
class Position(NamedTuple):
    """The position of an entry in a partition's log. Positions compare in log order, because a log's ledger ids
    rise."""

    ledger: LedgerId
    entry: EntryId


@dataclass(frozen=True, slots=True)
class Quorum:
    """How many bookies form an ensemble, store each entry, and must confirm it."""

    ensemble: int
    """Number of bookies over which a ledger's entries are striped; at least `write`."""
    write: int
    """Number of copies of each entry; at least `ack`."""
    ack: int
    """Number of copies on disk before a write is acknowledged; at least 1."""

    def __post_init__(self) -> None:
        if not 1 <= self.ack <= self.write <= self.ensemble:
            raise ValueError(f"expected 1 <= ack <= write <= ensemble, got {self}")

    @property
    def coverage(self) -> int:
        """Number of definite answers that every write set must give before an entry counts as absent or a ledger as
        fenced."""
        return self.write - self.ack + 1


# docs/protocol.md L2
@dataclass(frozen=True, slots=True)
class Fragment:
    """The entries from `first` to the next fragment, stored by one ensemble."""

    first: EntryId
    ensemble: tuple[BookieId, ...]

    def write_set(self, entry: EntryId, quorum: Quorum) -> tuple[BookieId, ...]:
        """Return the bookies that store `entry`, striped round-robin over the ensemble."""
        size = len(self.ensemble)
        if quorum.write == size:
            return self.ensemble
        return tuple(self.ensemble[(entry + i) % size] for i in range(quorum.write))


class LedgerState(IntEnum):
    """The state of a ledger, numbered as on Apache's wire (LedgerMetadataFormat.State)."""

    OPEN = 1
    IN_RECOVERY = 2
    CLOSED = 3


class DigestType(IntEnum):
    """The digest of a ledger's entries, numbered as on Apache's wire (LedgerMetadataFormat.DigestType)."""

    CRC32 = 1
    HMAC = 2
    CRC32C = 3
    DUMMY = 4


# docs/protocol.md L1
@dataclass(frozen=True, slots=True)
class LedgerMetadata:
    """A ledger's record in the metadata store. It changes only by compare-and-set."""

    ledger: LedgerId
    quorum: Quorum
    fragments: tuple[Fragment, ...]
    state: LedgerState = LedgerState.OPEN
    last_entry: EntryId = NO_ENTRY
    """Last entry of a CLOSED ledger."""
    length: int = 0
    """Payload bytes of all entries of a CLOSED ledger."""
    digest: DigestType = DigestType.CRC32C
    password: bytes = b""
    custom: tuple[tuple[str, bytes], ...] = ()
    """Sorted key-value pairs; they name the ledger's owner."""
    ctime_ms: int = 0
    token: int = field(default=0, compare=False)
    """Random number by which the creator recognizes its own create after the connection broke."""

    def __post_init__(self) -> None:
        firsts = [fragment.first for fragment in self.fragments]
        if not firsts or firsts[0] != 0 or firsts != sorted(set(firsts)):
            raise ValueError(f"expected fragments that start at 0 and increase, got {firsts}")
        for fragment in self.fragments:
            if len(fragment.ensemble) != self.quorum.ensemble or len(set(fragment.ensemble)) != self.quorum.ensemble:
                raise ValueError(f"expected {self.quorum.ensemble} distinct bookies, got {fragment.ensemble}")

    def fragment_of(self, entry: EntryId) -> Fragment:
        """Return the fragment that contains `entry`."""
        return self.fragments[bisect_right(self.fragments, entry, key=lambda f: f.first) - 1]

    def write_set(self, entry: EntryId) -> tuple[BookieId, ...]:
        """Return the bookies that store `entry` according to the metadata."""
        return self.fragment_of(entry).write_set(entry, self.quorum)

    def with_ensemble(self, first: EntryId, ensemble: tuple[BookieId, ...]) -> LedgerMetadata:
        """Return this ledger with its entries from `first` on stored by `ensemble`."""
        kept = tuple(f for f in self.fragments if f.first < first)
        return replace(self, fragments=(*kept, Fragment(first, ensemble)))

    def recovering(self) -> LedgerMetadata:
        """Return this ledger in recovery."""
        return replace(self, state=LedgerState.IN_RECOVERY)

    def closed(self, last_entry: EntryId, length: int) -> LedgerMetadata:
        """Return this ledger closed at `last_entry` with `length` payload bytes."""
        return replace(self, state=LedgerState.CLOSED, last_entry=last_entry, length=length)
