"""Measures whether a thread of this process waits for a processor, from the kernel's statistics (Linux,
sched-stats.rst)."""

from __future__ import annotations

from contextlib import suppress


class ThreadTimes:
    """The times of one thread, read from another one. If the kernel has no statistics, the thread is never starved."""

    def __init__(self, thread: int) -> None:
        """`thread`: the id from threading.get_native_id."""
        self._place = f"/proc/self/task/{thread}"
        self._ran, self._waited = self._read() or (0.0, 0.0)

    def starved_s(self, elapsed_s: float) -> float:
        """Return the seconds since the last call, which was `elapsed_s` ago, in which the thread was ready and did not
        run.

        The kernel adds up the wait of a thread when the wait ends. The state of the thread shows a wait that has not
        ended.
        """
        found = self._read()
        if found is None:
            return 0.0
        ran, waited = found[0] - self._ran, found[1] - self._waited
        self._ran, self._waited = found
        if self._is_ready():
            waited = max(waited, elapsed_s - ran)
        return min(elapsed_s, max(0.0, waited))

    def _read(self) -> tuple[float, float] | None:
        """Return the seconds on a processor, and the seconds of waiting for one."""
        with suppress(OSError, ValueError, IndexError), open(f"{self._place}/schedstat", "rb") as file:
            words = file.read().split()
            return int(words[0]) / 1e9, int(words[1]) / 1e9
        return None

    def _is_ready(self) -> bool:
        """Return True if the thread runs or wants to."""
        with suppress(OSError), open(f"{self._place}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] == b"R"
        return False
