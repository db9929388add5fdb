"""Slowly reads stored entries again, to find damage while other bookies still have copies. Damaged entries are left out
of the bookie's lists of entries and their ledgers are marked, so that they are copied to this bookie again
(docs/protocol.md, B14)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from kvstore.bookie.config import BookieConfig
from kvstore.bookie.index.entry_index import OFFSET_BITS, OFFSET_MASK
from kvstore.bookie.index.index_files import IndexBusy
from kvstore.bookie.journal.segment import Segment
from kvstore.bookie.storage import BookieStorage

log = logging.getLogger(__name__)

STEP_BYTES = 256 << 10
"""Bytes read between two pauses."""


class Scrubber:
    """The background scrubber of one bookie directory."""

    def __init__(self, config: BookieConfig, storage: BookieStorage) -> None:
        self._config = config
        self._storage = storage
        self.on_damage: Callable[[Collection[int]], None] = lambda _: None
        """Called with the ledgers that have damaged entries in a segment, as soon as the segment is read, because a
        round may take days. At the end of a round it is also called with the ledgers in limbo, which may lack
        entries."""

    async def run(self) -> None:
        """Repeat rounds until cancelled."""
        wait_s = self._config.scrub_first_s
        while self._config.scrub_bytes_per_s:
            await asyncio.sleep(wait_s)
            try:
                await self.round()
            except OSError as error:  # a temporary error: an entry that cannot be read now is not damaged
                log.warning("scrub failed, retrying later error=%s", error)
            wait_s = self._config.scrub_rest_s

    async def round(self) -> int:
        """Read all full segments once. Return the number of damaged entries."""
        inventory = self._storage.inventory
        count = 0
        for file in sorted(inventory.segments):
            segment = inventory.segments.get(file)
            if segment is None or file == self._storage.journal.open_group.segment.file:
                continue
            known = {each: place for each, place in inventory.damaged.items() if place >> OFFSET_BITS == file}
            in_segment = await self._readable_segment(segment)
            count += len(in_segment)
            for damaged, place in known.items() - set(in_segment):
                if inventory.damaged.get(damaged) == place:
                    del inventory.damaged[damaged]  # readable again, or no longer needed
            for (ledger, entry), place in in_segment:
                inventory.note_damaged(ledger, entry, place)
            if in_segment:
                self.on_damage(sorted({ledger for (ledger, _), _ in in_segment}))
        # Entries noted by reads meanwhile in segments that are not visited, such as the one being written, stay.
        for damaged, place in list(inventory.damaged.items()):
            if place >> OFFSET_BITS not in inventory.segments:
                del inventory.damaged[damaged]
        if in_limbo := sorted(ledger.id for ledger in inventory.ledgers.values() if ledger.is_limbo):
            self.on_damage(in_limbo)
        return count

    @property
    def damaged(self) -> dict[tuple[int, int], int]:
        """Maps (ledger, entry) of each damaged entry to the place of its copy. Includes entries that the last round or
        a later read found damaged."""
        return self._storage.inventory.damaged

    async def _readable_segment(self, segment: Segment) -> list[tuple[tuple[int, int], int]]:
        """Read a full segment. If its index file is damaged, read it again when the file has been rebuilt."""
        try:
            return await self._segment(segment)
        except IndexBusy as busy:
            rebuilt: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._storage.inventory.index_files.after_rebuild(
                busy.file, lambda: None if rebuilt.done() else rebuilt.set_result(None)
            )
            await rebuilt
        return await self._segment(segment)

    async def _segment(self, segment: Segment) -> list[tuple[tuple[int, int], int]]:
        damaged = []
        read = 0
        for ledger, sealed in self._storage.inventory.sealed_in(segment):
            found, is_live = self._storage.inventory.ledgers.get(ledger), ledger in segment.live
            for entry, place, size in sealed.inside(segment.file):  # this also reads the whole index file
                body = segment.read_body(place & OFFSET_MASK, size, ledger=ledger, entry=entry) if is_live else b""
                if body is None and found is not None and found.index.get(entry)[0] == place:
                    damaged.append(((ledger, entry), place))
                    self._storage.statistics.damaged_records += 1
                    log.error("damaged entry ledger=%d entry=%d segment=%d", ledger, entry, segment.file)
                read += size if is_live else 0
                if read >= STEP_BYTES:
                    await self._pause(read)
                    read = 0
        await self._pause(read)
        return damaged

    async def _pause(self, read: int) -> None:
        self._storage.statistics.scrubbed_bytes += read
        await asyncio.sleep(read / self._config.scrub_bytes_per_s if self._config.scrub_bytes_per_s else 0)
