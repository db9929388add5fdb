"""A thread that writes into one directory on request, so that others can tell whether its disk works."""

from __future__ import annotations

import logging
import os
import threading
from queue import SimpleQueue

from kvstore.env.files.private import FILE_MODE
from kvstore.env.liveness.threads import ThreadTimes

log = logging.getLogger(__name__)

PROBE = "PROBE"
"""Name of the file, which it has only for a moment."""


class DiskProbe:
    """The probe of one directory. Its thread may hang for as long as the disk does; nobody waits for it."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.times: ThreadTimes | None = None
        """Times of the thread, once it runs."""
        self.completed = 0
        """Number of writes that have ended, including failed ones. A disk that returns an error does not hang, and its
        users handle its errors."""
        self._asked = 0
        self._requests: SimpleQueue[bool] = SimpleQueue()
        self._fd = -1
        self._error = ""
        threading.Thread(target=self._run, name=f"probe {directory}", daemon=True).start()

    @property
    def is_under_way(self) -> bool:
        """True while a requested write has not ended."""
        return self._asked != self.completed

    def ask(self) -> None:
        """Request a small write and sync, unless one is in flight."""
        if not self.is_under_way:
            self._asked += 1
            self._requests.put(True)

    def close(self) -> None:
        """End the thread when the write in flight has ended."""
        self._requests.put(False)

    def _run(self) -> None:
        self.times = ThreadTimes(threading.get_native_id())
        while self._requests.get():
            try:
                self._write()
                self._error = ""
            except OSError as error:
                if str(error) != self._error:
                    self._error = str(error)
                    log.warning("disk probe failed directory=%s: %s", self.directory, error)
            self.completed += 1
        if self._fd >= 0:
            os.close(self._fd)

    def _write(self) -> None:
        """Write and sync. Raises OSError."""
        if self._fd < 0:
            place, flags = os.path.join(self.directory, PROBE), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
            self._fd = os.open(place, flags, FILE_MODE)
            os.unlink(place)
        os.pwrite(self._fd, b"%-15d\n" % self._asked, 0)
        os.fdatasync(self._fd)
