"""The journal, which is the entry log too: each byte is written once. Group commit, one sync per group.

Records gather in the open group while the previous group is being written and synced, off the event loop. When that is
done the open group is next, and so on: one sync is in flight at a time, and nothing is reported before the sync that
covers it. A sync that fails ends the process: what the disk holds is then unknown, and a second sync would not tell.

Segments are made one ahead. Without a segment ahead the journal is full: what is left of the present one is for what
room.py says (docs/protocol.md, B9); storage.py refuses ordinary adds then.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from struct import pack

from kvstore.bookie.config import BookieConfig
from kvstore.bookie.journal.group import JournalGroup
from kvstore.bookie.journal.record import (
    FILE_HEADER_SIZE,
    GROUP_HEADER_SIZE,
    RECORD_HEADER_SIZE,
    GroupHeader,
    RecordKind,
    encode_group_header,
    encode_record_head,
)
from kvstore.bookie.journal.room import Use, leaves
from kvstore.bookie.journal.segment import OpenFiles, Segment
from kvstore.bookie.journal.supply import RETRY_S, SegmentSupply, overhead
from kvstore.bookie.statistics import Statistics
from kvstore.env.ports import Env
from kvstore.env.syncs import NotWritten
from kvstore.os_errors import is_passing

log = logging.getLogger(__name__)

CERTIFY_S = 0.05
"""Idle time after which the last group is certified as synced: damage to it later is not taken for a torn tail."""
SMALL_GROUP_BYTES = 4 << 10
"""The sync of a group in blocks that were only allocated writes some 4 KiB more, of the file system's own journal. So
zeroes ahead cost less than they save where groups are smaller, and write every byte twice where they are larger."""


class Journal:
    """Appends records and reports groups as synced, in order."""

    open_group: JournalGroup
    """The group that the next record joins, unless it begins a segment."""
    _seed: int
    _limit: int

    def __init__(
        self,
        env: Env,
        config: BookieConfig,
        segments: dict[int, Segment],
        open_files: OpenFiles,
        statistics: Statistics,
        *,
        on_full: Callable[[bool], None],
        on_rolled: Callable[[Segment], None],
    ) -> None:
        self._env = env
        self._loop = asyncio.get_running_loop()
        self._config = config
        self._segments = segments
        """The segments that there are; those which this journal begins are added."""
        self.supply = SegmentSupply(
            env,
            config,
            segments,
            open_files,
            on_ready=self._on_ready,
            on_change=self._update_full,
            on_damage=self._die,
        )
        self._statistics = statistics
        self.on_synced: Callable[[JournalGroup], None] = lambda _group: None
        self._on_full = on_full
        self._on_rolled = on_rolled
        self._queue: deque[JournalGroup] = deque()
        self._syncing: JournalGroup | None = None
        self._sync_began = 0.0
        self._synced_file = 0
        self._synced_to = 0
        self._is_certified = True
        self._small_bytes = 0
        """Of this segment's groups below SMALL_GROUP_BYTES: so far is the segment ahead filled."""
        self._is_scheduled = False
        self._is_blocked = False
        self._why_blocked = ""
        self.is_full = True
        """Only the reserve is left, or not even that."""
        self.why_full = ""
        """Why it takes no ordinary adds, with the directory, as an operator reads it; empty if it takes them."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._is_stopped = False
        self.synced_group = 0
        """Every group up to this one is on the disk."""

    def open(self, *, file: int, group: int, synced: tuple[int, int], is_limbo: bool, room: int, size: int) -> None:
        """Begin segment `file`, of `size` bytes and with `room` at least, with group `group`.

        `synced`: the segment and the offset where the journal's former part ends. `is_limbo`: records of that part may
        be missing. Raises OSError if there is no room.
        """
        self.supply.next_file = file
        self._synced_file, self._synced_to = synced
        self.synced_group = group - 1
        room += overhead(len(self._segments) + 1)  # of a second group that names the segments
        self._begin(self.supply.create(room, size), group, is_limbo=is_limbo)
        self.supply.make_spare()
        self.supply.look()

    # Appending

    # docs/protocol.md B9
    def _update_full(self) -> None:
        self.is_full = self.supply.spare is None or self.supply.is_scarce or self._is_blocked
        self.why_full = (self._why_blocked if self._is_blocked else self.supply.why) if self.is_full else ""
        self._on_full(self.is_full)

    @property
    def room(self) -> int:
        """Bytes left in the present segment."""
        return self._limit - self.open_group.end

    @property
    def synced_file(self) -> int:
        """The segment of the last synced group. Those before it are full, and `on_rolled` was told so."""
        return self._synced_file

    def has_room(self, use: Use, size: int) -> bool:
        """Whether records of so many bytes may be appended now (docs/protocol.md, B20). For facts always: if there is
        none in the end, `append` says so."""
        if not self.is_full or use is Use.FACT:
            return True
        is_left = self.room - size >= leaves(use, self._config.segment_bytes)
        return use is not Use.ADD and (is_left or self.supply.may_make(size, use))

    def append(
        self, kind: int, flags: int, ledger: int, entry: int, body: bytes, *, urgent: bool = True, use: Use = Use.ADD
    ) -> int:
        """Add a record to the open group and return its offset. Not `urgent`: it waits CERTIFY_S for company. Whether
        there is room for this use is to be asked before, by `has_room`.

        Raises JournalFull.
        """
        group = self.open_group
        end = group.end + RECORD_HEADER_SIZE + len(body)
        if end > self._limit:
            group = self._roll(RECORD_HEADER_SIZE + len(body), use)
            end = group.end + RECORD_HEADER_SIZE + len(body)
        offset = group.end
        group.buffers += (encode_record_head(kind, flags, ledger, entry, body, seed=self._seed, offset=offset), body)
        group.end = end
        if not self._is_scheduled and self._syncing is None:
            self._schedule(urgent)
        return offset

    def after(self, group: int, done: Callable[[], None], *, urgent: bool = True) -> None:
        """Call `done` once `group`, which must have been begun, is on the disk; at once if it is."""
        if group <= self.synced_group:
            done()
            return
        if urgent and not self._is_scheduled and self._syncing is None:
            self._schedule(True)
        for each in (self._syncing, *self._queue, self.open_group):
            if each is not None and each.number == group:
                each.after.append(done)
                return
        if self._is_stopped:
            return
        raise AssertionError(f"group {group} was never begun")

    def barrier(self, done: Callable[[], None]) -> None:
        """Call `done` once everything appended so far is on the disk; at once if it is."""
        if self.open_group.buffers:
            self.after(self.open_group.number, done)
        elif self._queue:
            self._queue[-1].after.append(done)
        elif self._syncing is not None:
            self._syncing.after.append(done)
        else:
            done()

    def _schedule(self, urgent: bool) -> None:
        if urgent:
            self._is_scheduled = True
            self._loop.call_soon(self._flush)
        elif "linger" not in self._timers:
            self._later("linger", CERTIFY_S, self._flush)

    def _later(self, name: str, delay_s: float, call: Callable[[], None]) -> None:
        def fire() -> None:
            del self._timers[name]
            call()

        if name not in self._timers and not self._is_stopped:
            self._timers[name] = self._loop.call_later(delay_s, fire)

    # Groups

    # docs/protocol.md B1
    def _flush(self) -> None:
        self._is_scheduled = False
        if self._syncing is not None or self._is_stopped:
            return
        group = self._queue[0] if self._queue else self.open_group
        if (
            not (group.buffers or self._queue)
            or not group.segment.is_ready
            or (group.next is not None and not group.next.is_ready)
        ):
            return  # nothing to do, or a segment's header is being synced, which ends in another flush
        header = GroupHeader(
            group.segment.file,
            group.end - group.start - GROUP_HEADER_SIZE,
            group.number,
            self._synced_file,
            self._synced_to,
        )
        head = encode_group_header(header, group.segment.salt, group.start)
        if self._queue:
            self._queue.popleft()
        else:
            self.open_group = _group_after(group)
        self._syncing = group
        self._sync_began = self._env.clock.now()
        try:
            group.file.submit_write(group.start, b"".join((head, *group.buffers)), self._on_sync)
        except OSError as error:
            self._sync_failed(error)

    def _write_failed(self, group: JournalGroup, error: OSError) -> None:
        """Keep the group, of which nothing was reported yet, and write it again later if the error passes."""
        why = self.supply.reason(error)
        if not is_passing(error):
            self.fail(f"journal write failed: {why}")
            return
        if why != self._why_blocked or not self._is_blocked:
            log.warning("journal segment=%d cannot be written, trying again: %s", self.synced_file, why)
        self._syncing = None
        self._queue.appendleft(group)
        self._is_blocked, self._why_blocked = True, why
        self._update_full()
        self._later("retry", RETRY_S, self._flush)

    # docs/protocol.md L12
    def _on_sync(self, error: OSError | None) -> None:
        group = self._syncing
        if self._is_stopped or group is None:
            return
        if isinstance(error, NotWritten):
            self._write_failed(group, error)
            return
        if error is not None:
            self._sync_failed(error)
            return
        self._syncing = None
        if self._is_blocked:
            self._is_blocked = False
            self._update_full()
        if not group.buffers:  # a certificate, which syncs nothing itself
            self._flush()
            self._tell(group)
            return
        self._env.liveness.disk_works(self._config.journal_dir)
        statistics = self._statistics
        statistics.syncs += 1
        statistics.synced_bytes += group.end - group.start
        statistics.group_records.add(len(group.buffers) >> 1)
        statistics.sync_s.add(self._env.clock.now() - self._sync_began)
        self.synced_group = group.number
        self._synced_file, self._synced_to = group.segment.file, group.end
        group.segment.end = group.end
        self._is_certified = False
        if group.end - group.start < SMALL_GROUP_BYTES:
            self._small_bytes += group.end - group.start
        self._flush()  # the next sync runs while this group's senders are told
        self._tell(group)

    def _tell(self, group: JournalGroup) -> None:
        """Report a group that is on the disk, and do what was left until then."""
        self.on_synced(group)
        for done in group.after:
            try:
                done()
            except Exception:  # a fault of one client's must not keep the others from their answers
                log.exception("group=%d whoever waited for it failed", group.number)
        if group.next is not None:
            self._on_rolled(group.segment)
        elif (spare := self.supply.spare) is not None and spare.filled < self._small_bytes:
            self._statistics.filled_bytes += spare.fill(self._small_bytes, self._sync_failed)
        if self._syncing is None and "certify" not in self._timers:
            self._later("certify", CERTIFY_S, self.certify)

    def certify(self) -> None:
        """Say in the journal that its last group is synced. That needs no sync itself: it only repeats what is true."""
        if self._is_certified or self._syncing is not None or self._is_stopped or self._queue:
            return  # a journal that was never opened has nothing that is not certified
        group = self.open_group
        if group.buffers or group.end + GROUP_HEADER_SIZE > self._limit:
            return
        header = GroupHeader(group.segment.file, 0, group.number, self._synced_file, self._synced_to)
        self.open_group = _group_after(group)
        self._is_certified = True
        self._syncing = group  # a group that follows is not written before it: a gap would end the journal
        head = encode_group_header(header, group.segment.salt, group.start)
        try:
            group.file.submit_write(group.start, head, self._on_sync, is_synced=False)
        except OSError as error:
            self._sync_failed(error)

    def _sync_failed(self, error: OSError) -> None:
        if not self._is_stopped:
            self._die(f"journal sync failed: {error}")

    def fail(self, reason: str) -> None:
        """End the use of the directory for a reason that the journal has not found itself."""
        if not self._is_stopped:
            self._die(reason)

    def _die(self, reason: str) -> None:
        """Take nothing more: where the process outlives this journal, what is appended from now on finds no room."""
        self.stop()
        self._limit, self._is_blocked = 0, True
        self._env.fatal(reason)

    def unreported(self) -> list[JournalGroup]:
        """The groups that were not reported as synced, and after a failure never will be."""
        return [each for each in (self._syncing, *self._queue, self.open_group) if each is not None]

    # Segments

    def _begin(self, segment: Segment, number: int, *, is_limbo: bool = False) -> None:
        """Make `segment` the one that is written to.

        LIMBO stands before FILES: once a torn group lets nobody miss the segments that were lost, it has told so.
        """
        self.open_group = JournalGroup(
            number, segment, segment.handle, FILE_HEADER_SIZE, FILE_HEADER_SIZE + GROUP_HEADER_SIZE
        )
        self._small_bytes = 0
        self._seed = segment.seed
        # Room for NEXT, and for the header of its group where that has nothing else: on a full disk no file grows.
        self._limit = segment.capacity - GROUP_HEADER_SIZE - RECORD_HEADER_SIZE
        self._segments[segment.file] = segment
        if is_limbo:
            self.append(RecordKind.LIMBO, 0, -1, -1, b"", use=Use.FACT)
        self.note_files()

    def note_files(self) -> None:
        """Say in the journal which segments there are."""
        files = sorted(self._segments)
        self.append(RecordKind.FILES, 0, -1, -1, pack(f">{len(files)}I", *files), use=Use.FACT)

    def _roll(self, size: int, use: Use) -> JournalGroup:
        """Go on in the segment ahead. Raises JournalFull."""
        following = self.supply.take(size, use)
        last = self.open_group
        head = encode_record_head(RecordKind.NEXT, 0, -1, following.file, b"", seed=self._seed, offset=last.end)
        last.buffers += (head, b"")
        last.end += RECORD_HEADER_SIZE
        last.next = following
        self._queue.append(last)
        self._begin(following, last.number + 1)
        self.supply.make_spare()
        return self.open_group

    def _on_ready(self, error: OSError | None) -> None:
        if error is not None:
            self._sync_failed(error)
        else:
            self._flush()

    def stop(self) -> None:
        """Write nothing more. What was not reported as synced may or may not be there."""
        self._is_stopped = True
        self.supply.stop()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()


def _group_after(group: JournalGroup) -> JournalGroup:
    return JournalGroup(group.number + 1, group.segment, group.file, group.end, group.end + GROUP_HEADER_SIZE)
