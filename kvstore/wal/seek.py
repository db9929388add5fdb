"""Finds positions in a partition's log: its end, and the last entry with a given property. A search reads few entries
and never fences.

This package does not parse payloads, so the caller decides from an entry's payload whether the entry comes before the
position. The search bisects the log. The property must therefore hold for every entry up to some position, and for no
entry after it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

from kvstore.env.ports import Nursery
from kvstore.errors import BookieError, NoSuchLedger
from kvstore.meta.lost import given_up
from kvstore.types import NO_ENTRY, BookieId, EntryId, LedgerId, LedgerState, PartitionId, Position
from kvstore.wal.coverage import is_covered
from kvstore.wal.entry_reader import EntryReader
from kvstore.wal.handle import LedgerPorts
from kvstore.wal.ledger_list import BEGINNING, LedgerList
from kvstore.wal.lists import LedgerLists

ATTEMPTS = 3
"""Maximum number of attempts. A ledger may be trimmed between two reads; the next attempt uses the new ledger list."""

BEYOND = 2_000
"""Distance in entries beyond the last known entry of an open ledger at which no bookie can have an entry. It is twice
the maximum number of entries that a leader has in flight."""


Search = Callable[[LedgerList], Awaitable[tuple[Position, bytes] | None]]
"""Searches a log; returns an entry's position and payload, or None if no entry matches."""
IsBefore = Callable[[bytes], bool]


class SeekResult(NamedTuple):
    """The result of a search for an entry in a log."""

    position: Position
    """Position of the entry. If no entry was found, the position before the first entry of the log."""
    payload: bytes | None
    """The entry's payload; None if no entry was found. If the last entry of a log is marked as lost, the payload of the
    last entry before it that is not."""
    listed: LedgerList
    """The ledger list that the search used."""


class _Begun(NamedTuple):
    """A ledger that has entries."""

    reader: EntryReader
    last: EntryId
    first: EntryId
    """The ledger's first entry that is not marked as lost."""
    payload: bytes
    """Payload of `first`."""


# docs/protocol.md A14
def _kept(reader: EntryReader, entries: Iterable[int]) -> EntryId | None:
    """Return the first of `entries` that is not marked as lost, or None if all are."""
    is_lost = given_up(reader.metadata)
    return next((EntryId(each) for each in entries if not is_lost(EntryId(each))), None)


class Seeker:
    """Searches the logs of partitions. Calls raise BookieError if too few bookies answer, MetadataError, and
    NoSuchLedger if the log is being removed."""

    def __init__(self, ports: LedgerPorts, lists: LedgerLists, nursery: Nursery) -> None:
        self._ports, self._lists, self._nursery = ports, lists, nursery

    async def end(self, partition: PartitionId, *, for_good: bool = False) -> SeekResult:
        """Return the last entry that is known to be confirmed; for an idle log, this is its last entry. Pass `for_good`
        if the caller concludes that nothing follows; bookies that may lack entries of the ledger then do not count."""

        async def end_of(listed: LedgerList) -> tuple[Position, bytes] | None:
            return await self._end_of(listed, for_good=for_good)

        return await self._search(partition, end_of)

    async def last(self, partition: PartitionId, is_before: IsBefore) -> SeekResult:
        """Return the last entry for which `is_before` returns True. Reads a number of entries that is logarithmic in
        the length of the log."""

        async def halve(listed: LedgerList) -> tuple[Position, bytes] | None:
            found = await self._halve_ledgers(listed, is_before)
            return await self._halve_entries(found, is_before) if found is not None else None

        return await self._search(partition, halve)

    async def _search(self, partition: PartitionId, search: Search) -> SeekResult:
        for attempt in range(ATTEMPTS):
            listed, _ = await self._lists.read(partition, latest=attempt > 0)
            try:
                found = await search(listed)
            except NoSuchLedger:
                if attempt == ATTEMPTS - 1:
                    raise
                continue
            if found is not None:
                return SeekResult(*found, listed)
            break
        first = Position(listed.ledgers[0].id, NO_ENTRY) if listed.ledgers else BEGINNING
        return SeekResult(first, None, listed)

    async def _end_of(self, listed: LedgerList, *, for_good: bool) -> tuple[Position, bytes] | None:
        end: Position | None = None
        for each in reversed(listed.ledgers):
            reader = await self._open(each.id)
            last = await self._confirmed(reader, for_good=for_good)
            if end is None and last != NO_ENTRY:
                end = Position(each.id, last)
            kept = _kept(reader, range(last, NO_ENTRY, -1))
            if end is not None and kept is not None:
                return end, (await reader.read(kept)).payload
        return None

    async def _halve_ledgers(self, listed: LedgerList, is_before: IsBefore) -> _Begun | None:
        """Return the last ledger whose first entry satisfies `is_before`. The search starts at the end and doubles its
        stride, because most targets are near the end, and old ledgers may be trimmed or hard to read."""
        found: _Begun | None = None
        low, high, stride = 0, len(listed.ledgers) - 1, 0
        while low <= high:
            middle = high - stride if found is None and high - stride >= low else (low + high) // 2
            stride = 2 * stride + 1
            place, begun = await self._last_with_entries(listed, low, middle)
            if begun is None:
                low = middle + 1
            elif is_before(begun.payload):
                found, low = begun, middle + 1
            else:
                high = place - 1
        return found

    async def _last_with_entries(self, listed: LedgerList, low: int, high: int) -> tuple[int, _Begun | None]:
        """Return the last ledger with entries between places `low` and `high` of the list, and its place. If no ledger
        there has entries, return `low` and None. Entries that are marked as lost do not count."""
        for place in range(high, low - 1, -1):
            reader = await self._open(listed.ledgers[place].id)
            last = await self._confirmed(reader)
            if (first := _kept(reader, range(last + 1))) is not None:
                return place, _Begun(reader, last, first, (await reader.read(first)).payload)
        return low, None

    async def _open(self, ledger: LedgerId) -> EntryReader:
        metadata, _ = await self._ports.ledgers.read(ledger)
        return EntryReader(metadata, self._ports.bookies, self._nursery, self._ports.choice.own)

    async def _halve_entries(self, begun: _Begun, is_before: IsBefore) -> tuple[Position, bytes]:
        """Return the last entry of a ledger that satisfies `is_before`, apart from entries that are marked as lost. The
        entry `begun.first` must satisfy it."""
        place, found = begun.first, begun.payload
        low, high = int(begun.first), int(begun.last)
        while low < high:
            middle = (low + high + 1) // 2
            entry = _kept(begun.reader, range(middle, low, -1))
            if entry is None:
                low = middle
                continue
            payload = (await begun.reader.read(entry)).payload
            if is_before(payload):
                low, place, found = middle, entry, payload
            else:
                high = entry - 1
        return Position(begun.reader.metadata.ledger, place), found

    # docs/protocol.md L7
    async def _confirmed(self, reader: EntryReader, *, for_good: bool = False) -> EntryId:
        """Return the last readable entry of the ledger, or NO_ENTRY if there is none. `for_good` has the same meaning
        as in `end`."""
        metadata = reader.metadata
        if metadata.state is LedgerState.CLOSED:
            return metadata.last_entry
        fragment = metadata.fragments[-1]
        places = sorted(range(len(fragment.ensemble)), key=lambda at: fragment.ensemble[at] != self._ports.choice.own)
        lacs: dict[int, EntryId] = {}
        failure: BookieError | None = None
        for place in places:
            try:
                bookie = fragment.ensemble[place]
                lac = await self._ports.bookies.read_lac(bookie, metadata.ledger, reader.digest)
                if for_good:
                    await self._be_sure(bookie, metadata.ledger, lac)
                lacs[place] = lac
            except BookieError as error:
                failure = error
            if is_covered(lacs, metadata.quorum):  # so one of these bookies stored the last confirmed entry in time
                return max(*lacs.values(), EntryId(fragment.first - 1))
        raise BookieError(f"ledger {metadata.ledger}: too few bookies report its last entry: {failure}")

    # docs/protocol.md B7, L7
    async def _be_sure(self, bookie: BookieId, ledger: LedgerId, lac: EntryId) -> None:
        """Raise BookieError if entries of the ledger may be missing at the bookie. Such a bookie reports the
        last-add-confirmed of the entries that it still has, but never answers that an entry is absent."""
        answer = await self._ports.bookies.read(bookie, ledger, EntryId(lac + BEYOND))
        if answer.packet is not None:
            raise BookieError(f"{bookie}: its last-add-confirmed of ledger {ledger} is far behind its last entry")
