"""Counts the copies that ledgers have on registered bookies. Decides only.

Status, dashboard, metrics and commands take their numbers from here. A census reads only metadata and registrations. It
therefore covers the ledgers of every writer, and needs no ledger's password. It does not know which entries a
registered bookie has lost; a scrub, the auditor's check of entries and `kvstore fsck` find those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from kvstore.types import BookieId, LedgerMetadata, LedgerState, Quorum
from kvstore.wal.coverage import is_somewhere_short
from kvstore.wal.creator import owner_of


class LedgerKind(NamedTuple):
    """The properties of a ledger that determine how many copies it has. Most ledgers of a cluster share a few kinds."""

    ensembles: tuple[tuple[BookieId, ...], ...]
    """The distinct ensembles that hold entries."""
    written: tuple[BookieId, ...]
    """The ensemble that a leader writes to, which may hold no entry yet; empty for other ledgers. Missing copies there
    are not counted. The leader itself tracks them, and a ledger that a leader created ahead or abandoned is not
    under-replicated."""
    quorum: Quorum
    is_closed: bool
    is_foreign: bool
    """True if no partition of this cluster writes the ledger."""


class Shortage:
    """The number of under-replicated ledgers, under the assumption that only the bookies in `present` are
    registered."""

    def __init__(self, present: Collection[BookieId]) -> None:
        self.lacking = self.lacking_foreign = 0
        """Number of ledgers that name an unregistered bookie, and how many of them no partition of this cluster
        writes."""
        self.at_risk = self.at_risk_foreign = 0
        """Number of ledgers in which some entries have fewer copies than the ack quorum, and how many of them no
        partition of this cluster writes."""
        self.lacking_at: Counter[BookieId] = Counter()
        """Number of under-replicated ledgers, by the unregistered bookie whose copies are missing."""
        self.closed: Counter[BookieId] = Counter()
        """Number of closed ledgers that name the bookie, by unregistered bookie."""
        self.open: Counter[BookieId] = Counter()
        """Number of ledgers not yet closed that name the bookie, by unregistered bookie."""
        self._present = present

    @property
    def away(self) -> list[BookieId]:
        """The unregistered bookies that ledgers name, sorted by id."""
        return sorted({*self.closed, *self.open})

    def add(self, kind: LedgerKind, ledgers: int) -> None:
        """Count `ledgers` ledgers of the same kind."""
        gone = {bookie for ensemble in kind.ensembles for bookie in ensemble}.difference(self._present)
        for bookie in gone.union(kind.written).difference(self._present):
            (self.closed if kind.is_closed else self.open)[bookie] += ledgers
        if not gone:
            return
        self.lacking += ledgers
        self.lacking_foreign += ledgers * kind.is_foreign
        if any(_is_short(ensemble, gone, kind.quorum) for ensemble in kind.ensembles):
            self.at_risk += ledgers
            self.at_risk_foreign += ledgers * kind.is_foreign
        for bookie in gone:
            self.lacking_at[bookie] += ledgers


class Census:
    """A count of a cluster's ledgers by kind. Its memory grows with the number of kinds, not with the number of
    ledgers."""

    def __init__(self) -> None:
        self.ledgers = self.foreign = 0
        """Number of ledgers counted, and how many of them no partition of this cluster writes."""
        self.unreadable = 0
        """Number of ledgers whose metadata cannot be read. `ledgers` does not include them."""
        self._kinds: Counter[LedgerKind] = Counter()

    @property
    def kinds(self) -> Mapping[LedgerKind, int]:
        """The number of ledgers of each kind."""
        return self._kinds

    @property
    def named(self) -> frozenset[BookieId]:
        """The bookies that at least one ledger names."""
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
        """Return the under-replicated ledgers if only `present` bookies are registered. The cost grows with the number
        of kinds."""
        found = Shortage(present)
        for kind, ledgers in self._kinds.items():
            found.add(kind, ledgers)
        return found


def kind_of(metadata: LedgerMetadata) -> LedgerKind:
    """Return the kind of a ledger. Ensembles of fragments without entries are left out."""
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
    """Return the ensemble in a form that equal ensembles share. The order of bookies matters only if entries are
    striped; otherwise the ensemble is sorted."""
    return ensemble if quorum.write < quorum.ensemble else tuple(sorted(ensemble))


def _is_short(ensemble: tuple[BookieId, ...], gone: Collection[BookieId], quorum: Quorum) -> bool:
    """Return True if the bookies in `gone` leave some write set of the ensemble with fewer bookies than an ack
    quorum."""
    return is_somewhere_short({place for place, bookie in enumerate(ensemble) if bookie in gone}, quorum)


# A count is due again when something may have changed that the last count could not know.

REST_MIN_S, RESTS = 10.0, 9
"""Minimum pause between two counts: REST_MIN_S seconds, and RESTS times the duration of the last count."""
AGAIN_S = 3_600.0
"""Seconds after which a count is repeated even if every bookie that a ledger names is registered."""


class CompletedCount(NamedTuple):
    """A completed census, with the times and bookies that decide when the next one is due. `ended` is on the clock of
    `is_due`, in seconds."""

    census: Census
    ended: float
    took_s: float
    away: frozenset[BookieId]
    """The known bookies that were not registered when the count began."""
    named: frozenset[BookieId]
    """The bookies that any ledger names."""


def is_due(last: CompletedCount | None, away: Collection[BookieId], now: float) -> bool:
    """Return True if a new count is due at `now`. `away` are the known bookies that are not registered. A count is
    repeated after AGAIN_S, or when bookies that matter went away, but never before the minimum pause."""
    if last is None:
        return True
    since = now - last.ended
    if since < max(REST_MIN_S, RESTS * last.took_s):
        return False
    return since >= AGAIN_S or not last.away.issuperset(away) or not last.named.isdisjoint(away)
