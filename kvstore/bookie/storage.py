"""A bookie's storage: the calls that its service makes for other nodes, and that the node's own client makes directly.

No call waits. Each ends in one call of its `done` on the event loop, with a status first. An add, a fence or a LAC is
reported after the sync that makes it durable. Nothing that is not on disk is ever shown.

This module checks the form and the digest of requests; the parts carry them out:

  adds ──────────┬─ keys ── admission, which asks the metadata store
  explicit LACs ─┤
  fences ────────┴─ facts ── journal ── synced ──► inventory ◄── reader
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from kvstore.bookie.adds import Adds, Done
from kvstore.bookie.admission import LedgerAdmission
from kvstore.bookie.authority import MetadataAuthority
from kvstore.bookie.backpressure import BackpressureGate
from kvstore.bookie.config import BookieConfig
from kvstore.bookie.digests import HEADER_AND_CRC, Digests, is_crc, lac_proves_itself, proves_itself
from kvstore.bookie.explicit_lacs import ExplicitLacs
from kvstore.bookie.facts import Facts
from kvstore.bookie.fencing import WriteVerdict
from kvstore.bookie.index.index_files import IndexFiles
from kvstore.bookie.inventory import Inventory, OwnLedgers
from kvstore.bookie.journal.journal import Journal
from kvstore.bookie.journal.reserve import JournalFull, Use
from kvstore.bookie.journal.segment import Segment
from kvstore.bookie.keys import KEY_MAX, KeyChecks
from kvstore.bookie.ledger import LedgerListener
from kvstore.bookie.opening import (
    drop_ends_of_doubts,
    make_directory,
    release_empty_segments,
    renew_doubts,
    tidy,
    write_unsynced_again,
)
from kvstore.bookie.raw_adds import RawAdds
from kvstore.bookie.reader import ReadDone, Reader
from kvstore.bookie.refusals import BookieRefusals
from kvstore.bookie.replay import replay
from kvstore.bookie.statistics import Statistics
from kvstore.bookie.stored_copies import StoredCopies
from kvstore.env.ports import Env
from kvstore.os_errors import no_space
from kvstore.proto.bookkeeper import LAST_ENTRY, PACKET_MAX, Status
from kvstore.proto.digest import HEADER, LAC_HEADER, EntryDigest
from kvstore.types import BookieId, EntryId, LedgerId

log = logging.getLogger(__name__)

LAC_MAX = 1024


class BookieStorage:
    """The ledgers on one bookie's disk, and every operation on them."""

    journal: Journal
    facts: Facts
    adds: Adds
    raw: RawAdds
    reader: Reader

    def __init__(
        self,
        env: Env,
        config: BookieConfig,
        bookie: BookieId,
        authority: MetadataAuthority,
        own_ledgers: OwnLedgers | None = None,
        *,
        admission: LedgerAdmission | None = None,
    ) -> None:
        """Prepare the storage without touching the disk; call `start` next. A bookie with several directories has one
        storage for each and passes its own `admission`, which they share."""
        self.statistics = Statistics()
        self.own_ledgers = own_ledgers or OwnLedgers()
        self.inventory = Inventory(IndexFiles(env.disk, config.index_dir))
        self.bookie = bookie
        self.sync_gate = BackpressureGate()
        """Closed to all clients on other nodes while too many bytes wait for a sync."""
        self.metadata_gate = BackpressureGate()
        """Closed to requests for which `may_ask` is True while too many requests wait for the metadata store."""
        self.admission = admission or LedgerAdmission(
            authority, bookie, env.nursery, self.statistics, self.metadata_gate
        )
        self.digests = Digests(self.admission, self.statistics)
        self._env = env
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._on_readonly: Callable[[bool], None] = lambda _readonly: None
        self._refusals: BookieRefusals
        self._keys: KeyChecks
        self._explicit_lacs: ExplicitLacs

    # Lifecycle

    async def start(self, doubts: Sequence[str] = ()) -> None:
        """Read the journal and the index back from disk, and prepare the disk for writing. Raises ConfigError, or
        OSError if the disk fails or is full.

        Each string in `doubts` is a reason why records may be missing although the disk looks intact. If there is one,
        every ledger goes into limbo: a missing entry then counts as unknown instead of absent.
        """
        try:
            await self._start(doubts)
        except BaseException as error:
            self.stop()
            if isinstance(error, JournalFull):
                raise no_space(f"no space is left in {self._config.journal_dir} for the records of a start") from error
            raise

    async def _start(self, doubts: Sequence[str]) -> None:
        disk, config = self._env.disk, self._config
        for directory in (config.journal_dir, config.index_dir):
            make_directory(disk, directory)
        reserve_bytes = config.reserve_bytes
        found = replay(disk, config.journal_dir, config.index_dir, self.own_ledgers, reserve_bytes=reserve_bytes)
        doubts = [*doubts, *found.damage]
        for doubt in doubts:
            log.error("ledgers may lack records, missing entries count as unknown instead of absent reason=%s", doubt)
        if doubts:
            found.inventory.set_limbo(True)
            drop_ends_of_doubts(found)
        self.statistics.damaged_records += found.damaged_records + len(found.damage)
        self._assemble(found.inventory)
        found.rebuilder.on_lost = self._lost
        write_unsynced_again(found, config, self.journal, self.adds.store_again)
        renew_doubts(found, self.facts)
        await self.synced()
        release_empty_segments(found, self.journal)
        # a second group certifies that the first one, which replaces other segments, is synced
        self.journal.note_files()
        await self.synced()
        tidy(found, disk, config)
        found.inventory.index_files.is_serving = True

    def _assemble(self, inventory: Inventory) -> None:
        """Create the parts that need to know what the disk holds."""
        config, statistics = self._config, self.statistics
        self.inventory = inventory
        self.journal = journal = Journal(
            self._env,
            config,
            inventory.segments,
            inventory.open_files,
            statistics,
            on_full=self._full,
            on_rolled=self._rolled,
        )
        self.reader = Reader(inventory, journal, statistics, poll_ms_max=config.poll_ms_max)
        self.facts = Facts(inventory, journal, statistics)
        self._refusals = refusals = BookieRefusals(journal, statistics)
        self._keys = keys = KeyChecks(inventory, self.admission, refusals)
        self.adds = Adds(
            inventory,
            journal,
            statistics,
            held=StoredCopies(inventory, journal, self.reader, self.digests),
            facts=self.facts,
            keys=keys,
            admission=self.admission,
            refusals=refusals,
            sync_gate=self.sync_gate,
            pending_bytes_max=config.pending_bytes_max,
        )
        journal.on_synced = self.adds.synced
        self.raw = RawAdds(
            self._env.clock,
            is_on=config.admit_raw_adds,
            inventory=inventory,
            facts=self.facts,
            adds=self.adds,
            digests=self.digests,
            admission=self.admission,
            refusals=refusals,
            ordinary=self.add,
        )
        self._explicit_lacs = ExplicitLacs(
            inventory, journal, facts=self.facts, keys=keys, admission=self.admission, refusals=refusals
        )

    async def synced(self) -> None:
        """Wait until everything accepted before this call is on disk."""
        done = self._loop.create_future()
        self.journal.barrier(lambda: None if done.done() else done.set_result(None))
        await done

    def on_readonly(self, listener: Callable[[bool], None]) -> None:
        """Call `listener` with True when the bookie becomes read-only, and with False when it becomes writable again. A
        second call replaces the listener."""
        self._on_readonly = listener

    @property
    def is_readonly(self) -> bool:
        """True if the bookie refuses ordinary adds because only the reserve of the disk is left."""
        return self.journal.is_full

    @property
    def takes_copies(self) -> bool:
        """True if the bookie accepts recovery adds. A read-only bookie accepts them while the reserve has space."""
        return self.journal.has_capacity(Use.COPY, 0)

    def _rolled(self, segment: Segment) -> None:
        segment.release()
        checkpoint = self.inventory.close(segment, self.journal.synced_group)
        self.inventory.index_files.write(checkpoint)

    # docs/protocol.md B31
    def _lost(self, ledger: int) -> None:
        """Record durably that entries of a ledger may be missing. If the journal has no space for that record, the next
        start finds the damage again."""
        with suppress(JournalFull):
            self.facts.set_limbo(self.inventory.ledgers[ledger], True)

    def _full(self, is_full: bool) -> None:
        if is_full != self.statistics.readonly:
            self.statistics.readonly = is_full
            state = f"read-only: {self.journal.why_full}" if is_full else "writable again"
            log.warning("bookie state changed bookie=%s state=%s", self.bookie, state)
            self._on_readonly(is_full)
            self.sync_gate.open(self.adds)

    def space(self) -> tuple[int, int]:
        """Return the bytes that this bookie can use in total, and the free bytes. Raises OSError."""
        free = self.free_bytes()
        return free + sum(segment.capacity for segment in self.inventory.segments.values()), free

    def free_bytes(self) -> int:
        """Return the free bytes in the file system of the journal directory. Raises OSError."""
        return self._env.disk.free_bytes(self._config.journal_dir)

    def refresh_statistics(self) -> Statistics:
        """Update the statistics that are counted only on demand, and return all statistics."""
        self.inventory.count(self.statistics)
        with suppress(OSError):  # the disk may have failed
            self.statistics.free_bytes = self.free_bytes()
        return self.statistics

    # docs/protocol.md B35
    def stop(self) -> None:
        """Stop writing and close all files. Records whose `done` was not called may or may not be on disk. Calling it
        again does nothing."""
        if hasattr(self, "journal"):  # otherwise the disk could not even be read back
            self.journal.certify()
            self.journal.stop()
        for segment in self.inventory.segments.values():
            segment.release()
        self.inventory.index_files.close()

    # Writing

    # docs/protocol.md B12
    def may_ask(self, ledger: int, key: bytes, body: bytes | None = None, *, is_writers: bool = False) -> bool:
        """Return True if a request with this key may have to wait for the metadata store. Such a request is a fence, a
        packet (`body`), or an ordinary add of the ledger's writer (`is_writers`)."""
        if body is not None and not (proves_itself(body) or lac_proves_itself(body) or self.digests.knows(ledger, key)):
            return True
        return self._keys.may_ask(ledger, key, is_writers=is_writers)

    def add(self, ledger: int, entry: int, body: bytes, key: bytes, *, recovery: bool, done: Done) -> None:
        """Store an entry packet. `done` gets OK once the packet is on disk, otherwise the reason of the refusal:
        BAD_REQUEST, FENCED, UNAUTHORIZED, READ_ONLY, TOO_MANY_REQUESTS and others. A recovery add is accepted on a
        fenced ledger."""
        size = len(body)
        if size < HEADER.size or size > PACKET_MAX or not 0 < len(key) <= KEY_MAX:
            done(Status.BAD_REQUEST)
            return
        if size >= HEADER_AND_CRC.size:
            of_ledger, of_entry, lac, _, crc = HEADER_AND_CRC.unpack_from(body)
        else:
            of_ledger, of_entry, lac, _ = HEADER.unpack_from(body)
            crc = -1  # no digest
        if of_ledger != ledger or of_entry != entry or entry < 0 or ledger < 0:
            done(Status.BAD_REQUEST)
            return
        if is_crc(body, crc):  # it proves itself
            self.adds.take(ledger, entry, body, key, recovery, lac, done)
            return

        def judged(status: Status) -> None:
            if status is Status.OK:
                self.adds.take(ledger, entry, body, key, recovery, lac, done)
            else:
                done(status)

        check = partial(EntryDigest.open, ledger=LedgerId(ledger), entry=EntryId(entry), packet=body)
        self.digests.judge(ledger, key, len(body), check, judged)

    def write_lac(self, ledger: int, body: bytes, key: bytes, *, done: Done) -> None:
        """Keep an explicit LAC packet whose digest is valid. Readers see it before it is on disk, because it only
        reports which entries other bookies have stored."""
        if not LAC_HEADER.size <= len(body) <= LAC_MAX or LAC_HEADER.unpack_from(body)[0] != ledger or ledger < 0:
            done(Status.BAD_REQUEST)
            return
        if lac_proves_itself(body):
            self._explicit_lacs.keep(ledger, body, key, done)
            return

        def judged(status: Status) -> None:
            if status is Status.OK:
                self._explicit_lacs.keep(ledger, body, key, done)
            else:
                done(status)

        check = partial(EntryDigest.open_lac, ledger=LedgerId(ledger), packet=body)
        self.digests.judge(ledger, key, len(body), check, judged)

    def force(self, ledger: int, *, done: Done) -> None:
        """Call `done` with OK once everything accepted before this call is on disk."""
        self.journal.barrier(lambda: done(Status.OK))

    # Reading

    def read(self, ledger: int, entry: int, *, key: bytes | None = None, fence: bool = False, done: ReadDone) -> None:
        """Read one entry; LAST_ENTRY reads the last one stored. `done` gets the status, the entry id, the packet or
        None, and the highest LAC known here. NO_LEDGER and NO_ENTRY are definite answers.

        With `fence`, the ledger is fenced permanently, and the fence is on disk before any answer. A fencing read waits
        until everything accepted before it is on disk, and sees it.
        """
        self.statistics.reads += 1
        if entry < LAST_ENTRY or ledger < 0:
            done(Status.BAD_REQUEST, entry, None, -1)
        elif not fence:
            self.reader.read(ledger, entry, done, after_all=False)
        elif ledger in self.inventory.tombstones:
            done(Status.NO_LEDGER, entry, None, -1)  # its fence has outlived it
        elif key is None or not 0 < len(key) <= KEY_MAX:
            done(self._refusals.by(WriteVerdict.WRONG_KEY), entry, None, -1)
        else:
            self._keys.when_right(ledger, key, partial(self._fence_and_read, ledger, entry, key, done))

    def read_on(
        self, ledger: int, entry: int, body: bytes, limits: tuple[int, int], *, passes_over: bool = False
    ) -> list[bytes]:
        """Return `body`, the packet already read for `entry`, and the packets of the entries after it. `limits` are the
        maximum number of entries and of bytes; see Reader.read_on."""
        return self.reader.read_on(ledger, entry, body, limits, passes_over=passes_over)

    # docs/protocol.md L5
    def _fence_and_read(self, ledger: int, entry: int, key: bytes, done: ReadDone, status: Status, _: bool) -> None:
        """Fence the ledger, then read. The fence is on disk once the journal has synced the ledger's `last_group`."""
        if ledger in self.inventory.tombstones:
            status = Status.NO_LEDGER  # it was deleted while its metadata was read
        if status is Status.OK:
            status = self.facts.fence(ledger, key)
        if status is Status.OK:
            self.reader.read(ledger, entry, done, after_all=True)
        else:
            done(status, entry, None, -1)

    def read_lac(self, ledger: int, *, done: Callable[[Status, bytes | None, bytes | None], Any]) -> None:
        """Read the last explicit LAC packet and the last entry packet. Either may be None; if both are missing, the
        status is NO_ENTRY."""
        self.reader.read_lac(ledger, done=done)

    def long_poll(self, ledger: int, previous_lac: int, timeout_ms: int, *, done: ReadDone) -> Callable[[], None]:
        """Answer once the LAC has passed `previous_lac`, with the entry after `previous_lac` if it is stored here, or
        without an entry after `timeout_ms` milliseconds. Return a function that cancels the request."""
        return self.reader.long_poll(ledger, previous_lac, timeout_ms, done=done)

    def listen(self, ledger: int, listener: LedgerListener) -> Callable[[], None] | None:
        """Notify `listener` of everything stored of the ledger from now on. Return a function that removes the
        listener, or None if the ledger is unknown here."""
        return self.reader.listen(ledger, listener)

    def list_entries(self, ledger: int, *, done: Callable[[Status, Sequence[tuple[int, int]]], Any]) -> None:
        """List the ledger's entries stored here. `done` gets the status, and the entries as (first, count) runs in
        ascending order."""
        self.reader.list_entries(ledger, done=done)
