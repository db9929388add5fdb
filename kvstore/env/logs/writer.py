"""Writes the lines of a process's log in its own thread, so that no caller ever waits for a pipe or a disk.

The queue is bounded. While nobody reads standard error, or the disk of the log hangs, lines beyond the bound are
dropped and counted, and one line states the count when the writer continues.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, Protocol

log = logging.getLogger(__name__)

LINES_MAX = 10_000
BYTES_MAX = 4 << 20
"""Maximum number of lines and characters that wait to be written; lines beyond either are dropped."""
AUDIT_LINES_MAX = 1_000
AUDIT_BYTES_MAX = 1 << 20
"""Additional lines and characters of the audit log, which are queued while ordinary lines fill the queue."""
FLUSH_S = 2.0
"""Longest wait of a flush, as at the end of the process, for a writer that is stuck."""
_MODE = 0o640
"""Mode of new files. The umask of a node removes the group's access, unless the directory has a default ACL."""
FILE_BYTES_MAX = 16 << 20
FILES = 4
"""Number of files that are kept besides the current one."""


class LineSink(Protocol):
    """The destination of lines. Only the writer thread uses it."""

    def write(self, line: str) -> None:
        """Write a line and its newline. May block. Raises OSError."""
        ...

    def close(self) -> None: ...


class StandardError:
    """The standard error of this process. A real file is written without Python's buffer, because a thread that is
    blocked with the lock of that buffer would keep the process from ending."""

    def __init__(self) -> None:
        self._stream, self._fd = sys.stderr, -1
        with suppress(OSError, ValueError, AttributeError):
            self._fd = sys.stderr.fileno()

    def write(self, line: str) -> None:
        if self._fd < 0:
            print(line, file=self._stream)
            return
        data = memoryview(f"{line}\n".encode(errors="backslashreplace"))
        while data:
            data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        """Standard error stays open."""


class RotatedFile:
    """A file that is renamed to `<name>.1` when it is full, up to `<name>.4`. It holds whole lines only."""

    def __init__(self, path: Path, bytes_max: int = FILE_BYTES_MAX) -> None:
        """Raises OSError if the file cannot be opened for writing."""
        self._path, self._bytes_max = path, bytes_max
        self._fd, self._size = -1, 0
        self._open()

    def write(self, line: str) -> None:
        data = memoryview(f"{line}\n".encode(errors="backslashreplace"))
        if self._fd < 0:
            self._open()
        if self._size and self._size + len(data) > self._bytes_max:
            self._rotate()
        begin = self._size
        try:
            while data:
                written = os.write(self._fd, data)
                self._size += written
                data = data[written:]
        except OSError:
            if self._size > begin:  # the disk took a part; the next line must not be appended to it
                os.ftruncate(self._fd, begin)
                self._size = begin
            raise

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, _MODE)
        self._size = os.fstat(self._fd).st_size

    def _rotate(self) -> None:
        self.close()
        names = [self._path, *(self._path.with_name(f"{self._path.name}.{n}") for n in range(1, FILES + 1))]
        for old, new in reversed(list(pairwise(names))):
            with suppress(FileNotFoundError):
                os.replace(old, new)
        self._open()


class _Line(NamedTuple):
    """A formatted line and its sink."""

    sink: LineSink
    text: str
    written: Callable[[bool], None] | None
    """Called in the writer thread with True if the line was written, else with False."""


class LogWriter:
    """The writer thread of a process's log and its bounded queue. Lines of all sinks share both."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Line | threading.Event | None] = SimpleQueue()
        self._lock = threading.RLock()
        """Guards what callers count. Nobody blocks while holding it. Reentrant, because a finalizer may log."""
        self._lines_in = self._bytes_in = 0
        self._lines_out = self._bytes_out = 0
        """Counted by the writer thread alone."""
        self.dropped = 0
        """Number of lines dropped because the queue was full or a write failed."""
        self._reported = 0
        self._patience_s = FLUSH_S
        """Remaining wait of consecutive flushes that find the writer stuck, in seconds."""
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="log writer", daemon=True)
        self._thread.start()

    def put(
        self, sink: LineSink, text: str, *, is_audit: bool = False, written: Callable[[bool], None] | None = None
    ) -> bool:
        """Queue a line for the writer thread; return False if the line was dropped. Never blocks. `written` is called
        in the writer thread after the attempt to write the line; it is not called if the line was dropped."""
        lines_max = LINES_MAX + AUDIT_LINES_MAX if is_audit else LINES_MAX
        bytes_max = BYTES_MAX + AUDIT_BYTES_MAX if is_audit else BYTES_MAX
        with self._lock:
            lines, size = self._lines_in - self._lines_out, self._bytes_in - self._bytes_out
            if self._is_closed or lines >= lines_max or size + len(text) > bytes_max:
                self.dropped += 1
                return False
            self._lines_in += 1
            self._bytes_in += len(text)
            self._queue.put(_Line(sink, text, written))
            return True

    def flush(self) -> bool:
        """Wait until all lines queued before are written. Return False if the writer is stuck: after FLUSH_S, or at
        once if an earlier flush has waited that long."""
        if self._is_closed:
            return True
        written, began = threading.Event(), time.monotonic()
        self._queue.put(written)
        is_written = written.wait(self._patience_s)
        self._patience_s = FLUSH_S if is_written else max(0.0, self._patience_s - (time.monotonic() - began))
        return is_written

    def close(self) -> None:
        """Write what is queued, as far as `flush` waits for it, and end the thread."""
        self.flush()
        self._is_closed = True
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            is_written = self._write(item)
            if item.written is not None:
                item.written(is_written)
            self._lines_out += 1
            self._bytes_out += len(item.text)
            if self.dropped != self._reported and self._queue.empty():
                self._report()

    def _write(self, line: _Line) -> bool:
        try:
            line.sink.write(line.text)
            return True
        except (OSError, ValueError):
            # A full disk, a pipe whose reader has gone, a stream that is closed, text that its encoding lacks: the log
            # has no other place to say so, and the thread serves the lines that follow.
            with self._lock:
                self.dropped += 1
            return False

    def _report(self) -> None:
        """Log how many lines were dropped. The line passes through the loggers, which know the format."""
        dropped, self._reported = self.dropped - self._reported, self.dropped
        log.warning("dropped log lines=%d total=%d: the log could not be written fast enough", dropped, self.dropped)


class QueuedHandler(logging.Handler):
    """Formats records on the caller's thread and leaves the lines to a LogWriter."""

    def __init__(self, writer: LogWriter, sink: LineSink) -> None:
        super().__init__()
        self._writer, self.sink = writer, sink

    def handle(self, record: logging.LogRecord) -> bool:
        """Handle a record without the handler's lock. `logging.shutdown` holds that lock while it waits for the writer
        thread, which logs, too: it reports dropped lines."""
        admitted = bool(self.filter(record))
        if admitted:
            self.emit(record)
        return admitted

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._writer.put(self.sink, self.format(record))
        except Exception:  # noqa: BLE001 - a line that cannot be formatted costs itself only
            self.handleError(record)

    def flush(self) -> None:
        self._writer.flush()

    def handleError(self, record: logging.LogRecord) -> None:
        """Write the error through the writer, because Python's own handler would block on standard error."""
        self._writer.put(self.sink, f"a log line of {record.name} cannot be formatted: {sys.exception()!r}")

    def close(self) -> None:
        """The sink closes with the writer's thread idle; it belongs to nobody else."""
        if self._writer.flush():
            self.sink.close()
        super().close()
