"""Reads a journal directory back at start: which segments exist, what they hold, what is missing or damaged.

The segments up to the anchor (the newest segment with a group that is certified as synced) are history. Full ones are
read from their checkpoints, others from their records, and get their checkpoints at once, so that the places of only
one segment's entries at a time are in memory (docs/protocol.md, B31).

Records after the anchor's certified end, and in segments after it, may never have been synced, or were synced by a
process that then died of a failing disk. Those records are written again to a new segment before the bookie answers
anybody.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from errno import EIO

from kvstore.bookie.index.checkpoint import FORMAT, Checkpoint
from kvstore.bookie.index.checkpoints import indexed, read_checkpoint, remove_unfinished
from kvstore.bookie.index.index_files import IndexFiles
from kvstore.bookie.index_rebuild import IndexRebuilder
from kvstore.bookie.inventory import Inventory, OwnLedgers
from kvstore.bookie.journal.record import (
    FILE_HEADER_SIZE,
    GROUP_HEADER_SIZE,
    FileHeader,
    GroupHeader,
    RecordKind,
    decode_file_header,
    decode_group_header,
)
from kvstore.bookie.journal.scan import ScannedRecord, SegmentScan, certified, group_headers, scan
from kvstore.bookie.journal.segment import Segment, file_of_name
from kvstore.bookie.steps import at_once
from kvstore.env.ports import Disk
from kvstore.errors import ConfigError
from kvstore.os_errors import is_passing

log = logging.getLogger(__name__)

_BLOCK = 4096


@dataclass(slots=True)
class Replayed:
    """The content of a journal directory, and the work that remains before the bookie may answer requests."""

    inventory: Inventory
    rebuilder: IndexRebuilder
    next_file: int
    next_group: int
    synced: tuple[int, int]
    """Number of the anchor and the offset at which its certified part ends; zeros if there is no anchor."""
    again: list[ScannedRecord] = field(default_factory=list)
    """Records that must be written to the new segment."""
    ends: dict[Segment, int] = field(default_factory=dict)
    """Offset at which the readable part ends, for the anchor and each segment after it."""
    leftovers: list[Segment] = field(default_factory=list)
    """Segments to remove once the records are written again."""
    unreadable: list[Segment] = field(default_factory=list)
    """Segments to set aside once the records are written again."""
    checkpoints: list[Checkpoint] = field(default_factory=list)
    """Missing checkpoints to write once the records are written again."""
    damage: list[str] = field(default_factory=list)
    """Reasons why records of any ledger may be missing."""
    strange: set[int] = field(default_factory=set)
    """Segments whose file has the name or the index of another segment."""
    damaged_records: int = 0


@dataclass(slots=True)
class _File:
    """A segment as it was found."""

    segment: Segment
    has_header: bool
    is_torn: bool
    """True if it has no header because of a crash before the header was on disk: nothing was ever written after it."""
    checkpoint: Checkpoint | None
    first: GroupHeader | None
    """Header of its first group."""


def replay(
    disk: Disk, journal_dir: str, index_dir: str, own_ledgers: OwnLedgers | None = None, *, reserve_bytes: int = 0
) -> Replayed:
    """Read a journal directory back. Rebuilt index files leave `reserve_bytes` bytes of the disk free. Raises
    ConfigError for a format that this version does not know, and OSError."""
    index_files = IndexFiles(disk, index_dir, journal_dir=journal_dir, reserve_bytes=reserve_bytes)
    return _Replay(disk, journal_dir, Inventory(index_files, own_ledgers)).run()


class _Replay:
    def __init__(self, disk: Disk, journal_dir: str, inventory: Inventory) -> None:
        self._disk = disk
        self._journal_dir = journal_dir
        self._inventory = inventory
        self._index_files = inventory.index_files
        self._index_dir = self._index_files.directory
        rebuilder = IndexRebuilder(self._inventory)
        self._index_files.rebuild = rebuilder.rebuild
        self._listed: set[int] = set()
        """The segments that existed according to the anchor."""
        self._present: set[int] = set()
        """The segments that the directory lists. Each of them exists, even if the disk cannot read its inode, so that
        `exists` returns False."""
        self._result = Replayed(self._inventory, rebuilder, 1, 1, (0, 0))

    def run(self) -> Replayed:
        remove_unfinished(self._disk, self._index_dir)
        names = [file_of_name(name) for name in self._disk.list(self._journal_dir)]
        present = sorted(file for file in names if file is not None)
        self._present.update(present)
        files = {file: self._inspect(file) for file in sorted({*present, *indexed(self._disk, self._index_dir)})}
        self._result.next_file = max(files, default=0) + 1
        anchor = max((file for file, found in files.items() if self._is_certified(found, files)), default=0)
        expected = self._expected(files, anchor)
        for file in sorted(expected):
            if file <= anchor:
                self._load(files, sorted(expected), file, is_anchor=file == anchor)
        for file in present:
            if file > anchor:
                self._continue(files[file])
        self._find_missing(files, present, anchor)
        for file in sorted(files.keys() - self._inventory.segments.keys()):
            self._result.leftovers.append(files[file].segment)
        if lost := sorted(self._result.rebuilder.lost):
            self._result.damage.append(f"{self._journal_dir}: lost places of entries of ledgers {lost}")
        return self._result

    def _inspect(self, file: int) -> _File:
        try:
            checkpoint = read_checkpoint(self._disk, self._index_dir, file)
            segment = self._segment(file, 0)
            header = None
            if file in self._present:
                header = decode_file_header(_read_what_can_be(segment, 0, FILE_HEADER_SIZE))
        except ValueError as error:
            raise ConfigError(f"{self._journal_dir}, segment {file}: {error}") from None
        segment.release()  # another object takes its place, so nobody else would close the file
        if header is not None and header.file != file:
            header = None  # another segment's file under this name
        if checkpoint is not None and checkpoint.file != file:
            checkpoint = None
        if checkpoint is not None and header is not None and header.salt != checkpoint.salt:
            self._result.strange.add(file)
            self._result.damage.append(f"{segment.path} is not the segment that its index was made from")
            checkpoint = None
        if checkpoint is not None and checkpoint.format != FORMAT:
            checkpoint.ledgers = []  # drop them with all their entries; they are read when it is this segment's turn
        salt = header.salt if header else checkpoint.salt if checkpoint else 0
        segment = self._segment(file, salt)
        first = None
        if header is not None:
            data = _read_what_can_be(segment, FILE_HEADER_SIZE, GROUP_HEADER_SIZE)
            first = decode_group_header(data, 0, salt, FILE_HEADER_SIZE)
            segment.capacity = segment.handle.size()
        is_torn = header is None and self._is_blank(segment)
        segment.release()
        return _File(segment, header is not None, is_torn, checkpoint, first)

    # docs/protocol.md B6
    def _is_blank(self, segment: Segment) -> bool:
        """Return True if a file looks like a segment without any group. A file that the disk cannot read may be one."""
        if segment.file not in self._present:
            return True
        try:
            return not segment.handle.read(0, segment.handle.size())[FILE_HEADER_SIZE:].strip(b"\0")
        except OSError as error:
            if is_passing(error):
                raise
            return False

    def _segment(self, file: int, salt: int) -> Segment:
        header, open_files = FileHeader(file, salt), self._inventory.open_files
        return Segment(self._disk, self._journal_dir, header, capacity=0, open_files=open_files)

    def _bytes(self, found: _File) -> tuple[bytes, list[range]]:
        """Return all bytes of the segment, and the ranges that the disk cannot read. Return nothing if the file is gone
        or its header is unreadable too; that is treated as damage. Raises OSError if the header is readable and the
        rest is not readable now, because it would look as if nothing had been written."""
        segment, missing = found.segment, list[range]()
        if segment.file not in self._present:
            return b"", missing
        try:
            return _read_what_can_be(segment, 0, segment.handle.size(), missing), missing
        except OSError as error:
            if found.has_header or is_passing(error):
                raise
            log.error("segment cannot be read path=%s error=%s", segment.path, error)
            return b"", missing
        finally:
            segment.release()

    def _is_certified(self, found: _File, files: dict[int, _File]) -> bool:
        if found.checkpoint is not None or not found.has_header:
            return found.checkpoint is not None
        if self._reported_synced(found.segment.file, files) > FILE_HEADER_SIZE:
            return True
        headers = at_once(group_headers(self._bytes(found)[0], found.segment.salt))
        return certified(headers, found.segment.file) > FILE_HEADER_SIZE

    @staticmethod
    def _reported_synced(file: int, files: dict[int, _File]) -> int:
        """Return up to where a segment was synced, as the first groups of other segments say. For a segment with a
        single group, no other segment says it."""
        firsts = (other.first for other in files.values() if other.first is not None)
        return max((first.synced_to for first in firsts if first.synced_file == file), default=0)

    def _expected(self, files: dict[int, _File], anchor: int) -> set[int]:
        """Return the segments up to the anchor that exist according to the anchor."""
        if anchor == 0:
            return set()
        listed = self._listed = self._list_of(files, anchor)
        return {file for file in listed or files if file <= anchor}

    def _list_of(self, files: dict[int, _File], anchor: int) -> set[int]:
        """Return the segments that existed: from the list beside the anchor's checkpoint, or else from the records of
        the anchor. If those are unreadable, return the segments that were found and the one in which the journal
        continued."""
        found = files[anchor]
        checkpoint = found.checkpoint
        if checkpoint is not None and checkpoint.files:
            return set(checkpoint.files)
        probe = Inventory(self._index_files)
        scanned = self._scan(found, None if checkpoint is None else checkpoint.end, files)
        for record in scanned.records:
            if record.head.kind in (RecordKind.FILES, RecordKind.NEXT, RecordKind.REMOVED):
                probe.apply(found.segment, record.head, record.body)
        if checkpoint is not None and (scanned.damage or not probe.expected):
            probe.expected |= {*files, anchor + 1}
        return probe.expected

    def _scan(self, found: _File, known_end: int | None, files: dict[int, _File]) -> SegmentScan:
        file = found.segment.file
        synced_to = self._reported_synced(file, files)
        data, missing = self._bytes(found)
        return at_once(scan(data, file, found.segment.salt, known_end=known_end, synced_to=synced_to, missing=missing))

    def _load(self, files: dict[int, _File], expected: list[int], file: int, *, is_anchor: bool) -> None:
        found = files.get(file)
        if found is None:
            return  # missing, and nothing is known of it: see _find_missing
        segment, checkpoint = found.segment, found.checkpoint
        self._inventory.segments[file] = segment
        if checkpoint is not None:
            segment.end = checkpoint.end
            self._result.next_group = max(self._result.next_group, checkpoint.last_group + 1)
            self._load_checkpoint(segment, checkpoint, is_anchor=is_anchor)
            if is_anchor:
                self._inventory.expected = set(self._listed)
        elif found.has_header:
            after = next((files.get(other) for other in expected if other > file), None)
            first = after.first if after is not None else None
            end = first.synced_to if first is not None and first.synced_file == file else None
            self._apply(segment, self._scan(found, end, files), is_anchor=is_anchor)
        if is_anchor:
            self._result.synced = (file, segment.end)

    def _load_checkpoint(self, segment: Segment, checkpoint: Checkpoint, *, is_anchor: bool) -> None:
        if checkpoint.format == FORMAT:
            self._inventory.load(segment, checkpoint)
            return
        loaded = read_checkpoint(self._disk, self._index_dir, checkpoint.file)
        if loaded is None:
            raise OSError(
                EIO, f"{self._index_dir}: the checkpoint of segment {checkpoint.file} changed while it was read"
            )
        self._inventory.load(segment, loaded)
        if not self._index_files.write_now(loaded, with_list=is_anchor):
            self._result.checkpoints.append(loaded)

    def _apply(self, segment: Segment, result: SegmentScan, *, is_anchor: bool) -> None:
        segment.end = result.synced_to if is_anchor else result.end
        if is_anchor:
            self._result.ends[segment] = result.end
        self._note(segment, result)
        for record in result.records:
            if record.offset >= segment.end:
                self._repeat(segment, record)
            elif record.head.kind == RecordKind.ADD:
                self._inventory.apply_add(segment, record.head, record.body, record.offset, is_good=record.is_good)
            else:
                self._inventory.apply(segment, record.head, record.body)
        checkpoint = self._inventory.close(segment, result.last_group)
        if (
            is_anchor
            or self._hides_damage(segment, result)
            or not self._index_files.write_now(checkpoint, with_list=False)
        ):
            self._result.checkpoints.append(checkpoint)

    def _hides_damage(self, segment: Segment, result: SegmentScan) -> bool:
        """Return True if a checkpoint of the segment would let the next start miss its losses. Such a checkpoint must
        wait until a group on disk records what is in limbo (docs/protocol.md, B7)."""
        return bool(result.damage) or segment.file in self._result.strange

    def _note(self, segment: Segment, result: SegmentScan) -> None:
        self._result.next_group = max(self._result.next_group, result.last_group + 1)
        self._result.damaged_records += sum(not record.is_good for record in result.records)
        for start, stop in result.damage:
            self._result.damage.append(f"{segment.path} is damaged from byte {start} to {stop}")

    # docs/protocol.md B6
    def _repeat(self, segment: Segment, record: ScannedRecord) -> None:
        """Apply a record at once if it concerns only the segments themselves; keep any other to be written again."""
        if record.head.kind in (RecordKind.NEXT, RecordKind.REMOVED):
            self._inventory.apply(segment, record.head, record.body)
        elif record.head.kind != RecordKind.FILES:
            self._result.again.append(record)

    def _continue(self, found: _File) -> None:
        """Read a segment after the anchor: nothing in it is known to be synced."""
        if not found.has_header:
            return
        data, missing = self._bytes(found)
        result = at_once(scan(data, found.segment.file, found.segment.salt, missing=missing))
        self._result.ends[found.segment] = result.end
        self._note(found.segment, result)
        for record in result.records:
            self._repeat(found.segment, record)

    def _find_missing(self, files: dict[int, _File], present: list[int], anchor: int) -> None:
        """Find segments that should exist and do not, or are unreadable and have no checkpoint either."""
        damaged = {file for file in present if file > anchor and not (files[file].has_header or files[file].is_torn)}
        for file in sorted(self._inventory.expected | damaged):
            found = files.get(file)
            if found is not None and found.has_header:
                continue
            what = "is unreadable" if file in present else "is missing"
            if found is not None and found.checkpoint is not None and file <= anchor:
                log.error("journal segment lost, its entries are known but unreadable segment=%d reason=%r", file, what)
                continue
            self._result.damage.append(f"{self._journal_dir}: segment {file} {what}")
            self._inventory.segments.pop(file, None)
            if file in present:
                self._result.unreadable.append(files.pop(file).segment)


def _read_what_can_be(segment: Segment, offset: int, size: int, missing: list[range] | None = None) -> bytes:
    """Return bytes of a segment, with zeros where the disk fails; these are then detected as damage. Their ranges are
    added to `missing`."""
    try:
        return segment.handle.read(offset, size)
    except OSError as error:
        if is_passing(error):
            raise
        log.error("segment cannot be read path=%s from=%d error=%s", segment.path, offset, error)
        if size <= _BLOCK:
            if missing is not None:
                missing.append(range(offset, offset + size))
            return bytes(size)
    blocks = range(offset, offset + size, _BLOCK)
    return b"".join(_read_what_can_be(segment, at, min(_BLOCK, offset + size - at), missing) for at in blocks)
