"""One file of the journal: made ahead at its full size, filled once, read at random until it is removed."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.bookie.journal import record
from kvstore.bookie.journal.record import FILE_HEADER_SIZE, RECORD_HEADER_SIZE, FileHeader
from kvstore.env.ports import Disk, File
from kvstore.os_errors import is_medium_error, is_passing

FILL_BYTES = 256 << 10
"""Zeroes written at a time. A file whose blocks were written once syncs about twice as fast as one only allocated."""
PAGE = bytes(4096)
"""What one write of them has: the kernel keeps what was one large write as one large piece of memory, which each later
sync goes through, and counts as written, for a record of a few bytes."""


def segment_name(file: int) -> str:
    return f"{file:08d}.journal"


def file_of_name(name: str) -> int | None:
    """The segment id in a file name; None if it is not a segment's."""
    stem, dot, suffix = name.partition(".")
    return int(stem) if dot and suffix == "journal" and len(stem) == 8 and stem.isdigit() else None


class OpenFiles:
    """Bounds how many segments are open for reading: the one opened longest ago is closed first."""

    def __init__(self, files_max: int = 128) -> None:
        self._files_max = files_max
        self._open: dict[int, Segment] = {}

    def opened(self, segment: Segment) -> None:
        self._open.pop(segment.file, None)
        self._open[segment.file] = segment
        if len(self._open) > self._files_max:
            self._open.pop(next(iter(self._open))).release()


class Segment:
    """A segment and what is counted about it."""

    __slots__ = (
        "_disk",
        "_file",
        "_open_files",
        "capacity",
        "directory",
        "end",
        "file",
        "filled",
        "is_filling",
        "is_ready",
        "live",
        "salt",
        "seed",
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
        """Where its records end; of the one that is being written: as far as they are synced."""
        self.is_ready = True
        """The file's header is on the disk: groups may follow."""
        self.filled = 0
        self.is_filling = False
        self.live: dict[int, int] = {}
        """Bytes of entries that are still wanted, per ledger. Counted when the segment is full."""
        self.touched: set[int] = set()
        """Ledgers with any record in it, dropped ones too."""

    @property
    def path(self) -> str:
        return f"{self.directory}/{segment_name(self.file)}"

    @property
    def handle(self) -> File:
        """The open file. One that is written to stays open; others are closed when too many are. Raises OSError."""
        if self._file is None:
            self._file = self._disk.open(self.path)
            self._open_files.opened(self)
        return self._file

    @property
    def live_bytes(self) -> int:
        return sum(self.live.values())

    def create(self, ready: Callable[[OSError | None], None]) -> None:
        """Make the file at its full size; `ready` is called when its header is on the disk. Raises OSError."""
        self.is_ready = False
        self._file = self._disk.open(self.path, create=True)
        self._file.allocate(self.capacity)
        self._file.pwrite(0, record.encode_file_header(FileHeader(self.file, self.salt)))
        self._disk.sync_dir(self.directory)
        self.filled = len(PAGE)  # the header's

        def on_synced(error: OSError | None) -> None:
            self.is_ready = error is None
            ready(error)

        self._file.submit_sync(on_synced)

    def fill(self, up_to: int, failed: Callable[[OSError], None]) -> int:
        """Write zeroes ahead, a piece at a time, until `up_to`; how many. What cannot be written stays merely
        allocated.

        `failed` is called if they cannot be synced. The kernel reports an error once: a group written meanwhile may
        have lost its bytes by the same error, and its own sync then knows of none.
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
        """Return the body of the record at `offset`, which has `size` bytes; None if it is not what was written. Raises
        OSError for an error that passes, which says nothing about the record."""
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
        """Close the file if it is open; it is opened again when it is needed."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """Delete the file, if it is there. Raises OSError."""
        self.release()
        if self._disk.exists(self.path):
            self._disk.remove(self.path)

    def set_aside(self) -> None:
        """Keep an unreadable file under another name, for whoever wants to look. Raises OSError."""
        self.release()
        self._disk.rename(self.path, self.path.replace(".journal", ".damaged"))

    def cut(self, end: int) -> None:
        """Give back what follows `end`: it is written elsewhere, or nobody can read it. Raises OSError."""
        if self._disk.exists(self.path) and self.handle.size() > end:
            self.handle.truncate(end)
