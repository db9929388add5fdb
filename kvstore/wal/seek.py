"""Finds places in a partition's log: its end, and the last entry of which something is true. Reads few entries, never
fences.

Whoever asks says by its payload whether an entry stands before the place: this package parses none. What is asked must
be true of some first entries of the log, and of none behind them: so it is found by halving.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from kvstore.env.ports import Nursery
from kvstore.errors import BookieError, NoSuchLedger
from kvstore.types import NO_ENTRY, EntryId, LedgerId, LedgerState, PartitionId, Position
from kvstore.wal.entry_reader import EntryReader
from kvstore.wal.handle import LedgerPorts
from kvstore.wal.ledger_list import BEGINNING, LedgerList
from kvstore.wal.lists import LedgerLists

ATTEMPTS = 3
"""A ledger may be trimmed between two looks; the list then names others."""


LastOf = Callable[[EntryReader], Awaitable[tuple[EntryId, bytes] | None]]
"""An entry of one ledger, and its payload."""


class Found(NamedTuple):
    """A place in a log."""

    position: Position
    """The entry; or right before the first entry that there is, if none was found."""
    payload: bytes | None
    """Of the entry; None if none was found."""
    listed: LedgerList
    """As it was when this was found."""


class Seeker:
    """Calls raise BookieError when too few bookies answer, MetadataError, and NoSuchLedger if the log is being taken
    away."""

    def __init__(self, ports: LedgerPorts, lists: LedgerLists, nursery: Nursery) -> None:
        self._ports, self._lists, self._nursery = ports, lists, nursery

    async def end(self, partition: PartitionId) -> Found:
        """The last entry that is known to be confirmed: an idle log's very last."""
        return await self._search(partition, self._last_of)

    async def last(self, partition: PartitionId, is_before: Callable[[bytes], bool]) -> Found:
        """The last entry of which `is_before` is true."""

        async def last_of(reader: EntryReader) -> tuple[EntryId, bytes] | None:
            return await self._halve(reader, is_before)

        return await self._search(partition, last_of)

    async def _search(self, partition: PartitionId, last_of: LastOf) -> Found:
        for attempt in range(ATTEMPTS):
            listed, _ = await self._lists.read(partition, latest=attempt > 0)
            try:
                for each in reversed(listed.ledgers):
                    found = await last_of(await self._open(each.id))
                    if found is not None:
                        return Found(Position(each.id, found[0]), found[1], listed)
            except NoSuchLedger:
                if attempt == ATTEMPTS - 1:
                    raise
                continue
            break
        first = Position(listed.ledgers[0].id, NO_ENTRY) if listed.ledgers else BEGINNING
        return Found(first, None, listed)

    async def _open(self, ledger: LedgerId) -> EntryReader:
        metadata, _ = await self._ports.ledgers.read(ledger)
        return EntryReader(metadata, self._ports.bookies, self._nursery, self._ports.choice.own)

    async def _last_of(self, reader: EntryReader) -> tuple[EntryId, bytes] | None:
        last = await self._confirmed(reader)
        return (last, (await reader.read(last)).payload) if last != NO_ENTRY else None

    async def _halve(self, reader: EntryReader, is_before: Callable[[bytes], bool]) -> tuple[EntryId, bytes] | None:
        """The last entry of one ledger of which it is true."""
        low, high, found = 0, await self._confirmed(reader), None
        if high != NO_ENTRY:
            first = (await reader.read(EntryId(0))).payload
            if is_before(first):
                found = (EntryId(0), first)
            else:
                high = NO_ENTRY
        while low < high:
            middle = EntryId((low + high + 1) // 2)
            payload = (await reader.read(middle)).payload
            if is_before(payload):
                low, found = middle, (middle, payload)
            else:
                high = EntryId(middle - 1)
        return found

    async def _confirmed(self, reader: EntryReader) -> EntryId:
        """The last entry that may be read; NO_ENTRY if there is none."""
        metadata = reader.metadata
        if metadata.state is LedgerState.CLOSED:
            return metadata.last_entry
        fragment, quorum = metadata.fragments[-1], metadata.quorum
        wanted = quorum.ensemble - quorum.ack + 1  # so many have one among them that had the last entry in time
        heard: list[EntryId] = []
        failure: BookieError | None = None
        for bookie in sorted(fragment.ensemble, key=lambda bookie: bookie != self._ports.choice.own):
            if len(heard) == wanted:
                break
            try:
                heard.append(await self._ports.bookies.read_lac(bookie, metadata.ledger, reader.digest))
            except BookieError as error:
                failure = error
        if len(heard) < wanted:
            raise BookieError(f"ledger {metadata.ledger}: too few bookies tell where it ends: {failure}")
        return max(*heard, EntryId(fragment.first - 1))
