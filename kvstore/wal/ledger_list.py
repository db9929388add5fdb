"""A partition's list of ledgers: the document at /partitions/<id>/log, and the changes that a leader makes to it.
Decides only (docs/protocol.md G1, G6, G11)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvstore.types import NO_ENTRY, NO_LEDGER, EntryId, LedgerId, Position, Seq
from kvstore.wal.ports import ListedLedger

BEGINNING = Position(NO_LEDGER, NO_ENTRY)
"""The position before every entry."""
_FIRST = Seq(0)
LEASE_MARGIN_MIN_S = 0.05
LEASE_MARGIN = 0.1
"""Fraction of the lease by which two machines' clocks may drift apart while the lease runs; real clocks drift far
less."""
GROW_FROM, GROW_STEP, GROWTH_MAX = 1_000, 500, 64
"""Beyond GROW_FROM ledgers in the list, the size of new ledgers doubles for each further GROW_STEP ledgers, up to
GROWTH_MAX times the usual size."""
NEVER = 1 << 40


@dataclass(frozen=True, slots=True)
class Listed:
    """One ledger of the list, as stored; see ListedLedger."""

    id: LedgerId
    first_seq: Seq
    exact: bool
    epoch: int
    lease_ms: int


@dataclass(frozen=True, slots=True)
class LogEnd:
    """The position of the last entry of some part of the log, as stored in the list."""

    ledger: LedgerId
    entry: EntryId


@dataclass(frozen=True, slots=True)
class LedgerList:
    """A partition's list of ledgers. Only the leader changes it, and only by compare-and-set."""

    epoch: int = 0
    ledgers: tuple[Listed, ...] = ()
    trimmed_seq: Seq = _FIRST
    """All sequences below this one were trimmed."""
    trimmed_end: LogEnd | None = None
    """The last trimmed entry. A replica that has applied it has missed nothing (docs/protocol.md G16)."""
    closed_end: LogEnd | None = None
    """Position of the last entry before the last two ledgers; all ledgers before these two are CLOSED (docs/protocol.md
    G25). None if an older version wrote the list."""

    @property
    def infos(self) -> list[ListedLedger]:
        """The ledgers in the form that users of the log get."""
        return [ListedLedger(each.id, each.first_seq, each.exact, each.epoch, each.lease_ms) for each in self.ledgers]

    def names(self, ledger: LedgerId) -> bool:
        """Return True if the list names the ledger."""
        return any(each.id == ledger for each in self.ledgers)

    # docs/protocol.md G26
    def explains(self, position: Position) -> bool:
        """Return True if the log has, or had before it was trimmed, an entry at `position`. The position before the
        first entry of a ledger without entries also counts."""
        if position == BEGINNING or self.names(position.ledger):
            return True
        if position.entry == NO_ENTRY:
            return bool(self.ledgers) and position.ledger < self.ledgers[0].id
        end = self.trimmed_end
        return end is not None and position <= Position(end.ledger, end.entry)

    def with_ledger(
        self, ledger: LedgerId, first_seq: Seq, *, epoch: int, lease_ms: int, closed_end: Position | None = None
    ) -> LedgerList:
        """Return the list with a new ledger at its end. `first_seq` is a lower bound of the ledger's first sequence.
        `closed_end` is the last entry before the ledger that has been the last one until now, or None if it is
        unknown."""
        assert epoch >= self.epoch, f"epoch {epoch} comes after {self.epoch}"
        assert not self.ledgers or ledger > self.ledgers[-1].id, "ledger ids of one log rise"
        first = max(first_seq, self.ledgers[-1].first_seq if self.ledgers else Seq(0))
        ledgers = (*self.ledgers, Listed(ledger, first, False, epoch, lease_ms))
        end = None if closed_end is None else LogEnd(*closed_end)
        return replace(self, epoch=epoch, ledgers=ledgers, closed_end=end)

    # docs/protocol.md G25
    def closed_before(self, after: Position) -> LedgerId | None:
        """Return the first of the last two ledgers if no entry lies between `after` and that ledger, otherwise None. A
        reader at `after` can continue there without reading the metadata of earlier ledgers."""
        if self.closed_end is None or not self.ledgers:
            return None
        first = self.ledgers[-2:][0].id
        is_past = Position(self.closed_end.ledger, self.closed_end.entry) <= after < Position(first, NO_ENTRY)
        return first if is_past else None

    def with_exact(self, ledger: LedgerId, first_seq: Seq) -> LedgerList:
        """Return the list with the exact first sequence of `ledger`. The ledger before it must be closed."""
        ledgers = tuple(
            replace(each, first_seq=first_seq, exact=True) if each.id == ledger else each for each in self.ledgers
        )
        return replace(self, ledgers=ledgers)

    def without_first(self, ends: Sequence[EntryId]) -> LedgerList:
        """Return the list without its oldest `len(ends)` ledgers. `ends` are their last entries, NO_ENTRY for a ledger
        without entries."""
        assert 0 < len(ends) < len(self.ledgers), "the last ledger is never trimmed"
        kept = self.ledgers[len(ends) :]
        end = self.trimmed_end or LogEnd(*BEGINNING)
        for gone, last in zip(self.ledgers, ends, strict=False):
            if last != NO_ENTRY:
                end = LogEnd(gone.id, last)
        return replace(self, ledgers=kept, trimmed_seq=kept[0].first_seq, trimmed_end=end)

    def trimmable(self, durable_seq: Seq, pinned: LedgerId | None) -> list[LedgerId]:
        """Return the oldest ledgers that end before `durable_seq` and that no pin holds. A pin holds `pinned` and all
        later ledgers. The last two ledgers are never returned: the last one is being written, and the one before it may
        not be closed yet.

        Control records have no sequence of their own, so a ledger whose last mutation is `durable_seq` is kept. A
        replica that has synced exactly that mutation may be positioned before the ledger's end, and could not continue
        if the ledger were deleted.
        """
        gone: list[LedgerId] = []
        before: list[LedgerId] = []
        """Ledgers after those, up to the next one with a known first sequence. Some leader may have had no time to
        record it, or nothing to append."""
        for this, following in zip(self.ledgers[:-2], self.ledgers[1:], strict=False):
            if pinned is not None and this.id >= pinned:
                break
            before.append(this.id)
            if following.exact:
                if following.first_seq > durable_seq:
                    break
                gone += before
                before = []
        return gone

    def droppable(self, count: int) -> int:
        """Return the largest number of ledgers, at most `count`, that can be dropped from the beginning of the list.
        The first sequence of the ledger after them must be exact."""
        while count and not self.ledgers[count].exact:
            count -= 1
        return count

    @property
    def growth(self) -> int:
        """The factor by which the next ledger may exceed the usual size and age before it is rolled (docs/protocol.md,
        G21). It makes the list grow more slowly than the log if something prevents trimming."""
        steps = -(-(len(self.ledgers) - GROW_FROM) // GROW_STEP)
        return min(1 << max(0, steps), GROWTH_MAX)

    def lease_wait_s(self) -> float:
        """Return the number of seconds after the last fencing answer during which a former leader may still answer
        reads. This is the longest lease of the ledgers that a new leader fences, plus a margin for clock drift, or 0 if
        there is no lease. The listed leases include pauses that a clock does not see (docs/protocol.md, P17, P32)."""
        lease_s = max((each.lease_ms for each in self.ledgers[-2:]), default=0) / 1000
        return lease_s + max(LEASE_MARGIN_MIN_S, LEASE_MARGIN * lease_s) if lease_s else 0.0
