"""Decides how one ledger that is marked as under-replicated is repaired. Decides only: each event calls for one command
(docs/protocol.md, A10 to A13).

  READ ──closed──► FILL ──► WRITE ──► END
   └──not closed──► PROBE ──► END (later), or RECOVER ──► READ

A bookie counts as lost if the mark names it and it is not registered *now*. So a bookie that has come back meanwhile
keeps its places, and so does a bookie that is away for a moment without being marked. The bookies themselves tell which
entries are missing: a mark is only a reason to ask them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, assert_never

from kvstore.meta.lost import without_lost
from kvstore.types import BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, LedgerState
from kvstore.wal.coverage import is_covered
from kvstore.wal.creator import owner_of
from kvstore.wal.placement import newcomers_of, node_of_or_none, replaced, spread_out
from kvstore.wal.repair import bookies_of

if TYPE_CHECKING:
    from random import Random

CHECKS_MAX = 4
"""Maximum number of conflicts with other changes of the ledger's metadata before the attempt ends."""
PATIENCE, PATIENCE_TO_SPREAD = 3, 8
"""Number of attempts that may fail at a replacement bookie before another one is chosen. Every bookie that was tried
keeps copies that are never read. PATIENCE_TO_SPREAD applies if no copy is lost and copies only share a zone."""
FIRST_S, LED_S_MAX, AGAIN_S_MAX = 5.0, 30.0, 300.0
"""Delay in seconds after a failed attempt: FIRST_S after the first failure, doubled with each further failure, up to
AGAIN_S_MAX, or up to LED_S_MAX if the ledger's leader has yet to replace the bookie."""

NO_SPARE = "needs a replacement bookie: start one on another machine"
READ_ONLY = "has an under-replicated bookie that is read-only"
CHANGING = "was changed by others in every attempt"
HAS_GONE = "has a marked bookie that came back and has gone away again"
LOCK_LOST = "is no longer locked by this worker, or auto-recovery is off"
IS_LED = "is open: its leader replaces the bookie or rolls to a new ledger; try again later"
IN_GRACE = "is open: its writer may still replace the bookie; it is recovered after a while without changes"
DOUBTFUL = "is open, and a bookie of its last ensemble was set up after it, so that missing entries there prove nothing"
UNCOVERED = "is open, and too few bookies of its last ensemble are up to find its end"


@dataclass(frozen=True, slots=True)
class RegisteredBookies:
    """The bookies that are registered with the metadata store, by state, and their zones."""

    writable: frozenset[BookieId]
    readonly: frozenset[BookieId]
    zones: Mapping[BookieId, str]
    """Zones of the registered bookies and of those that were registered before."""

    @property
    def there(self) -> frozenset[BookieId]:
        return self.writable | self.readonly


@dataclass(frozen=True, slots=True)
class Writer:
    """The state of an open ledger's writer."""

    is_led: bool
    """True if the partition that the ledger was created for has a leader and lists the ledger."""
    lac: EntryId
    """The highest last-add-confirmed that any of the ledger's bookies knows, or NO_ENTRY if none of them knows one."""
    doubtful: frozenset[BookieId] = frozenset()
    """Bookies whose answer "no such entry" proves nothing, because their disk may be newer than the ledger."""


@dataclass(slots=True)
class AttemptHistory:
    """The state that is kept between repair attempts at one ledger."""

    tries: int = 0
    """Number of consecutive failed attempts."""
    reason: str = ""
    """Reason why the last attempt failed; kept so that each reason is logged only once."""
    refusals: int = 0
    """Number of attempts that failed because replacement bookies did not accept copies."""
    avoid: set[BookieId] = field(default_factory=set)
    """Replacement bookies that are no longer chosen, because they refused copies too often."""
    seen: tuple[LedgerState, Fragment, EntryId] | None = None
    """The last observed state of an open ledger, which has not changed since `seen_at`."""
    seen_at: float = 0.0


# ── events ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class MetadataRead:
    """Event: the ledger's metadata and the registered bookies were read."""

    metadata: LedgerMetadata
    version: int
    standing: RegisteredBookies


@dataclass(frozen=True, slots=True)
class Gone:
    """Event: the ledger was deleted."""


@dataclass(frozen=True, slots=True)
class WriterProbed:
    """Event: the state of the open ledger's writer is known."""

    writer: Writer


@dataclass(frozen=True, slots=True)
class Filled:
    """Event: all readable entries were copied to the bookies that accept copies."""

    unreadable: frozenset[EntryId] = frozenset()
    has_capacity: bool = True
    """False if a bookie that must be filled lacks entries and is read-only."""
    refused: frozenset[BookieId] = frozenset()
    """Bookies of the current ensemble that did not list their entries or did not accept copies."""


@dataclass(frozen=True, slots=True)
class MetadataWritten:
    """Event: the metadata now names the replacement bookies."""


@dataclass(frozen=True, slots=True)
class Overtaken:
    """Event: another process has changed the metadata, so the compare-and-set failed."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """Event: the ledger is closed."""


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """Event: a command failed with an error."""

    reason: str
    refused: frozenset[BookieId] = frozenset()
    """Bookies that did not accept copies."""


@dataclass(frozen=True, slots=True)
class LockLost:
    """Event: this worker no longer holds the lock. Another worker continues the repair."""


Event = MetadataRead | Gone | WriterProbed | Filled | MetadataWritten | Overtaken | Recovered | AttemptFailed | LockLost

# ── commands ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ReadMetadata:
    """Command: read the ledger's current metadata and the registered bookies."""


@dataclass(frozen=True, slots=True)
class ProbeWriter:
    """Command: find out the state of the open ledger's writer."""

    metadata: LedgerMetadata
    there: frozenset[BookieId]


@dataclass(frozen=True, slots=True)
class Fill:
    """Command: ask bookies which of the entries that `wanted` assigns to them they lack, and copy these entries to
    them."""

    metadata: LedgerMetadata
    wanted: LedgerMetadata
    last: EntryId
    newcomers: frozenset[BookieId]
    """Bookies that must answer and accept their copies, because `wanted` will name them."""
    must: frozenset[BookieId]
    """Bookies that must have all their copies before the mark is removed: the newcomers, and the bookies that the mark
    names."""
    may: frozenset[BookieId]
    """Other bookies that the metadata names. They get their missing copies if they answer."""
    takers: frozenset[BookieId]
    read_at: frozenset[BookieId]
    """Bookies whose copies must be read one by one, because these bookies also list entries that they cannot read."""


@dataclass(frozen=True, slots=True)
class WriteMetadata:
    """Command: replace the ledger's metadata by `wanted` if its version is still `version`."""

    wanted: LedgerMetadata
    version: int


@dataclass(frozen=True, slots=True)
class Recover:
    """Command: fence the ledger, find its end, wait until its leader's lease expires, and close it."""


@dataclass(frozen=True, slots=True)
class End:
    """Command: end this attempt."""

    is_complete: bool
    """True if the marked bookies lack nothing, so that the mark can be removed."""
    reason: str = ""
    again_s: float = 0.0


Command = ReadMetadata | ProbeWriter | Fill | WriteMetadata | Recover | End


class RepairMachine:
    """The state machine of one attempt to repair one ledger. `marked` are the bookies that the mark names; if it is
    empty, any bookie of the ledger may lack entries. `grace_s` is the number of seconds that an unchanged open ledger
    is left alone. `luck` returns a Random with the same seed in each attempt and worker, so that a second attempt
    chooses the bookies that the first one has filled."""

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
        self._checks = 0
        self._found: MetadataRead | None = None
        self._wanted: LedgerMetadata | None = None
        self._lacks_spare = False
        self._rest = ""
        """Reason why the ledger stays under-replicated after everything possible is done."""

    def start(self) -> Command:
        """Return the first command of the attempt."""
        return self._read_metadata()

    def handle(self, event: Event, now: float) -> Command:
        """Apply `event` and return the next command. Must not be called after an End. `now` is the boot-time clock in
        seconds."""
        match event:
            case MetadataRead():
                return self._plan(event)
            case Gone():
                return End(is_complete=True)
            case WriterProbed(writer):
                return self._judge(writer, now)
            case Filled():
                return self._filled(event)
            case MetadataWritten():
                return self._end(self._rest)
            case Overtaken():
                return self._read_metadata()
            case Recovered():
                return self._read_metadata()
            case AttemptFailed(reason, refused):
                return self._failed(reason, refused)
            case LockLost():
                return End(is_complete=False, reason=LOCK_LOST)
            case _:
                assert_never(event)

    def _read_metadata(self) -> Command:
        self._checks += 1
        self._wanted = None
        return ReadMetadata() if self._checks <= CHECKS_MAX else self._end(CHANGING)

    def _end(self, reason: str, again_s_max: float = AGAIN_S_MAX) -> Command:
        past = self._past
        if not reason:
            past.tries, past.refusals, past.avoid = 0, 0, set()
            return End(is_complete=True)
        again_s = min(FIRST_S * 2**past.tries, again_s_max)
        past.tries = min(past.tries + 1, 16)
        return End(is_complete=False, reason=reason, again_s=again_s)

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
        """Give the places of lost bookies in the fragments `changing` to other bookies, and spread copies over zones.
        Return the command that fills all bookies that are then named."""
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
            self._past.avoid = set()  # the next attempt may draw them again: they may be healthy by then
        self._rest = (
            f"has {len(unreadable)} entries without a good copy, the first is {min(unreadable)}"
            if unreadable
            else NO_SPARE
            if self._lacks_spare
            else f"has bookies that do not answer or take no copies: {', '.join(sorted(filled.refused))}"
            if filled.refused
            else READ_ONLY
            if not filled.has_capacity
            else ""
        )
        if wanted.fragments == metadata.fragments:
            return self._end(self._rest)
        return WriteMetadata(wanted, self._found.version)

    # ── ledgers that are not closed ───────────────────────────────────────────────────────────────────────────────────

    # docs/protocol.md A11, A12
    def _judge(self, writer: Writer, now: float) -> Command:
        """Decide whether the ledger still belongs to its writer or must be recovered."""
        assert self._found is not None
        metadata, standing, past = self._found.metadata, self._found.standing, self._past
        if writer.is_led:
            past.seen = None
            return self._end(IS_LED, LED_S_MAX)
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
            return End(is_complete=False, reason=IN_GRACE, again_s=left_s)
        if writer.doubtful.intersection(last.ensemble):
            return self._end(DOUBTFUL)
        up = {place for place, bookie in enumerate(last.ensemble) if bookie in standing.there}
        if not is_covered(up, metadata.quorum):
            return self._end(UNCOVERED)
        return Recover()

    # docs/protocol.md A3
    def end_of(self, end: End, there: Callable[[BookieId], bool]) -> End:
        """Return `end`, or a failed End if a marked bookie has kept its place but is no longer registered. The mark
        must then stay, because the auditor does not mark a ledger again for a bookie that its mark already names."""
        named = bookies_of(self._wanted) if self._wanted is not None else ()
        if end.is_complete and not all(there(each) for each in self._marked.intersection(named)):
            return End(is_complete=False, reason=HAS_GONE)
        return end

    def check(self) -> None:
        """Assert the invariants: only bookies change, and never the last fragment of a ledger that is not closed
        (docs/protocol.md, L1, L2)."""
        if self._found is None or self._wanted is None:
            return
        metadata = self._found.metadata
        assert replace(self._wanted, fragments=metadata.fragments) == metadata
        assert [each.first for each in self._wanted.fragments] == [each.first for each in metadata.fragments]
        assert metadata.state is LedgerState.CLOSED or self._wanted.fragments[-1] == metadata.fragments[-1]


def is_incarnation(bookie: BookieId) -> bool:
    """Return True if `bookie` is the id of a kvstore bookie. Such a bookie gets a new id when it loses its disk, and
    lists no entries that it cannot read (docs/protocol.md, L13, B14)."""
    return node_of_or_none(bookie) is not None


def _kept_where(metadata: LedgerMetadata, wanted: LedgerMetadata, unreadable: Collection[EntryId]) -> LedgerMetadata:
    """Return `wanted` with the fragments of `metadata` wherever an entry could not be copied, so that no bookie is
    named for entries that it does not have."""
    stays = {metadata.fragment_of(entry).first for entry in unreadable}
    pairs = zip(metadata.fragments, wanted.fragments, strict=True)
    return replace(wanted, fragments=tuple(before if before.first in stays else after for before, after in pairs))
