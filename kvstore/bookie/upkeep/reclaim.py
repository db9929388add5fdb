"""Frees the space of deleted ledgers: drops them, rewrites the remaining entries of sparse segments, and removes these
segments.

A ledger is dropped if the metadata store's list does not contain it and a read of its own node confirms that. A list
that fails drops nothing. A segment is removed in steps, and a crash between any two of them loses nothing: its live
entries and the facts about its ledgers are written again and synced, then a record says that the segment is not needed,
then it is deleted.
"""

from __future__ import annotations

import asyncio
import logging

from kvstore.bookie.authority import MetadataAuthority
from kvstore.bookie.config import BookieConfig
from kvstore.bookie.index.checkpoints import remove_checkpoint
from kvstore.bookie.index.entry_index import OFFSET_MASK
from kvstore.bookie.inventory import IsOurs, none_are_ours
from kvstore.bookie.journal.record import ADMITTED, CLEARED, RECORD_HEADER_SIZE, RecordKind
from kvstore.bookie.journal.reserve import JournalFull, Use
from kvstore.bookie.journal.segment import Segment
from kvstore.bookie.ledger import lac_of
from kvstore.bookie.storage import BookieStorage
from kvstore.env.ports import Env
from kvstore.errors import MetadataError, UndecodableNode
from kvstore.meta.ledger_ids import LedgerIdCount
from kvstore.types import LedgerId

log = logging.getLogger(__name__)

STEP_BYTES = 256 << 10
"""Bytes rewritten between two syncs and pauses."""
STUCK_S = 3600.0
"""Seconds after which a segment with unreadable entries is tried again although nothing has changed."""
FULL_RETRY_S = 5.0
"""Seconds between two checks while the disk is full."""


# docs/protocol.md B10
class Reclaimer:
    """The background reclaimer of one bookie directory."""

    def __init__(
        self,
        env: Env,
        config: BookieConfig,
        storage: BookieStorage,
        authority: MetadataAuthority,
        is_ours: IsOurs = none_are_ours,
    ) -> None:
        self._is_ours = is_ours
        self._env = env
        self._config = config
        self._storage = storage
        self._inventory = storage.inventory
        self._journal = storage.journal
        self._authority = authority
        self._stuck: dict[int, tuple[int, float]] = {}
        """Segments with unreadable live entries, each with its number of live bytes and the time of the attempt. They
        are retried once something has changed: an entry was stored again, a ledger was deleted, or the disk can read
        them again."""

    async def run(self) -> None:
        """Reclaim space periodically until cancelled."""
        while True:
            await self._wait()
            try:
                await self.drop_deleted()
                await self.free_segments()
            except (MetadataError, JournalFull, OSError) as error:
                log.warning("reclaim failed, retrying error=%r", error)

    async def _wait(self) -> None:
        """Wait until the next check. On a full disk the wait is short."""
        left_s = self._config.reclaim_interval_s
        while left_s > 0:
            step_s = min(left_s, FULL_RETRY_S)
            await asyncio.sleep(step_s)
            left_s = 0 if self._journal.is_full else left_s - step_s

    # Ledgers

    async def drop_deleted(self) -> list[int]:
        """Drop the ledgers that the metadata store certainly no longer has, and return them. Raises MetadataError."""
        here = sorted(self._inventory.ledgers)
        if not here:
            return []
        listed = set(await self._authority.ledgers())
        dropped = []
        unlisted = [ledger for ledger in here if ledger not in listed]
        if not unlisted:
            return []
        counted = await self._authority.counted()
        if await self._is_older_copy(unlisted, counted):
            return []
        for ledger in unlisted:
            if self._may_be_of_later_metadata(ledger, counted):
                log.error(
                    "ledger=%d is kept: the metadata store does not know it, but has given no id beyond %d here and %s "
                    "before it was moved: it is an older copy of itself "
                    "(docs/how-to/back-up-and-restore-metadata.md)",
                    ledger, counted.to, [each.to for each in counted.former],
                )  # fmt: skip
                self._storage.statistics.unassigned_ledgers += 1
            elif await self._is_gone(LedgerId(ledger)):
                self.drop(ledger)
                dropped.append(ledger)
        return dropped

    # docs/protocol.md B29
    async def _is_older_copy(self, unlisted: list[int], counted: LedgerIdCount) -> bool:
        """Return True if the metadata store has never allocated ids of ledgers that it knew before. In that case also
        mark the store as an older copy, because each check takes an id, and a later check would find no fault."""
        suspects = [each for each in unlisted if self._is_own(each) and counted.never_gave(each)]
        unknown = [each for each in suspects if await self._is_gone(LedgerId(each))]
        if unknown:
            log.error(
                "the metadata store is an older copy of itself: it has given ids up to %d, but does not know %d "
                "ledgers from %d on; all are kept (docs/how-to/back-up-and-restore-metadata.md)",
                counted.to, len(unknown), unknown[0],
            )  # fmt: skip
            self._storage.statistics.unassigned_ledgers += len(unknown)
            await self._authority.mark_older(f"a bookie has {len(unknown)} ledgers from {unknown[0]} on that it lacks")
        return bool(unknown)

    # docs/protocol.md B29
    def _may_be_of_later_metadata(self, ledger: int, counted: LedgerIdCount) -> bool:
        return counted.may_be_missing(ledger) or (self._is_own(ledger) and counted.never_gave(ledger))

    def _is_own(self, ledger: int) -> bool:
        """Return True if this cluster created the ledger and the metadata store knew it when it was admitted here."""
        found = self._inventory.ledgers.get(ledger)
        return found is not None and found.is_admitted and self._is_ours(LedgerId(ledger), found.key)

    async def _is_gone(self, ledger: LedgerId) -> bool:
        """Return True if the ledger was deleted. A ledger with unreadable metadata counts as existing."""
        try:
            return await self._authority.metadata(ledger) is None
        except UndecodableNode as error:
            log.warning("ledger is kept, its metadata is unreadable ledger=%d error=%s", ledger, error)
            return False

    def drop(self, ledger: int) -> None:
        """Forget a ledger that is certainly deleted. If it was fenced, its fence remains as a tombstone. Raises
        JournalFull."""
        found = self._inventory.ledgers.get(ledger)
        if found is None:
            return
        self._fact(RecordKind.TOMBSTONE if found.is_fenced else RecordKind.DROPPED, 0, ledger, b"")
        self._inventory.drop(ledger, tombstone=found.is_fenced)
        self._storage.statistics.dropped_ledgers += 1
        log.info("ledger dropped ledger=%d fenced=%s", ledger, found.is_fenced)

    # Segments

    async def free_segments(self) -> list[int]:
        """Rewrite the live entries of sparse segments, and remove these segments. Return the removed segments. Raises
        JournalFull or OSError."""
        removed = []
        for segment in self._sparse():
            if await self._free(segment):
                removed.append(segment.file)
        return removed

    def _sparse(self) -> list[Segment]:
        """Return the sparse segments, emptiest first. Only segments that are full, synced and counted: the open group
        may be in the next segment while the last group of this one is on its way to the disk, and then this segment's
        entries are not counted yet."""
        current = self._journal.synced_file
        full = [each for file, each in sorted(self._inventory.segments.items()) if file < current]
        sparse = [each for each in full if self._is_sparse(each) and not self._is_stuck(each)]
        return sorted(sparse, key=lambda segment: segment.live_bytes)

    # docs/protocol.md B22
    def _is_sparse(self, segment: Segment) -> bool:
        """Return True if a rewrite of the segment frees space. The heads of small entries, and space at the end that
        no large entry fits into, are neither live nor free: the entries need them again wherever they are."""
        size, live = self._config.segment_bytes, segment.live_bytes
        enough = self._config.sparse_share * size
        if live > enough or live <= 0 or segment.capacity < size:
            return live <= enough
        counts = (
            sealed.count(segment.file)
            for ledger, sealed in self._inventory.sealed_in(segment)
            if segment.live.get(ledger, 0) > 0
        )
        dead = segment.end - live - RECORD_HEADER_SIZE * sum(counts)
        return dead >= (size - enough) / 2

    def _is_stuck(self, segment: Segment) -> bool:
        """Return True if nothing has changed since an attempt could not read entries of the segment (docs/protocol.md,
        B22)."""
        live_bytes, seen_at = self._stuck.get(segment.file, (-1, 0.0))
        return live_bytes == segment.live_bytes and self._env.clock.now() - seen_at < STUCK_S

    async def _free(self, segment: Segment) -> bool:
        if segment.live and not self._journal.has_capacity(Use.REWRITE, segment.live_bytes):
            return False
        if self._separates_ledgers(segment):
            return False
        for ledger in sorted(segment.live):
            if not await self._rewrite(segment, ledger):
                await self._storage.synced()  # entries that were written again are no longer live here
                self._stuck[segment.file] = segment.live_bytes, self._env.clock.now()
                return False
        self._stuck.pop(segment.file, None)
        if self._separates_ledgers(segment):  # a ledger was created again during the rewrite
            return False
        for ledger in sorted(segment.touched):
            self._repeat_facts(segment, ledger)
        # Also record that there is no doubt, because an older segment may record that the doubt began.
        self._fact(RecordKind.LIMBO, 0 if self._inventory.is_limbo else CLEARED, -1, b"")
        await self._storage.synced()
        freed = segment.capacity
        self._journal.append(RecordKind.REMOVED, 0, -1, segment.file, b"", use=Use.FACT)
        self._inventory.remove(segment)
        await self._storage.synced()
        segment.remove()
        remove_checkpoint(self._env.disk, self._config.index_dir, segment.file)
        self._storage.statistics.reclaimed_bytes += freed
        self._journal.supply.make_spare()
        return True

    # docs/protocol.md B10
    def _separates_ledgers(self, segment: Segment) -> bool:
        """Return True if the segment keeps the records of two ledgers with one id apart: it records the drop of the
        former ledger, the later one exists, and older segments have records of the former one."""
        again = segment.dropped & self._inventory.ledgers.keys()
        older = (each for each in self._inventory.segments.values() if each.file < segment.file)
        return bool(again) and any(not again.isdisjoint(each.touched) for each in older)

    async def _rewrite(self, segment: Segment, ledger: int) -> bool:
        """Write the ledger's entries in `segment` to the journal again. Return False if any of them cannot be read or
        found."""
        found = self._inventory.ledgers.get(ledger)
        written = 0
        for entry, place, size in found.index.inside(segment.file) if found is not None else ():
            if found is None or self._inventory.ledgers.get(ledger) is not found:
                return True  # dropped meanwhile
            if found.index.get(entry)[0] != place:
                continue  # stored again meanwhile
            body = segment.read_body(place & OFFSET_MASK, size, ledger=ledger, entry=entry)
            if body is None:
                log.error(
                    "damaged entry, its segment is kept ledger=%d entry=%d segment=%d", ledger, entry, segment.file
                )
                return False
            if not self._journal.has_capacity(Use.REWRITE, RECORD_HEADER_SIZE + size):
                raise JournalFull
            self._storage.adds.store_copy(found, entry, body)
            written += size + RECORD_HEADER_SIZE
            if written >= STEP_BYTES:
                await self._pause(written)
                written = 0
        await self._pause(written)
        return not self._has_lost_places(segment, ledger)

    # docs/protocol.md B22
    def _has_lost_places(self, segment: Segment, ledger: int) -> bool:
        """Return True if the segment still has live entries of a ledger in limbo after its known entries were written
        again. Their places were lost with the index file, and the disk may be able to read them later."""
        found = self._inventory.ledgers.get(ledger)
        if found is None or not found.is_limbo or segment.live.get(ledger, 0) <= 0:
            return False
        log.error("places of entries are lost, their segment is kept ledger=%d segment=%d", ledger, segment.file)
        return True

    async def _pause(self, written: int) -> None:
        self._storage.statistics.rewritten_bytes += written
        await self._storage.synced()
        await asyncio.sleep(written / self._config.rewrite_bytes_per_s)

    def _repeat_facts(self, segment: Segment, ledger: int) -> None:
        """Write all facts about a ledger that has records in `segment` again, even if they are recorded elsewhere
        too."""
        found = self._inventory.ledgers.get(ledger)
        if found is not None:
            self._storage.facts.note(RecordKind.KEY, ADMITTED * found.is_admitted, found, -1, found.key)
            if found.is_fenced:
                self._storage.facts.note(RecordKind.FENCE, 0, found, -1, found.key)
            if found.explicit_lac:
                self._storage.facts.note(RecordKind.LAC, 0, found, lac_of(found.explicit_lac), found.explicit_lac)
            if found.is_limbo:
                self._storage.facts.note(RecordKind.LIMBO, 0, found, -1, b"")
        elif ledger in self._inventory.tombstones:
            self._fact(RecordKind.TOMBSTONE, 0, ledger, b"")
        elif any(ledger in each.touched for each in self._inventory.segments.values() if each.file < segment.file):
            self._fact(RecordKind.DROPPED, 0, ledger, b"")  # older records of it still exist
            self._inventory.drop(ledger, tombstone=False)  # also for the checkpoint, if the ledger is created again

    def _fact(self, kind: RecordKind, flags: int, ledger: int, body: bytes) -> None:
        self._journal.append(kind, flags, ledger, -1, body, use=Use.FACT)
        if ledger >= 0:
            self._journal.open_group.segment.touched.add(ledger)
