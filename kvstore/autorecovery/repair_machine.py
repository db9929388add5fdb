"""Says how one ledger that is marked as lacking copies becomes whole. Decides only: each event calls for one command
(docs/protocol.md, A10 to A13).

    LOOK ──closed──► FILL ──► RECORD ──► END
      └──not closed──► ASK ──► END (later), or RECOVER ──► LOOK

A bookie counts as lost when the mark names it and it is not registered *now*: so one that has come back meanwhile loses
no place, and one that is away for a moment, and not marked, keeps it too. What is really missing the bookies themselves
say: a mark is a reason to look and nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, assert_never

from kvstore.meta.lost import without_lost
from kvstore.types import BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, LedgerState
from kvstore.wal.coverage import is_covered
from kvstore.wal.creator import owner_of
from kvstore.wal.placement import machine_of, newcomers_of, replaced, spread_out
from kvstore.wal.repair import bookies_of

if TYPE_CHECKING:
    from random import Random

LOOKS_MAX = 4
"""Conflicts with others who change the ledger, until it is left for later."""
PATIENCE, PATIENCE_TO_SPREAD = 3, 8
"""After so many attempts that failed at a newcomer another is drawn: each that was tried is left with copies that
nobody asks for. The second where nothing is lost, and copies only share a zone."""
LED_S = 30.0
"""Until a ledger that has a leader is looked at again."""
FIRST_S, AGAIN_S_MAX = 5.0, 300.0
"""Until the next attempt after one that failed: the first, doubled with each, and the longest."""

NO_SPARE = "no other bookie can take its place: start one on another machine"
NO_ROOM = "a bookie that lacks entries is read-only"
CHANGING = "others change its metadata all the time"
HAS_GONE = "a bookie that the mark names was back when it was looked at, and has gone again"
LOCK_LOST = "the lock on it was lost, or auto-recovery is switched off"
IS_LED = "is open: its leader replaces the bookie, or goes on in a new ledger; try again later"
IN_GRACE = "is open: its writer may yet replace the bookie; it is recovered if nothing comes for a while"
DOUBTFUL = "is open, and a bookie of its last ensemble was set up after it: what that one does not have says nothing"
UNCOVERED = "is open, and too few bookies of its last ensemble are up to tell where it ends"


@dataclass(frozen=True, slots=True)
class RegisteredBookies:
    """The registered bookies."""

    writable: frozenset[BookieId]
    readonly: frozenset[BookieId]
    zones: Mapping[BookieId, str]
    """Of these and of those that were."""

    @property
    def there(self) -> frozenset[BookieId]:
        return self.writable | self.readonly


@dataclass(frozen=True, slots=True)
class Writer:
    """Facts about an open ledger's writer."""

    is_led: bool
    """The partition whose log the ledger was made for has a leader."""
    lac: EntryId
    """The highest last-add-confirmed that any of its bookies knows of; NO_ENTRY if none."""
    doubtful: frozenset[BookieId] = frozenset()
    """Bookies whose "no such entry" may come from a disk that is younger than the ledger."""


@dataclass(slots=True)
class AttemptHistory:
    """A memory of earlier attempts at one ledger."""

    tries: int = 0
    """That have failed, in a row."""
    reason: str = ""
    """Why the last one did: so that a log says it once."""
    refusals: int = 0
    """Of the failed ones, those at newcomers that took no copies."""
    avoid: set[BookieId] = field(default_factory=set)
    """Newcomers that took no copies, as often as is borne."""
    seen: tuple[LedgerState, Fragment, EntryId] | None = None
    """What an open ledger was like, and since when it has not changed."""
    seen_at: float = 0.0


# ── events ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class MetadataRead:
    metadata: LedgerMetadata
    version: int
    standing: RegisteredBookies


@dataclass(frozen=True, slots=True)
class Gone:
    """The ledger was deleted."""


@dataclass(frozen=True, slots=True)
class WriterProbed:
    writer: Writer


@dataclass(frozen=True, slots=True)
class Filled:
    """Everything that could be copied is."""

    unreadable: frozenset[EntryId] = frozenset()
    has_room: bool = True
    """False: a bookie that was to be filled lacks entries, and is read-only."""
    refused: frozenset[BookieId] = frozenset()
    """Bookies with places of their own that did not say what they have, or took no copies."""


@dataclass(frozen=True, slots=True)
class MetadataWritten:
    """The metadata names the newcomers."""


@dataclass(frozen=True, slots=True)
class Overtaken:
    """The metadata had been changed by others."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """The ledger is closed."""


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    reason: str
    refused: frozenset[BookieId] = frozenset()
    """Bookies that took no copies."""


@dataclass(frozen=True, slots=True)
class LockLost:
    """The lock is another's, who goes on."""


Event = MetadataRead | Gone | WriterProbed | Filled | MetadataWritten | Overtaken | Recovered | AttemptFailed | LockLost

# ── commands ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ReadMetadata:
    """Read the ledger's metadata as of now, and who is registered."""


@dataclass(frozen=True, slots=True)
class ProbeWriter:
    """Find out about the open ledger's writer."""

    metadata: LedgerMetadata
    there: frozenset[BookieId]


@dataclass(frozen=True, slots=True)
class Fill:
    """Ask bookies what they lack of what `wanted` names them for, and copy it to them."""

    metadata: LedgerMetadata
    wanted: LedgerMetadata
    last: EntryId
    newcomers: frozenset[BookieId]
    """Who must answer, and take what it is given: it is to be named for that."""
    must: frozenset[BookieId]
    """Who is to be filled before the mark goes: these, and whom the mark names."""
    may: frozenset[BookieId]
    """Others that the metadata name: filled if they answer."""
    takers: frozenset[BookieId]
    read_at: frozenset[BookieId]
    """Bookies whose copies are read: of those that list what they cannot read as well."""


@dataclass(frozen=True, slots=True)
class WriteMetadata:
    """Compare-and-set the ledger's metadata."""

    wanted: LedgerMetadata
    version: int


@dataclass(frozen=True, slots=True)
class Recover:
    """Fence the ledger, find its end, wait out its leader's lease, and close it."""


@dataclass(frozen=True, slots=True)
class End:
    """This attempt is over."""

    is_whole: bool
    """Nothing is missing any more where the mark said so."""
    reason: str = ""
    again_s: float = 0.0


Command = ReadMetadata | ProbeWriter | Fill | WriteMetadata | Recover | End


class RepairMachine:
    """One attempt at one ledger. `marked` empty: any bookie may lack copies. `grace_s`: how long an open ledger is left
    as it is while nothing changes in it. `luck` begins in the same way each time, and for every worker: so a second
    attempt finds what the first has copied."""

    def __init__(
        self,
        ledger: LedgerId,
        marked: Collection[BookieId],
        past: AttemptHistory,
        *,
        grace_s: float,
        luck: Callable[[], Random],
    ) -> None:
        self.ledger = ledger
        self._marked, self._past, self._grace_s, self._luck = frozenset(marked), past, grace_s, luck
        self._looks = 0
        self._found: MetadataRead | None = None
        self._wanted: LedgerMetadata | None = None
        self._lacks_spare = False
        self._rest = ""
        """Why the ledger is not whole although what could be done is done."""

    def start(self) -> Command:
        return self._look()

    def handle(self, event: Event, now: float) -> Command:
        """Return what `event` calls for. After End there are no more events."""
        match event:
            case MetadataRead():
                return self._plan(event)
            case Gone():
                return End(is_whole=True)
            case WriterProbed(writer):
                return self._judge(writer, now)
            case Filled():
                return self._filled(event)
            case MetadataWritten():
                return self._end(self._rest)
            case Overtaken():
                return self._look()
            case Recovered():
                return self._look()
            case AttemptFailed(reason, refused):
                return self._failed(reason, refused)
            case LockLost():
                return End(is_whole=False, reason=LOCK_LOST)
            case _:
                assert_never(event)

    def _look(self) -> Command:
        self._looks += 1
        self._wanted = None
        return ReadMetadata() if self._looks <= LOOKS_MAX else self._end(CHANGING)

    def _end(self, reason: str) -> Command:
        past = self._past
        if not reason:
            past.tries, past.refusals, past.avoid = 0, 0, set()
            return End(is_whole=True)
        again_s = min(FIRST_S * 2**past.tries, AGAIN_S_MAX)
        past.tries = min(past.tries + 1, 16)
        return End(is_whole=False, reason=reason, again_s=again_s)

    def _failed(self, reason: str, refused: frozenset[BookieId]) -> Command:
        past = self._past
        if self._found is not None and refused:
            patience = PATIENCE if self._lost(self._found) else PATIENCE_TO_SPREAD
            past.refusals += 1
            if past.refusals % patience == 0:
                past.avoid |= refused
        return self._end(reason)

    # ── closed ledgers ────────────────────────────────────────────────────────────────────────────────────────────────

    def _plan(self, found: MetadataRead) -> Command:
        self._found = found
        metadata = found.metadata
        if metadata.state is not LedgerState.CLOSED:
            return ProbeWriter(metadata, found.standing.there)
        return self._fill(found, metadata.fragments, metadata.last_entry)

    def _lost(self, found: MetadataRead) -> frozenset[BookieId]:
        named = frozenset(bookies_of(found.metadata))
        return ((self._marked or named) & named) - found.standing.there

    # docs/protocol.md A10, W10
    def _fill(self, found: MetadataRead, changing: tuple[Fragment, ...], last: EntryId) -> Command:
        """Give the places of lost bookies in the fragments `changing` to others, spread copies over zones, and have all
        who are then named filled."""
        metadata, standing = found.metadata, found.standing
        wanted = metadata
        if changing:
            part = self._replaced(found, replace(metadata, fragments=changing))
            wanted = replace(metadata, fragments=(*part.fragments, *metadata.fragments[len(changing) :]))
        self._wanted = wanted
        named = frozenset(bookies_of(wanted))
        marked = self._marked & named & standing.there
        newcomers = frozenset(newcomers_of(metadata, wanted))
        must, may = marked | newcomers, (named & standing.there) - marked - newcomers
        read_at = frozenset(each for each in marked if not is_incarnation(each))
        return Fill(metadata, wanted, last, newcomers, must, may, standing.writable, read_at)

    def _replaced(self, found: MetadataRead, part: LedgerMetadata) -> LedgerMetadata:
        standing, lost = found.standing, self._lost(found)
        spares, luck = standing.writable - self._past.avoid, self._luck()
        wanted = replaced(part, lost, standing.zones, spares, luck)
        self._lacks_spare = not lost.isdisjoint(bookies_of(wanted))
        return spread_out(wanted, standing.zones, spares, luck) or wanted

    def _filled(self, filled: Filled) -> Command:
        assert self._found is not None
        assert self._wanted is not None
        metadata = self._found.metadata
        unreadable = without_lost(metadata, filled.unreadable)
        wanted = _kept_where(metadata, self._wanted, unreadable)
        if self._lacks_spare:
            self._past.avoid = set()  # the next attempt draws them again: who took no copies may be well by then
        self._rest = (
            f"no good copy of {len(unreadable)} entries was found, the first is {min(unreadable)}"
            if unreadable
            else NO_SPARE
            if self._lacks_spare
            else f"has bookies that do not answer, or take no copies: {', '.join(sorted(filled.refused))}"
            if filled.refused
            else NO_ROOM
            if not filled.has_room
            else ""
        )
        if wanted.fragments == metadata.fragments:
            return self._end(self._rest)
        return WriteMetadata(wanted, self._found.version)

    # ── ledgers that are not closed ───────────────────────────────────────────────────────────────────────────────────

    # docs/protocol.md A11, A12
    def _judge(self, writer: Writer, now: float) -> Command:
        """Whether the ledger is its writer's still, or is to be recovered."""
        assert self._found is not None
        metadata, standing, past = self._found.metadata, self._found.standing, self._past
        if writer.is_led:
            past.seen = None
            return End(is_whole=False, reason=IS_LED, again_s=LED_S)
        last, lost = metadata.fragments[-1], self._lost(self._found)
        is_ours = owner_of(metadata) is not None
        if metadata.state is LedgerState.OPEN and not (lost if is_ours else lost.intersection(last.ensemble)):
            confirmed = max(writer.lac, EntryId(last.first - 1))
            return self._fill(self._found, () if is_ours else metadata.fragments[:-1], confirmed)
        seen = (metadata.state, last, writer.lac)
        if past.seen != seen:
            past.seen, past.seen_at = seen, now
        left_s = past.seen_at + self._grace_s - now
        if left_s > 0:
            return End(is_whole=False, reason=IN_GRACE, again_s=left_s)
        if writer.doubtful.intersection(last.ensemble):
            return self._end(DOUBTFUL)
        up = {place for place, bookie in enumerate(last.ensemble) if bookie in standing.there}
        if not is_covered(up, metadata.quorum):
            return self._end(UNCOVERED)
        return Recover()

    # docs/protocol.md A3
    def end_of(self, end: End, there: Callable[[BookieId], bool]) -> End:
        """`end` as it is to be told: the auditor marks no ledger again for a bookie that its mark names, so the mark
        must stay for those that have kept their places and are not registered any more."""
        named = bookies_of(self._wanted) if self._wanted is not None else ()
        if end.is_whole and not all(there(each) for each in self._marked.intersection(named)):
            return End(is_whole=False, reason=HAS_GONE)
        return end

    def check(self) -> None:
        """The invariants: only bookies change, and of a ledger that is not closed not the ones that it is written to
        (docs/protocol.md, L1, L2)."""
        if self._found is None or self._wanted is None:
            return
        metadata = self._found.metadata
        assert replace(self._wanted, fragments=metadata.fragments) == metadata
        assert [each.first for each in self._wanted.fragments] == [each.first for each in metadata.fragments]
        assert metadata.state is LedgerState.CLOSED or self._wanted.fragments[-1] == metadata.fragments[-1]


def is_incarnation(bookie: BookieId) -> bool:
    """Whether the id is of one of our bookies, which comes back under another one when it has lost its disk, and lists
    no entries that it cannot read (docs/protocol.md, L13, B14)."""
    return machine_of(bookie) != bookie


def _kept_where(metadata: LedgerMetadata, wanted: LedgerMetadata, unreadable: Collection[EntryId]) -> LedgerMetadata:
    """`wanted`, but the fragments with entries that could not be copied as they are in `metadata`: nobody is named for
    what it does not have."""
    stays = {metadata.fragment_of(entry).first for entry in unreadable}
    pairs = zip(metadata.fragments, wanted.fragments, strict=True)
    return replace(wanted, fragments=tuple(before if before.first in stays else after for before, after in pairs))
