"""Copies entries of one ledger to bookies that lack them: several entries at once, within a limit in bytes per second.
Copies are recovery adds, which bookies accept on fenced ledgers. Each entry is read from any bookie that has a good
copy (docs/protocol.md, W8, W11)."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from kvstore.env.ports import Nursery
from kvstore.errors import BookieError, Corrupted, LedgerError, StoreError
from kvstore.meta.lost import given_up
from kvstore.proto.availability import HeldEntries
from kvstore.proto.digest import Packet, master_key
from kvstore.types import BookieId, EntryId, LedgerId, LedgerMetadata
from kvstore.wal.connection import AnsweredError
from kvstore.wal.copies.pace import CopyPace
from kvstore.wal.entry_reader import BATCH_BYTES, EntryReader
from kvstore.wal.ports import BookieClient
from kvstore.wal.read_ahead import ENTRIES_MAX, ReadAhead
from kvstore.wal.repair import Missing, missing_copies

log = logging.getLogger(__name__)

AT_ONCE_MAX = 16
"""Number of entries copied concurrently, to hide the round trip and the sync. Takes up to 16 MiB of memory for the
largest entries."""
ADD_TIMEOUT_S = 5.0
UNREADABLE_MAX = 1_000
"""Number of unreadable entries after which the rest of their fragment is skipped, because each of them may wait for a
bookie that does not answer. Once a ledger has this many, the first unreadable entry in each further fragment has this
effect."""


class CopyFault(NamedTuple):
    """A fault in one bookie's copy of an entry."""

    entry: EntryId
    what: str
    is_certain: bool
    """True if the bookie's answer proves the fault. False if the bookie gave no definite answer or could not be
    asked."""


class Copying:
    """Copies the entries of one ledger. `metadata` says which bookies have them."""

    def __init__(
        self,
        metadata: LedgerMetadata,
        bookies: BookieClient,
        nursery: Nursery,
        pace: CopyPace,
        *,
        own: BookieId | None = None,
    ) -> None:
        self.copied = 0
        """Number of copies made."""
        self.copied_bytes = 0
        self.unreadable: dict[EntryId, LedgerError] = {}
        """The entries without a good copy, each with the reason. Filled only by `fill` with `skip_unreadable`."""
        self.refused: set[BookieId] = set()
        """Bookies that refused a copy or did not list their entries."""
        self.is_given_up = given_up(metadata)
        """Returns True if an entry was abandoned, so that no copy of it is needed."""
        self.reader = EntryReader(metadata, bookies, nursery, own)
        self._bookies, self._nursery, self._pace = bookies, nursery, pace
        self._key = master_key(metadata.password)
        self._skip_unreadable = False
        self._may_refuse: Collection[BookieId] = ()
        self._unreadable_in: Counter[EntryId] = Counter()
        """Number of unreadable entries in each fragment, by the fragment's first entry."""

    async def held(self, at: Collection[BookieId]) -> dict[BookieId, HeldEntries]:
        """Return the entries that each of the bookies holds. Raises LedgerError if any bookie does not list them."""
        found = {}
        for bookie in sorted(at):
            try:
                found[bookie] = await self._bookies.entries(bookie, self.reader.metadata.ledger)
            except LedgerError:
                self.refused.add(bookie)
                raise
        return found

    async def held_by_responsive(self, at: Collection[BookieId]) -> dict[BookieId, HeldEntries]:
        """Return the entries that each of the bookies holds. Bookies that do not list them are left out, and recorded
        as refusing."""
        found: dict[BookieId, HeldEntries] = {}
        for bookie in sorted(at):
            with suppress(LedgerError):
                found |= await self.held([bookie])
        return found

    async def fill(
        self,
        wanted: LedgerMetadata,
        last: EntryId,
        held: Mapping[BookieId, HeldEntries],
        takers: Collection[BookieId],
        noticed: Callable[[list[Missing]], None] = lambda _: None,
        *,
        skip_unreadable: bool = False,
        may_refuse: Collection[BookieId] = (),
    ) -> int:
        """Find the entries up to `last` that bookies in `held` lack although `wanted` names them, and copy these
        entries to the bookies that are also in `takers`. Return the number of copies. `noticed` is called with the
        missing copies of each slice.

        With `skip_unreadable`, entries that cannot be read are recorded and skipped. If a bookie in `may_refuse`
        refuses a copy, only the copying to this bookie ends. Raises StoreError for any other error; copies made before
        remain.
        """
        ledger, before = wanted.ledger, self.copied
        self._skip_unreadable, self._may_refuse = skip_unreadable, may_refuse
        for missing in missing_copies(wanted, last, held):
            if missing and not self._is_hopeless(missing[0].entry):
                noticed(missing)
                await self._copy_all([each for each in missing if each.bookie in takers and self._takes(each.bookie)])
            await asyncio.sleep(0)  # let other tasks run
        if self.copied > before:
            log.info("copies made ledger=%d copies=%d", ledger, self.copied - before)
        return self.copied - before

    async def copy(self, entry: EntryId, bookies: Sequence[BookieId]) -> None:
        """Copy one entry to each of the bookies, within the rate limit. Raises StoreError."""
        await self._give(entry, await self._packet(entry), bookies)

    async def copy_if_readable(self, entry: EntryId, bookie: BookieId) -> None:
        """Copy one entry to one bookie, or record the entry as unreadable. Raises StoreError."""
        try:
            packet = await self._packet(entry)
        except LedgerError as error:
            if len(self.unreadable) >= UNREADABLE_MAX:
                raise
            self.unreadable[entry] = error
            return
        await self._give(entry, packet, [bookie])

    def _takes(self, bookie: BookieId) -> bool:
        return bookie not in self.refused or bookie not in self._may_refuse

    def _is_hopeless(self, entry: EntryId) -> bool:
        """Return True if so many entries of the fragment are unreadable that its remaining entries are skipped."""
        found = self._unreadable_in[self.reader.metadata.fragment_of(entry).first]
        return found >= (UNREADABLE_MAX if len(self.unreadable) < UNREADABLE_MAX else 1)

    async def faults(
        self, bookie: BookieId, last: EntryId, noticed: Callable[[EntryId], None] = lambda _: None
    ) -> AsyncIterator[CopyFault]:
        """Read every entry up to `last` that the bookie should have, within the rate limit, and yield the faults.
        `noticed` is called with each entry to report progress."""
        metadata = self.reader.metadata
        named = (EntryId(each) for each in range(last + 1) if bookie in metadata.write_set(EntryId(each)))
        while entries := list(itertools.islice(named, ENTRIES_MAX)):
            noticed(entries[0])
            good = await self._good_copies(bookie, entries)
            left = iter([each for each in entries if each not in good])
            while some := list(itertools.islice(left, AT_ONCE_MAX)):
                tasks = [self._nursery.spawn(self._fault(bookie, each), name=f"check {each}") for each in some]
                for found in [await task for task in tasks]:
                    if found is not None:
                        yield found

    async def _good_copies(self, bookie: BookieId, entries: Sequence[EntryId]) -> Collection[EntryId]:
        """Return the entries whose intact packets the bookie returns in one batch. The other entries must be read
        alone."""
        ledger = self.reader.metadata.ledger
        try:
            packets = await self._bookies.read_batch(
                bookie, ledger, range(entries[0], entries[-1] + 1), bytes_max=BATCH_BYTES
            )
        except BookieError:
            return ()
        await self._pace.spend(sum(map(len, packets)))
        return self.reader.digest.open_those(ledger, packets, set(entries)).keys()

    async def _fault(self, bookie: BookieId, entry: EntryId) -> CopyFault | None:
        ledger = self.reader.metadata.ledger
        try:
            answer = await self._bookies.read(bookie, ledger, entry)
            if answer.packet is None:
                return CopyFault(entry, "missing", is_certain=True)
            await self._pace.spend(len(answer.packet))
            self.reader.digest.open(ledger, entry, answer.packet)
        except Corrupted:
            return CopyFault(entry, "damaged", is_certain=True)
        except LedgerError as error:
            return CopyFault(entry, f"unreadable: {error}", is_certain=isinstance(error, AnsweredError))
        return None

    async def _packet(self, entry: EntryId, ahead: ReadAhead[Packet] | None = None) -> bytes:
        """Return the entry's packet. Raises LedgerError."""
        found = await ahead.take(entry) if ahead is not None else None
        if found is None:
            found = await self.reader.read(entry)
        return self.reader.digest.packet(self.reader.metadata.ledger, entry, found.lac, found.length, found.payload)

    async def _give(self, entry: EntryId, packet: bytes, bookies: Sequence[BookieId]) -> None:
        await self._pace.spend(len(packet) * len(bookies))
        for bookie in filter(self._takes, bookies):
            try:
                await self._add(bookie, self.reader.metadata.ledger, entry, packet)
            except StoreError as error:
                self.refused.add(bookie)
                if bookie not in self._may_refuse:
                    raise
                log.info("entry not copied ledger=%d entry=%d error=%s", self.reader.metadata.ledger, entry, error)
                continue
            self.copied += 1
            self.copied_bytes += len(packet)

    async def _copy_all(self, missing: list[Missing]) -> None:
        by_entry = itertools.groupby(missing, key=lambda each: each.entry)
        waiting = deque((entry, [each.bookie for each in lacking]) for entry, lacking in by_entry)

        def following(entry: EntryId) -> list[EntryId]:
            return [entry, *itertools.islice((each for each, _ in waiting if each > entry), ENTRIES_MAX - 1)]

        lacking = {each.bookie for each in missing}
        ahead = ReadAhead(following, partial(self.reader.read_batch, lacking=lacking))
        workers = [
            self._nursery.spawn(self._work(waiting, ahead), name=f"copy ledger {self.reader.metadata.ledger}")
            for _ in range(min(AT_ONCE_MAX, len(waiting)))
        ]
        errors = [await worker for worker in workers]
        for error in errors:
            if error is not None:
                raise error

    async def _work(
        self, waiting: deque[tuple[EntryId, list[BookieId]]], ahead: ReadAhead[Packet]
    ) -> StoreError | None:
        """Copy entries until none is left. The first error ends the work of all concurrent copiers."""
        while waiting:
            entry, named = waiting.popleft()
            bookies = [*filter(self._takes, named)]
            if not bookies:
                continue
            try:
                packet = await self._packet(entry, ahead)
            except LedgerError as error:
                if not self._skip_unreadable:
                    waiting.clear()
                    return error
                self.unreadable[entry] = error
                self._unreadable_in[self.reader.metadata.fragment_of(entry).first] += 1
                if self._is_hopeless(entry):
                    waiting.clear()  # a slice is within one fragment
                continue
            try:
                await self._give(entry, packet, bookies)
            except StoreError as error:
                waiting.clear()
                return error
        return None

    async def _add(self, bookie: BookieId, ledger: LedgerId, entry: EntryId, packet: bytes) -> None:
        stored: asyncio.Future[StoreError | None] = asyncio.get_running_loop().create_future()

        def done(error: StoreError | None) -> None:
            if not stored.done():
                stored.set_result(error)

        self._bookies.add(bookie, ledger, entry, packet, self._key, True, done)
        try:
            async with asyncio.timeout(ADD_TIMEOUT_S):
                error = await stored
        except TimeoutError:
            error = BookieError(f"{bookie}: did not answer in time")
        if error is not None:
            raise error
