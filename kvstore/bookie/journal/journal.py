"""The journal, which is also the entry log: each byte is written once. Group commit, one sync per group.

Records gather in the open group while the previous group is written and synced, outside of the event loop. Then the
open group is next, and so on. One sync is in progress at a time, and nothing is reported before the sync that covers
it. After a failed sync, it is unknown what the disk holds, and a second sync would not show it. So the bookie stops
using the directory, and the process ends if the bookie has no other directory.

Segments are created one ahead. Without a segment ahead the journal is full: reserve.py says what the rest of the
present segment is for (docs/protocol.md, B9), and storage.py refuses ordinary adds.
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
from kvstore.bookie.journal.reserve import Use, leaves
from kvstore.bookie.journal.segment import OpenFiles, Segment
from kvstore.bookie.journal.supply import RETRY_S, SegmentSupply, overhead
from kvstore.bookie.statistics import Statistics
from kvstore.env.ports import Env
from kvstore.env.syncs import NotWritten
from kvstore.os_errors import is_passing

log = logging.getLogger(__name__)

CERTIFY_S = 0.05
"""Idle seconds after which the last group is certified as synced, so that later damage to it is not taken for a torn
tail."""
SMALL_GROUP_BYTES = 4 << 10
"""Group size below which zeros are written ahead. The sync of a group into merely allocated blocks also writes about 4
KiB of the file system's own journal. For smaller groups, zeros ahead cost less than they save; for larger ones they
write every byte twice."""


class Journal:
    """The writer of the journal: appends records to groups, and reports groups in order once they are synced."""

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
        """The existing segments. The journal adds each segment that it begins."""
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
        """Bytes of this segment's groups smaller than SMALL_GROUP_BYTES; the segment ahead is filled with zeros up to
        this offset."""
        self._is_scheduled = False
        self._is_blocked = False
        self._why_blocked = ""
        self.is_full = True
        """True if only the reserve is left."""
        self.why_full = ""
        """Reason why ordinary adds are refused, with the directory, for operators. Empty if they are accepted."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._is_stopped = False
        self.synced_group = 0
        """Every group up to this one is on disk."""

    def open(
        self, *, file: int, group: int, synced: tuple[int, int], is_limbo: bool, records_bytes: int, size: int
    ) -> None:
        """Begin segment `file` with group `group`. The segment has `size` bytes, and at least `records_bytes` for
        records. `synced` is the segment and the offset at which the synced part of the former journal ends. With
        `is_limbo`, records of that part may be missing. Raises OSError if there is no space."""
        self.supply.next_file = file
        self._synced_file, self._synced_to = synced
        self.synced_group = group - 1
        records_bytes += overhead(len(self._segments) + 1)  # for a second group that lists the segments
        self._begin(self.supply.create(records_bytes, size), group, is_limbo=is_limbo)
        self.supply.make_spare()
        self.supply.poll()

    # Appending

    # docs/protocol.md B9
    def _update_full(self) -> None:
        self.is_full = self.supply.spare is None or self.supply.is_scarce or self._is_blocked
        self.why_full = (self._why_blocked if self._is_blocked else self.supply.why) if self.is_full else ""
        self._on_full(self.is_full)

    @property
    def bytes_left(self) -> int:
        """Bytes left in the current segment."""
        return self._limit - self.open_group.end

    @property
    def synced_file(self) -> int:
        """Number of the segment with the last synced group. All earlier segments are full, and `on_rolled` was called
        for them."""
        return self._synced_file

    def has_capacity(self, use: Use, size: int) -> bool:
        """Return True if records of `size` bytes in total may be appended now (docs/protocol.md, B20). Always True for
        facts; `append` fails if there is no space for them."""
        if not self.is_full or use is Use.FACT:
            return True
        is_left = self.bytes_left - size >= leaves(use, self._config.segment_bytes)
        return use is not Use.ADD and (is_left or self.supply.may_make(size, use))

    def append(
        self, kind: int, flags: int, ledger: int, entry: int, body: bytes, *, urgent: bool = True, use: Use = Use.ADD
    ) -> int:
        """Add a record to the open group, and return its offset in the segment. A record that is not `urgent` may
        wait up to CERTIFY_S seconds for others. The caller must check `has_capacity` for the same use first. Raises
        JournalFull."""
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
        """Call `done` once `group` is on disk, or at once if it already is. The group must have begun."""
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
        """Call `done` once everything appended so far is on disk, or at once if it already is."""
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
        """Keep the group, which was not reported yet. If the error is temporary, write the group again later."""
        why = self.supply.reason(error)
        if not is_passing(error):
            self.fail(f"journal write failed: {why}")
            return
        if why != self._why_blocked or not self._is_blocked:
            log.warning("journal segment cannot be written, retrying segment=%d reason=%s", self.synced_file, why)
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
            self._report(group)
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
        self._flush()  # the next sync runs while this group's senders are answered
        self._report(group)

    def _report(self, group: JournalGroup) -> None:
        """Report a group that is on disk, and run the callbacks that waited for it."""
        self.on_synced(group)
        for done in group.after:
            try:
                done()
            except Exception:  # an error of one client must not keep the others from their answers
                log.exception("callback of a synced group failed group=%d", group.number)
        if group.next is not None:
            self._on_rolled(group.segment)
        elif (spare := self.supply.spare) is not None and spare.filled < self._small_bytes:
            self._statistics.filled_bytes += spare.fill(self._small_bytes, self._sync_failed)
        if self._syncing is None and "certify" not in self._timers:
            self._later("certify", CERTIFY_S, self.certify)

    def certify(self) -> None:
        """Record in the journal that its last group is synced. The record itself needs no sync, because it only states
        a fact."""
        if self._is_certified or self._syncing is not None or self._is_stopped or self._queue:
            return  # a journal that was never opened has nothing to certify
        group = self.open_group
        if group.buffers or group.end + GROUP_HEADER_SIZE > self._limit:
            return
        header = GroupHeader(group.segment.file, 0, group.number, self._synced_file, self._synced_to)
        self.open_group = _group_after(group)
        self._is_certified = True
        self._syncing = group  # the next group is not written before it, because a gap would end the journal
        head = encode_group_header(header, group.segment.salt, group.start)
        try:
            group.file.submit_write(group.start, head, self._on_sync, is_synced=False)
        except OSError as error:
            self._sync_failed(error)

    def _sync_failed(self, error: OSError) -> None:
        if not self._is_stopped:
            self._die(f"journal sync failed: {error}")

    def fail(self, reason: str) -> None:
        """Stop using the directory for `reason`, which was found outside the journal."""
        if not self._is_stopped:
            self._die(reason)

    def _die(self, reason: str) -> None:
        """Accept no more records. If the process continues to run, later appends raise JournalFull."""
        self.stop()
        self._limit, self._is_blocked = 0, True
        self._env.fatal(reason)

    def unreported(self) -> list[JournalGroup]:
        """Return the groups that were not reported as synced. After a failure they never will be."""
        return [each for each in (self._syncing, *self._queue, self.open_group) if each is not None]

    # Segments

    def _begin(self, segment: Segment, number: int, *, is_limbo: bool = False) -> None:
        """Begin to write to `segment`.

        LIMBO is written before FILES. After FILES, lost segments are no longer expected, so a torn group that contains
        FILES must contain LIMBO too.
        """
        self.open_group = JournalGroup(
            number, segment, segment.handle, FILE_HEADER_SIZE, FILE_HEADER_SIZE + GROUP_HEADER_SIZE
        )
        self._small_bytes = 0
        self._seed = segment.seed
        # Space for NEXT, and for the header of its group if that has nothing else: on a full disk no file grows.
        self._limit = segment.capacity - GROUP_HEADER_SIZE - RECORD_HEADER_SIZE
        self._segments[segment.file] = segment
        if is_limbo:
            self.append(RecordKind.LIMBO, 0, -1, -1, b"", use=Use.FACT)
        self.note_files()

    def note_files(self) -> None:
        """Record the existing segments in the journal."""
        files = sorted(self._segments)
        self.append(RecordKind.FILES, 0, -1, -1, pack(f">{len(files)}I", *files), use=Use.FACT)

    def _roll(self, size: int, use: Use) -> JournalGroup:
        """Continue in the segment ahead. Raises JournalFull."""
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
        """Stop writing. Records that were not reported as synced may or may not be on disk."""
        self._is_stopped = True
        self.supply.stop()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()


def _group_after(group: JournalGroup) -> JournalGroup:
    return JournalGroup(group.number + 1, group.segment, group.file, group.end, group.end + GROUP_HEADER_SIZE)
