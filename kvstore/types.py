"""The nouns of the log: immutable, comparable, without behaviour that does I/O."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import NamedTuple, NewType

LedgerId = NewType("LedgerId", int)
EntryId = NewType("EntryId", int)
BookieId = NewType("BookieId", str)
"""`<name>-<incarnation>`, or what the operator gives; what ensembles name."""
ServerId = NewType("ServerId", str)
"""The node's id, for example `n1`."""
PartitionId = NewType("PartitionId", str)
"""For example `p1`."""
Seq = NewType("Seq", int)
"""A mutation's place in its partition's log; rises by one per mutation, over ledgers and leaders. The first is 1."""

NO_ENTRY = EntryId(-1)
"""The id before the first."""
NO_LEDGER = LedgerId(-1)
"""The id before the first."""


# docs/protocol.md G7
class Position(NamedTuple):
    """Where an entry stands in a partition's log. Compares in log order (ledger ids of one log rise)."""

    ledger: LedgerId
    entry: EntryId


@dataclass(frozen=True, slots=True)
class Quorum:
    """How many bookies form an ensemble, store each entry, and must confirm it."""

    ensemble: int
    """Bookies that the entries of a ledger go round; at least `write`."""
    write: int
    """Copies of each entry; at least `ack`."""
    ack: int
    """Copies that are on disk before a write is answered; at least 1."""

    def __post_init__(self) -> None:
        if not 1 <= self.ack <= self.write <= self.ensemble:
            raise ValueError(f"want 1 <= ack <= write <= ensemble, got {self}")

    @property
    def coverage(self) -> int:
        """Definite answers that every write set must give before an entry counts as absent or a ledger as fenced."""
        return self.write - self.ack + 1


# docs/protocol.md L2
@dataclass(frozen=True, slots=True)
class Fragment:
    """The entries from `first` up to the next fragment, kept by one ensemble."""

    first: EntryId
    ensemble: tuple[BookieId, ...]

    def write_set(self, entry: EntryId, quorum: Quorum) -> tuple[BookieId, ...]:
        """The bookies that hold `entry`, striped round-robin over the ensemble."""
        size = len(self.ensemble)
        if quorum.write == size:
            return self.ensemble
        return tuple(self.ensemble[(entry + i) % size] for i in range(quorum.write))


class LedgerState(IntEnum):
    """The states of a ledger, numbered as on Apache's wire (LedgerMetadataFormat.State)."""

    OPEN = 1
    IN_RECOVERY = 2
    CLOSED = 3


class DigestType(IntEnum):
    """The kinds of digests, numbered as on Apache's wire (LedgerMetadataFormat.DigestType)."""

    CRC32 = 1
    HMAC = 2
    CRC32C = 3
    DUMMY = 4


# docs/protocol.md L1
@dataclass(frozen=True, slots=True)
class LedgerMetadata:
    """A ledger's record in the metadata store. Changed only by compare-and-set."""

    ledger: LedgerId
    quorum: Quorum
    fragments: tuple[Fragment, ...]
    state: LedgerState = LedgerState.OPEN
    last_entry: EntryId = NO_ENTRY
    """Meaningful only when CLOSED."""
    length: int = 0
    """Payload bytes of all entries; meaningful only when CLOSED."""
    digest: DigestType = DigestType.CRC32C
    password: bytes = b""
    custom: tuple[tuple[str, bytes], ...] = ()
    """Sorted pairs; whose ledger it is."""
    ctime_ms: int = 0
    token: int = field(default=0, compare=False)
    """Random number by which a creator recognises its own create after a broken connection."""

    def __post_init__(self) -> None:
        firsts = [fragment.first for fragment in self.fragments]
        if not firsts or firsts[0] != 0 or firsts != sorted(set(firsts)):
            raise ValueError(f"fragments must start at 0 and increase, got {firsts}")
        for fragment in self.fragments:
            if len(fragment.ensemble) != self.quorum.ensemble or len(set(fragment.ensemble)) != self.quorum.ensemble:
                raise ValueError(f"want {self.quorum.ensemble} distinct bookies, got {fragment.ensemble}")

    def fragment_of(self, entry: EntryId) -> Fragment:
        """The fragment that `entry` belongs to."""
        return self.fragments[bisect_right(self.fragments, entry, key=lambda f: f.first) - 1]

    def write_set(self, entry: EntryId) -> tuple[BookieId, ...]:
        """The bookies named for `entry`."""
        return self.fragment_of(entry).write_set(entry, self.quorum)

    def with_ensemble(self, first: EntryId, ensemble: tuple[BookieId, ...]) -> LedgerMetadata:
        """The same ledger, with entries from `first` on kept by `ensemble`."""
        kept = tuple(f for f in self.fragments if f.first < first)
        return replace(self, fragments=(*kept, Fragment(first, ensemble)))

    def recovering(self) -> LedgerMetadata:
        """The same ledger, taken over by a recovery."""
        return replace(self, state=LedgerState.IN_RECOVERY)

    def closed(self, last_entry: EntryId, length: int) -> LedgerMetadata:
        """The same ledger, ended at `last_entry` with `length` payload bytes in all."""
        return replace(self, state=LedgerState.CLOSED, last_entry=last_entry, length=length)
