"""Gives up what cannot be recovered of a ledger, at an operator's word: what is left of it gets all its copies, and
what is lost is noted and not looked for any more (docs/protocol.md, A14).

Only bookies that are registered are asked, and all of them must answer. A ledger that is not closed is fenced at them
and closed behind the last entry that any of them has, or knows to be confirmed: others may have had more.
"""

from __future__ import annotations

import itertools
import logging
from contextlib import suppress
from dataclasses import dataclass

from kvstore.autorecovery.mender import Mended, Mender
from kvstore.autorecovery.mending import Past
from kvstore.errors import BookieError, Corrupted, InvalidRequest, LedgerError, Unavailable, VersionConflict
from kvstore.meta.lost import runs_of, text_of, with_lost
from kvstore.meta.underreplication import Underreplication
from kvstore.proto.bookkeeper import RECOVERY_PRIORITY, Status
from kvstore.proto.digest import EntryDigest, Packet, master_key
from kvstore.types import NO_ENTRY, BookieId, EntryId, LedgerId, LedgerMetadata, LedgerState
from kvstore.wal.connection import AnsweredError
from kvstore.wal.creator import owner_of
from kvstore.wal.ensembles import in_recovery
from kvstore.wal.repair import bookies_of

log = logging.getLogger(__name__)

NO_GOOD_COPY = (Status.IO_ERROR, Status.UNKNOWN_LEDGER_STATE)
"""Answers of a bookie that has a damaged copy, or has lost what it had. Any other refusal may be over in a moment."""
HOLE_MAX = 8
"""So many entries that nobody has, one after the other, end a ledger that was not closed."""


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

    @property
    def text(self) -> str:
        """The lost entries, for people and scripts: `3-5,9`."""
        return text_of(runs_of(self.lost))


class GivingUp:
    """Calls raise MetadataError; Unavailable if a registered bookie does not answer; InvalidRequest for a ledger that
    has a leader."""

    def __init__(self, mender: Mender, marks: Underreplication, *, worker: str) -> None:
        self._mender, self._marks, self._worker = mender, marks, worker
        self._ports = mender.ports

    async def look(self, ledger: LedgerId) -> Loss:
        """Find what would be lost, as far as can be seen without fencing."""
        metadata, _ = await self._ports.ledgers.read_latest(ledger)
        if metadata.state is LedgerState.CLOSED:
            return await self._loss(metadata, metadata.last_entry)
        partition = owner_of(metadata)
        if partition is not None and await self._mender.is_led(partition):
            raise InvalidRequest(f"ledger {ledger} is that of partition {partition}, which has a leader")
        return await self._loss(metadata, await self._end(metadata, fence=False))

    async def give_up(self, ledger: LedgerId, now_ms: int) -> tuple[Loss, Mended]:
        """Close the ledger if it is not, note what is lost, and have the rest copied. Raises VersionConflict if others
        repair it just now."""
        await self.look(ledger)
        metadata, _ = await self._ports.ledgers.update(ledger, in_recovery)
        if metadata.state is not LedgerState.CLOSED:
            metadata = await self._close(metadata)
        loss = await self._loss(metadata, metadata.last_entry)
        await self._ports.ledgers.update(ledger, lambda recorded: with_lost(recorded, loss.lost))
        log.warning("ledger=%d is given up, lost entries: %s", ledger, loss.text or "none")
        await self._marks.mark(ledger, loss.away or bookies_of(metadata), now_ms)
        lock = await self._marks.lock(ledger, self._worker)
        if lock is None:
            raise VersionConflict(f"ledger {ledger} is being repaired by others, which now know what is lost")
        mended = await self._mender.mend(ledger, lock.mark.replicas, Past(), is_held=lambda: lock.is_held)
        if mended.is_whole:
            await self._marks.mark_replicated(lock, lock.mark.version)
        else:
            await lock.release()
        return loss, mended

    async def _close(self, metadata: LedgerMetadata) -> LedgerMetadata:
        end = await self._end(metadata, fence=True)
        fenced_at = self._ports.clock.now()
        last = await self._last_readable(metadata, end)
        await self._mender.wait_out_lease(owner_of(metadata), fenced_at)

        def closed(recorded: LedgerMetadata) -> LedgerMetadata:
            if recorded.state is LedgerState.CLOSED:
                return recorded
            if recorded.fragments != metadata.fragments:
                raise VersionConflict(f"ledger {metadata.ledger} has changed while it was given up")
            return recorded.closed(end, last.length if last is not None else 0)

        recorded, _ = await self._ports.ledgers.update(metadata.ledger, closed)
        return recorded

    async def _end(self, metadata: LedgerMetadata, *, fence: bool) -> EntryId:
        """Behind the last-add-confirmed that any bookie knows, and every entry that any of them has."""
        last = metadata.fragments[-1]
        digest = EntryDigest(metadata.digest, metadata.password)
        end = EntryId(last.first - 1)
        for bookie in self._there(last.ensemble):
            found = await self._read(metadata, bookie, NO_ENTRY, fence=fence)
            with suppress(Corrupted):
                end = max(end, digest.open(metadata.ledger, None, found).lac) if found is not None else end
            end = max(end, await self._lac(metadata.ledger, bookie, digest))
        for entry in itertools.count(end + 1):
            if await self._good(metadata, EntryId(entry), fence=fence) is not None:
                end = EntryId(entry)
            elif entry - end >= HOLE_MAX:
                return end
        raise AssertionError("count() does not end")

    async def _lac(self, ledger: LedgerId, bookie: BookieId, digest: EntryDigest) -> EntryId:
        """The last-add-confirmed that the bookie knows; NO_ENTRY if it cannot tell. Raises Unavailable if it does not
        answer: entries that were acknowledged would be cut off for a moment's silence."""
        try:
            return await self._ports.bookies.read_lac(bookie, ledger, digest)
        except BookieError as error:
            if isinstance(error, AnsweredError) and error.status in NO_GOOD_COPY:
                return NO_ENTRY
            raise Unavailable(f"bookie {bookie} is registered and does not answer, try again: {error}") from error

    async def _loss(self, metadata: LedgerMetadata, last: EntryId) -> Loss:
        lost = [each for each in map(EntryId, range(last + 1)) if await self._good(metadata, each) is None]
        away = [bookie for bookie in bookies_of(metadata) if not self._ports.choice.is_registered(bookie)]
        return Loss(metadata.ledger, metadata.state, last, tuple(lost), tuple(away))

    async def _last_readable(self, metadata: LedgerMetadata, end: EntryId) -> Packet | None:
        for entry in range(end, NO_ENTRY, -1):
            if (found := await self._good(metadata, EntryId(entry))) is not None:
                return found
        return None

    def _there(self, bookies: tuple[BookieId, ...]) -> list[BookieId]:
        return [bookie for bookie in bookies if self._ports.choice.is_registered(bookie)]

    async def _good(self, metadata: LedgerMetadata, entry: EntryId, *, fence: bool = False) -> Packet | None:
        """A good copy of the entry, if any registered bookie has one."""
        digest = EntryDigest(metadata.digest, metadata.password)
        for bookie in self._there(metadata.write_set(entry)):
            try:
                found = await self._read(metadata, bookie, entry, fence=fence)
                if found is not None:
                    return digest.open(metadata.ledger, entry, found)
            except Corrupted:
                continue
        return None

    async def _read(self, metadata: LedgerMetadata, bookie: BookieId, entry: EntryId, *, fence: bool) -> bytes | None:
        """The bookie's copy; None if it has none, or cannot read it. Raises Unavailable for any other answer."""
        key = master_key(metadata.password) if fence else None
        try:
            answer = await self._ports.bookies.read(
                bookie, metadata.ledger, entry, fence_key=key, priority=RECOVERY_PRIORITY
            )
        except LedgerError as error:
            if isinstance(error, AnsweredError) and error.status in NO_GOOD_COPY:
                return None
            raise Unavailable(f"bookie {bookie} is registered and does not answer, try again: {error}") from error
        return answer.packet
