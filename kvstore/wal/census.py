"""Counts the copies that ledgers have on registered bookies. Decides only.

Status, dashboard, metrics and commands take their numbers from here. A census reads only metadata and registrations. So
it covers the ledgers of every writer, and needs no ledger's password. It does not know which entries a registered
bookie has lost: a scrub, the auditor's check of entries and `kvstore fsck` find those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from kvstore.types import BookieId, LedgerMetadata, LedgerState, Quorum
from kvstore.wal.coverage import is_somewhere_short
from kvstore.wal.creator import owner_of


class LedgerKind(NamedTuple):
    """The properties of a ledger that its copies depend on. Most ledgers of a cluster share a few kinds."""

    ensembles: tuple[tuple[BookieId, ...], ...]
    """The distinct ensembles that hold entries."""
    written: tuple[BookieId, ...]
    """The ensemble that a leader writes to, which may hold no entry yet; empty for other ledgers. Nothing is counted as
    missing there: the leader knows what is missing, and a ledger that it created ahead or abandoned is not
    under-replicated."""
    quorum: Quorum
    is_closed: bool
    is_foreign: bool
    """True if no partition of this cluster writes the ledger."""


class Shortage:
    """The under-replicated ledgers while only `present` bookies are registered."""

    def __init__(self, present: Collection[BookieId]) -> None:
        self.lacking = self.lacking_foreign = 0
        """Number of ledgers that name an unregistered bookie, and number of those that no partition writes."""
        self.at_risk = 0
        """Number of ledgers with entries that have fewer copies than the ack quorum."""
        self.lacking_at: Counter[BookieId] = Counter()
        """Number of under-replicated ledgers by the unregistered bookie that causes it."""
        self.closed: Counter[BookieId] = Counter()
        """Number of closed ledgers that name each unregistered bookie."""
        self.open: Counter[BookieId] = Counter()
        """Number of ledgers that are not closed and name each unregistered bookie."""
        self._present = present

    @property
    def away(self) -> list[BookieId]:
        """The unregistered bookies that ledgers name, sorted."""
        return sorted({*self.closed, *self.open})

    def add(self, kind: LedgerKind, ledgers: int) -> None:
        """Count `ledgers` ledgers of one kind."""
        gone = {bookie for ensemble in kind.ensembles for bookie in ensemble}.difference(self._present)
        for bookie in gone.union(kind.written).difference(self._present):
            (self.closed if kind.is_closed else self.open)[bookie] += ledgers
        if not gone:
            return
        self.lacking += ledgers
        self.lacking_foreign += ledgers * kind.is_foreign
        self.at_risk += ledgers * any(_is_short(ensemble, gone, kind.quorum) for ensemble in kind.ensembles)
        for bookie in gone:
            self.lacking_at[bookie] += ledgers


class Census:
    """The ledgers of a cluster by kind. Its size grows with the kinds, not with the ledgers."""

    def __init__(self) -> None:
        self.ledgers = self.foreign = 0
        """Ledgers in all; those of them that no partition writes."""
        self.unreadable = 0
        """Ledgers whose metadata cannot be read, which `ledgers` does not include."""
        self._kinds: Counter[LedgerKind] = Counter()

    @property
    def kinds(self) -> Mapping[LedgerKind, int]:
        """Each kind with its number of ledgers."""
        return self._kinds

    @property
    def named(self) -> frozenset[BookieId]:
        """The bookies that any ledger names."""
        return frozenset(
            bookie for kind in self._kinds for ensemble in (*kind.ensembles, kind.written) for bookie in ensemble
        )

    def add(self, metadata: LedgerMetadata) -> None:
        """Count one ledger."""
        kind = kind_of(metadata)
        self.ledgers += 1
        self.foreign += kind.is_foreign
        self._kinds[kind] += 1

    def shortage(self, present: Collection[BookieId]) -> Shortage:
        """Return the under-replicated ledgers while only `present` bookies are registered."""
        found = Shortage(present)
        for kind, ledgers in self._kinds.items():
            found.add(kind, ledgers)
        return found


def kind_of(metadata: LedgerMetadata) -> LedgerKind:
    """Return the kind of a ledger. The ensemble of a fragment without entries is left out."""
    is_closed, is_foreign = metadata.state is LedgerState.CLOSED, owner_of(metadata) is None
    quorum, fragments = metadata.quorum, metadata.fragments
    written: tuple[BookieId, ...] = ()
    if is_closed:
        fragments = tuple(each for each in fragments if each.first <= metadata.last_entry)
    elif not is_foreign:
        fragments, written = fragments[:-1], _shown(fragments[-1].ensemble, quorum)
    ensembles = {_shown(each.ensemble, quorum) for each in fragments}
    return LedgerKind(tuple(sorted(ensembles)), written, quorum, is_closed, is_foreign)


def _shown(ensemble: tuple[BookieId, ...], quorum: Quorum) -> tuple[BookieId, ...]:
    """Return the ensemble; sorted unless entries are striped over it, which is the only case in which order matters."""
    return ensemble if quorum.write < quorum.ensemble else tuple(sorted(ensemble))


def _is_short(ensemble: tuple[BookieId, ...], gone: Collection[BookieId], quorum: Quorum) -> bool:
    """Return True if some write set of the ensemble has fewer bookies left than an ack quorum."""
    return is_somewhere_short({place for place, bookie in enumerate(ensemble) if bookie in gone}, quorum)


# A count is due again when something may have changed that the last count could not know.

REST_MIN_S, RESTS = 10.0, 9
"""Minimum number of seconds between two counts, and minimum pause as a multiple of the duration of the last count."""
AGAIN_S = 3_600.0
"""Seconds after which a count is repeated even if every bookie that a ledger names is registered."""


class CompletedCount(NamedTuple):
    """The result of a completed count, and the facts that decide when the next count is due."""

    census: Census
    ended: float
    took_s: float
    away: frozenset[BookieId]
    """The bookies that were known to be away when the count began."""
    named: frozenset[BookieId]
    """The bookies that any ledger names."""


def is_due(last: CompletedCount | None, away: Collection[BookieId], now: float) -> bool:
    """Return True if the ledgers must be counted now. `away`: known bookies that are not registered."""
    if last is None:
        return True
    since = now - last.ended
    if since < max(REST_MIN_S, RESTS * last.took_s):
        return False
    return since >= AGAIN_S or not last.away.issuperset(away) or not last.named.isdisjoint(away)
