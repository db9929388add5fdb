"""Gives up what cannot be recovered of a ledger, at an operator's word: what is left of it gets all its copies, and
what is lost is noted and not looked for any more (docs/protocol.md, A14).

Only bookies that are registered are asked, and all of them must answer. A ledger that is not closed is fenced at them
and closed behind the last entry that any of them has, or knows to be confirmed: others may have had more. Nothing is
given up that the operator was not shown: a bookie may go away while he thinks.
"""

from __future__ import annotations

import itertools
import logging
from contextlib import suppress
from dataclasses import dataclass

from kvstore.autorecovery.repair_machine import AttemptHistory
from kvstore.autorecovery.repairer import LedgerRepairer, RepairOutcome
from kvstore.errors import BookieError, Corrupted, InvalidRequest, LedgerError, Unavailable, VersionConflict
from kvstore.meta.lost import runs_of, text_of, with_lost
from kvstore.meta.registration import RegistrationClient
from kvstore.meta.underreplication import Underreplication
from kvstore.proto.bookkeeper import RECOVERY_PRIORITY, Status
from kvstore.proto.digest import EntryDigest, Packet, master_key
from kvstore.types import NO_ENTRY, BookieId, EntryId, LedgerId, LedgerMetadata, LedgerState
from kvstore.wal.connection import AnsweredError
from kvstore.wal.creator import owner_of
from kvstore.wal.ensembles import in_recovery
from kvstore.wal.handle import LedgerPorts
from kvstore.wal.repair import bookies_of

log = logging.getLogger(__name__)

NO_GOOD_COPY_STATUSES = (Status.IO_ERROR, Status.UNKNOWN_LEDGER_STATE)
"""Answers of a bookie that has a damaged copy, or has lost what it had. Any other refusal may be over in a moment."""
HOLE_MAX = 8
"""So many entries that nobody has, one after the other, end a ledger that was not closed."""
LOOK_AGAIN = "it goes no further; start every bookie that can be started, and call it again"


@dataclass(frozen=True, slots=True)
class Loss:
    """A ledger, and the entries of it that are lost or would be."""

    ledger: LedgerId
    state: LedgerState
    last: EntryId
    """The last entry; of one that is not closed, the last that is known of."""
    lost: tuple[EntryId, ...]
    away: tuple[BookieId, ...]
    """Bookies that the metadata name and that are not registered: what only they have is lost."""
    unsure: tuple[BookieId, ...] = ()
    """Bookies that said of an entry neither that they have it nor that they have not."""

    @property
    def text(self) -> str:
        """The lost entries, for people and scripts: `3-5,9`."""
        return text_of(runs_of(self.lost))


class LedgerAbandonment:
    """Calls raise MetadataError; Unavailable if a registered bookie does not answer, has come back or gone away
    meanwhile; InvalidRequest for a ledger that has a leader."""

    def __init__(self, repairer: LedgerRepairer, marks: Underreplication, *, worker: str) -> None:
        self._repairer, self._marks, self._worker = repairer, marks, worker
        self._ports = repairer.ports
        self._registered = RegistrationClient(repairer.store)

    async def find_loss(self, ledger: LedgerId) -> Loss:
        """Find what would be lost, as far as can be seen without fencing."""
        metadata, _ = await self._ports.ledgers.read_latest(ledger)
        asking = _BookieQueries(self._ports, metadata)
        if metadata.state is LedgerState.CLOSED:
            return await asking.loss(metadata.last_entry)
        partition = owner_of(metadata)
        if partition is not None and await self._repairer.is_led(partition):
            raise InvalidRequest(f"ledger {ledger} is that of partition {partition}, which has a leader")
        return await asking.loss(await asking.end(fence=False))

    async def abandon(self, ledger: LedgerId, now_ms: int, agreed: Loss) -> tuple[Loss, RepairOutcome]:
        """Close the ledger if it is not, note what is lost, and have the rest copied. Raises VersionConflict if others
        repair it just now; Unavailable if more would be lost than was `agreed`, the answer of `look`."""
        seen = await self.find_loss(ledger)
        _refuse_more(seen, agreed)
        metadata, _ = await self._ports.ledgers.update(ledger, in_recovery)
        if metadata.state is not LedgerState.CLOSED:
            metadata = await self._close(metadata, seen)
        asking = _BookieQueries(self._ports, metadata)
        loss = await asking.loss(metadata.last_entry)
        _refuse_more(loss, agreed)
        await self._refuse_if_back(asking)
        await self._ports.ledgers.update(ledger, lambda recorded: with_lost(recorded, loss.lost))
        log.warning("ledger=%d is given up, lost entries: %s", ledger, loss.text or "none")
        await self._marks.mark(ledger, loss.away or bookies_of(metadata), now_ms)
        lock = await self._marks.lock(ledger, self._worker)
        if lock is None:
            raise VersionConflict(f"ledger {ledger} is being repaired by others, which now know what is lost")
        outcome = await self._repairer.repair(
            ledger, lock.mark.replicas, AttemptHistory(), is_held=lambda: lock.is_held
        )
        if outcome.is_whole:
            await self._marks.mark_replicated(lock, lock.mark.version)
        else:
            await lock.release()
        return loss, outcome

    async def _close(self, metadata: LedgerMetadata, seen: Loss) -> LedgerMetadata:
        asking = _BookieQueries(self._ports, metadata)
        _refuse_if_gone(asking.away, seen)
        end = await asking.end(fence=True)
        _refuse_earlier_end(end, seen)
        fenced_at = self._ports.clock.now()
        last = await asking.last_readable(end)
        await self._repairer.wait_out_lease(owner_of(metadata), fenced_at)

        def closed(recorded: LedgerMetadata) -> LedgerMetadata:
            if recorded.state is LedgerState.CLOSED:
                return recorded
            if recorded.fragments != metadata.fragments:
                raise VersionConflict(f"ledger {metadata.ledger} has changed while it was given up")
            return recorded.closed(end, last.length if last is not None else 0)

        await self._refuse_if_back(asking)
        recorded, _ = await self._ports.ledgers.update(metadata.ledger, closed)
        return recorded

    async def _refuse_if_back(self, asking: _BookieQueries) -> None:
        """Raise Unavailable if a bookie is registered that was away when it would have been asked."""
        back = (await self._registered.names()).intersection(asking.away)
        if back:
            raise Unavailable(
                f"bookie {', '.join(sorted(back))} is back, and may have what would be lost: call it again"
            )


def _refuse_more(found: Loss, agreed: Loss) -> None:
    """Raise Unavailable if more is lost than was agreed to."""
    _refuse_if_gone(found.away, agreed)
    if agreed.state is not LedgerState.CLOSED:
        _refuse_earlier_end(found.last, agreed)
    if more := set(found.lost).difference(agreed.lost):
        said = f"nobody can read {text_of(runs_of(more))} of ledger {found.ledger} now, which was not said before"
        raise Unavailable(f"{said}: {LOOK_AGAIN}")


def _refuse_if_gone(away: tuple[BookieId, ...], agreed: Loss) -> None:
    """Raise Unavailable if a bookie is away that was registered before: what only it has would be lost, too."""
    if gone := set(away).difference(agreed.away):
        raise Unavailable(f"bookie {', '.join(sorted(gone))} was registered, and has gone away since: {LOOK_AGAIN}")


def _refuse_earlier_end(end: EntryId, agreed: Loss) -> None:
    """Raise Unavailable if a ledger that is not closed seems to end before what was found there."""
    if end < agreed.last:
        raise Unavailable(
            f"entry {agreed.last} of ledger {agreed.ledger} was there, and now the last is {end}: try again"
        )


class _BookieQueries:
    """The bookies of a ledger that are registered, as far as is known, as this is made, and their answers."""

    def __init__(self, ports: LedgerPorts, metadata: LedgerMetadata) -> None:
        self._ports, self._metadata = ports, metadata
        self._digest = EntryDigest(metadata.digest, metadata.password)
        self._unsure: set[BookieId] = set()
        self.away = tuple(each for each in bookies_of(metadata) if not ports.choice.is_registered(each))

    async def loss(self, last: EntryId) -> Loss:
        lost = [each for each in map(EntryId, range(last + 1)) if await self._good(each) is None]
        return Loss(
            self._metadata.ledger, self._metadata.state, last, tuple(lost), self.away, tuple(sorted(self._unsure))
        )

    async def end(self, *, fence: bool) -> EntryId:
        """Behind the last-add-confirmed that any bookie knows, and every entry that any of them has."""
        last = self._metadata.fragments[-1]
        end = EntryId(last.first - 1)
        for bookie in self._there(last.ensemble):
            found = await self._read(bookie, NO_ENTRY, fence=fence)
            with suppress(Corrupted):
                lac = self._digest.open(self._metadata.ledger, None, found).lac if found is not None else NO_ENTRY
                end = max(end, lac)
            end = max(end, await self._lac(bookie))
        for entry in itertools.count(end + 1):
            if await self._good(EntryId(entry), fence=fence) is not None:
                end = EntryId(entry)
            elif entry - end >= HOLE_MAX:
                return end
        raise AssertionError("count() does not end")

    async def last_readable(self, end: EntryId) -> Packet | None:
        for entry in range(end, NO_ENTRY, -1):
            if (found := await self._good(EntryId(entry))) is not None:
                return found
        return None

    async def _lac(self, bookie: BookieId) -> EntryId:
        """The last-add-confirmed that the bookie knows; NO_ENTRY if it cannot tell. Raises Unavailable if it does not
        answer: entries that were acknowledged would be cut off for a moment's silence."""
        try:
            return await self._ports.bookies.read_lac(bookie, self._metadata.ledger, self._digest)
        except BookieError as error:
            if isinstance(error, AnsweredError) and error.status in NO_GOOD_COPY_STATUSES:
                return NO_ENTRY
            raise Unavailable(f"bookie {bookie} is registered and does not answer, try again: {error}") from error

    def _there(self, bookies: tuple[BookieId, ...]) -> list[BookieId]:
        return [bookie for bookie in bookies if bookie not in self.away]

    async def _good(self, entry: EntryId, *, fence: bool = False) -> Packet | None:
        """A good copy of the entry, if any registered bookie has one."""
        for bookie in self._there(self._metadata.write_set(entry)):
            try:
                found = await self._read(bookie, entry, fence=fence)
                if found is not None:
                    return self._digest.open(self._metadata.ledger, entry, found)
            except Corrupted:
                continue
        return None

    async def _read(self, bookie: BookieId, entry: EntryId, *, fence: bool) -> bytes | None:
        """The bookie's copy; None if it has none, or cannot read it. Raises Unavailable for any other answer, and if it
        refuses the fence alone."""
        key = master_key(self._metadata.password) if fence else None
        try:
            answer = await self._ports.bookies.read(
                bookie, self._metadata.ledger, entry, fence_key=key, priority=RECOVERY_PRIORITY
            )
        except LedgerError as error:
            if not isinstance(error, AnsweredError) or error.status not in NO_GOOD_COPY_STATUSES:
                raise Unavailable(f"bookie {bookie} is registered and does not answer, try again: {error}") from error
            if error.status is Status.UNKNOWN_LEDGER_STATE:
                self._unsure.add(bookie)
            if fence:
                await self._refuse_if_read_unfenced(bookie, entry)
            return None
        return answer.packet

    async def _refuse_if_read_unfenced(self, bookie: BookieId, entry: EntryId) -> None:
        """Raise Unavailable if the entry is not what the bookie could not read: then that was the fence, without which
        its answer ends nothing (docs/protocol.md, L5)."""
        try:
            await self._ports.bookies.read(bookie, self._metadata.ledger, entry, priority=RECOVERY_PRIORITY)
        except LedgerError as error:
            if isinstance(error, AnsweredError) and error.status in NO_GOOD_COPY_STATUSES:
                return
            raise Unavailable(f"bookie {bookie} is registered and does not answer, try again: {error}") from error
        raise Unavailable(f"bookie {bookie} cannot be fenced: make room on its disk, and call it again")
