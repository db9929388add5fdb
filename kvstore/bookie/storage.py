"""A bookie's storage: the calls that its service makes for other nodes, and that the node's own client makes directly.

No call waits. Each ends in one call of its `done` on the event loop, with a status first; an add, a fence or a LAC is
reported after the sync that makes it durable. Nothing that is not on the disk is ever shown.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvstore.bookie.admission import Admission, Authority
from kvstore.bookie.backpressure import Door
from kvstore.bookie.checkpoints import write_checkpoint
from kvstore.bookie.config import BookieConfig
from kvstore.bookie.digests import Digests, lac_proves_itself, proves_itself
from kvstore.bookie.fencing import Verdict, judge_add, judge_key
from kvstore.bookie.inventory import Inventory
from kvstore.bookie.journal.group import Group
from kvstore.bookie.journal.journal import Journal
from kvstore.bookie.journal.record import ADMITTED, CLEARED, RECORD_HEADER_SIZE, RECOVERY, Kind
from kvstore.bookie.journal.room import JournalFull, Use
from kvstore.bookie.journal.segment import Segment
from kvstore.bookie.ledger import Ledger, lac_of
from kvstore.bookie.opening import make_directory, tidy, write_again
from kvstore.bookie.reader import ReadDone, Reader
from kvstore.bookie.replay import replay
from kvstore.bookie.statistics import Statistics
from kvstore.env.ports import Env
from kvstore.proto.bookkeeper import LAST_ENTRY, PACKET_MAX, Status
from kvstore.proto.digest import HEADER, LAC_HEADER, EntryDigest
from kvstore.types import BookieId, EntryId, LedgerId

log = logging.getLogger(__name__)

Done = Callable[[Status], Any]
KEY_MAX = 64
LAC_MAX = 1024
LOCAL_FACTOR = 2
"""How far the node's own client may go beyond what makes others wait, before its adds are refused."""
REFUSALS = {
    Verdict.FENCED: Status.FENCED,
    Verdict.WRONG_KEY: Status.UNAUTHORIZED,
    Verdict.UNKNOWN: Status.UNKNOWN_LEDGER_STATE,
}


def _nobody(_status: Status) -> None:
    """Nobody waits for this add."""


class BookieStorage:
    """Ledgers on this bookie's disk."""

    def __init__(self, env: Env, config: BookieConfig, bookie: BookieId, authority: Authority) -> None:
        self.statistics = Statistics()
        self.inventory = Inventory()
        self.bookie = bookie
        self.door = Door(lambda: self.is_busy)
        """For all from elsewhere, while too much waits for a sync."""
        self.gate = Door(lambda: self.admission.is_busy)
        """For what `may_ask`, while too much waits for the metadata."""
        self.admission = Admission(authority, bookie, env.nursery, self.statistics, on_answered=self.gate.let_in)
        self.digests = Digests(self.admission, self.statistics)
        self._env = env
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._ledgers: dict[int, Ledger] = {}
        self._pending_bytes = 0
        self._on_readonly: Callable[[bool], None] = lambda _readonly: None
        self.journal: Journal

    async def start(self, doubts: Sequence[str] = ()) -> None:
        """Read the disk back and make it ready. Raises ConfigError, OSError.

        `doubts`: why records may be missing although the disk looks whole.
        """
        disk, config = self._env.disk, self._config
        for directory in (config.journal_dir, config.index_dir):
            make_directory(disk, directory)
        found = replay(disk, config.journal_dir, config.index_dir)
        doubts = [*doubts, *found.damage]
        for doubt in doubts:
            log.error("%s: ledgers may lack records; what is not found counts as unknown, not as absent", doubt)
        self.inventory, self._ledgers = found.inventory, found.inventory.ledgers
        if doubts:
            self.inventory.set_limbo(True)
        self.statistics.damaged_records += found.damaged_records + len(found.damage)
        self.journal = Journal(
            self._env,
            config,
            self.inventory.segments,
            self.inventory.open_files,
            self.statistics,
            on_synced=self._synced,
            on_full=self._full,
            on_rolled=self._rolled,
        )
        self.reader = Reader(self.inventory, self.journal, self.statistics, poll_ms_max=config.poll_ms_max)
        write_again(found, config, self.journal, self.append_copy)
        await self.synced()
        self.journal.note_files()  # a second group says that the first one, which replaces other segments, is synced
        await self.synced()
        tidy(found, disk, config)

    async def synced(self) -> None:
        """Return when everything accepted before is on the disk."""
        done = self._loop.create_future()
        self.journal.barrier(lambda: None if done.done() else done.set_result(None))
        await done

    def on_readonly(self, listener: Callable[[bool], None]) -> None:
        """Call `listener` when the bookie becomes read-only or writable again."""
        self._on_readonly = listener

    @property
    def is_readonly(self) -> bool:
        """Ordinary adds are refused: the disk is full but for the reserve."""
        return self.journal.is_full

    # Adding

    @property
    def is_busy(self) -> bool:
        """So much waits for a sync that who comes from elsewhere should wait at the door. A full disk is no reason: its
        adds are refused at once."""
        return self._pending_bytes > self._config.pending_bytes_max and not self.journal.is_full

    # docs/protocol.md B12
    def may_ask(self, ledger: int, key: bytes, body: bytes | None = None, *, is_writers: bool = False) -> bool:
        """Whether what shows this key for the ledger may have to wait for the metadata store: a fence, a packet, or an
        ordinary add of its writer's."""
        if body is not None and not (proves_itself(body) or lac_proves_itself(body) or self.digests.knows(ledger, key)):
            return True
        found = self._ledgers.get(ledger)
        if ledger in self.inventory.tombstones or (found is not None and found.is_fenced and is_writers):
            return False
        return judge_key(found, key) is Verdict.ASK or (found is not None and is_writers and not found.is_admitted)

    def add(self, ledger: int, entry: int, body: bytes, key: bytes, *, recovery: bool, done: Done) -> None:
        """Store an entry packet. OK once it is on the disk; FENCED, UNAUTHORIZED, READ_ONLY, TOO_MANY_REQUESTS, …"""
        if len(body) < HEADER.size or len(body) > PACKET_MAX or not 0 < len(key) <= KEY_MAX:
            done(Status.BAD_REQUEST)
            return
        of_ledger, of_entry, lac, _ = HEADER.unpack_from(body)
        if of_ledger != ledger or of_entry != entry or entry < 0 or ledger < 0:
            done(Status.BAD_REQUEST)
            return
        if proves_itself(body):
            self._take(ledger, entry, body, key, recovery, lac, done)
            return

        def judged(status: Status) -> None:
            if status is Status.OK:
                self._take(ledger, entry, body, key, recovery, lac, done)
            else:
                done(status)

        check = partial(EntryDigest.open, ledger=LedgerId(ledger), entry=EntryId(entry), packet=body)
        self.digests.judge(ledger, key, len(body), check, judged)

    def _take(self, ledger: int, entry: int, body: bytes, key: bytes, recovery: bool, lac: int, done: Done) -> None:
        """Store a packet whose digest is right, if it is admitted."""
        found = self._ledgers.get(ledger)
        if found is None or found.key != key or found.is_fenced or not found.is_admitted:
            found = self._judged(ledger, entry, body, key, recovery, lac, done)  # otherwise judge_add says ADMIT
            if found is None:
                return
        self._store(found, entry, body, recovery, lac, done)

    def _judged(
        self, ledger: int, entry: int, body: bytes, key: bytes, recovery: bool, lac: int, done: Done
    ) -> Ledger | None:
        """The ledger if the add is admitted at once; otherwise it is refused, or waits for the metadata."""
        verdict, use = self._judge(ledger, key, recovery), Use.COPY if recovery else Use.ADD
        if verdict is Verdict.ADMIT:
            return self._first_contact(ledger, key, done, use=use, size=len(body))
        if verdict is not Verdict.ASK:
            self._refuse(verdict, done)
            return None

        def resume(of_key: Verdict, of_add: Verdict) -> None:
            again = self._judge(ledger, key, recovery)  # it may have been fenced meanwhile
            if again is Verdict.ASK:
                again = of_key if recovery else of_add
            if again is not Verdict.ADMIT:
                self._refuse(again, done)
                return
            found = self._first_contact(ledger, key, done, 0 if recovery else ADMITTED, use=use, size=len(body))
            if found is not None:
                self._store(found, entry, body, recovery, lac, done)

        if not self.admission.ask(ledger, key, len(body), resume):
            self.statistics.refused_overload += 1
            done(Status.TOO_MANY_REQUESTS)
        return None

    def _judge(self, ledger: int, key: bytes, recovery: bool) -> Verdict:
        tombstoned = ledger in self.inventory.tombstones
        return judge_add(self._ledgers.get(ledger), key=key, recovery=recovery, is_tombstoned=tombstoned)

    def _refuse(self, verdict: Verdict, done: Done) -> None:
        self.statistics.refused_fenced += verdict is Verdict.FENCED
        self.statistics.refused_key += verdict is Verdict.WRONG_KEY
        self.statistics.refused_unknown += verdict is Verdict.UNKNOWN
        done(REFUSALS[verdict])

    def _first_contact(
        self, ledger: int, key: bytes, done: Done, flags: int = 0, use: Use = Use.ADD, size: int = 0
    ) -> Ledger | None:
        """The ledger in the books, its key noted in the journal; None, which is then told, if there was no room for
        that and for the `size` bytes that are to follow."""
        found = self._ledgers.get(ledger)
        if found is not None and found.key and found.is_admitted >= bool(flags):
            return found
        try:
            if not self.journal.has_room(use, 2 * RECORD_HEADER_SIZE + len(key) + size):
                raise JournalFull
            found = self._known(ledger, key)
            self.note(Kind.KEY, flags | ADMITTED * found.is_admitted, found, -1, key, use=use)
        except JournalFull:
            self._refuse_for_now(done)
            return None
        found.is_admitted |= bool(flags)
        return found

    def _known(self, ledger: int, key: bytes) -> Ledger:
        """The ledger in the books. A new one is in limbo while records of any ledger may be missing."""
        is_new = ledger not in self._ledgers
        found = self.inventory.known(ledger, key)
        if is_new and self.inventory.is_limbo:
            self.set_limbo(found, True)
        return found

    def _store(self, ledger: Ledger, entry: int, body: bytes, recovery: bool, lac: int, done: Done) -> None:
        journal = self.journal
        if not recovery and (journal.is_full or self._pending_bytes > LOCAL_FACTOR * self._config.pending_bytes_max):
            self._refuse_for_now(done)
            return
        index = ledger.index
        if (entry - index.first < len(index.places) or index.others) and self._has(ledger, entry, body):
            done(Status.OK)  # a repetition whose answer was lost
            return
        if recovery and not journal.has_room(Use.COPY, RECORD_HEADER_SIZE + len(body)):
            self._refuse_for_now(done)
            return
        try:
            offset = journal.append(Kind.ADD, RECOVERY if recovery else 0, ledger.id, entry, body)
        except JournalFull:
            self._refuse_for_now(done)
            return
        group = journal.open_group
        group.adds.append((ledger, entry, offset, len(body), lac, done))
        ledger.last_group = group.number
        self._pending_bytes += len(body)

    def append_copy(self, ledger: Ledger, entry: int, body: bytes) -> None:
        """Store a packet that is here once more. Raises JournalFull."""
        offset = self.journal.append(Kind.ADD, RECOVERY, ledger.id, entry, body, use=Use.REWRITE)
        group = self.journal.open_group
        lac = HEADER.unpack_from(body)[2]
        group.adds.append((ledger, entry, offset, len(body), lac, _nobody))
        ledger.last_group = group.number
        self._pending_bytes += len(body)

    def _refuse_for_now(self, done: Done) -> None:
        if self.journal.is_full:
            self.statistics.refused_readonly += 1
            done(Status.READ_ONLY)
        else:
            self.statistics.refused_overload += 1
            done(Status.TOO_MANY_REQUESTS)

    def _has(self, ledger: Ledger, entry: int, body: bytes) -> bool:
        place, size = ledger.index.get(entry)
        return bool(place) and size == len(body) and self.reader.body(ledger.id, entry, place, size) == body

    def _synced(self, group: Group) -> None:
        """A group is on the disk: show all its entries, then tell those who sent them."""
        segment, stored, size_sum = group.segment, self.inventory.stored, 0
        for ledger, entry, offset, size, lac, _ in group.adds:
            stored(segment, ledger, entry, offset, size)
            size_sum += size
            if lac > ledger.lac:
                ledger.raise_lac(lac)
        self._pending_bytes -= size_sum
        self.statistics.adds += len(group.adds)
        self.statistics.add_bytes += size_sum
        for add in group.adds:
            try:
                add[5](Status.OK)
            except Exception:  # a fault of one client's must not keep the others from their answers
                log.exception("ledger=%d entry=%d whoever sent it failed", add[0].id, add[1])
        self.door.let_in()

    def _rolled(self, segment: Segment) -> None:
        segment.release()
        checkpoint = self.inventory.close(segment, self.journal.synced_group)
        write_checkpoint(self._env.disk, self._config.index_dir, checkpoint)

    def _full(self, is_full: bool) -> None:
        if is_full != self.statistics.readonly:
            self.statistics.readonly = is_full
            log.warning("bookie=%s is %s", self.bookie, "read-only: the disk is full" if is_full else "writable again")
            self._on_readonly(is_full)
            self.door.let_in()

    def note(
        self, kind: Kind, flags: int, ledger: Ledger, entry: int, body: bytes, *, urgent: bool = True,
        use: Use = Use.FACT,
    ) -> None:  # fmt: skip
        """Append a record about a ledger. Raises JournalFull."""
        self.journal.append(kind, flags, ledger.id, entry, body, urgent=urgent, use=use)
        group = self.journal.open_group
        group.segment.touched.add(ledger.id)
        ledger.last_group = group.number

    def set_limbo(self, ledger: Ledger, is_limbo: bool) -> None:
        """Mark that records of `ledger` may be missing, or that they are complete again. Raises JournalFull."""
        ledger.is_limbo = is_limbo
        ledger.is_admitted &= not is_limbo
        self.note(Kind.LIMBO, 0 if is_limbo else CLEARED, ledger, -1, b"")

    # Reading

    def read(self, ledger: int, entry: int, *, key: bytes | None = None, fence: bool = False, done: ReadDone) -> None:
        """Read one entry (LAST_ENTRY: the last one stored).

        With `fence` the ledger is fenced, for good and on the disk, before any answer. What was accepted before a
        fencing read is waited for, then seen. NO_LEDGER and NO_ENTRY are definite.
        """
        self.statistics.reads += 1
        if entry < LAST_ENTRY or ledger < 0:
            done(Status.BAD_REQUEST, entry, None, -1)
        elif not fence:
            self.reader.read(ledger, entry, done, after_all=False)
        elif ledger in self.inventory.tombstones:
            done(Status.NO_LEDGER, entry, None, -1)  # its fence has outlived it
        elif key is None or not 0 < len(key) <= KEY_MAX:
            self._refuse(Verdict.WRONG_KEY, lambda status: done(status, entry, None, -1))
        else:
            self._when_key_is_right(ledger, key, partial(self._fence_and_read, ledger, entry, key, done))

    def _when_key_is_right(self, ledger: int, key: bytes, go_on: Callable[[Status, bool], None]) -> None:
        """Call `go_on` with OK if the key is the ledger's, as is known here or as the metadata store says, else with
        why not; and with whether that store has just said that the ledger's writer may add here. docs/protocol.md,
        B13."""
        verdict = judge_key(self._ledgers.get(ledger), key)
        if verdict is not Verdict.ASK:
            self._tell(verdict, False, go_on)
            return

        def resume(of_key: Verdict, of_add: Verdict) -> None:
            known = judge_key(self._ledgers.get(ledger), key)
            self._tell(of_key if known is Verdict.ASK else known, of_add is Verdict.ADMIT, go_on)

        if not self.admission.ask(ledger, key, len(key), resume):
            self.statistics.refused_overload += 1
            go_on(Status.TOO_MANY_REQUESTS, False)

    def _tell(self, verdict: Verdict, may_add: bool, go_on: Callable[[Status, bool], None]) -> None:
        if verdict is Verdict.ADMIT:
            go_on(Status.OK, may_add)
        else:
            self._refuse(verdict, lambda status: go_on(status, False))

    # docs/protocol.md L5
    def _fence_and_read(self, ledger: int, entry: int, key: bytes, done: ReadDone, status: Status, _: bool) -> None:
        """Fence, then read. The fence is on the disk once the ledger's `last_group` is."""
        if ledger in self.inventory.tombstones:
            status = Status.NO_LEDGER  # it was deleted while the metadata was asked about it
        if status is Status.OK:
            status = self._fence(ledger, key)
        if status is Status.OK:
            self.reader.read(ledger, entry, done, after_all=True)
        else:
            done(status, entry, None, -1)

    def _fence(self, ledger: int, key: bytes) -> Status:
        found = self._ledgers.get(ledger)
        if found is not None and found.is_fenced:
            return Status.OK
        try:
            found = self._known(ledger, key)
            self.note(Kind.FENCE, 0, found, -1, key)
        except JournalFull:
            return Status.IO_ERROR
        found.is_fenced = True
        self.statistics.fences += 1
        return Status.OK

    def read_lac(self, ledger: int, *, done: Callable[[Status, bytes | None, bytes | None], Any]) -> None:
        """The last explicit LAC packet and the last entry packet; NO_ENTRY if there is neither."""
        self.reader.read_lac(ledger, done=done)

    def long_poll(self, ledger: int, previous_lac: int, timeout_ms: int, *, done: ReadDone) -> Callable[[], None]:
        """Answer when the LAC has passed `previous_lac`, with the entry after that if it is here, or at the timeout.
        What is returned takes the question back."""
        return self.reader.long_poll(ledger, previous_lac, timeout_ms, done=done)

    def list_entries(self, ledger: int, *, done: Callable[[Status, Sequence[tuple[int, int]]], Any]) -> None:
        """The entries here, as runs (first, count), rising."""
        self.reader.list_entries(ledger, done=done)

    def write_lac(self, ledger: int, body: bytes, key: bytes, *, done: Done) -> None:
        """Keep an explicit LAC packet whose digest is right. Readers see it at once: it only tells of what others have
        stored."""
        if not LAC_HEADER.size <= len(body) <= LAC_MAX or LAC_HEADER.unpack_from(body)[0] != ledger or ledger < 0:
            done(Status.BAD_REQUEST)
            return
        if lac_proves_itself(body):
            self._keep_lac(ledger, body, key, done)
            return

        def judged(status: Status) -> None:
            if status is Status.OK:
                self._keep_lac(ledger, body, key, done)
            else:
                done(status)

        check = partial(EntryDigest.open_lac, ledger=LedgerId(ledger), packet=body)
        self.digests.judge(ledger, key, len(body), check, judged)

    def _keep_lac(self, ledger: int, body: bytes, key: bytes, done: Done) -> None:
        if ledger in self.inventory.tombstones or not 0 < len(key) <= KEY_MAX:
            done(Status.FENCED if key else Status.BAD_REQUEST)
        else:
            self._when_key_is_right(ledger, key, partial(self._note_lac, ledger, body, key, done))

    def _note_lac(self, ledger: int, body: bytes, key: bytes, done: Done, status: Status, may_add: bool) -> None:
        if status is not Status.OK or ledger in self.inventory.tombstones:
            done(Status.FENCED if status is Status.OK else status)
            return
        if self.journal.is_full:
            self._refuse_for_now(done)
            return
        is_new = may_add and self._judge(ledger, key, recovery=False) is Verdict.ASK
        found = self._first_contact(ledger, key, done, flags=ADMITTED if is_new else 0)
        if found is None:
            return
        try:
            self.note(Kind.LAC, 0, found, lac_of(body), body, urgent=False, use=Use.ADD)
        except JournalFull:
            self._refuse_for_now(done)
            return
        found.set_explicit_lac(body)
        self.journal.after(found.last_group, lambda: done(Status.OK), urgent=False)
        if not (found.is_admitted or found.is_fenced):
            self._admit_ahead(ledger, key)

    def _admit_ahead(self, ledger: int, key: bytes) -> None:
        """A writer speaks of its ledger before its first add: that add need not wait for the metadata store then."""

        def resume(_: Verdict, of_add: Verdict) -> None:
            if of_add is Verdict.ADMIT and self._judge(ledger, key, recovery=False) is Verdict.ASK:
                self._first_contact(ledger, key, lambda _: None, flags=ADMITTED)

        self.admission.ask(ledger, key, len(key), resume)

    def force(self, ledger: int, *, done: Done) -> None:
        """OK once everything accepted before is on the disk."""
        self.journal.barrier(lambda: done(Status.OK))

    def space(self) -> tuple[int, int]:
        """Bytes in all, as far as this bookie could use them, and bytes that are free."""
        free = self._env.disk.free_bytes(self._config.journal_dir)
        return free + sum(segment.capacity for segment in self.inventory.segments.values()), free

    def refresh_statistics(self) -> Statistics:
        """Fill in what is counted only on demand."""
        self.inventory.count(self.statistics)
        return self.statistics

    def stop(self) -> None:
        """Write nothing more. What was not reported may or may not be there."""
        self.journal.certify()
        self.journal.stop()
        for segment in self.inventory.segments.values():
            segment.release()
