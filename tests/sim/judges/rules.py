"""Rules for every write to the metadata store, checked at each write (docs/protocol.md: ledgers L1 to L9, the list
G1 to G3 and G25, the end of a partition H5, the balancer H13, machines H15 and W10)."""

from __future__ import annotations

import re
from collections.abc import Callable

import orjson

from kvstore.meta import ledger_metadata, paths
from kvstore.ring import PartitionState, Ring, decode
from kvstore.server.balance.balancer import WHO
from kvstore.server.balance.record import KIND
from kvstore.types import NO_ENTRY, EntryId, LedgerId, LedgerMetadata, LedgerState, PartitionId, Position, machine_of
from kvstore.wal import list_codec
from kvstore.wal.ledger_list import LedgerList, Listed
from kvstore.wal.placement import node_of_or_none

_LOG = re.compile(re.escape(paths.PARTITIONS) + r"/([^/]+)/log")
_STEPS = {
    LedgerState.OPEN: {LedgerState.OPEN, LedgerState.IN_RECOVERY, LedgerState.CLOSED},
    LedgerState.IN_RECOVERY: {LedgerState.IN_RECOVERY, LedgerState.CLOSED},
    LedgerState.CLOSED: {LedgerState.CLOSED},
}


class MetadataRules:
    """Observes every write to the store's tree (as an observer of MemoryTree) and keeps the current metadata.

    `confirmed(ledger)` returns the last entry that the ledger's writer has confirmed. `broken(message)` is called for
    each broken rule, `closed(ledger, last entry)` for each ledger that is closed.
    """

    def __init__(
        self,
        confirmed: Callable[[LedgerId], EntryId],
        broken: Callable[[str], None],
        closed: Callable[[LedgerId, EntryId], None],
    ) -> None:
        self.ledgers: dict[LedgerId, LedgerMetadata] = {}
        self.written: dict[LedgerId, LedgerMetadata] = {}
        """The ledgers as nodes wrote them last. A restored older copy and what is written to it change nothing here,
        because the writers that continue do not know of it."""
        self.lists: dict[PartitionId, list[Listed]] = {}
        self.partition_of: dict[LedgerId, PartitionId] = {}
        """The partition of every ledger that was ever listed."""
        self.ring: Ring | None = None
        self.kept: set[LedgerId] = set()
        """Ledgers of partitions that have left the ring, kept for change feeds."""
        self._steps_recorded = self._steps_made = 0
        """The balancer's steps in its record, and in the ring."""
        self.on_trim: Callable[[PartitionId, list[Listed]], None] = lambda _partition, _dropped: None
        self._confirmed, self._broken, self._closed = confirmed, broken, closed

    def __call__(self, path: str, old: bytes | None, new: bytes | None) -> None:
        ledger = paths.ledger_of(path)
        if ledger is not None:
            self._ledger_changed(ledger, new)
        elif match := _LOG.fullmatch(path):
            self._list_changed(PartitionId(match.group(1)), new)
        elif path.startswith(f"{paths.KEPT}/") and new is not None:
            self.kept.update(LedgerId(each["id"]) for each in orjson.loads(new)["ledgers"])
        elif path == paths.RING and new is not None:
            self._ring_changed(decode(new))
        elif path == paths.BALANCE and new is not None:
            before = KIND.decoded(old).steps if old is not None else ()
            self._steps_recorded += sum(step not in before for step in KIND.decoded(new).steps)

    def restored(self, path: str, _old: bytes | None, new: bytes | None) -> None:
        """Accept the content of a restored copy without checks: the rules judge writes of nodes, and no node wrote
        this."""
        ledger = paths.ledger_of(path)
        if ledger is not None:
            self.ledgers.pop(ledger, None)
            if new is not None:
                self.ledgers[ledger] = ledger_metadata.decode(ledger, new)
        elif match := _LOG.fullmatch(path):
            partition = PartitionId(match.group(1))
            listed = list_codec.decode(new, what=partition) if new is not None else LedgerList()
            self.lists[partition] = list(listed.ledgers)
        elif path == paths.RING:
            self.ring = decode(new) if new is not None else None

    def _expect(self, holds: bool, rule: str, what: object) -> None:
        if not holds:
            self._broken(f"{rule}: {what}")

    # ── one ledger ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _ledger_changed(self, ledger: LedgerId, data: bytes | None) -> None:
        before = self.ledgers.get(ledger)
        after = ledger_metadata.decode(ledger, data) if data is not None else None
        if self.written.get(ledger) == before:
            self.written.pop(ledger, None)
            if after is not None:
                self.written[ledger] = after
        if after is None:
            listed = [p for p, lines in self.lists.items() if any(line.id == ledger for line in lines)]
            self._expect(not listed, "G1 a listed ledger's metadata is removed", (ledger, listed))
            self.ledgers.pop(ledger, None)
            return
        self.ledgers[ledger] = after
        for each in after.fragments:
            machines = {machine_of(node_of_or_none(bookie) or bookie) for bookie in each.ensemble}
            distinct = len(machines) == len(each.ensemble)
            self._expect(distinct, "W10 an ensemble has one bookie of each machine", (ledger, each))
        if before is None:
            fresh = after.state is LedgerState.OPEN and len(after.fragments) == 1
            self._expect(fresh, "L1 a ledger begins open, with one fragment", after)
            return
        self._ledger_step(before, after)
        if after.state is LedgerState.CLOSED and before.state is not LedgerState.CLOSED:
            self._closed(ledger, after.last_entry)

    def _ledger_step(self, before: LedgerMetadata, after: LedgerMetadata) -> None:
        step = (before, after)
        self._expect(after.state in _STEPS[before.state], "L1 states only go forward", step)
        self._expect(after.quorum == before.quorum, "L1 the quorum never changes", step)
        if before.state is LedgerState.CLOSED:
            ended = (before.last_entry, before.length) == (after.last_entry, after.length)
            self._expect(ended, "L1 the end of a closed ledger never changes", step)
        if before.state is after.state is LedgerState.IN_RECOVERY:
            self._expect(
                before.fragments == after.fragments, "L9 a recovery publishes ensembles only as it closes", step
            )
        if after.state is LedgerState.OPEN:
            last = self._confirmed(after.ledger)
            kept = [each for each in before.fragments if each.first <= last]
            self._expect(
                list(after.fragments[: len(kept)]) == kept,
                f"L2 a fragment with confirmed entries (up to {last}) never changes while the ledger is open",
                step,
            )
            early = [each for each in after.fragments[len(kept) :] if each.first <= last]
            self._expect(not early, f"L4 a new ensemble begins after the last confirmed entry ({last})", step)

    # ── the ring ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _ring_changed(self, after: Ring) -> None:
        before, self.ring = self.ring, after
        known = before.operations if before is not None else ()
        new = [each.id for each in after.operations if each not in known]
        self._steps_made += sum(id.startswith(f"{WHO}-") for id in new)
        self._expect(
            self._steps_made <= self._steps_recorded, "H13 the balancer records a step before it makes it", new
        )
        for partition in sorted(before.partitions) if before is not None else ():
            was = before.partitions[partition].state if before is not None else None
            if partition not in after.partitions:
                retired = was is PartitionState.RETIRED and partition in after.retired
                self._expect(retired, "H5 only a retired partition leaves the ring, and its id stays", (partition, was))
                self._expect(not self.lists.get(partition), "H5 its list is deleted first", partition)
                mine = [ledger for ledger, owner in self.partition_of.items() if owner == partition]
                left = [ledger for ledger in mine if ledger in self.ledgers and ledger not in self.kept]
                self._expect(not left, "H5 its ledgers are deleted first", (partition, left))
        for partition, member in after.partitions.items():
            for moved in map(set, zip(*member.replacing, strict=True)) if member.replacing else (set(),):
                kept = [server for server in member.replicas if server not in moved]
                distinct = len(set(map(machine_of, kept))) == len(kept)
                self._expect(distinct, "H15 a machine has one replica of a partition", (partition, member))
            if member.state is PartitionState.RETIRED:
                busy = partition in after.tokens.values() or any(
                    partition in (m.source, m.target) for m in after.moves.values()
                )
                self._expect(not busy, "H5 a retiring partition owns nothing and has no open move", partition)

    def _has_retired(self, partition: PartitionId) -> bool:
        member = self.ring.partitions.get(partition) if self.ring is not None else None
        return member is not None and member.state is PartitionState.RETIRED

    # ── a partition's list ────────────────────────────────────────────────────────────────────────────────────────────

    def _list_changed(self, partition: PartitionId, data: bytes | None) -> None:
        before = self.lists.get(partition, [])
        listed = list_codec.decode(data, what=partition) if data is not None else LedgerList()
        after = list(listed.ledgers)
        self.lists[partition] = after
        if data is None or (before and not after):
            self._expect(
                self._has_retired(partition), "H5 only retired partitions lose their list", (partition, before)
            )
            self._expect(data is not None or not before, "H5 a list is emptied before it goes", (partition, before))
            return
        ids = [line.id for line in after]
        self._expect(ids == sorted(set(ids)), "G1 ids in a list are unique and rise", ids)
        kept = [line for line in before if line.id in set(ids)]
        self._expect([line.id for line in kept] == ids[: len(kept)], "G1 a list grows at its end", (before, after))
        dropped = before[: len(before) - len(kept)]
        self._expect(dropped + kept == before, "G1 a list is trimmed at its beginning", (before, after))
        for was, now in zip(kept, after, strict=False):
            self._line_step(was, now)
        self._check_states(partition, after)
        if (closed_end := listed.closed_end) is not None:
            self._check_closed_end(after, dropped, Position(closed_end.ledger, closed_end.entry))
        for line in after[len(kept) :]:
            self._appended(partition, kept, line)
            kept = [*kept, line]
        if dropped:
            self._trimmed(partition, dropped)

    def _check_closed_end(self, lines: list[Listed], dropped: list[Listed], said: Position) -> None:
        """Check that the list's closed end is the last entry before the last two ledgers. Ledgers that were trimmed
        before this write are not known here."""
        ends = [
            Position(line.id, self.ledgers[line.id].last_entry)
            for line in [*dropped, *lines[:-2]]
            if line.id in self.ledgers and self.ledgers[line.id].last_entry != NO_ENTRY
        ]
        first = lines[-2:][0].id
        is_end = said == ends[-1] if ends else said < Position(first, NO_ENTRY)
        self._expect(is_end, "G25 the closed end is the last entry before the last two ledgers", (said, lines))

    def _line_step(self, was: Listed, now: Listed) -> None:
        if was.exact or not now.exact:
            self._expect(
                was == now, "G1 a line of the list changes only when its first sequence becomes exact", (was, now)
            )
        self._expect(now.first_seq >= was.first_seq and now.epoch == was.epoch, "G1 a bound only rises", (was, now))

    def _check_states(self, partition: PartitionId, lines: list[Listed]) -> None:
        for line in lines[:-2]:
            state = self.ledgers[line.id].state if line.id in self.ledgers else None
            self._expect(state is LedgerState.CLOSED, "G1 all but the last two are closed", (partition, line, state))

    def _appended(self, partition: PartitionId, before: list[Listed], line: Listed) -> None:
        self._expect(line.id in self.ledgers, "G1 a ledger exists before it is listed", line)
        self._expect(line.id not in self.partition_of, "G1 a ledger is listed once", line)
        self.partition_of[line.id] = partition
        if not before:
            return
        last = before[-1]
        self._expect(line.epoch >= last.epoch, "G1 epochs never fall", (last, line))
        if line.epoch != last.epoch:
            open_ones = [each for each in before if self.ledgers[each.id].state is not LedgerState.CLOSED]
            self._expect(
                not open_ones, "G3 a leader has closed the last two before it lists its own", (open_ones, line)
            )
        else:
            closed = all(self.ledgers[each.id].state is LedgerState.CLOSED for each in before[:-1])
            self._expect(closed, "G1 one roll at a time", (before, line))

    def _trimmed(self, partition: PartitionId, dropped: list[Listed]) -> None:
        for line in dropped:
            metadata = self.ledgers.get(line.id)
            closed = metadata is not None and metadata.state is LedgerState.CLOSED
            self._expect(closed, "G6 only closed ledgers are trimmed", line)
        self.on_trim(partition, dropped)
