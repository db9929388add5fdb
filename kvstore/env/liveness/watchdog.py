"""The watchdog of a real process: a thread beside the event loop that gathers evidence and ends metadata sessions.

The thread wakes every TICK_S. It compares counters, asks idle disks for a small write each second, and reads how long
silent threads have waited for a processor. A disk that completes the syncs of a journal is not probed. When the
evidence fails, the thread ends the metadata sessions without the event loop. If a session cannot be ended within
GONE_S, the thread ends the process (docs/protocol.md, P45).
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from kvstore.env.liveness.evidence import LOOP, TICK_S, Evidence, Sign
from kvstore.env.liveness.port import GiveUp, Hung, Liveness
from kvstore.env.liveness.probe import DiskProbe
from kvstore.env.liveness.threads import ThreadTimes

log = logging.getLogger(__name__)

NOT_LIVE = "node is not live"
"""Start of the log line of a node that ends its metadata session. Drills and tests search for it."""
GAVE_UP = "the metadata session cannot be ended"
"""Reason that is logged last when the watchdog ends the process. Drills and tests search for it."""

GONE_S = 2.0
"""Longest wait for the end of a session before the process ends."""


class _Disk:
    """The disk of one or more watched directories, as the kernel tells disks apart."""

    def __init__(self, path: str) -> None:
        self.probe = DiskProbe(path)
        self.works = 0
        """Number of completed writes that others have reported."""
        self._seen = 0

    def sign(self, elapsed_s: float) -> Sign:
        """Return what has happened since the last call, and ask for a write if nothing has."""
        seen = self.works + self.probe.completed
        is_alive, self._seen = seen != self._seen, seen
        was_under_way, times = self.probe.is_under_way, self.probe.times
        if not is_alive:
            self.probe.ask()
        starved_s = times.starved_s(elapsed_s) if times is not None else 0.0
        return Sign(is_alive or not was_under_way, starved_s if was_under_way else 0.0)


class Watchdog(Liveness):
    """The watchdog. Create it on the event loop that it watches. The loop is watched from `start` on, a directory from
    `watch_disk` on."""

    def __init__(self, end: Callable[[str], object], base: str = "") -> None:
        """`end` ends the process. Watched directories may be relative to `base`."""
        self._end, self._base = end, base
        self._loop = asyncio.get_running_loop()
        self._thread_of_loop = ThreadTimes(threading.get_native_id())
        self._beats = self._beats_seen = 0
        self._lock = threading.Lock()
        """Guards the tables below. Nobody blocks while holding it."""
        self._evidence = Evidence()
        self._disks: dict[int, _Disk] = {}
        """Disks by device."""
        self._devices: dict[str, int] = {}
        """Devices of the watched directories."""
        self._on_hung: dict[str, Hung] = {}
        self._sessions: list[GiveUp] = []
        self._failing_since = 0.0
        self._is_closed = threading.Event()
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    @property
    def failure(self) -> str:
        return self._evidence.failure

    def start(self) -> None:
        """Require from now on that `beat` is called."""
        with self._lock:
            self._evidence.watch_loop()

    def beat(self) -> None:
        self._beats += 1

    def watch_disk(self, path: str, on_hung: Hung | None = None) -> None:
        """Watch the disk of a directory. Raises OSError if the directory does not exist."""
        place = os.path.join(self._base, path)
        device = os.stat(place).st_dev
        with self._lock:
            if device not in self._disks:
                self._disks[device] = _Disk(place)
            self._devices[path] = device
            self._evidence.watch_disk(path, is_spare=on_hung is not None)
            if on_hung is not None:
                self._on_hung[path] = on_hung

    def disk_works(self, path: str) -> None:
        # The watchdog's thread may abandon the directory between these two lines.
        device = self._devices.get(path)
        if device is not None and (disk := self._disks.get(device)) is not None:
            disk.works += 1

    def add_session(self, give_up: GiveUp) -> Callable[[], None]:
        def take_back() -> None:
            with self._lock, suppress(ValueError):
                self._sessions.remove(give_up)

        with self._lock:
            self._sessions.append(give_up)
        return take_back

    def statistics(self) -> dict[str, float]:
        with self._lock:
            silence = self._evidence.silence_s
        return {
            "liveness_failing": bool(self.failure),
            "liveness_failures_total": self._evidence.failures,
            "loop_silence_s": silence.pop(LOOP, 0.0),
            "disk_silence_s": max(silence.values(), default=0.0),
        }

    def close(self) -> None:
        """Stop watching."""
        self._is_closed.set()
        with self._lock:
            for disk in self._disks.values():
                disk.probe.close()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._is_closed.wait(TICK_S):
            now = time.monotonic()
            try:
                self._tick(now - before, now)
            except Exception as error:  # noqa: BLE001 - the root of a thread: without it nobody would watch
                self._end(f"the watchdog failed: {error!r}")
            before = now

    def _tick(self, elapsed_s: float, now: float) -> None:
        with self._lock:
            signs = {LOOP: self._sign_of_loop(elapsed_s)}
            found = {device: disk.sign(elapsed_s) for device, disk in self._disks.items()}
            signs |= {path: found[device] for path, device in self._devices.items()}
            before = self._evidence.failure
            hung = self._evidence.tick(elapsed_s, signs)
            failure, sessions = self._evidence.failure, list(self._sessions)
        for path in hung:
            self._give_up_directory(path)
        if failure and not before:
            self._failing_since = now
            log.error("%s, ends its metadata session: %s", NOT_LIVE, failure)
        elif before and not failure:
            log.warning("node is live again, after %.1f s: %s", now - self._failing_since, before)
        if failure:
            self._end_sessions(sessions, failure, now)

    def _sign_of_loop(self, elapsed_s: float) -> Sign:
        is_alive, self._beats_seen = self._beats != self._beats_seen, self._beats
        return Sign(is_alive, self._thread_of_loop.starved_s(elapsed_s))

    def _give_up_directory(self, path: str) -> None:
        log.error("directory=%s hangs: no write has been completed in time", path)
        with self._lock:
            device = self._devices.pop(path)
            if device not in self._devices.values():
                self._disks.pop(device).probe.close()
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._on_hung.pop(path), "its disk completes no writes any more")

    def _end_sessions(self, sessions: list[GiveUp], failure: str, now: float) -> None:
        remaining = [give_up for give_up in sessions if not give_up()]
        if remaining and now - self._failing_since > GONE_S:
            self._end(f"{GAVE_UP}, and {failure}")
