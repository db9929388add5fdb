"""Makes missing copies again: asks the bookies of a log's ledgers what they hold, and copies what they lack.

A leader runs it for its own log: after a takeover, when a bookie is back, when another set of bookies is registered.
Copies are recovery adds, which pass fences; they are throttled by bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvstore.env.events import wait_within
from kvstore.env.ports import Nursery
from kvstore.errors import BookieError, LedgerError, MetadataError, StoreError
from kvstore.proto.digest import master_key
from kvstore.types import BookieId, EntryId, LedgerId, LedgerMetadata, LedgerState
from kvstore.wal.entry_reader import EntryReader
from kvstore.wal.handle import LedgerPorts
from kvstore.wal.ports import BookieClient
from kvstore.wal.repair import Missing, bookies_of, missing_copies

log = logging.getLogger(__name__)

SETTLE_S = 1.0
"""Entries confirmed so long ago have reached whoever was to get them."""
RETRY_S = 20.0
ADD_TIMEOUT_S = 5.0


# docs/protocol.md W8
class Copier:
    """Of one leader's log. `wanted` gives the ledgers to look after, and the last entry of the one that is open."""

    def __init__(
        self,
        ports: LedgerPorts,
        nursery: Nursery,
        wanted: Callable[[], list[tuple[LedgerId, EntryId | None]]],
        *,
        bytes_per_s: int,
    ) -> None:
        self.copied = 0
        self._ports = ports
        self._nursery = nursery
        self._wanted = wanted
        self._bytes_per_s = bytes_per_s
        self._wake = asyncio.Event()
        self._complete: set[LedgerId] = set()
        """Closed ledgers whose copies were all seen."""
        self.lacking: set[LedgerId] = set()
        """Ledgers that lacked copies, or whose bookies were not all registered, when they were last looked at."""

    def look(self) -> None:
        """Look soon at the ledgers that have not been seen complete."""
        self._wake.set()

    def look_again(self) -> None:
        """Look soon at every ledger: a bookie that is back may have lost what it had."""
        self._complete = set()
        self.look()

    def start(self) -> None:
        self._nursery.spawn(self._run(), name="repair")
        self.look()

    async def _run(self) -> None:
        self._ports.choice.listen(self, self.look_again)
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                if not await self._pass():
                    await wait_within(self._wake, RETRY_S)
                    self._wake.set()
        finally:
            self._ports.choice.forget(self)

    async def _pass(self) -> bool:
        """Look at every ledger once; False if one that is registered could not be asked or supplied."""
        wanted, complete = self._wanted(), self._complete
        await asyncio.sleep(SETTLE_S)
        is_done = True
        for ledger, last in wanted:
            if ledger not in complete:
                try:
                    is_done &= await self._repair(ledger, last, complete)
                except (LedgerError, MetadataError) as error:
                    log.info("ledger=%d not repaired now: %r", ledger, error)
                    self.lacking.add(ledger)
                    is_done = False
        complete.intersection_update(ledger for ledger, _ in wanted)
        self.lacking.intersection_update(ledger for ledger, _ in wanted)
        return is_done

    async def _repair(self, ledger: LedgerId, last: EntryId | None, complete: set[LedgerId]) -> bool:
        """Makes the ledger's missing copies. `complete` is replaced while bookies come and go: what was seen of them
        before says nothing then."""
        metadata, _ = await self._ports.ledgers.read(ledger)
        if metadata.state is LedgerState.CLOSED:
            last = metadata.last_entry
        if last is None:
            return False  # being closed
        there = [bookie for bookie in bookies_of(metadata) if self._ports.choice.is_registered(bookie)]
        are_all_there = len(there) == len(bookies_of(metadata))
        held = {}
        for bookie in there:
            held[bookie] = await self._ports.bookies.entries(bookie, ledger)
        missing = missing_copies(metadata, last, held)
        takers = (
            self._ports.choice.writable
        )  # a read-only one keeps what room it has for fences (docs/protocol.md, B20)
        are_all_there &= all(each.bookie in takers for each in missing)
        if missing or not are_all_there:
            self.lacking.add(ledger)
        if missing:
            await self._copy(metadata, [each for each in missing if each.bookie in takers])
        if are_all_there:
            self.lacking.discard(ledger)
        if metadata.state is LedgerState.CLOSED and are_all_there:
            complete.add(ledger)
        return True

    async def _copy(self, metadata: LedgerMetadata, missing: list[Missing]) -> None:
        log.info("ledger=%d lacks %d copies", metadata.ledger, len(missing))
        reader = EntryReader(metadata, self._ports.bookies, self._nursery, self._ports.choice.own)
        key = master_key(metadata.password)
        for entry, bookie in missing:
            found = await reader.read(entry)
            packet = reader.digest.packet(metadata.ledger, entry, found.lac, found.length, found.payload)
            await add_copy(self._ports.bookies, bookie, metadata.ledger, entry, packet, key)
            self.copied += 1
            await asyncio.sleep(len(packet) / self._bytes_per_s)


async def add_copy(
    bookies: BookieClient, bookie: BookieId, ledger: LedgerId, entry: EntryId, packet: bytes, key: bytes
) -> None:
    """Store one more copy by a recovery add. Raises the StoreError that says why it was not stored."""
    stored: asyncio.Future[StoreError | None] = asyncio.get_running_loop().create_future()

    def done(error: StoreError | None) -> None:
        if not stored.done():
            stored.set_result(error)

    bookies.add(bookie, ledger, entry, packet, key, True, done)
    try:
        async with asyncio.timeout(ADD_TIMEOUT_S):
            error = await stored
    except TimeoutError:
        error = BookieError(f"{bookie}: no answer in time")
    if error is not None:
        raise error
