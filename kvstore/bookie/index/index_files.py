"""The index files of a bookie: writes each file once, when its segment is full, and looks up entries in them.

Until a file is on disk under its name, the entries of its segment are answered from memory; then that memory is
released (docs/protocol.md, B31). A block with a wrong checksum is never trusted: `rebuild` recreates the file's entries
from the segment.
"""

from __future__ import annotations

import asyncio
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
from kvstore.bookie.steps import Steps, at_once
from kvstore.env.ports import Disk, File
from kvstore.os_errors import busy, is_passing, no_space

log = logging.getLogger(__name__)

BLOCKS_MAX = 1024
"""Maximum number of blocks in memory, about 5 MB; the least recently used block is dropped first."""
OPEN_MAX = 64
"""Maximum number of open files."""


@dataclass(frozen=True, slots=True)
class RebuiltIndex:
    """A segment's entries, rebuilt from the segment."""

    entries: Mapping[int, EntryIndex]
    """The entries by ledger."""
    data: bytes | None
    """The whole file; None if it cannot be recreated as it was, so that the next start must read the segment."""


class IndexBusy(OSError):
    """The index file of a segment is being rebuilt, which may take seconds. The lookup may be tried again then."""

    def __init__(self, file: int) -> None:
        super().__init__(*busy(f"index of segment {file} is being rebuilt").args)
        self.file = file


def _nothing(_file: int) -> Steps[RebuiltIndex | None]:
    """Rebuild nothing, because nothing was read back yet."""
    yield from ()
    return None


def _log_unwritten(file: int, error: OSError) -> None:
    log.warning("checkpoint not written, its index stays in memory segment=%d error=%s", file, error)


def _discard(disk: Disk, path: str) -> None:
    """Release the space of an incomplete file."""
    with suppress(OSError):
        disk.remove(path)


class IndexFiles:
    """The index files of one directory."""

    def __init__(self, disk: Disk, directory: str, *, journal_dir: str = "", reserve_bytes: int = 0) -> None:
        """`reserve_bytes`: free space of `journal_dir` that index files must leave (docs/protocol.md, B20)."""
        self.directory = directory
        self.rebuild: Callable[[int], Steps[RebuiltIndex | None]] = _nothing
        """Rebuilds an unreadable file in steps; returns None if its segment no longer exists."""
        self.is_serving = False
        """True if files are rebuilt between other work, because clients wait meanwhile. Until then, a lookup that meets
        an unreadable file rebuilds it at once."""
        self._rebuilding: dict[int, Steps[RebuiltIndex | None]] = {}
        """Segments whose files are being rebuilt, one after the other."""
        self._waiting: dict[int, list[Callable[[], None]]] = {}
        """Callbacks for the end of each of these rebuilds."""
        self.blocks_read = 0
        self.rebuilt = 0
        """Number of files that were rebuilt from their segments because a part was unreadable."""
        self._disk = disk
        self._journal_dir, self._reserve_bytes = journal_dir, reserve_bytes
        self._salts: dict[int, int] = {}
        self._in_memory: dict[int, Mapping[int, EntryIndex]] = {}
        """Segment → ledger → entries, while they are not in a readable file."""
        self._unwritten: deque[Checkpoint] = deque()
        """Files that the disk rejected. They are written again after the next file."""
        self._listed = 0
        """The segment whose checkpoint the last list accompanies."""
        self._blocks: dict[int, EntryColumns] = {}
        self._open: dict[int, File] = {}
        self._is_closed = False

    @property
    def in_memory(self) -> int:
        """Number of segments whose entries are in memory because their files are not on disk."""
        return len(self._in_memory)

    def known(self, file: int, salt: int) -> None:
        """Record that a segment's file exists."""
        self._salts[file] = salt

    def forget(self, file: int) -> None:
        """Forget a segment that is removed. The caller removes the file."""
        self._salts.pop(file, None)
        self._in_memory.pop(file, None)
        self._close(file)
        self._unwritten = deque(each for each in self._unwritten if each.file != file)

    def close(self) -> None:
        """Write nothing more, and close the open files."""
        self._is_closed = True
        for file in list(self._open):
            self._close(file)

    # Lookups

    def find(self, file: int, ledger: int, at: int, count: int, entry: int) -> tuple[int, int]:
        """Return place and size of `entry` if it is in the block of `count` entries at offset `at`; otherwise
        NOWHERE."""
        entries = self._in_memory.get(file)
        if entries is not None:
            return entries[ledger].get(entry) if ledger in entries else NOWHERE
        key = file << OFFSET_BITS | at
        block = self._blocks.pop(key, None) or self._block_or_none(file, at, count)
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
        """Return all entries of a block. Return None if those of the segment are in memory, or the block is unreadable;
        `held` has them then. The block is not cached, because the caller reads everything."""
        if file in self._in_memory:
            return None
        block = self._block_or_none(file, at, count)
        if block is None:
            self._rebuild_index(file)
        return block

    def _block_or_none(self, file: int, at: int, count: int) -> EntryColumns | None:
        """Return a block, or None if it is unreadable. Raises OSError for a temporary error, and IndexBusy."""
        if file in self._rebuilding:
            raise IndexBusy(file)
        return self.block(file, at, count)

    def is_held(self, file: int) -> bool:
        """Return True if the segment's entries are in memory."""
        return file in self._in_memory

    def held(self, file: int, ledger: int) -> EntryIndex:
        """Return a ledger's entries in a segment that is not read from its file."""
        return self._in_memory.get(file, {}).get(ledger) or EntryIndex()

    def block(self, file: int, at: int, count: int) -> EntryColumns | None:
        """Return a block of a segment's file, or None if it is not what was written. Raises OSError for a temporary
        error."""
        self.blocks_read += 1
        try:
            data = self._opened(file).read(at, block_bytes(count))
        except OSError as error:
            if is_passing(error):
                raise
            log.error("index cannot be read segment=%d offset=%d error=%s", file, at, error)
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

    # docs/protocol.md B31, B40
    def _rebuild_index(self, file: int) -> None:
        """Rebuild the file. While clients are served, only begin to, and raise IndexBusy."""
        if not self.is_serving:
            self._replace_by(file, at_once(self.rebuild(file)))
            return
        log.error("index is damaged, rebuilding it from the segment segment=%d", file)
        self._rebuilding[file] = self.rebuild(file)
        if len(self._rebuilding) == 1:
            asyncio.get_running_loop().call_soon(self._continue)
        raise IndexBusy(file)

    def _continue(self) -> None:
        """Do the next step of the oldest rebuild. The other tasks of the process run between two steps."""
        file, steps = next(iter(self._rebuilding.items()))
        try:
            if not self._is_closed:
                next(steps)
                asyncio.get_running_loop().call_soon(self._continue)
                return
        except StopIteration as end:
            self._rebuild_ended(file)
            self._replace_by(file, end.value)
        except OSError as error:
            log.warning("index not rebuilt, the next lookup tries again segment=%d error=%s", file, error)
            self._rebuild_ended(file)
        except BaseException:
            self._rebuild_ended(file)
            raise

    def _rebuild_ended(self, file: int) -> None:
        del self._rebuilding[file]
        loop = asyncio.get_running_loop()
        for waiting in self._waiting.pop(file, ()):
            loop.call_soon(waiting)
        if self._rebuilding:
            loop.call_soon(self._continue)

    def after_rebuild(self, file: int, resume: Callable[[], None]) -> None:
        """Call `resume` in a later turn, when the file is no longer being rebuilt. It may be unreadable again."""
        if file in self._rebuilding:
            self._waiting.setdefault(file, []).append(resume)
        else:
            asyncio.get_running_loop().call_soon(resume)

    def _replace_by(self, file: int, rebuilt: RebuiltIndex | None) -> None:
        self._close(file)
        if rebuilt is None:
            return
        log.error("index was rebuilt from the segment segment=%d", file)
        self.rebuilt += 1
        self._in_memory[file] = rebuilt.entries
        if rebuilt.data is None:
            self._remove_stale(file)
        else:
            self._replace(file, rebuilt.data, lambda: None, partial(_log_unwritten, file))

    def checkpoint(self, file: int) -> Checkpoint | None:
        """Return the table of a segment's file if it exists and is intact. Raises OSError for a temporary error."""
        try:
            found = read_checkpoint(self._disk, self.directory, file)
        except ValueError:
            return None
        return found if found is not None and found.format == FORMAT and found.file == file else None

    # Writing

    def hold(self, checkpoint: Checkpoint) -> None:
        """Answer reads of a full segment from memory until its file is written."""
        self._salts[checkpoint.file] = checkpoint.salt
        self._in_memory[checkpoint.file] = {
            part.ledger: part.entries for part in checkpoint.ledgers if part.entries is not None
        }

    def write(self, checkpoint: Checkpoint) -> None:
        """Write the file of a full segment whose entries are in memory, and the list of segments, if the disk accepts
        them. Without the file, a start reads the segment itself."""
        self._write(checkpoint)
        self._write_another()

    def _write_another(self) -> None:
        """Retry a file that the disk rejected: after each successful one, and with each new one."""
        if self._unwritten:
            self._write(self._unwritten.popleft())

    def _write(self, checkpoint: Checkpoint) -> None:
        def written() -> None:
            if checkpoint.file > self._listed:
                self.write_list(checkpoint.file, checkpoint.files)
            self._write_another()

        def failed(error: OSError) -> None:
            _log_unwritten(checkpoint.file, error)
            if checkpoint.file in self._in_memory:
                self._unwritten.append(checkpoint)

        data = encode_checkpoint(checkpoint)
        try:
            self._require_space(len(data))
        except OSError as error:
            failed(error)
            return
        self._replace(checkpoint.file, data, written, failed)

    def _replace(self, file: int, data: bytes, written: Callable[[], None], failed: Callable[[OSError], None]) -> None:
        """Replace a segment's file atomically, and release the memory of its entries."""
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
        """Write the list of the existing segments beside the newest checkpoint, if the disk accepts it."""
        self._listed = file

        def on_synced() -> None:
            self._disk.sync_dir(self.directory)
            for older in indexed(self._disk, self.directory, LIST):
                if older < file:
                    self._disk.remove(list_path(self.directory, older))

        def failed(error: OSError) -> None:
            log.warning("list of segments not written segment=%d error=%s", file, error)

        self._submit(list_path(self.directory, file), encode_list(file, files), on_synced, failed)

    def _submit(self, path: str, data: bytes, done: Callable[[], None], failed: Callable[[OSError], None]) -> None:
        """Write a file and sync it, then call `done`. An OSError of `done` counts as a failure too."""
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
    def _require_space(self, size: int) -> None:
        """Raise OSError if a file of `size` bytes would use space that is reserved for fences and for a start."""
        if self._reserve_bytes and self._disk.free_bytes(self._journal_dir) < size + self._reserve_bytes:
            raise no_space(f"expected {self._reserve_bytes} bytes to stay free in {self._journal_dir}")

    def write_now(self, checkpoint: Checkpoint, *, with_list: bool) -> bool:
        """Write the file of a segment whose entries are in memory, after the list of segments if the checkpoint has one
        and `with_list` is set. Return when both are on disk, or False if the disk rejects them. Used at start."""
        try:
            if with_list and checkpoint.files:
                self._put(list_path(self.directory, checkpoint.file), encode_list(checkpoint.file, checkpoint.files))
            data = encode_checkpoint(checkpoint)
            self._require_space(len(data))
            self._put(checkpoint_path(self.directory, checkpoint.file), data)
        except OSError as error:
            _log_unwritten(checkpoint.file, error)
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

    def _remove_stale(self, file: int) -> None:
        """Remove a file that cannot be recreated: the next start reads the segment."""
        with suppress(OSError):
            self._disk.remove(checkpoint_path(self.directory, file))
            self._disk.sync_dir(self.directory)
