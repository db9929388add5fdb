"""The true content of the partitions' logs, recorded from writers and replicas and checked at each event.

A position is confirmed when the writer of its ledger says so, final when it is confirmed or within a closed ledger, and
applied when any replica has applied it. Trimmed entries stay here, so that at the end of a run every mutation of every
log is known (docs/protocol.md: L3, L10, L15, the list G4 and G5, state P1, P2 and P5).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.partition.state.entry import Entry
from kvstore.types import NO_ENTRY, BookieId, EntryId, LedgerId, LedgerMetadata, LedgerState, PartitionId, Position, Seq


@dataclass(slots=True)
class Noted:
    """An entry that a replica has applied."""

    entry: Entry
    payload: bytes
    nodes: list[str]


class Logbook:
    """The record of all logs. tests/sim/watching.py reports the events; `broken(message)` is called for each broken
    rule."""

    def __init__(self, broken: Callable[[str], None]) -> None:
        self.confirmed: dict[LedgerId, EntryId] = {}
        self.closed: dict[LedgerId, EntryId] = {}
        self.appended: dict[LedgerId, dict[EntryId, bytes]] = {}
        """Payloads by position, as first appended."""
        self.entries: dict[PartitionId, dict[Position, Noted]] = {}
        self.acks: dict[LedgerId, dict[EntryId, set[BookieId]]] = {}
        """The bookies that have acknowledged the entry to the writer."""
        self._broken = broken

    def last_confirmed(self, ledger: LedgerId) -> EntryId:
        return self.confirmed.get(ledger, NO_ENTRY)

    def is_final(self, position: Position) -> bool:
        """Return True if the entry can no longer be lost, according to writers and recoveries."""
        ledger, entry = position
        return entry <= self.confirmed.get(ledger, NO_ENTRY) or entry <= self.closed.get(ledger, NO_ENTRY)

    # ── noted ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def append(self, ledger: LedgerId, entry: EntryId, payload: bytes) -> None:
        """The ledger's own writer sends an entry."""
        sent = self.appended.setdefault(ledger, {})
        if entry in sent:
            self._broken(f"L15 entry {entry} of ledger {ledger} was appended twice")
        sent[entry] = payload

    def stored(self, ledger: LedgerId, entry: EntryId, bookie: BookieId) -> None:
        """A bookie acknowledges to the writer that the entry is on its disk."""
        self.acks.setdefault(ledger, {}).setdefault(entry, set()).add(bookie)

    def confirm(self, ledger: LedgerId, entry: EntryId, recorded: LedgerMetadata | None, is_listed: bool) -> None:
        """The ledger's own writer confirms an entry. `recorded` is the metadata that was last written for it."""
        before = self.confirmed.get(ledger, NO_ENTRY)
        if entry != before + 1:
            self._broken(f"L3 ledger {ledger} confirms entry {entry} after {before}")
        self.confirmed[ledger] = max(before, entry)
        if not is_listed:
            self._broken(f"G2 ledger {ledger} confirms entry {entry} but is in no list")
        if entry > self.closed.get(ledger, entry):
            self._broken(f"L10 entry {entry} is confirmed, ledger {ledger} is closed at {self.closed[ledger]}")
        if recorded is not None and recorded.state is not LedgerState.CLOSED:
            holders = self.acks.get(ledger, {}).get(entry, set()) & set(recorded.write_set(entry))
            if len(holders) < recorded.quorum.ack:
                self._broken(f"L3 entry {entry} of ledger {ledger} is confirmed with {sorted(holders)} of {recorded}")

    def close(self, ledger: LedgerId, last: EntryId) -> None:
        """The end of the ledger is recorded."""
        self.closed[ledger] = last
        if self.confirmed.get(ledger, NO_ENTRY) > last:
            self._broken(f"L10 ledger {ledger} is closed at {last}, {self.confirmed[ledger]} was confirmed")

    def apply(self, node: str, partition: PartitionId, position: Position, entry: Entry) -> None:
        """A replica applies an entry."""
        if not self.is_final(position):
            self._broken(
                f"P1 {node} applies {position} of {partition}; confirmed {self.confirmed.get(position.ledger)}, "
                f"closed at {self.closed.get(position.ledger)}"
            )
        noted = self.entries.setdefault(partition, {}).get(position)
        if noted is not None and noted.entry == entry:
            noted.nodes.append(node)
            return
        payload = entry.encode()
        if noted is None:
            self.entries[partition][position] = Noted(entry, payload, [node])
            sent = self.appended.get(position.ledger, {}).get(position.entry)
            if sent is not None and sent != payload:
                self._broken(f"L15 {node} applies another payload at {position} than was appended")
        else:
            noted.nodes.append(node)
            if noted.payload != payload:
                self._broken(f"L15 {node} applies another payload at {position} than {noted.nodes[0]}")

    # ── at the end ────────────────────────────────────────────────────────────────────────────────────────────────────

    def entries_of(self, partition: PartitionId) -> list[tuple[Position, Entry]]:
        """Return all entries that the partition's log has ever had, in order. Ranges that it took over leave gaps in
        the sequences."""
        return [(position, noted.entry) for position, noted in sorted(self.entries.get(partition, {}).items())]

    def log(self, partition: PartitionId) -> list[tuple[Position, Entry]]:
        """Return all entries that the partition's log has ever had, in order. Check that there are no gaps."""
        entries = self.entries_of(partition)
        seq, epoch, time_ms = Seq(0), 0, 0
        for position, entry in entries:
            if entry.first_seq != seq + 1:
                self._broken(f"G4 {partition}: {position} begins at {entry.first_seq}, the entry before ends at {seq}")
            if entry.epoch < epoch:
                self._broken(f"P2 {partition}: {position} has epoch {entry.epoch} after {epoch}")
            if entry.time_ms < time_ms:
                self._broken(f"G4 {partition}: {position} has time {entry.time_ms} after {time_ms}")
            seq, epoch, time_ms = entry.last_seq, entry.epoch, entry.time_ms
        return entries
