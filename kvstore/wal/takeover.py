"""Opens a partition's log for a new leader: steps 1 to 4 of docs/protocol.md G8, up to the list's compare-and-set. G9
says when the wait is saved, and `LedgerList.lease_wait_s` how long it is. The new leader appends the record of step 5.

  read the list ► fence, recover n, then n+1 ► wait out their leases ► close both, list a new ledger

The log ends where the metadata of the closed ledgers says, whoever closed them. The wait comes before the closes and
the list: until then nobody sees the recovered entries, and a candidate that loses starts again, including the wait. A
crash after any step leaves a state that the next attempt can continue from.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from kvstore.env.events import wait_within
from kvstore.env.ports import Nursery
from kvstore.errors import (
    MetadataLost,
    MetadataUnknown,
    NoSuchLedger,
    NoSuchNode,
    StoreError,
    UndecodableNode,
    VersionConflict,
)
from kvstore.types import NO_ENTRY, NO_LEDGER, LedgerMetadata, PartitionId, Position, Seq
from kvstore.wal.creator import LedgerCreator
from kvstore.wal.deaths import ProvenDeaths
from kvstore.wal.handle import LedgerPorts
from kvstore.wal.ledger_list import BEGINNING, LedgerList
from kvstore.wal.lists import LedgerLists, PerhapsListed
from kvstore.wal.opener import LedgerTakeover

log = logging.getLogger(__name__)

ATTEMPTS_MAX = 4
TIMER_MIN_S = 0.001
FIRST_SEQ = Seq(1)
LONG_LIST_WAIT_S = 60.0
"""Delay in seconds before the takeover of a log whose list is already long, because each takeover makes the list
longer."""


Others = Callable[[], Coroutine[Any, Any, Position | None]]


async def no_others() -> None:
    """Return None: no other replica has reported a position."""


@dataclass(frozen=True, slots=True)
class TakenOver:
    """A log that this process may append to, as LogTakeover.run returns it."""

    listed: LedgerList
    version: int
    metadata: LedgerMetadata
    """Metadata of the new, open ledger at the end of the list."""
    recovered_end: Position
    waited: bool


class LogTakeover:
    """The takeover of one partition's log by a new leader."""

    def __init__(
        self,
        partition: PartitionId,
        *,
        ports: LedgerPorts,
        lists: LedgerLists,
        creator: LedgerCreator,
        is_release: Callable[[bytes], bool],
        deaths: ProvenDeaths,
        nursery: Nursery,
    ) -> None:
        self._partition = partition
        self._ports = ports
        self._lists = lists
        self._creator = creator
        self._is_release, self._deaths = is_release, deaths
        self._nursery = nursery

    async def run(
        self,
        lease_ms: int,
        next_seq: Callable[[], Seq],
        applied: Callable[[], Position | None] = lambda: None,
        others: Others = no_others,
    ) -> TakenOver:
        """Take over the log, and return it ready for appends. The attempt is repeated up to ATTEMPTS_MAX times if other
        processes change the log. `lease_ms` is the lease that is listed with the new ledger. For `next_seq`, `applied`
        and `others`, see PartitionLogs.open_as_leader.

        Raises NotRecoverable, NotEnoughBookies, NoSuchLedger and MetadataError. MetadataError is VersionConflict if
        other processes were first in every attempt. It is MetadataLost if the list is empty although the local state
        once had one, or if the log ends before a position that the local state or another replica has applied.
        """
        for _ in range(ATTEMPTS_MAX):
            try:
                return await self._attempt(lease_ms, next_seq, applied, others)
            except (VersionConflict, NoSuchNode) as error:
                log.info("takeover restarts partition=%s reason=%r", self._partition, error)
        raise VersionConflict(
            f"partition {self._partition}: others changed its log during {ATTEMPTS_MAX} consecutive attempts"
        )

    async def _attempt(
        self, lease_ms: int, next_seq: Callable[[], Seq], applied: Callable[[], Position | None], others: Others
    ) -> TakenOver:
        listed, version = await self._lists.make(self._partition)
        if self._lists.is_long(self._partition):
            log.warning(
                "ledger list is long, delaying the takeover partition=%s ledgers=%d",
                self._partition,
                len(listed.ledgers),
            )
            await asyncio.sleep(LONG_LIST_WAIT_S)
            listed, version = await self._lists.make(self._partition)
        # docs/protocol.md G23
        if not listed.ledgers and (seq := next_seq()) > FIRST_SEQ:
            raise MetadataLost(
                f"partition {self._partition}: its list is empty, but the state here is at sequence {seq - 1}"
            )
        now = self._ports.clock.now
        began = now()
        asked = self._nursery.spawn(others(), name=f"{self._partition} ask applied")
        taken = [LedgerTakeover(each.id, self._ports, self._nursery) for each in listed.ledgers[-2:]]
        for each in taken:
            await each.take_over()
        await self._checked_end(listed, version, taken, applied())
        released = await self._is_released(taken)
        recovered = now()
        last = listed.ledgers[-1].id if listed.ledgers else NO_LEDGER
        metadata = await self._creator.create(self._partition, after=last)
        created = now()
        try:
            has_waited = not released and await self._wait_out(listed, taken)
            waited = now()
            await self._checked_end(listed, version, taken, await asked, whose="another replica")
            for each in taken:
                await each.close()
            # Use the recorded end rather than the one found above: another recovery may have been first, and found more
            # or fewer entries.
            end = await self._checked_end(listed, version, taken, applied())
            epoch = listed.epoch + 1
            before = await self._closed_end(listed, taken)
            new = listed.with_ledger(metadata.ledger, next_seq(), epoch=epoch, lease_ms=lease_ms, closed_end=before)
            version = await self._lists.write(self._partition, new, version, created=metadata.ledger)
        except (MetadataUnknown, PerhapsListed):
            raise  # the ledger may be listed
        except StoreError:
            await self._creator.discard(metadata)
            raise
        log.info(
            "partition=%s epoch=%d opened ledger=%d after %s recover_ms=%d create_ms=%d wait_ms=%d list_ms=%d",
            self._partition,
            epoch,
            metadata.ledger,
            end,
            *map(_ms, (recovered - began, created - recovered, waited - created, now() - waited)),
        )
        return TakenOver(new, version, metadata, end, waited=has_waited)

    async def _is_released(self, taken: list[LedgerTakeover]) -> bool:
        """Return True if the last entry of the recovered log is a release record, with which the former leader has
        stopped answering reads permanently. An entry that is marked as lost may have been anything."""
        for each in reversed(taken):
            if each.last != NO_ENTRY:
                payload = await each.last_payload()
                return payload is not None and self._is_release(payload)
        return False

    # docs/protocol.md P17, G8, G28
    async def _wait_out(self, listed: LedgerList, taken: list[LedgerTakeover]) -> bool:
        """Wait until no former leader can answer reads any more: until all leases have ended, or until the end of the
        process that has made the last ledger is proven. Leaders before that process had no lease when it listed the
        ledger. Return True if the leases had to end."""
        if not taken:
            return False
        until = max(each.fenced_at for each in taken) + listed.lease_wait_s()
        while not self._deaths.is_proven(taken[-1].maker):
            left_s = until - self._ports.clock.now()
            if left_s <= 0:
                return True
            await wait_within(self._deaths.news, max(left_s, TIMER_MIN_S))
        log.info("partition=%s the former leader's process has ended", self._partition)
        return False

    # docs/protocol.md G24
    async def _checked_end(
        self,
        listed: LedgerList,
        version: int,
        taken: list[LedgerTakeover],
        applied: Position | None,
        *,
        whose: str = "the state here",
    ) -> Position:
        """Return the end of the log as far as it is known. Raises MetadataLost if the log ends before `applied`. Raises
        VersionConflict instead if the only reason is that another recovery has found more entries in the meantime, or
        that another leader has listed more."""
        end = await self._end(listed, taken, taken)
        if applied is None or applied <= end:
            return end
        for each in taken:
            if await each.is_closed_elsewhere():
                raise VersionConflict(f"ledger {each.ledger} was closed by another recovery")
        await self._lists.confirm(self._partition, version)
        raise MetadataLost(
            f"partition {self._partition}: its log ends at {_shown(end)}, but {whose} is at {_shown(applied)}: "
            "the metadata store is an older copy of itself (docs/how-to/back-up-and-restore-metadata.md)"
        )

    async def _end(self, listed: LedgerList, taken: list[LedgerTakeover], counted: list[LedgerTakeover]) -> Position:
        """Return the last entry of the log up to the last ledger in `counted`, which must be the first ledgers of
        `taken`. Reads the metadata of other ledgers only if an older version wrote the list."""
        for takeover in reversed(counted):
            if takeover.last != NO_ENTRY:
                return Position(takeover.ledger, takeover.last)
        if (closed := listed.closed_end) is not None:
            return Position(closed.ledger, closed.entry)
        for each in reversed(listed.ledgers[: -len(taken)] if taken else ()):
            metadata, _ = await self._ports.ledgers.read(each.id)
            if metadata.last_entry != NO_ENTRY:
                return Position(each.id, metadata.last_entry)
        trimmed = listed.trimmed_end
        return Position(trimmed.ledger, trimmed.entry) if trimmed else BEGINNING

    # docs/protocol.md G25
    async def _closed_end(self, listed: LedgerList, taken: list[LedgerTakeover]) -> Position | None:
        """Return the last entry before the last listed ledger. Return None if an older version wrote the list and the
        ledger with that entry cannot be read."""
        try:
            return await self._end(listed, taken, taken[:-1])
        except (UndecodableNode, NoSuchLedger):
            return None


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _shown(position: Position) -> str:
    return f"ledger {position.ledger}, entry {position.entry}"
