"""Keeps the copies of a log's open ledger complete, and has missing copies of its closed ledgers made.

A leader runs it for its own log: after a takeover, when a bookie is back, and when the set of registered bookies
changes. The leader itself makes missing copies of its open ledger, because nobody else knows where that ledger ends. It
marks closed ledgers that are under-replicated. Then only the replication workers copy them (docs/design/0010,
protocol.md A10).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection

from kvstore.env.events import wait_within
from kvstore.env.ports import Nursery
from kvstore.errors import BookieError, LedgerError, MetadataError, MetadataUnavailable
from kvstore.types import BookieId, EntryId, LedgerId, LedgerMetadata, LedgerState
from kvstore.wal.copies.copying import Copying
from kvstore.wal.copies.pace import CopyPace
from kvstore.wal.handle import LedgerPorts
from kvstore.wal.placement import leaving
from kvstore.wal.repair import Missing, bookies_of, missing_copies

log = logging.getLogger(__name__)

SETTLE_S = 1.0
"""Entries that were confirmed this long ago have reached all bookies that they were sent to."""
RETRY_S = 20.0
RECHECK_S = 30.0
"""Seconds between two checks of an under-replicated ledger, because workers repair it without a notification. If
nothing has changed, a check reads only its metadata."""
ROUND_S = 900.0
"""Seconds after which every ledger is checked again, because a bookie may have found damage in it (docs/protocol.md,
B14)."""

Mark = Callable[[LedgerId, Collection[BookieId]], Awaitable[None]]
"""Has a closed ledger repaired whose copies at these bookies are missing or share a zone with others. A mark must name
bookies: one without names would mean all bookies, and a bookie that is restarted then would lose its places."""


# docs/protocol.md W8
class Copier:
    """The copier of one leader's log. `wanted` returns the ledgers to check, and the last entry of the open one."""

    def __init__(
        self,
        ports: LedgerPorts,
        nursery: Nursery,
        wanted: Callable[[], list[tuple[LedgerId, EntryId | None]]],
        *,
        mark: Mark,
        pace: CopyPace,
    ) -> None:
        self.copied = 0
        """Number of copies made."""
        self._ports = ports
        self._nursery = nursery
        self._wanted = wanted
        self._mark = mark
        self._pace = pace
        self._wake = asyncio.Event()
        self._complete: set[LedgerId] = set()
        """Closed ledgers whose copies were all found."""
        self._awaited: dict[LedgerId, tuple[int, frozenset[BookieId]]] = {}
        """Closed ledgers that are under-replicated only because bookies are away, with the version of their metadata
        and these bookies."""
        self.lacking: dict[LedgerId, frozenset[BookieId]] = {}
        """Ledgers that were under-replicated, or whose bookies were not all registered, at the last check, with these
        bookies. No bookies if they could not be found out."""
        self.crowded: set[LedgerId] = set()
        """Closed ledgers with copies of one entry in the same zone although a bookie of another zone could take one."""

    def look(self) -> None:
        """Check soon the ledgers that were not found complete."""
        self._wake.set()

    def look_again(self) -> None:
        """Check every ledger soon, because a bookie that is back may have lost its entries."""
        self._complete, self._awaited = set(), {}
        self.look()

    def start(self) -> None:
        self._nursery.spawn(self._run(), name="repair")
        self.look()

    async def _run(self) -> None:
        self._ports.choice.listen(self, self.look_again)
        try:
            round_at = self._ports.clock.now()
            while True:
                await wait_within(self._wake, RECHECK_S if self.lacking else ROUND_S)
                self._wake.clear()
                if self._ports.clock.now() - round_at >= ROUND_S:
                    round_at, self._complete, self._awaited = self._ports.clock.now(), set(), {}
                if not await self._pass():
                    await wait_within(self._wake, RETRY_S)
                    self._wake.set()
        finally:
            self._ports.choice.forget(self)

    async def _pass(self) -> bool:
        """Check every ledger once. Return False if a ledger on registered bookies is still under-replicated or could
        not be checked."""
        wanted, complete = self._wanted(), self._complete
        await asyncio.sleep(SETTLE_S)
        is_done, is_told = True, False
        for ledger, last in wanted:
            if ledger not in complete:
                try:
                    is_done &= await self._look_at(ledger, last, complete)
                except (LedgerError, MetadataError) as error:
                    # While the metadata store is unreachable, this happens for every ledger in every pass.
                    level = logging.DEBUG if is_told and isinstance(error, MetadataUnavailable) else logging.INFO
                    log.log(level, "ledger not repaired now ledger=%d error=%r", ledger, error)
                    is_told |= isinstance(error, MetadataUnavailable)
                    if isinstance(error, LedgerError):  # otherwise nothing is known, and the last result stays
                        self.lacking.setdefault(ledger, frozenset())
                    is_done = False
        complete.intersection_update(ledger for ledger, _ in wanted)
        ids = {ledger for ledger, _ in wanted}
        self.lacking = {ledger: bookies for ledger, bookies in self.lacking.items() if ledger in ids}
        self._awaited = {ledger: seen for ledger, seen in self._awaited.items() if ledger in ids}
        self.crowded.intersection_update(ledger for ledger, _ in wanted)
        return is_done

    async def _look_at(self, ledger: LedgerId, last: EntryId | None, complete: set[LedgerId]) -> bool:
        """Check one ledger. `complete` is replaced when bookies come or go; results of before do not count then."""
        metadata, version = await self._ports.ledgers.read(ledger)
        there = [bookie for bookie in bookies_of(metadata) if self._ports.choice.is_registered(bookie)]
        if away := frozenset(bookies_of(metadata)).difference(there):
            self.lacking[ledger] = away
        if metadata.state is LedgerState.CLOSED:
            awaited = self._awaited
            if away and awaited.get(ledger) == (version, away):
                return True
            is_done = await self._look_at_closed(metadata, there, complete)
            if is_done and away:
                awaited[ledger] = (version, away)
            return is_done
        if last is None:
            return False  # being closed
        await self._fill(metadata, last, there)
        return True

    async def _fill(self, metadata: LedgerMetadata, last: EntryId, there: list[BookieId]) -> None:
        """Make the open ledger's missing copies."""
        # A read-only bookie keeps its free space for fences (docs/protocol.md, B20).
        takers = self._ports.choice.writable
        without_room: set[BookieId] = set()
        lacking = set(bookies_of(metadata)).difference(there)

        def noticed(missing: list[Missing]) -> None:
            found = {each.bookie for each in missing}
            lacking.update(found)
            self.lacking[metadata.ledger] = frozenset(lacking)
            without_room.update(found - takers)

        copying = self._copying(metadata)
        held = await copying.held_by_responsive(there)
        self.copied += await copying.fill(metadata, last, held, takers, noticed, may_refuse=there)
        if copying.refused:
            raise BookieError(f"{', '.join(sorted(copying.refused))} did not list their entries, or took no copies")
        if len(there) == len(bookies_of(metadata)) and not without_room:
            self.lacking.pop(metadata.ledger, None)

    async def _look_at_closed(self, metadata: LedgerMetadata, there: list[BookieId], complete: set[LedgerId]) -> bool:
        ledger, copying = metadata.ledger, self._copying(metadata)
        lacking = await self._lacking(copying, there)
        wanted = self._ports.choice.spread_out(metadata)
        crowded = frozenset(leaving(metadata, wanted) if wanted is not None else ())
        if crowded:
            self.crowded.add(ledger)
        else:
            self.crowded.discard(ledger)
        away = frozenset(bookies_of(metadata)).difference(there)
        if lacking or away:
            self.lacking[ledger] = away | lacking
        else:
            self.lacking.pop(ledger, None)
            if not crowded and not copying.refused:
                complete.add(ledger)
        if lacking or crowded:
            await self._mark(ledger, crowded | lacking)
        if copying.refused:
            raise BookieError(f"{', '.join(sorted(copying.refused))} did not list their entries")
        return not lacking and not crowded

    async def _lacking(self, copying: Copying, there: list[BookieId]) -> set[BookieId]:
        """Return the bookies that lack an entry of a closed ledger, among those that list their entries."""
        found: set[BookieId] = set()
        metadata, held = copying.reader.metadata, await copying.held_by_responsive(there)
        for missing in missing_copies(metadata, metadata.last_entry, held):
            found.update(each.bookie for each in missing)
            if len(found) == len(held):
                break
            await asyncio.sleep(0)  # let other tasks run
        return found

    def _copying(self, metadata: LedgerMetadata) -> Copying:
        ports = self._ports
        return Copying(metadata, ports.bookies, self._nursery, self._pace, own=ports.choice.own)
