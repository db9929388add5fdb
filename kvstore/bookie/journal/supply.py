"""Creates a journal's segments, one ahead of the segment that is being written.

On a full disk there is none ahead until there is free space again. Records that cannot wait get small segments from the
reserve (docs/protocol.md, B9 and B20).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from errno import EEXIST

from kvstore.bookie.config import BookieConfig
from kvstore.bookie.journal.record import FILE_HEADER_SIZE, GROUP_HEADER_SIZE, RECORD_HEADER_SIZE, FileHeader
from kvstore.bookie.journal.reserve import JournalFull, Use, kept_bytes, start_bytes
from kvstore.bookie.journal.segment import OpenFiles, Segment, segment_name
from kvstore.env.ports import Env
from kvstore.os_errors import is_no_space, is_passing, no_space, reason_of

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Seconds between two attempts to create the next segment, or to write, on a full disk."""
FILES_RESERVE = 64
"""Inodes that ordinary adds leave free, because fences, starts and the state of partitions need new files."""
POLL_S = 5.0
"""Seconds between two checks of the disk's free space, while there is enough."""


class SegmentSupply:
    """The segment ahead, and the creation of others."""

    def __init__(
        self,
        env: Env,
        config: BookieConfig,
        segments: dict[int, Segment],
        open_files: OpenFiles,
        *,
        on_ready: Callable[[OSError | None], None],
        on_change: Callable[[], None],
        on_damage: Callable[[str], None],
    ) -> None:
        """`segments`: the existing ones. `on_ready` is called when a segment's header is synced or cannot be,
        `on_change` when there is a segment ahead or none could be created, `on_damage` if the disk is broken."""
        self.spare: Segment | None = None
        """The segment ahead; None if the disk is full."""
        self.is_scarce = False
        """True if other files have filled the disk into the reserve."""
        self._why_none = self._why_scarce = ""
        """Why there is no segment ahead, and why the disk is scarce. Their texts differ for the same full disk."""
        self.next_file = 1
        self._env, self._config = env, config
        self._loop = asyncio.get_running_loop()
        self._segments, self._open_files = segments, open_files
        self._on_ready, self._on_change, self._on_damage = on_ready, on_change, on_damage
        self._retry: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopped = False

    @property
    def why(self) -> str:
        """Why there is no segment ahead, or why the disk is scarce, for operators."""
        return self._why_none or self._why_scarce

    def make_spare(self) -> None:
        """Create the segment ahead if there is none, now or, on a full disk, when there is free space."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self.spare is not None or self._is_stopped:
            return
        try:
            self._keep_reserve(self._config.segment_bytes + self._config.reserve_bytes, FILES_RESERVE)
            self.spare = self.create(0, self._config.segment_bytes)
        except OSError as error:
            why = self.reason(error)
            if not is_passing(error):
                self._on_damage(f"journal segment {self.next_file} cannot be created: {why}")
                return
            if why != self._why_none:
                log.warning("journal segment cannot be created, retrying segment=%d reason=%s", self.next_file, why)
            self._why_none = why
            self._on_change()
            self._retry = self._loop.call_later(RETRY_S, self.make_spare)
            return
        self._why_none = ""
        self._on_change()

    def reason(self, error: OSError) -> str:
        """Return the text of an error of the journal's directory for operators."""
        place, has_inodes = self._config.journal_dir, True
        with suppress(OSError):
            has_inodes = self._env.disk.free_files(place) > 0
        return reason_of(error, place, has_inodes=has_inodes)

    def _keep_reserve(self, size: int, files: int) -> None:
        """Raise OSError unless this many bytes and inodes are free. A quota does not show here; the attempt to write
        detects it."""
        place = self._config.journal_dir
        if self._free_bytes() < size:
            raise no_space(f"less than {size} bytes are free")
        if self._env.disk.free_files(place) < files:
            raise no_space(f"fewer than {files} inodes are free")

    # docs/protocol.md B9
    def poll(self) -> None:
        """Check periodically how much space is free, because nothing else does while there is a segment ahead, and
        whether the files still exist."""
        self._check_disk()
        if self._is_stopped:
            return
        self._timer = self._loop.call_later(RETRY_S if self.is_scarce else POLL_S, self.poll)

    def _check_disk(self) -> None:
        try:
            if self._is_removed():
                place = self._config.journal_dir
                self._on_damage(f"files of the journal are gone from {place}: somebody has removed or moved them")
                return
            share = 1 if self.is_scarce else 2
            self._keep_reserve(self._config.reserve_bytes // share, FILES_RESERVE // share)
            why = ""
        except OSError as error:
            why = self.reason(error)
            if not is_no_space(error):
                log.warning("cannot read the free space of the journal reason=%s", why)
                return
        if why or self.is_scarce:
            self.is_scarce, self._why_scarce = bool(why), why
            self._on_change()

    # docs/protocol.md L12
    def _is_removed(self) -> bool:
        """Return True if the segment that is being written no longer has a name. Its writes and syncs still succeed,
        but nobody would find them again, so a copy there is no copy. Raises OSError."""
        newest = self._segments[max(self._segments)] if self._segments else None
        if newest is None or self._env.disk.exists(newest.path):
            return False
        return segment_name(newest.file) not in self._env.disk.list(self._config.journal_dir)

    def take(self, size: int, use: Use) -> Segment:
        """Return the segment in which the journal continues, with space for a record of `size` bytes. Raises
        JournalFull."""
        spare = self.spare
        needed = overhead(len(self._segments) + 1) + size
        if self._is_stopped or (spare is None and not self.may_make(size, use)):
            raise JournalFull
        try:
            if spare is None:
                return self.create(0, self._piece_bytes(size, use))
            if needed > spare.capacity:
                spare.handle.allocate(needed)
                spare.capacity = needed
        except OSError as error:
            if not is_passing(error):
                self._on_damage(f"journal segment {self.next_file} cannot be created: {self.reason(error)}")
            raise JournalFull from error
        self.spare = None
        return spare

    # docs/protocol.md B35
    def create(self, records_bytes: int, size: int) -> Segment:
        """Create a segment of `size` bytes, with space for at least `records_bytes`. Raises OSError; FileExistsError if
        another process has created it, whose file stays as it is."""
        salt = self._env.random.getrandbits(64) | 1
        capacity = max(size, overhead(len(self._segments) + 2) + records_bytes)
        header, disk = FileHeader(self.next_file, salt), self._env.disk
        segment = Segment(disk, self._config.journal_dir, header, capacity=capacity, open_files=self._open_files)
        if disk.exists(segment.path):
            raise FileExistsError(EEXIST, "another process has created this segment", segment.path)
        try:
            segment.create(self._on_ready)
        except OSError:
            segment.remove()
            raise
        self.next_file += 1
        return segment

    def may_make(self, size: int, use: Use) -> bool:
        """Return True if a small segment for a record of `size` bytes may be created from the reserve, half of which is
        only for facts."""
        if self._is_stopped:
            return False
        config, start = self._config, start_bytes(self._config.segment_bytes)
        stays = start if use is Use.FACT else max(start, config.reserve_bytes // 2)
        try:
            return use >= Use.REWRITE and self._free_bytes() >= self._piece_bytes(size, use) + stays
        except OSError:
            return False  # the next write finds out

    def _piece_bytes(self, size: int, use: Use) -> int:
        """Return the size of a small segment. For facts, it is half of the free space, so that there are few segments,
        but at least the size of the record."""
        needed, usual = size + overhead(len(self._segments) + 2), kept_bytes(self._config.segment_bytes)
        return max(needed, min(usual, self._free_bytes() // 2) if use is Use.FACT else usual)

    def _free_bytes(self) -> int:
        return self._env.disk.free_bytes(self._config.journal_dir)

    def stop(self) -> None:
        """Create no more segments."""
        self._is_stopped = True
        for timer in (self._retry, self._timer):
            if timer is not None:
                timer.cancel()


def overhead(files: int) -> int:
    """Return the bytes of a segment that are not available for its first record."""
    return FILE_HEADER_SIZE + 2 * GROUP_HEADER_SIZE + 3 * RECORD_HEADER_SIZE + 4 * files
