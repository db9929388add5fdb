"""Keeps a log's copies as they should be: makes again what bookies lack, and moves what shares a zone.

A leader runs it for its own log: after a takeover, when a bookie is back, when another set of bookies is registered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.env.events import wait_within
from kvstore.env.ports import Nursery
from kvstore.errors import LedgerError, MetadataError
from kvstore.types import BookieId, EntryId, LedgerId, LedgerMetadata, LedgerState
from kvstore.wal.copies.copying import Copying
from kvstore.wal.handle import LedgerPorts
from kvstore.wal.placement import newcomers_of
from kvstore.wal.repair import Missing, bookies_of

log = logging.getLogger(__name__)

SETTLE_S = 1.0
"""Entries confirmed so long ago have reached whoever was to get them."""
RETRY_S = 20.0
ROUND_S = 900.0
"""After so long every ledger is looked at again: a bookie may have found damage in it (docs/protocol.md, B14)."""


@dataclass(slots=True)
class _Move:
    """Of places of a ledger that share a zone, which has not come about yet."""

    version: int
    """Of the metadata that it was drawn from."""
    wanted: LedgerMetadata
    drawn_at: float
    tries: int = 0
    again_at: float = 0.0


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
        """Copies made."""
        self._ports = ports
        self._nursery = nursery
        self._wanted = wanted
        self._bytes_per_s = bytes_per_s
        self._wake = asyncio.Event()
        self._complete: set[LedgerId] = set()
        """Closed ledgers whose copies were all seen."""
        self.lacking: set[LedgerId] = set()
        """Ledgers that lacked copies, or whose bookies were not all registered, when they were last looked at."""
        self.crowded: set[LedgerId] = set()
        """Closed ledgers with copies of one entry in one zone, though a bookie of another can take one."""
        self._moves: dict[LedgerId, _Move] = {}

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
            round_at = self._ports.clock.now()
            while True:
                await wait_within(self._wake, ROUND_S)
                self._wake.clear()
                if self._ports.clock.now() - round_at >= ROUND_S:
                    round_at, self._complete = self._ports.clock.now(), set()
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
        self.crowded.intersection_update(ledger for ledger, _ in wanted)
        self._moves = {ledger: self._moves[ledger] for ledger, _ in wanted if ledger in self._moves}
        return is_done

    async def _repair(self, ledger: LedgerId, last: EntryId | None, complete: set[LedgerId]) -> bool:
        """Makes the ledger's missing copies. `complete` is replaced while bookies come and go: what was seen of them
        before says nothing then."""
        metadata, version = await self._ports.ledgers.read(ledger)
        if metadata.state is LedgerState.CLOSED:
            last = metadata.last_entry
        if last is None:
            return False  # being closed
        there = [bookie for bookie in bookies_of(metadata) if self._ports.choice.is_registered(bookie)]
        are_all_there = len(there) == len(bookies_of(metadata))
        if not are_all_there:
            self.lacking.add(ledger)
        # A read-only one keeps what room it has for fences (docs/protocol.md, B20).
        takers = self._ports.choice.writable
        without_room: set[BookieId] = set()

        def noticed(missing: list[Missing]) -> None:
            self.lacking.add(ledger)
            without_room.update(each.bookie for each in missing if each.bookie not in takers)

        copying = self._copying(metadata)
        self.copied += await copying.fill(metadata, last, there, takers, noticed)
        are_all_there = are_all_there and not without_room
        if are_all_there:
            self.lacking.discard(ledger)
        if metadata.state is not LedgerState.CLOSED:
            return True
        is_spread = await self._spread_out(metadata, version, copying)
        if are_all_there and is_spread:
            complete.add(ledger)
        return is_spread

    # docs/protocol.md W11
    async def _spread_out(self, metadata: LedgerMetadata, version: int, copying: Copying) -> bool:
        """Give copies that share a zone to bookies of other zones: first the copies are made, then the metadata names
        them. False if that is still to be tried again."""
        ledger = metadata.ledger
        move = self._move_or_none(metadata, version)
        if move is None:
            self.crowded.discard(ledger)
            return True
        self.crowded.add(ledger)
        if self._ports.clock.now() < move.again_at:
            return False
        wanted, newcomers = move.wanted, newcomers_of(metadata, move.wanted)
        log.info("ledger=%d copies share a zone: some go to %s", ledger, sorted(newcomers))
        try:
            self.copied += await copying.fill(wanted, wanted.last_entry, newcomers, newcomers)
            await self._ports.ledgers.write(wanted, version)
        except (LedgerError, MetadataError) as error:
            log.info("ledger=%d copies still share a zone: %r", ledger, error)
            move.again_at = self._ports.clock.now() + min(RETRY_S * 2**move.tries, ROUND_S)
            move.tries += 1
            return False
        del self._moves[ledger]
        self.crowded.discard(ledger)
        return True

    def _move_or_none(self, metadata: LedgerMetadata, version: int) -> _Move | None:
        """The same newcomers as before, for as long as they can be, and until a round is over. Were others drawn each
        time, each would be left with copies that nobody asks for."""
        now, former = self._ports.clock.now(), self._moves.get(metadata.ledger)
        if former is not None and former.version == version:
            can_be = newcomers_of(metadata, former.wanted) <= self._ports.choice.writable
            if now < former.again_at or (can_be and now < former.drawn_at + ROUND_S):
                return former
        wanted = self._ports.choice.spread_out(metadata)
        if wanted is None:
            self._moves.pop(metadata.ledger, None)
            return None
        move = self._moves[metadata.ledger] = _Move(version, wanted, now)
        if former is not None:
            move.tries, move.again_at = former.tries, former.again_at
        return move

    def _copying(self, metadata: LedgerMetadata) -> Copying:
        ports = self._ports
        return Copying(
            metadata,
            ports.bookies,
            self._nursery,
            ports.clock,
            bytes_per_s=self._bytes_per_s,
            own=ports.choice.own,
        )
