"""One ledger's writer. Decides only: events in, commands out (docs/protocol.md L3, L4, W1-W6).

     ReplaceBookies              EnsembleChanged | ChangeFailed
  OPEN ────────────────► CHANGING ────────────────────────────────► OPEN
   └─ Fenced | StopWriting ─┴─────────► HALTED

An entry is confirmed once Qa bookies of its recorded write set have it on disk. Entries are confirmed in order, and
never while CHANGING: the new fragment starts right after the last confirmed entry, so that entry must not move
meanwhile.

A failed bookie is replaced if there is a spare. If there is none, the bookie stays in the ensemble and is sent nothing,
and the others keep confirming entries (delayed ensemble change) until the bookie is back or a spare appears. A recovery
writes entries back through the same machine: its ensemble changes stay in memory, and the LAC in its packets does not
move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, assert_never

import msgspec

from kvstore.errors import LedgerFenced, StoreError
from kvstore.types import NO_ENTRY, BookieId, EntryId, LedgerMetadata
from kvstore.wal.coverage import write_set_indexes

OUTSTANDING_ENTRIES_MAX = 2_000
OUTSTANDING_BYTES_MAX = 32 << 20
"""Limits on the number and the bytes of entries that the writer keeps for one slow bookie. The writer keeps the
confirmed entries that the bookie has not stored, and all entries after them. Beyond either limit the bookie counts as
failed."""

Pack = Callable[[EntryId, EntryId, int, bytes], bytes]
"""Builds the packet that bookies store from the entry id, the last-add-confirmed, the ledger's length in bytes
including this entry, and the payload."""


class WriterState(Enum):
    """The states of a LedgerWriter; see the diagram above."""

    OPEN = auto()
    CHANGING = auto()
    HALTED = auto()


class Append(NamedTuple):
    """Event: the caller appends an entry."""

    payload: bytes
    now: float
    """Boot-time clock in seconds. The writer returns it in Confirm as the time when the entry was first sent."""


class AddStored(NamedTuple):
    """Event: a bookie has stored an entry durably."""

    entry: EntryId
    bookie: BookieId


@dataclass(frozen=True, slots=True)
class AddFailed:
    """Event: the bookie did not store an entry. It is unreachable, silent, read-only or broken."""

    bookie: BookieId


@dataclass(frozen=True, slots=True)
class Returned:
    """Event: a failed bookie of the ensemble accepts adds again."""

    bookie: BookieId


@dataclass(frozen=True, slots=True)
class Spares:
    """Event: the set of bookies that may replace a failed one has changed. It is empty while the metadata store is
    unreachable."""

    bookies: frozenset[BookieId]


@dataclass(frozen=True, slots=True)
class EnsembleChanged:
    """Event: the metadata store has recorded the ensemble change."""

    metadata: LedgerMetadata
    replaced: frozenset[BookieId]
    """The bookies that the change replaced. A bookie that was chosen again for its own place is included."""


@dataclass(frozen=True, slots=True)
class ChangeFailed:
    """Event: the ensemble change was abandoned, and is certainly not recorded."""


@dataclass(frozen=True, slots=True)
class Fenced:
    """Event: a bookie refused an add because another writer has taken over the ledger."""


@dataclass(frozen=True, slots=True)
class StopWriting:
    """Event: the ledger no longer belongs to this writer, for a reason other than fencing."""

    error: StoreError


Event = Append | AddStored | AddFailed | Returned | Spares | EnsembleChanged | ChangeFailed | Fenced | StopWriting


class Store(msgspec.Struct, frozen=True):
    """Command: send the entry's packet to every bookie in `bookies`."""

    entry: EntryId
    packet: bytes
    bookies: tuple[BookieId, ...]


class Confirm(msgspec.Struct, frozen=True):
    """Command: report the entry as confirmed to its caller. An ack quorum of bookies has it on disk."""

    entry: EntryId
    sent_at: float


@dataclass(frozen=True, slots=True)
class ReplaceBookies:
    """Command: record an ensemble without the writer's `failed` bookies, starting at entry `next_fragment`. The driver
    may also replace bookies that fail before it sends the metadata write."""


@dataclass(frozen=True, slots=True)
class SlowBookiesFailed:
    """Command: treat these bookies as failed although they reported no error. The writer keeps more than
    OUTSTANDING_ENTRIES_MAX entries or OUTSTANDING_BYTES_MAX bytes, and these bookies have not stored the oldest
    entry."""

    bookies: tuple[BookieId, ...]


@dataclass(frozen=True, slots=True)
class Halt:
    """Command: stop the writer, which accepts no more entries. The outcome of entries after the last confirmed one is
    unknown."""

    error: StoreError


Command = Store | Confirm | ReplaceBookies | SlowBookiesFailed | Halt


class _Sent(msgspec.Struct):
    """An entry that some bookie has not stored yet. Bits represent places in the ensemble."""

    packet: bytes
    length: int
    targets: int
    sent_at: float
    acks: int = 0


class LedgerWriter:
    """The state machine that writes one ledger. It turns each event into commands, which the caller must perform in
    order."""

    def __init__(
        self,
        metadata: LedgerMetadata,
        pack: Pack,
        *,
        after: EntryId = NO_ENTRY,
        length: int = 0,
        frozen_lac: EntryId | None = None,
    ) -> None:
        """Start writing in the last fragment of `metadata`, after entry `after`. `length` is the number of payload
        bytes up to and including `after`. A recovery passes `frozen_lac`, which all packets then carry as the
        last-add-confirmed."""
        self.state = WriterState.OPEN
        self.metadata = metadata
        self.last_added = after
        self.last_confirmed = after
        self.length = length
        """Payload bytes in the ledger, up to the last entry added."""
        self.confirmed_length = length
        """Payload bytes in the ledger, up to the last entry confirmed."""
        self._pack = pack
        self._frozen_lac = frozen_lac
        self._spares: frozenset[BookieId] = frozenset()
        self._failed = 0
        self._sent: dict[EntryId, _Sent] = {}
        """In ascending order. An entry is removed when it is confirmed and every bookie of its write set has stored it
        or failed."""
        self._held_bytes = 0
        self._assign_bookies(metadata)

    def _assign_bookies(self, metadata: LedgerMetadata) -> None:
        self.metadata = metadata
        quorum = metadata.quorum
        self._ensemble = metadata.fragments[-1].ensemble
        self._bits = {bookie: 1 << i for i, bookie in enumerate(self._ensemble)}
        self._ack = quorum.ack
        # The places that hold an entry depend only on its id modulo E.
        self._masks = [
            sum(1 << i for i in write_set_indexes(EntryId(entry), quorum)) for entry in range(quorum.ensemble)
        ]
        self._bookies_of = {mask: self._at(mask) for mask in self._masks}

    def _at(self, mask: int) -> tuple[BookieId, ...]:
        return tuple(bookie for i, bookie in enumerate(self._ensemble) if mask >> i & 1)

    @property
    def failed(self) -> frozenset[BookieId]:
        """The failed bookies of the current ensemble. The writer sends them nothing until they return or are
        replaced."""
        return frozenset(self._at(self._failed))

    @property
    def next_fragment(self) -> EntryId:
        """The entry at which the next ensemble change starts: the first one not confirmed."""
        return EntryId(self.last_confirmed + 1)

    @property
    def unconfirmed(self) -> int:
        """Number of entries added but not yet confirmed."""
        return self.last_added - self.last_confirmed

    @property
    def held_bytes(self) -> int:
        """Bytes of packets kept because some bookie has not stored them yet."""
        return self._held_bytes

    def handle(self, event: Event) -> list[Command]:
        """Apply `event` and return the commands to perform, in order. Returns no commands once the writer is HALTED."""
        if self.state is WriterState.HALTED:
            return []
        match event:
            case Append(payload, now):
                return self.append(payload, now)
            case AddStored(entry, bookie):
                return self.stored(entry, bookie)
            case AddFailed(bookie):
                return self._fail(self._bits.get(bookie, 0))
            case Returned(bookie):
                return self._return(bookie)
            case Spares(bookies):
                self._spares = bookies
                return self._replace_failed()
            case EnsembleChanged(metadata, replaced):
                return self._resume(metadata, replaced)
            case ChangeFailed():
                self._spares = frozenset()  # until the driver names spares again
                self.state = WriterState.OPEN
                return self._confirm_ready()
            case Fenced():
                return self._halt(LedgerFenced(f"ledger {self.metadata.ledger} has another writer"))
            case StopWriting(error):
                return self._halt(error)
            case _:
                assert_never(event)

    def append(self, payload: bytes, now: float) -> list[Command]:
        """Add an entry without the cost of an Append event. `now` is the boot-time clock in seconds. The writer must
        not be HALTED."""
        entry = EntryId(self.last_added + 1)
        self.last_added = entry
        self.length += len(payload)
        lac = self.last_confirmed if self._frozen_lac is None else self._frozen_lac
        packet = self._pack(entry, lac, self.length, payload)
        mask = self._masks[entry % len(self._masks)]
        self._sent[entry] = _Sent(packet, self.length, mask, now)
        self._held_bytes += len(packet)
        live = mask & ~self._failed
        commands: list[Command] = [Store(entry, packet, self._bookies_of[mask] if live == mask else self._at(live))]
        if len(self._sent) > OUTSTANDING_ENTRIES_MAX or self._held_bytes > OUTSTANDING_BYTES_MAX:
            commands += self._fail_slow(self._slowest())
        return commands

    # docs/protocol.md W2
    def _slowest(self) -> int:
        """Return the places that have not stored the oldest kept entry, if that entry is confirmed. Return 0 if it is
        not confirmed: failing those bookies could then leave too few to confirm anything."""
        entry, oldest = next(iter(self._sent.items()))
        return oldest.targets & ~oldest.acks & ~self._failed if entry <= self.last_confirmed else 0

    def _fail_slow(self, bits: int) -> list[Command]:
        return [SlowBookiesFailed(self._at(bits)), *self._fail(bits)] if bits else []

    def oldest_outstanding(self) -> dict[BookieId, EntryId]:
        """Return the first entry that each bookie has not stored. Bookies without outstanding adds and failed bookies
        are left out."""
        found: dict[BookieId, EntryId] = {}
        wanted = ((1 << len(self._ensemble)) - 1) & ~self._failed
        for entry, sent in self._sent.items():
            if late := sent.targets & ~sent.acks & wanted:
                found.update(dict.fromkeys(self._at(late), entry))
                wanted &= ~late
            if not wanted:
                break
        return found

    def stored(self, entry: EntryId, bookie: BookieId) -> list[Command]:
        """Record that `bookie` has stored `entry`, without the cost of an AddStored event. Return the commands to
        perform."""
        sent = self._sent.get(entry)
        if sent is None:
            return []  # complete already
        bit = self._bits.get(bookie, 0) & sent.targets
        sent.acks |= bit  # no bit if the bookie was replaced
        if entry <= self.last_confirmed:
            if not sent.targets & ~(sent.acks | self._failed):
                self._drop(entry, sent)
        elif bit and entry == self.last_confirmed + 1 and sent.acks.bit_count() >= self._ack:
            return self._confirm_ready()  # entries are confirmed in order
        return []

    def _confirm_ready(self) -> list[Command]:
        commands: list[Command] = []
        while self.state is WriterState.OPEN and self.last_confirmed < self.last_added:
            entry = EntryId(self.last_confirmed + 1)
            sent = self._sent[entry]
            if sent.acks.bit_count() < self._ack:
                break
            self.last_confirmed = entry
            self.confirmed_length = sent.length
            commands.append(Confirm(entry, sent.sent_at))
            if not sent.targets & ~(sent.acks | self._failed):
                self._drop(entry, sent)
        return commands

    def _drop(self, entry: EntryId, sent: _Sent) -> None:
        """Remove an entry that every bookie of its write set has stored or failed to store."""
        del self._sent[entry]
        self._held_bytes -= len(sent.packet)

    def _fail(self, bits: int) -> list[Command]:
        if not bits & ~self._failed:
            return []
        self._failed |= bits
        self._forget_confirmed()
        return self._replace_failed()

    def _forget_confirmed(self) -> None:
        """Remove confirmed entries that only failed bookies have not stored. Repair copies them when the bookies are
        back."""
        for entry, sent in list(self._sent.items()):
            if entry > self.last_confirmed:
                break
            if not sent.targets & ~(sent.acks | self._failed):
                self._drop(entry, sent)

    def _replace_failed(self) -> list[Command]:
        if self.state is not WriterState.OPEN or not self._failed or not self._spares.difference(self._ensemble):
            return []  # done when the current change ends, or when there is a spare
        self.state = WriterState.CHANGING
        return [ReplaceBookies()]

    def _return(self, bookie: BookieId) -> list[Command]:
        bit = self._bits.get(bookie, 0) & self._failed
        if not bit or self.state is WriterState.CHANGING:
            return []
        self._failed &= ~bit
        for entry, sent in self._sent.items():
            if entry > self.last_confirmed:
                break
            sent.acks |= bit & sent.targets  # entries confirmed without it count as stored: repair copies them
        return self._send_again(bit)

    def _resume(self, metadata: LedgerMetadata, replaced: Iterable[BookieId]) -> list[Command]:
        """Send the unconfirmed entries to the changed places. A place counts as changed even if the same bookie was
        chosen for it again, because it may never have received what was sent before."""
        assert self.state is WriterState.CHANGING, self.state
        now = metadata.fragments[-1].ensemble
        changed = sum(1 << i for i, (a, b) in enumerate(zip(self._ensemble, now, strict=True)) if a != b)
        changed |= sum(self._bits.get(bookie, 0) for bookie in replaced)
        for entry in [entry for entry in self._sent if entry <= self.last_confirmed]:
            self._held_bytes -= len(self._sent.pop(entry).packet)  # entries of a former fragment
        self._assign_bookies(metadata)
        self._failed &= ~changed
        self.state = WriterState.OPEN
        for sent in self._sent.values():
            sent.acks &= ~changed
        return [*self._send_again(changed), *self._confirm_ready(), *self._replace_failed()]

    def _send_again(self, places: int) -> list[Command]:
        return [
            Store(entry, sent.packet, self._at(missing))
            for entry, sent in self._sent.items()
            if entry > self.last_confirmed and (missing := sent.targets & places & ~sent.acks & ~self._failed)
        ]

    def _halt(self, error: StoreError) -> list[Command]:
        self.state = WriterState.HALTED
        self._sent.clear()
        self._held_bytes = 0
        return [Halt(error)]

    def check(self) -> None:
        """Assert the writer's invariants. Used by tests; the cost grows with the number of kept entries."""
        ids = list(self._sent)
        assert ids == sorted(ids)
        if self.state is not WriterState.HALTED:
            unconfirmed = [entry for entry in ids if entry > self.last_confirmed]
            assert unconfirmed == list(range(self.last_confirmed + 1, self.last_added + 1))
        assert self._held_bytes == sum(len(sent.packet) for sent in self._sent.values())
        every = (1 << len(self._ensemble)) - 1
        assert self._failed & ~every == 0
        for entry, sent in self._sent.items():
            assert sent.targets.bit_count() == self.metadata.quorum.write
            assert sent.acks & ~sent.targets == 0
            if entry <= self.last_confirmed:
                assert sent.acks.bit_count() >= self._ack
                assert sent.targets & ~(sent.acks | self._failed), f"entry {entry} is kept for nobody"
        if self.state is WriterState.CHANGING:
            assert self._failed
        if self.state is WriterState.OPEN and (head := self._sent.get(self.next_fragment)) is not None:
            assert head.acks.bit_count() < self._ack, "an entry that is safe was not confirmed"
        assert self.metadata.fragments[-1].first <= self.next_fragment
