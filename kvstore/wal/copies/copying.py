"""Copies entries of one ledger to bookies that lack them: several at once, within a number of bytes per second.

Copies are recovery adds, which pass fences; each entry is read from any bookie that has a good copy of it
(docs/protocol.md, W8, W11).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence

from kvstore.env.ports import Clock, Nursery
from kvstore.errors import BookieError, StoreError
from kvstore.proto.digest import master_key
from kvstore.types import BookieId, EntryId, LedgerId, LedgerMetadata
from kvstore.wal.entry_reader import EntryReader
from kvstore.wal.ports import BookieClient
from kvstore.wal.repair import Missing, missing_copies

log = logging.getLogger(__name__)

AT_ONCE_MAX = 16
"""Entries under way, so that a round trip and a sync are not waited for at each; so many of the largest are 16 MiB."""
ADD_TIMEOUT_S = 5.0


class Copying:
    """Of one ledger, whose entries are where `metadata` says."""

    def __init__(
        self,
        metadata: LedgerMetadata,
        bookies: BookieClient,
        nursery: Nursery,
        clock: Clock,
        *,
        bytes_per_s: int,
        own: BookieId | None = None,
    ) -> None:
        self.copied = 0
        """Copies made."""
        self.reader = EntryReader(metadata, bookies, nursery, own)
        self._bookies, self._nursery, self._clock = bookies, nursery, clock
        self._key = master_key(metadata.password)
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        """When what was copied so far is within the rate."""

    async def fill(
        self,
        wanted: LedgerMetadata,
        last: EntryId,
        at: Collection[BookieId],
        takers: Collection[BookieId],
        noticed: Callable[[list[Missing]], None] = lambda _: None,
    ) -> int:
        """Ask the bookies `at` what they lack of what `wanted` names them for, up to the entry `last`, and copy it to
        those that are `takers`; returns how many copies were made. `noticed` is told what is missing, slice by slice.
        Raises StoreError; what was copied until then stays."""
        ledger, before = wanted.ledger, self.copied
        held = {bookie: await self._bookies.entries(bookie, ledger) for bookie in sorted(at)}
        for missing in missing_copies(wanted, last, held):
            if missing:
                noticed(missing)
                await self._copy_all([each for each in missing if each.bookie in takers])
            await asyncio.sleep(0)  # the event loop is others' in between
        if self.copied > before:
            log.info("ledger=%d %d copies made", ledger, self.copied - before)
        return self.copied - before

    async def copy(self, entry: EntryId, bookies: Sequence[BookieId]) -> int:
        """Copy one entry to each of the bookies; returns its packet's size. Raises StoreError."""
        ledger = self.reader.metadata.ledger
        found = await self.reader.read(entry)
        packet = self.reader.digest.packet(ledger, entry, found.lac, found.length, found.payload)
        for bookie in bookies:
            await self._add(bookie, ledger, entry, packet)
            self.copied += 1
        return len(packet) * len(bookies)

    async def _copy_all(self, missing: list[Missing]) -> None:
        by_entry = itertools.groupby(missing, key=lambda each: each.entry)
        waiting = deque((entry, [each.bookie for each in lacking]) for entry, lacking in by_entry)
        workers = [
            self._nursery.spawn(self._work(waiting), name=f"copy ledger {self.reader.metadata.ledger}")
            for _ in range(min(AT_ONCE_MAX, len(waiting)))
        ]
        errors = [await worker for worker in workers]
        for error in errors:
            if error is not None:
                raise error

    async def _work(self, waiting: deque[tuple[EntryId, list[BookieId]]]) -> StoreError | None:
        """Copy entries until there is none left; the first error ends the work of all."""
        while waiting:
            entry, bookies = waiting.popleft()
            try:
                await self._pace(await self.copy(entry, bookies))
            except StoreError as error:
                waiting.clear()
                return error
        return None

    async def _pace(self, size: int) -> None:
        now = self._clock.now()
        self._free_at = max(self._free_at, now) + size / self._bytes_per_s
        await asyncio.sleep(self._free_at - now)

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
            error = BookieError(f"{bookie}: no answer in time")
        if error is not None:
            raise error
