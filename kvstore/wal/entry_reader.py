"""Reads confirmed entries of one ledger. An EntryRead makes the decisions for each entry."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from functools import partial
from typing import assert_never

from kvstore.env.ports import Nursery
from kvstore.errors import BookieError, LedgerFenced, StoreError
from kvstore.proto.digest import EntryDigest, Packet
from kvstore.types import BookieId, EntryId, LedgerMetadata
from kvstore.wal import reader
from kvstore.wal.ports import BookieClient
from kvstore.wal.reader import Answered, AskBookie, Done, EntryRead, HedgeDue, Impossible, in_order
from kvstore.wal.shares import ReadShare, shares_of

HEDGE_S = 0.05
"""Seconds without an answer after which a second bookie is asked as well."""
BATCH_BYTES = 1 << 20
"""Bytes requested in one batch: enough to hide the round trip, and few enough to arrive within the timeout of a
batch."""


class EntryReader:
    """A reader of one ledger's confirmed entries. The caller may replace `metadata` by a newer version for the same
    ledger at any time."""

    def __init__(
        self, metadata: LedgerMetadata, bookies: BookieClient, nursery: Nursery, own: BookieId | None = None
    ) -> None:
        self.metadata = metadata
        self.troubled: set[BookieId] = set()
        """Bookies whose last answer was an error or is late. They are asked last, so that a reader that catches up does
        not wait for a dead bookie at every entry."""
        self.damaged: set[tuple[BookieId, EntryId]] = set()
        """Copies with a wrong digest that reads have found."""
        self._gave_none: dict[BookieId, EntryId] = {}
        """The last entry of the last batch of each bookie that did not return the first entry of that batch. The bookie
        is not asked for batches up to that entry again."""
        self._bookies = bookies
        self._nursery = nursery
        self.own = own
        self.digest = EntryDigest(metadata.digest, metadata.password)

    async def read(self, entry: EntryId) -> Packet:
        """Return one confirmed entry, its digest verified. Raises NoSuchEntry if every bookie of its write set denies
        having it, and BookieError if too few bookies answer."""
        return await _ReadInFlight(self, entry).result()

    async def read_or_error(self, entry: EntryId) -> Packet | StoreError:
        """Return one confirmed entry, or the error as a value. For reads that run as tasks."""
        try:
            return await self.read(entry)
        except StoreError as error:
            return error

    # docs/protocol.md T12
    async def read_batch(
        self, entries: Sequence[EntryId], bytes_max: int = BATCH_BYTES, lacking: Collection[BookieId] = ()
    ) -> dict[EntryId, Packet]:
        """Return some of the confirmed `entries`, about `bytes_max` bytes at most, their digests verified. `entries`
        must be in ascending order. Entries that are missing from the result must be read with `read`. Bookies in
        `lacking` are known not to have the entries, and are not asked."""
        gave_none = [bookie for bookie, last in self._gave_none.items() if entries[0] <= last]
        shares = shares_of(
            entries,
            self.metadata.write_set,
            self.own,
            self.troubled.union(gave_none, lacking),
            gap_max=self.metadata.quorum.ensemble,
        )
        size = bytes_max // max(len(shares), 1)
        if len(shares) == 1:
            return await self._share(shares[0], size)
        tasks = [self._nursery.spawn(self._share(each, size), name=f"read at {each.bookie}") for each in shares]
        found: dict[EntryId, Packet] = {}
        for task in tasks:
            found.update(await task)
        return found

    async def _share(self, share: ReadShare, bytes_max: int) -> dict[EntryId, Packet]:
        bookie, entries = share
        ledger, span = self.metadata.ledger, range(entries[0], entries[-1] + 1)
        try:
            packets = await self._bookies.read_batch(bookie, ledger, span, bytes_max=bytes_max)
        except BookieError:
            packets = ()
        good = self.digest.open_those(ledger, packets, set(entries))
        found = {entry: packet for entry, (packet, _) in good.items()}
        if entries[0] not in found:
            self._gave_none[bookie] = entries[-1]
        return found

    def order(self, entry: EntryId) -> tuple[BookieId, ...]:
        """Return the bookies of the entry's write set in the order in which to ask them."""
        return in_order(self.metadata.write_set(entry), self.own, self.troubled)

    async def ask(self, bookie: BookieId, entry: EntryId) -> reader.Event:
        """Ask one bookie for the entry, and return its answer as an event."""
        try:
            answer = await self._bookies.read(bookie, self.metadata.ledger, entry)
        except (BookieError, LedgerFenced) as error:
            self.troubled.add(bookie)
            return reader.ReadFailed(bookie, str(error))
        self.troubled.discard(bookie)
        return Answered(bookie, answer.packet)

    def spawn(self, reading: _ReadInFlight, bookie: BookieId) -> None:
        self._nursery.spawn(reading.ask(bookie), name=f"read {reading.entry} at {bookie}")


class _ReadInFlight:
    """One read in progress."""

    def __init__(self, owner: EntryReader, entry: EntryId) -> None:
        self.entry = entry
        self._owner = owner
        order = owner.order(entry)
        self._first = order[0]
        self._machine = EntryRead(entry, order, partial(owner.digest.open, owner.metadata.ledger, entry))
        self._done: asyncio.Future[Packet] = asyncio.get_running_loop().create_future()

    def _late(self) -> None:
        if self._first != self._owner.own:
            self._owner.troubled.add(self._first)
        self._handle(HedgeDue())

    async def result(self) -> Packet:
        hedge = asyncio.get_running_loop().call_later(HEDGE_S, self._late)
        try:
            self._perform(self._machine.start())
            return await self._done
        finally:
            hedge.cancel()
            self._owner.damaged.update((bookie, self.entry) for bookie in self._machine.damaged)

    async def ask(self, bookie: BookieId) -> None:
        self._handle(await self._owner.ask(bookie, self.entry))

    def _handle(self, event: reader.Event) -> None:
        if not self._done.done():
            self._perform(self._machine.handle(event))

    def _perform(self, commands: list[reader.Command]) -> None:
        for command in commands:
            match command:
                case AskBookie(bookie):
                    self._owner.spawn(self, bookie)
                case Done(packet):
                    self._done.set_result(packet)
                case Impossible(error):
                    self._done.set_exception(error)
                case _:
                    assert_never(command)
