"""Keeps the copies of a log's open ledger as they should be, and has those of its closed ones made again.

A leader runs it for its own log: after a takeover, when a bookie is back, when another set of bookies is registered.
What its open ledger lacks it copies itself, because nobody else knows where that ends. A closed ledger that lacks
copies it marks: whoever repairs marked ledgers is then the only one who copies it (docs/design/0010, protocol.md A10).
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
"""Entries confirmed so long ago have reached whoever was to get them."""
RETRY_S = 20.0
RECHECK_S = 30.0
"""How often a ledger that lacks copies is looked at again: others repair it, and tell nobody. One read of its metadata
if nothing has changed."""
ROUND_S = 900.0
"""After so long every ledger is looked at again: a bookie may have found damage in it (docs/protocol.md, B14)."""

Mark = Callable[[LedgerId, Collection[BookieId]], Awaitable[None]]
"""Has a closed ledger repaired that lacks copies at these bookies, or has some there that share a zone with others. A
mark that names nobody would mean everybody: whoever is restarted just then would lose its places."""


# docs/protocol.md W8
class Copier:
    """Looks after the copies of one leader's log. `wanted` gives the ledgers to look after, and the last entry of the
    one that is open."""

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
        """Copies made."""
        self._ports = ports
        self._nursery = nursery
        self._wanted = wanted
        self._mark = mark
        self._pace = pace
        self._wake = asyncio.Event()
        self._complete: set[LedgerId] = set()
        """Closed ledgers whose copies were all seen."""
        self._awaited: dict[LedgerId, tuple[int, frozenset[BookieId]]] = {}
        """Closed ledgers that lack copies at bookies which are away, and nowhere else → the version of their metadata,
        and these bookies."""
        self.lacking: dict[LedgerId, frozenset[BookieId]] = {}
        """Ledgers that lacked copies, or whose bookies were not all registered, when they were last looked at → these
        bookies; none where that could not be found out."""
        self.crowded: set[LedgerId] = set()
        """Closed ledgers with copies of one entry in one zone, though a bookie of another can take one."""

    def look(self) -> None:
        """Look soon at the ledgers that have not been seen complete."""
        self._wake.set()

    def look_again(self) -> None:
        """Look soon at every ledger: a bookie that is back may have lost what it had."""
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
        """Look at every ledger once; False if one that is registered lacks something still, or could not be asked."""
        wanted, complete = self._wanted(), self._complete
        await asyncio.sleep(SETTLE_S)
        is_done, is_told = True, False
        for ledger, last in wanted:
            if ledger not in complete:
                try:
                    is_done &= await self._look_at(ledger, last, complete)
                except (LedgerError, MetadataError) as error:
                    # While the metadata store is away it is so with every ledger, at every pass.
                    level = logging.DEBUG if is_told and isinstance(error, MetadataUnavailable) else logging.INFO
                    log.log(level, "ledger=%d not repaired now: %r", ledger, error)
                    is_told |= isinstance(error, MetadataUnavailable)
                    if isinstance(error, LedgerError):  # else nothing is known: it lacks no more than it did before
                        self.lacking.setdefault(ledger, frozenset())
                    is_done = False
        complete.intersection_update(ledger for ledger, _ in wanted)
        ids = {ledger for ledger, _ in wanted}
        self.lacking = {ledger: bookies for ledger, bookies in self.lacking.items() if ledger in ids}
        self._awaited = {ledger: seen for ledger, seen in self._awaited.items() if ledger in ids}
        self.crowded.intersection_update(ledger for ledger, _ in wanted)
        return is_done

    async def _look_at(self, ledger: LedgerId, last: EntryId | None, complete: set[LedgerId]) -> bool:
        """`complete` is replaced while bookies come and go: what was seen of them before says nothing then."""
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
        # A read-only one keeps what room it has for fences (docs/protocol.md, B20).
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
            raise BookieError(f"{', '.join(sorted(copying.refused))} did not say what they have, or took no copies")
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
            raise BookieError(f"{', '.join(sorted(copying.refused))} did not say what they have")
        return not lacking and not crowded

    async def _lacking(self, copying: Copying, there: list[BookieId]) -> set[BookieId]:
        """Those of the bookies that lack an entry of a closed ledger, of those that say what they have."""
        found: set[BookieId] = set()
        metadata, held = copying.reader.metadata, await copying.held_by_responsive(there)
        for missing in missing_copies(metadata, metadata.last_entry, held):
            found.update(each.bookie for each in missing)
            if len(found) == len(held):
                break
            await asyncio.sleep(0)  # the event loop is others' in between
        return found

    def _copying(self, metadata: LedgerMetadata) -> Copying:
        ports = self._ports
        return Copying(metadata, ports.bookies, self._nursery, self._pace, own=ports.choice.own)
