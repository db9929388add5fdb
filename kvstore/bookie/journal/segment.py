"""One file of the journal: created ahead at its full size, filled once, read at random until it is removed."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.bookie.journal import record
from kvstore.bookie.journal.record import FILE_HEADER_SIZE, RECORD_HEADER_SIZE, FileHeader
from kvstore.env.ports import Disk, File
from kvstore.os_errors import is_medium_error, is_passing

FILL_BYTES = 256 << 10
"""Bytes of zeros written at a time. A file whose blocks were written once syncs about twice as fast as a merely
allocated one."""
PAGE = bytes(4096)
"""Content of one write of zeros. The kernel keeps one large write as one large piece of memory. Each later sync would
go through all of it, and count it as written, for a record of a few bytes."""


def segment_name(file: int) -> str:
    return f"{file:08d}.journal"


def file_of_name(name: str) -> int | None:
    """Return the segment id in a file name, or None if it is not a segment's name."""
    stem, dot, suffix = name.partition(".")
    return int(stem) if dot and suffix == "journal" and len(stem) == 8 and stem.isdigit() else None


class OpenFiles:
    """Limits the number of segments that are open for reading: the one opened first is closed first."""

    def __init__(self, files_max: int = 128) -> None:
        self._files_max = files_max
        self._open: dict[int, Segment] = {}

    def opened(self, segment: Segment) -> None:
        self._open.pop(segment.file, None)
        self._open[segment.file] = segment
        if len(self._open) > self._files_max:
            self._open.pop(next(iter(self._open))).release()


class Segment:
    """A segment and the counts about it."""

    __slots__ = (
        "_disk",
        "_file",
        "_open_files",
        "capacity",
        "directory",
        "dropped",
        "end",
        "file",
        "filled",
        "is_filling",
        "is_ready",
        "live",
        "salt",
        "seed",
        "superseded",
        "touched",
    )

    def __init__(self, disk: Disk, directory: str, header: FileHeader, *, capacity: int, open_files: OpenFiles) -> None:
        self._disk = disk
        self._open_files = open_files
        self._file: File | None = None
        self.directory = directory
        self.file = header.file
        self.salt = header.salt
        self.seed = record.seed_of(header.salt)
        self.capacity = capacity
        self.end = FILE_HEADER_SIZE
        """Where its records end; for the segment that is being written, the end of the synced records."""
        self.is_ready = True
        """True if the file's header is on disk, so that groups may follow."""
        self.filled = 0
        self.is_filling = False
        self.live: dict[int, int] = {}
        """Bytes of entries that are still needed, by ledger. Counted when the segment is full."""
        self.touched: set[int] = set()
        """Ledgers with any record in the segment, including dropped ones."""
        self.superseded: dict[int, list[tuple[int, int]]] = {}
        """For each ledger, the older segments with copies that its entries here have replaced, and the bytes of these
        copies. Set when the segment is full."""
        self.dropped: set[int] = set()
        """Ledgers that were gone when the segment was full, or were dropped in it and exist again. Set when the segment
        is full."""

    @property
    def path(self) -> str:
        return f"{self.directory}/{segment_name(self.file)}"

    @property
    def handle(self) -> File:
        """The open file. The file that is written to stays open; others are closed when too many are open. Raises
        OSError."""
        if self._file is None:
            self._file = self._disk.open(self.path)
            self._open_files.opened(self)
        return self._file

    @property
    def live_bytes(self) -> int:
        return sum(self.live.values())

    def create(self, ready: Callable[[OSError | None], None]) -> None:
        """Create the file at its full size. `ready` is called when its header is on disk. Raises OSError."""
        self.is_ready = False
        self._file = self._disk.open(self.path, create=True)
        self._file.allocate(self.capacity)
        self._file.pwrite(0, record.encode_file_header(FileHeader(self.file, self.salt)))
        self._disk.sync_dir(self.directory)
        self.filled = len(PAGE)  # the page of the header

        def on_synced(error: OSError | None) -> None:
            self.is_ready = error is None
            ready(error)

        self._file.submit_sync(on_synced)

    def fill(self, up_to: int, failed: Callable[[OSError], None]) -> int:
        """Write zeros ahead, one piece at a time, until `up_to`. Return the number of bytes. Bytes that cannot be
        written stay merely allocated.

        `failed` is called if they cannot be synced. The kernel reports an error only once: a group that was written
        meanwhile may have lost its bytes by the same error, and its own sync does not report it then.
        """
        size = min(FILL_BYTES, self.capacity - self.filled)
        if self.is_filling or size <= 0 or self.filled >= up_to:
            return 0
        try:
            for at in range(self.filled, self.filled + size, len(PAGE)):
                self.handle.pwrite(at, PAGE[: self.capacity - at])
        except OSError:
            self.filled = self.capacity
            return 0
        self.filled += size
        self.is_filling = True

        def on_synced(error: OSError | None) -> None:
            self.is_filling = False
            if error is not None:
                failed(error)

        try:
            self.handle.submit_sync(on_synced)
        except OSError as error:
            failed(error)
        return size

    def read_body(self, offset: int, size: int, *, ledger: int, entry: int) -> bytes | None:
        """Return the body of the record at `offset`, which has `size` bytes, or None if it is not what was written.
        Raises OSError for a temporary error, which says nothing about the record."""
        try:
            return self._read_body(offset, size, ledger, entry)
        except OSError as error:
            if is_passing(error):
                raise
            return None

    def read_certainly(self, offset: int, size: int, *, ledger: int, entry: int) -> bytes | None:
        """Read a body as `read_body` does. Raises OSError if the bytes may be intact although this read failed."""
        try:
            return self._read_body(offset, size, ledger, entry)
        except OSError as error:
            if not is_medium_error(error):
                raise
            return None

    def _read_body(self, offset: int, size: int, ledger: int, entry: int) -> bytes | None:
        data = self.handle.read(offset, RECORD_HEADER_SIZE + size)
        head = record.decode_record_head(data, 0, seed=self.seed, offset=offset)
        if head is None or (head.size, head.ledger, head.entry) != (size, ledger, entry):
            return None
        body = data[RECORD_HEADER_SIZE:]
        return body if record.is_body_good(head, body) else None

    def release(self) -> None:
        """Close the file if it is open; it is opened again when needed."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """Delete the file if it exists. Raises OSError."""
        self.release()
        if self._disk.exists(self.path):
            self._disk.remove(self.path)

    def set_aside(self) -> None:
        """Keep an unreadable file under another name for inspection. Raises OSError."""
        self.release()
        self._disk.rename(self.path, self.path.replace(".journal", ".damaged"))

    def cut(self, end: int) -> None:
        """Release the space after `end`: its bytes are written elsewhere, or are unreadable. Raises OSError."""
        if self._disk.exists(self.path) and self.handle.size() > end:
            self.handle.truncate(end)
