"""Finds the end of a ledger that its writer did not close. Decides only: events in, commands out (docs/protocol.md L7,
L8, R2, R3).

  FENCING ──covered──► READING ──an absent entry──► ENDED
    └────────────────────┴──── too many unknown ──► UNDECIDED

Answers are present, absent or unknown. Present is a packet with a valid digest. Absent is the answer of a bookie that
is sure. Everything else is unknown: a timeout, an I/O error, a wrong digest, a bookie that cannot vouch for its
records. An unknown answer never ends a recovery. Every read fences, so that a bookie which once said "absent" can never
accept the entry later.

The entries that are found go, in order, to the write-back (a LedgerWriter whose ensemble changes stay in memory and
whose LAC does not move). The driver does the closing compare-and-set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import assert_never

from kvstore.errors import Corrupted
from kvstore.proto.digest import Packet
from kvstore.types import BookieId, EntryId, LedgerMetadata
from kvstore.wal.coverage import is_covered, is_window_covered, write_set_indexes

READ_AHEAD = 8
"""Number of entries requested concurrently, which is slightly more than a writer usually has in flight."""

Open = Callable[[EntryId | None, bytes], Packet]
"""Verifies a packet that was read for an entry; None accepts the packet of any entry. Raises Corrupted."""


class Phase(Enum):
    """The states of a Recovery; see the diagram above."""

    FENCING = auto()
    READING = auto()
    ENDED = auto()
    UNDECIDED = auto()


@dataclass(frozen=True, slots=True)
class LastAnswer:
    """Event: a bookie has fenced the ledger. `packet` is the last entry that it holds, or None if it holds none."""

    bookie: BookieId
    packet: bytes | None


@dataclass(frozen=True, slots=True)
class EntryAnswer:
    """Event: a bookie has fenced the ledger. `packet` is its copy of `entry`, or None if it is sure that it has
    none."""

    bookie: BookieId
    entry: EntryId
    packet: bytes | None


@dataclass(frozen=True, slots=True)
class Unknown:
    """Event: a bookie gave no answer, or no definite one. `entry` is None if the last entry was requested."""

    bookie: BookieId
    entry: EntryId | None


Event = LastAnswer | EntryAnswer | Unknown


@dataclass(frozen=True, slots=True)
class AskLast:
    """Command: fence the ledger at these bookies, and read the last entry from each."""

    bookies: tuple[BookieId, ...]


@dataclass(frozen=True, slots=True)
class AskEntry:
    """Command: fence the ledger at these bookies, and read one entry from each."""

    entry: EntryId
    bookies: tuple[BookieId, ...]


@dataclass(frozen=True, slots=True)
class TailEntry:
    """Command: write back the next entry of the ledger's tail."""

    packet: Packet


@dataclass(frozen=True, slots=True)
class EndFound:
    """Command: finish, because the ledger ends at `last`. `length` is the ledger's length in bytes, or None if no entry
    was read; the driver must then read `last` to find the length."""

    last: EntryId
    length: int | None


@dataclass(frozen=True, slots=True)
class Undecided:
    """Command: give up, because there are too few definite answers. The ledger stays as it is."""

    reason: str


Command = AskLast | AskEntry | TailEntry | EndFound | Undecided


class _EntryAnswers:
    """The answers received about one entry, by place in the ensemble."""

    __slots__ = ("absent", "packet", "silent")

    def __init__(self) -> None:
        self.packet: Packet | None = None
        self.absent: set[int] = set()
        self.silent: set[int] = set()


class Recovery:
    """The state machine that searches for the end of one ledger. `metadata` is the metadata as recorded when the
    recovery took the ledger over."""

    def __init__(self, metadata: LedgerMetadata, open_packet: Open) -> None:
        self.metadata = metadata
        self.phase = Phase.FENCING
        self.lac = EntryId(metadata.fragments[-1].first - 1)
        """The highest entry known to be confirmed. It does not change after the FENCING phase."""
        self.found = 0
        self._open = open_packet
        self._ensemble = metadata.fragments[-1].ensemble
        self._fenced: set[int] = set()
        self._silent: set[int] = set()
        self._next = EntryId(0)
        """The first undecided entry."""
        self._asked: dict[EntryId, _EntryAnswers] = {}
        self._length: int | None = None

    def start(self) -> list[Command]:
        """Return the first commands of the recovery."""
        return [AskLast(self._ensemble)]

    def handle(self, event: Event) -> list[Command]:
        """Apply `event` and return the commands to perform. Returns no commands once the recovery is ENDED or
        UNDECIDED."""
        match event:
            case LastAnswer(bookie, packet):
                return self._last(bookie, packet)
            case EntryAnswer(bookie, entry, packet):
                return self._entry(bookie, entry, packet)
            case Unknown(bookie, entry):
                return self._silence(bookie, entry)
            case _:
                assert_never(event)

    def _last(self, bookie: BookieId, packet: bytes | None) -> list[Command]:
        if self.phase is not Phase.FENCING:
            return []
        if packet is not None:
            try:
                lac = self._open(None, packet).lac
            except Corrupted:
                return self._silence(bookie, None)  # an answer counts only after it has been verified
            self.lac = max(self.lac, lac)
        self._fenced.add(self._ensemble.index(bookie))
        if not is_covered(self._fenced, self.metadata.quorum):
            return self._undecided_fence()
        self.phase = Phase.READING
        self._next = EntryId(self.lac + 1)
        return [self._ask(EntryId(self._next + i)) for i in range(READ_AHEAD)]

    def _ask(self, entry: EntryId) -> AskEntry:
        self._asked[entry] = _EntryAnswers()
        places = write_set_indexes(entry, self.metadata.quorum)
        return AskEntry(entry, tuple(self._ensemble[i] for i in places))

    def _undecided_fence(self) -> list[Command]:
        if len(self._fenced | self._silent) < len(self._ensemble):
            return []
        silent = sorted(self._ensemble[i] for i in self._silent)
        return self._end_undecided(f"no definite answer from {', '.join(silent)}: the ledger may still be written to")

    def _entry(self, bookie: BookieId, entry: EntryId, packet: bytes | None) -> list[Command]:
        asked = self._asked.get(entry)
        if asked is None or self.phase is not Phase.READING:
            return []
        if packet is None:
            asked.absent.add(self._ensemble.index(bookie))
        elif asked.packet is None:
            try:
                asked.packet = self._open(entry, packet)
            except Corrupted:
                return self._silence(bookie, entry)
        return self._decide()

    def _silence(self, bookie: BookieId, entry: EntryId | None) -> list[Command]:
        place = self._ensemble.index(bookie)
        if entry is None:
            self._silent.add(place)
            return self._undecided_fence() if self.phase is Phase.FENCING else []
        asked = self._asked.get(entry)
        if asked is None or self.phase is not Phase.READING:
            return []
        asked.silent.add(place)
        return self._decide()

    def _decide(self) -> list[Command]:
        """Process entries in order until one cannot be decided yet."""
        commands: list[Command] = []
        quorum = self.metadata.quorum
        while True:
            asked = self._asked[self._next]
            places = write_set_indexes(self._next, quorum)
            if asked.packet is not None:
                commands += self._take(asked.packet)
            elif is_window_covered(places, asked.absent, quorum):
                self.phase = Phase.ENDED
                return [*commands, EndFound(EntryId(self._next - 1), self._length)]
            elif asked.absent.union(asked.silent).issuperset(places):
                silent = ", ".join(self._ensemble[i] for i in sorted(asked.silent))
                return [*commands, *self._end_undecided(f"entry {self._next}: no definite answer from {silent}")]
            else:
                return commands

    def _take(self, packet: Packet) -> list[Command]:
        del self._asked[self._next]
        self._length = packet.length
        self._next = EntryId(self._next + 1)
        self.found += 1
        return [TailEntry(packet), self._ask(EntryId(self._next + READ_AHEAD - 1))]

    def _end_undecided(self, reason: str) -> list[Command]:
        self.phase = Phase.UNDECIDED
        return [Undecided(f"ledger {self.metadata.ledger}: {reason}")]

    def check(self) -> None:
        """Assert the recovery's invariants. Used by tests."""
        first = self.metadata.fragments[-1].first
        assert self.lac >= first - 1
        if self.phase is Phase.READING:
            assert is_covered(self._fenced, self.metadata.quorum)
            assert list(self._asked) == list(range(self._next, self._next + READ_AHEAD))
            assert self._next == self.lac + 1 + self.found
        for asked in self._asked.values():
            assert not asked.absent & asked.silent
