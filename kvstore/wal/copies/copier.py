"""Keeps the copies of a log's open ledger complete, and marks closed ledgers whose copies are missing.

A leader runs it for its own log: after a takeover, when a bookie is back, and when the set of registered bookies
changes. The leader itself makes the missing copies of its open ledger, because no other process knows where that ledger
ends. It only marks closed ledgers that are under-replicated; the replication workers copy them (docs/design/0010,
protocol.md A10).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress

from kvstore.env.events import wait_within
from kvstore.env.ports import Nursery
from kvstore.errors import BookieError, LedgerError, MetadataError, MetadataUnavailable
from kvstore.proto.availability import HeldEntries
from kvstore.types import BookieId, EntryId, LedgerId, LedgerMetadata, LedgerState
from kvstore.wal.copies.copying import Copying
from kvstore.wal.copies.pace import CopyPace
from kvstore.wal.handle import LedgerPorts
from kvstore.wal.placement import leaving
from kvstore.wal.repair import Missing, bookies_of, entries_at_risk, missing_copies

log = logging.getLogger(__name__)

SETTLE_S = 1.0
"""Seconds after which a confirmed entry has reached all bookies that it was sent to."""
RETRY_S = 20.0
RECHECK_S = 30.0
"""Seconds between two checks of an under-replicated ledger."""
CHECK_S, CHECKS_PER_S = 2.0, 10
"""Seconds between two reads of the metadata of all ledgers that wait for a worker, because workers send no notification
when they repair a ledger. With many such ledgers the interval is longer, so that CHECKS_PER_S is the maximum number of
reads per second."""
ROUND_S = 900.0
"""Seconds after which every ledger is checked again, because a bookie may have found damage in it (docs/protocol.md,
B14)."""

NO_ENTRIES = HeldEntries([])

Mark = Callable[[LedgerId, Collection[BookieId]], Awaitable[None]]
"""Marks a closed ledger for repair because its copies at these bookies are missing or share a zone. The collection
must not be empty: a mark without bookies means all bookies, and a bookie that restarts at that time would lose its
places."""


# docs/protocol.md W8
class Copier:
    """The copier of one leader's log. `wanted` returns the ledgers to check; the open ledger comes with its last
    confirmed entry."""

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
        """Closed ledgers that have all their copies."""
        self._awaited: dict[LedgerId, tuple[int, frozenset[BookieId]]] = {}
        """Closed ledgers that are under-replicated only because bookies are away. For each, the version of its metadata
        and these bookies."""
        self.lacking: dict[LedgerId, frozenset[BookieId]] = {}
        """Ledgers that were under-replicated at the last check or name unregistered bookies, each with these bookies.
        The set is empty if the bookies could not be determined."""
        self.at_risk: set[LedgerId] = set()
        """Those of them with an entry that has fewer copies than the ack quorum."""
        self.sharing_zones: set[LedgerId] = set()
        """Closed ledgers with several copies of an entry in one zone although a bookie in another zone could hold
        one."""

    def check_soon(self) -> None:
        """Request a check of the ledgers that are not known to be complete."""
        self._wake.set()

    def recheck_all(self) -> None:
        """Request a check of every ledger, because a bookie that is back may have lost its entries."""
        self._complete, self._awaited = set(), {}
        self.check_soon()

    def start(self) -> None:
        self._nursery.spawn(self._run(), name="repair")
        self.check_soon()

    async def _run(self) -> None:
        self._ports.choice.listen(self, self.recheck_all)
        try:
            round_at = self._ports.clock.now()
            while True:
                await self._pause()
                self._wake.clear()
                if self._ports.clock.now() - round_at >= ROUND_S:
                    round_at, self._complete, self._awaited = self._ports.clock.now(), set(), {}
                if not await self._pass():
                    await wait_within(self._wake, RETRY_S)
                    self._wake.set()
        finally:
            self._ports.choice.forget(self)

    async def _pause(self) -> None:
        """Wait until a check is requested or due, or until a worker has repaired a ledger."""
        clock, awaited = self._ports.clock, self._awaited
        due_at = clock.now() + (RECHECK_S if self.lacking else ROUND_S)
        while (left_s := due_at - clock.now()) > 0:
            check_s = max(CHECK_S, len(awaited) / CHECKS_PER_S) if awaited else left_s
            if await wait_within(self._wake, min(left_s, check_s)) or await self._is_any_repaired():
                return

    async def _is_any_repaired(self) -> bool:
        with suppress(LedgerError, MetadataError):
            for ledger, (version, _) in list(self._awaited.items()):
                if (await self._ports.ledgers.read(ledger))[1] != version:
                    return True
        return False

    async def _pass(self) -> bool:
        """Check every ledger once. Return False if a ledger on registered bookies is still under-replicated or could
        not be checked."""
        wanted, complete = self._wanted(), self._complete
        await asyncio.sleep(SETTLE_S)
        is_done, is_logged = True, False
        for ledger, last in wanted:
            if ledger not in complete:
                try:
                    is_done &= await self._check(ledger, last, complete)
                except (LedgerError, MetadataError) as error:
                    # While the metadata store is unreachable, this happens for every ledger in every pass.
                    level = logging.DEBUG if is_logged and isinstance(error, MetadataUnavailable) else logging.INFO
                    log.log(level, "ledger not repaired now ledger=%d error=%r", ledger, error)
                    is_logged |= isinstance(error, MetadataUnavailable)
                    if isinstance(error, LedgerError):  # otherwise nothing is known, and the last result stays
                        self.lacking.setdefault(ledger, frozenset())
                    is_done = False
        complete.intersection_update(ledger for ledger, _ in wanted)
        ids = {ledger for ledger, _ in wanted}
        self.lacking = {ledger: bookies for ledger, bookies in self.lacking.items() if ledger in ids}
        self._awaited = {ledger: seen for ledger, seen in self._awaited.items() if ledger in ids}
        self.sharing_zones.intersection_update(ledger for ledger, _ in wanted)
        self.at_risk.intersection_update(self.lacking)
        return is_done

    async def _check(self, ledger: LedgerId, last: EntryId | None, complete: set[LedgerId]) -> bool:
        """Check one ledger. `complete` is the set in use when the pass began. It is replaced when bookies come or go,
        so that earlier results no longer count."""
        metadata, version = await self._ports.ledgers.read(ledger)
        there = [bookie for bookie in bookies_of(metadata) if self._ports.choice.is_registered(bookie)]
        if away := frozenset(bookies_of(metadata)).difference(there):
            self.lacking[ledger] = away
        if metadata.state is LedgerState.CLOSED:
            awaited = self._awaited
            if away and awaited.get(ledger) == (version, away):
                return True
            is_done = await self._check_closed(metadata, there, complete)
            if is_done and away:
                awaited[ledger] = (version, away)
            return is_done
        if last is None:
            return False  # being closed
        await self._fill(metadata, last, there)
        return True

    async def _fill(self, metadata: LedgerMetadata, last: EntryId, there: list[BookieId]) -> None:
        """Make the missing copies of the open ledger."""
        # A read-only bookie keeps its free space for fences (docs/protocol.md, B20).
        takers = self._ports.choice.writable
        without_space: set[BookieId] = set()
        lacking = set(bookies_of(metadata)).difference(there)

        def noticed(missing: list[Missing]) -> None:
            found = {each.bookie for each in missing}
            lacking.update(found)
            self.lacking[metadata.ledger] = frozenset(lacking)
            without_space.update(found - takers)

        copying = self._copying(metadata)
        held = await copying.held_by_responsive(there)
        self.copied += await copying.fill(metadata, last, held, takers, noticed, may_refuse=there)
        if copying.refused:
            raise BookieError(f"{', '.join(sorted(copying.refused))} did not list their entries, or took no copies")
        if len(there) == len(bookies_of(metadata)) and not without_space:
            self.lacking.pop(metadata.ledger, None)
        # All others have every entry by now.
        incomplete = {bookie: each for bookie, each in held.items() if bookie in without_space}
        await self._judge_risk(metadata, last, there, incomplete)

    async def _check_closed(self, metadata: LedgerMetadata, there: list[BookieId], complete: set[LedgerId]) -> bool:
        ledger, copying = metadata.ledger, self._copying(metadata)
        held = await copying.held_by_responsive(there)
        lacking = await self._lacking(metadata, held)
        await self._judge_risk(metadata, metadata.last_entry, there, held if lacking else {})
        wanted = self._ports.choice.spread_out(metadata)
        sharing = frozenset(leaving(metadata, wanted) if wanted is not None else ())
        if sharing:
            self.sharing_zones.add(ledger)
        else:
            self.sharing_zones.discard(ledger)
        away = frozenset(bookies_of(metadata)).difference(there)
        if lacking or away:
            self.lacking[ledger] = away | lacking
        else:
            self.lacking.pop(ledger, None)
            if not sharing and not copying.refused:
                complete.add(ledger)
        if lacking or sharing:
            await self._mark(ledger, sharing | lacking)
        if copying.refused:
            raise BookieError(f"{', '.join(sorted(copying.refused))} did not list their entries")
        return not lacking and not sharing

    async def _judge_risk(
        self, metadata: LedgerMetadata, last: EntryId, there: list[BookieId], held: Mapping[BookieId, HeldEntries]
    ) -> None:
        """Note if some entry up to `last` has fewer copies than the ack quorum. Bookies that are away have none, and
        those in `held` only these entries."""
        away = set(bookies_of(metadata)).difference(there)
        is_at_risk = False
        if away or held:
            for found in entries_at_risk(metadata, last, {**held, **dict.fromkeys(away, NO_ENTRIES)}):
                is_at_risk |= bool(found)
                if is_at_risk:
                    break
                await asyncio.sleep(0)  # let other tasks run
        (self.at_risk.add if is_at_risk else self.at_risk.discard)(metadata.ledger)

    async def _lacking(self, metadata: LedgerMetadata, held: Mapping[BookieId, HeldEntries]) -> set[BookieId]:
        """Return the bookies in `held` that lack an entry of a closed ledger."""
        found: set[BookieId] = set()
        for missing in missing_copies(metadata, metadata.last_entry, held):
            found.update(each.bookie for each in missing)
            if len(found) == len(held):
                break
            await asyncio.sleep(0)  # let other tasks run
        return found

    def _copying(self, metadata: LedgerMetadata) -> Copying:
        ports = self._ports
        return Copying(metadata, ports.bookies, self._nursery, self._pace, own=ports.choice.own)
