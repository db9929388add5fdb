"""The index files of a bookie: writes each once, when its segment is full, and looks entries up in them.

Until a file is on the disk under its name, the entries of its segment are answered from memory; then that memory is let
go (docs/protocol.md, B31). A block whose checksum is wrong is never believed: `mend` makes the file's entries again
from the segment, and they are answered from memory again until the new file is on the disk.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from kvstore.bookie.index.blocks import block_bytes, decode_block
from kvstore.bookie.index.checkpoint import FORMAT, Checkpoint, encode_checkpoint, encode_list
from kvstore.bookie.index.checkpoints import ASIDE, LIST, checkpoint_path, indexed, list_path, read_checkpoint
from kvstore.bookie.index.entry_index import NOWHERE, OFFSET_BITS, EntryColumns, EntryIndex
from kvstore.env.ports import Disk, File
from kvstore.os_errors import is_passing, no_room

log = logging.getLogger(__name__)

BLOCKS_MAX = 1024
"""Kept in memory, the one used longest ago goes first: about 5 MB."""
OPEN_MAX = 64
"""Files that stay open."""


@dataclass(frozen=True, slots=True)
class RebuiltIndex:
    """A segment's entries, made again from the segment."""

    entries: Mapping[int, EntryIndex]
    """By ledger."""
    data: bytes | None
    """The whole file; None if it cannot be made again as it was, so that the next start has to read the segment."""


def _say_unwritten(file: int, error: OSError) -> None:
    log.warning("segment=%d no checkpoint yet, its index stays in memory: %s", file, error)


def _discard(disk: Disk, path: str) -> None:
    """Give back the room of a file that was not written as a whole."""
    with suppress(OSError):
        disk.remove(path)


class IndexFiles:
    """One directory of them."""

    def __init__(self, disk: Disk, directory: str, *, journal_dir: str = "", reserve_bytes: int = 0) -> None:
        """`reserve_bytes`: of `journal_dir`, which index files leave free (docs/protocol.md, B20)."""
        self.directory = directory
        self.rebuild: Callable[[int], RebuiltIndex | None] = lambda _file: None
        """Make a file that cannot be read again; None if there is no such segment any more."""
        self.blocks_read = 0
        self.rebuilt = 0
        """Files of which something could not be read, so that they were made again from their segments."""
        self._disk = disk
        self._journal_dir, self._reserve_bytes = journal_dir, reserve_bytes
        self._salts: dict[int, int] = {}
        self._in_memory: dict[int, Mapping[int, EntryIndex]] = {}
        """Segment → ledger → entries, while they are not in a file that can be read."""
        self._unwritten: deque[Checkpoint] = deque()
        """Those that the disk did not take. They are tried again when the next one is written."""
        self._listed = 0
        """The segment beside whose checkpoint the last list was written."""
        self._blocks: dict[int, EntryColumns] = {}
        self._open: dict[int, File] = {}
        self._is_closed = False

    @property
    def in_memory(self) -> int:
        """Segments whose entries are in memory because their files are not on the disk."""
        return len(self._in_memory)

    def known(self, file: int, salt: int) -> None:
        """A segment's file is there."""
        self._salts[file] = salt

    def forget(self, file: int) -> None:
        """The segment goes. The file is removed by whoever removes the segment."""
        self._salts.pop(file, None)
        self._in_memory.pop(file, None)
        self._close(file)
        self._unwritten = deque(each for each in self._unwritten if each.file != file)

    def close(self) -> None:
        """Write nothing more, and close what is open."""
        self._is_closed = True
        for file in list(self._open):
            self._close(file)

    # Looking up

    def find(self, file: int, ledger: int, at: int, count: int, entry: int) -> tuple[int, int]:
        """Place and size of `entry` if it is in the block of `count` entries at `at`; else NOWHERE."""
        entries = self._in_memory.get(file)
        if entries is not None:
            return entries[ledger].get(entry) if ledger in entries else NOWHERE
        key = file << OFFSET_BITS | at
        block = self._blocks.pop(key, None) or self.block(file, at, count)
        if block is None:
            self._rebuild_index(file)
            return self.find(file, ledger, at, count, entry) if file in self._in_memory else NOWHERE
        self._blocks[key] = block
        if len(self._blocks) > BLOCKS_MAX:
            del self._blocks[next(iter(self._blocks))]
        found = bisect_left(block.entries, entry)
        if found == count or block.entries[found] != entry:
            return NOWHERE
        return file << OFFSET_BITS | block.offsets[found], block.sizes[found]

    # docs/protocol.md B31
    def columns(self, file: int, at: int, count: int) -> EntryColumns | None:
        """All entries of a block; None if those of the segment are in memory, or cannot be read: `held` has them then.
        Not kept for the next one who asks: this is for those who read everything."""
        if file in self._in_memory:
            return None
        block = self.block(file, at, count)
        if block is None:
            self._rebuild_index(file)
        return block

    def is_held(self, file: int) -> bool:
        """Whether the entries of the segment are in memory, as many as there are."""
        return file in self._in_memory

    def held(self, file: int, ledger: int) -> EntryIndex:
        """A ledger's entries in a segment that is not read from its file."""
        return self._in_memory.get(file, {}).get(ledger) or EntryIndex()

    def block(self, file: int, at: int, count: int) -> EntryColumns | None:
        """Return a block of a segment's file; None if it is not what was written. Raises OSError for an error that
        passes."""
        self.blocks_read += 1
        try:
            data = self._opened(file).read(at, block_bytes(count))
        except OSError as error:
            if is_passing(error):
                raise
            log.error("segment=%d its index cannot be read at %d: %s", file, at, error)
            return None
        return decode_block(data, self._salts.get(file, 0), at, count)

    def _opened(self, file: int) -> File:
        found = self._open.get(file)
        if found is None:
            found = self._open[file] = self._disk.open(checkpoint_path(self.directory, file))
            if len(self._open) > OPEN_MAX:
                self._close(next(iter(self._open)))
        return found

    def _close(self, file: int) -> None:
        if (found := self._open.pop(file, None)) is not None:
            found.close()

    def _rebuild_index(self, file: int) -> None:
        rebuilt = self.rebuild(file)
        self._close(file)
        if rebuilt is None:
            return
        log.error("segment=%d its index is damaged, it is made again from the segment", file)
        self.rebuilt += 1
        self._in_memory[file] = rebuilt.entries
        if rebuilt.data is None:
            self._give_up(file)
        else:
            self._replace(file, rebuilt.data, lambda: None, partial(_say_unwritten, file))

    def checkpoint(self, file: int) -> Checkpoint | None:
        """Return the table of a segment's file, if it is there and whole. Raises OSError for an error that passes."""
        try:
            found = read_checkpoint(self._disk, self.directory, file)
        except ValueError:
            return None
        return found if found is not None and found.format == FORMAT and found.file == file else None

    # Writing

    def hold(self, checkpoint: Checkpoint) -> None:
        """Answer what is in a full segment from memory until its file is written."""
        self._salts[checkpoint.file] = checkpoint.salt
        self._in_memory[checkpoint.file] = {
            part.ledger: part.entries for part in checkpoint.ledgers if part.entries is not None
        }

    def write(self, checkpoint: Checkpoint) -> None:
        """Write the file of a full segment that is held, and the list of segments, if the disk takes them. Without it
        a start reads the segment itself."""
        self._write(checkpoint)
        self._write_another()

    def _write_another(self) -> None:
        """Try one again that the disk did not take: after each that it took, and with each new one."""
        if self._unwritten:
            self._write(self._unwritten.popleft())

    def _write(self, checkpoint: Checkpoint) -> None:
        def written() -> None:
            if checkpoint.file > self._listed:
                self.write_list(checkpoint.file, checkpoint.files)
            self._write_another()

        def failed(error: OSError) -> None:
            _say_unwritten(checkpoint.file, error)
            if checkpoint.file in self._in_memory:
                self._unwritten.append(checkpoint)

        data = encode_checkpoint(checkpoint)
        try:
            self._need_room(len(data))
        except OSError as error:
            failed(error)
            return
        self._replace(checkpoint.file, data, written, failed)

    def _replace(self, file: int, data: bytes, written: Callable[[], None], failed: Callable[[OSError], None]) -> None:
        """Put `data` in the place of a segment's file, whole or not at all, and let go of what is held of it."""
        path = checkpoint_path(self.directory, file)

        def on_synced() -> None:
            if file not in self._in_memory:
                self._disk.remove(path + ASIDE)  # the segment is gone
                return
            self._disk.rename(path + ASIDE, path)
            self._disk.sync_dir(self.directory)
            self._close(file)
            del self._in_memory[file]
            written()

        self._submit(path + ASIDE, data, on_synced, failed)

    # docs/protocol.md B22
    def write_list(self, file: int, files: list[int]) -> None:
        """Put the list of the segments that there are beside the newest checkpoint, if the disk takes it."""
        self._listed = file

        def on_synced() -> None:
            self._disk.sync_dir(self.directory)
            for older in indexed(self._disk, self.directory, LIST):
                if older < file:
                    self._disk.remove(list_path(self.directory, older))

        def failed(error: OSError) -> None:
            log.warning("segment=%d no list of segments beside its checkpoint: %s", file, error)

        self._submit(list_path(self.directory, file), encode_list(file, files), on_synced, failed)

    def _submit(self, path: str, data: bytes, done: Callable[[], None], failed: Callable[[OSError], None]) -> None:
        """Write a file and sync it, then call `done`, of which an OSError is a failure too."""
        try:
            file = self._disk.open(path, create=True)
        except OSError as error:
            failed(error)
            return

        def on_synced(error: OSError | None) -> None:
            file.close()
            if self._is_closed:
                return
            try:
                if error is not None:
                    raise error
                done()
            except OSError as reason:
                failed(reason)

        try:
            file.pwrite(0, data)
            file.truncate(len(data))
            file.submit_sync(on_synced)
        except OSError as error:
            file.close()
            _discard(self._disk, path)
            failed(error)

    # docs/protocol.md B20
    def _need_room(self, size: int) -> None:
        """Raise OSError if a file of `size` bytes would take of the room for fences and for a start."""
        if self._reserve_bytes and self._disk.free_bytes(self._journal_dir) < size + self._reserve_bytes:
            raise no_room(f"expected {self._reserve_bytes} bytes to stay free in {self._journal_dir}")

    def write_now(self, checkpoint: Checkpoint, *, with_list: bool) -> bool:
        """Write the file of a segment that is held, after the list of segments if that is in the checkpoint and wanted,
        and return when they are on the disk; False if the disk does not take them. For starts."""
        try:
            if with_list and checkpoint.files:
                self._put(list_path(self.directory, checkpoint.file), encode_list(checkpoint.file, checkpoint.files))
            data = encode_checkpoint(checkpoint)
            self._need_room(len(data))
            self._put(checkpoint_path(self.directory, checkpoint.file), data)
        except OSError as error:
            _say_unwritten(checkpoint.file, error)
            return False
        del self._in_memory[checkpoint.file]
        return True

    def _put(self, path: str, data: bytes) -> None:
        file = self._disk.open(path + ASIDE, create=True)
        try:
            file.pwrite(0, data)
            file.truncate(len(data))
            file.sync()
        except OSError:
            _discard(self._disk, path + ASIDE)
            raise
        finally:
            file.close()
        self._disk.rename(path + ASIDE, path)
        self._disk.sync_dir(self.directory)

    def _give_up(self, file: int) -> None:
        """Remove a file that cannot be made whole again: the next start reads the segment."""
        with suppress(OSError):
            self._disk.remove(checkpoint_path(self.directory, file))
            self._disk.sync_dir(self.directory)
