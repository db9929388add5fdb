"""Abandons the unrecoverable entries of a ledger when an operator asks for it. The remaining entries get all their
copies. The lost entries are recorded in the ledger's metadata, and repair no longer searches for them
(docs/protocol.md, A14).

Only registered bookies are asked, and all of them must answer. If the ledger is not closed, it is fenced on these
bookies and closed after the last entry that any of them has or knows to be confirmed; other bookies may have had later
entries. Because a bookie may go away while the operator decides, no entry is abandoned that the operator was not shown.
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
"""Statuses that prove that a bookie has a damaged copy or has lost its copy. Any other refusal may be temporary."""
HOLE_MAX = 8
"""Number of consecutive entries without any copy after which a ledger that was not closed is considered to end."""
RETRY_LATER = "nothing more is abandoned; start every bookie that can be started, and run the command again"


@dataclass(frozen=True, slots=True)
class Loss:
    """The entries of one ledger that are lost, or would be lost if the operator abandons them."""

    ledger: LedgerId
    state: LedgerState
    last: EntryId
    """The ledger's last entry, or its last known entry if the ledger is not closed."""
    lost: tuple[EntryId, ...]
    away: tuple[BookieId, ...]
    """Bookies that the ledger names but that are not registered. Entries that only these bookies have are lost."""
    unsure: tuple[BookieId, ...] = ()
    """Bookies that neither returned an entry nor denied having it."""

    @property
    def text(self) -> str:
        """The ids of the lost entries as text, for example `3-5,9`."""
        return text_of(runs_of(self.lost))


class LedgerAbandonment:
    """Finds and abandons lost entries. Calls raise MetadataError, InvalidRequest if the ledger has a leader, and
    Unavailable if a registered bookie does not answer or if a bookie came back or went away during the call."""

    def __init__(self, repairer: LedgerRepairer, marks: Underreplication, *, worker: str) -> None:
        self._repairer, self._marks, self._worker = repairer, marks, worker
        self._ports = repairer.ports
        self._registered = RegistrationClient(repairer.store)

    async def find_loss(self, ledger: LedgerId) -> Loss:
        """Return the entries that would be lost, without changing or fencing the ledger. Reads every entry of the
        ledger."""
        metadata, _ = await self._ports.ledgers.read_latest(ledger)
        asking = _BookieQueries(self._ports, metadata)
        if metadata.state is LedgerState.CLOSED:
            return await asking.loss(metadata.last_entry)
        partition = owner_of(metadata)
        if partition is not None and await self._repairer.is_led(partition):
            raise InvalidRequest(f"ledger {ledger} belongs to partition {partition}, which has a leader")
        return await asking.loss(await asking.end(fence=False))

    async def abandon(self, ledger: LedgerId, now_ms: int, agreed: Loss) -> tuple[Loss, RepairOutcome]:
        """Close the ledger if it is open, record the lost entries, and copy the rest. `agreed` is the result of
        `find_loss` that the operator has accepted; `now_ms` is the wall clock. Returns what was lost, and the outcome
        of the repair. Raises VersionConflict if another worker is repairing the ledger, and Unavailable if more would
        be lost than `agreed`."""
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
        log.warning("abandoned lost entries ledger=%d entries=%s", ledger, loss.text or "none")
        await self._marks.mark(ledger, loss.away or bookies_of(metadata), now_ms)
        lock = await self._marks.lock(ledger, self._worker)
        if lock is None:
            raise VersionConflict(f"another worker repairs ledger {ledger}; it now knows the lost entries")
        outcome = await self._repairer.repair(
            ledger, lock.mark.replicas, AttemptHistory(), is_held=lambda: lock.is_held
        )
        if outcome.is_complete:
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
                raise VersionConflict(f"ledger {metadata.ledger} was changed while it was being closed")
            return recorded.closed(end, last.length if last is not None else 0)

        await self._refuse_if_back(asking)
        recorded, _ = await self._ports.ledgers.update(metadata.ledger, closed)
        return recorded

    async def _refuse_if_back(self, asking: _BookieQueries) -> None:
        """Raise Unavailable if a bookie that was away when the others were asked is registered now."""
        back = (await self._registered.names()).intersection(asking.away)
        if back:
            raise Unavailable(
                f"bookie {', '.join(sorted(back))} is back and may have the lost entries; run the command again"
            )


def _refuse_more(found: Loss, agreed: Loss) -> None:
    """Raise Unavailable if more is lost than the operator has agreed to."""
    _refuse_if_gone(found.away, agreed)
    if agreed.state is not LedgerState.CLOSED:
        _refuse_earlier_end(found.last, agreed)
    if more := set(found.lost).difference(agreed.lost):
        reason = f"entries {text_of(runs_of(more))} of ledger {found.ledger} have become unreadable"
        raise Unavailable(f"{reason}: {RETRY_LATER}")


def _refuse_if_gone(away: tuple[BookieId, ...], agreed: Loss) -> None:
    """Raise Unavailable if a bookie that was registered before is away now. Entries that only this bookie has would be
    lost too."""
    if gone := set(away).difference(agreed.away):
        raise Unavailable(f"bookie {', '.join(sorted(gone))} was registered and has gone away: {RETRY_LATER}")


def _refuse_earlier_end(end: EntryId, agreed: Loss) -> None:
    """Raise Unavailable if a ledger that is not closed now seems to end before an entry that was found earlier."""
    if end < agreed.last:
        raise Unavailable(
            f"expected ledger {agreed.ledger} to reach entry {agreed.last} as before, got last entry {end}; try again"
        )


class _BookieQueries:
    """Queries to those bookies of a ledger that were registered when the instance was created."""

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
        """Return the highest entry that any bookie has or knows as its last-add-confirmed. The search continues past
        holes of fewer than HOLE_MAX entries."""
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
        """Return the bookie's last-add-confirmed, or NO_ENTRY if its copy is damaged or lost. Raises Unavailable if the
        bookie does not answer; otherwise a short silence could cut off acknowledged entries."""
        try:
            return await self._ports.bookies.read_lac(bookie, self._metadata.ledger, self._digest)
        except BookieError as error:
            if isinstance(error, AnsweredError) and error.status in NO_GOOD_COPY_STATUSES:
                return NO_ENTRY
            raise Unavailable(f"bookie {bookie} is registered and does not answer; try again: {error}") from error

    def _there(self, bookies: tuple[BookieId, ...]) -> list[BookieId]:
        return [bookie for bookie in bookies if bookie not in self.away]

    async def _good(self, entry: EntryId, *, fence: bool = False) -> Packet | None:
        """Return a good copy of the entry, or None if no registered bookie has one."""
        for bookie in self._there(self._metadata.write_set(entry)):
            try:
                found = await self._read(bookie, entry, fence=fence)
                if found is not None:
                    return self._digest.open(self._metadata.ledger, entry, found)
            except Corrupted:
                continue
        return None

    async def _read(self, bookie: BookieId, entry: EntryId, *, fence: bool) -> bytes | None:
        """Return the bookie's copy, or None if it has none or cannot read it. Raises Unavailable if the bookie gives
        any other answer, or if it refuses only the fence."""
        key = master_key(self._metadata.password) if fence else None
        try:
            answer = await self._ports.bookies.read(
                bookie, self._metadata.ledger, entry, fence_key=key, priority=RECOVERY_PRIORITY
            )
        except LedgerError as error:
            if not isinstance(error, AnsweredError) or error.status not in NO_GOOD_COPY_STATUSES:
                raise Unavailable(f"bookie {bookie} is registered and does not answer; try again: {error}") from error
            if error.status is Status.UNKNOWN_LEDGER_STATE:
                self._unsure.add(bookie)
            if fence:
                await self._refuse_if_read_unfenced(bookie, entry)
            return None
        return answer.packet

    async def _refuse_if_read_unfenced(self, bookie: BookieId, entry: EntryId) -> None:
        """Raise Unavailable if the bookie can read the entry without fencing. In that case the fence itself has failed,
        and without a fence the bookie's answer cannot end the ledger (docs/protocol.md, L5)."""
        try:
            await self._ports.bookies.read(bookie, self._metadata.ledger, entry, priority=RECOVERY_PRIORITY)
        except LedgerError as error:
            if isinstance(error, AnsweredError) and error.status in NO_GOOD_COPY_STATUSES:
                return
            raise Unavailable(f"bookie {bookie} is registered and does not answer; try again: {error}") from error
        raise Unavailable(f"bookie {bookie} cannot fence the ledger; free space on its disk, and run the command again")
