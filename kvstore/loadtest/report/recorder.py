"""Measurements of a run: histograms and a timeline, in deltas that workers send and a master merges.

Each process calls `sample` every second. It reads how long the process used a processor and how long it waited for one.

Each operation has two latencies, in microseconds. *Response* runs from when the operation should have begun: the
latency that a caller with its own schedule sees. *Service* runs from when the operation did begin. An operation counts
as done in the second in which it ended, and as due in the second in which it should have begun. Its response time also
belongs to the second in which it was due, so that a stall shows as the callers of each second experienced it.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hdrh.histogram import HdrHistogram

QUEUED = Path("/proc/self/schedstat")
"""Scheduler statistics of the main thread, which runs all users: nanoseconds on a processor, nanoseconds queued."""
LATENCY_US_MAX = 600_000_000
WRONG_MAX = 50
"""Maximum number of wrong values that are reported in full. All are counted."""
FINE, COARSE = 3, 2
"""Significant digits of a histogram: for the whole run, and for one second."""
UNPACKED_MAX = 600
"""Maximum number of seconds with unpacked histograms, 24 KiB each. Older ones are packed."""
USE_S = 5.0
"""Seconds over which processor use is averaged. A single busy second is not saturation."""


def histogram(digits: int) -> Any:
    return HdrHistogram(1, LATENCY_US_MAX, digits)


@dataclass(slots=True)
class TimelineSecond:
    """The measurements of one second of wall clock."""

    due: int = 0
    done: int = 0
    errors: int = 0
    times: Any = field(default_factory=lambda: histogram(COARSE))
    """The histogram, or its encoding while it is packed."""

    @property
    def responses(self) -> Any:
        """The histogram for reading. Values that are recorded in it may be lost."""
        return HdrHistogram.decode(self.times) if isinstance(self.times, bytes) else self.times

    def unpack(self) -> Any:
        """Return the histogram for recording."""
        self.times = self.responses
        return self.times

    def pack(self) -> None:
        self.times = self.times if isinstance(self.times, bytes) else self.times.encode()


@dataclass(slots=True)
class Tally:
    """One operation at one endpoint, after the warm-up."""

    errors: int = 0
    bytes: int = 0
    responses: Any = field(default_factory=lambda: histogram(FINE))
    services: Any = field(default_factory=lambda: histogram(FINE))

    def record(self, response_s: float, service_s: float) -> None:
        """Add one successful operation."""
        self.responses.record_value(_us(response_s))
        self.services.record_value(_us(service_s))


class Recorder:
    """The measurements of one process. Times are seconds of wall clock."""

    def __init__(self, counted_from: float = 0.0) -> None:
        self.counted_from = counted_from
        """Operations that were due earlier appear only in the timeline."""
        self.cells: dict[int, TimelineSecond] = {}
        self._ready: deque[int] = deque()
        self.tallies: dict[tuple[str, str], Tally] = {}
        self.error_counts: Counter[tuple[str, str, str]] = Counter()
        self.wrong: list[str] = []
        self.wrong_count = 0
        self.busiest = 0.0
        """Highest share of a processor that a process of the load used over USE_S seconds after the warm-up."""
        self._used: dict[str, tuple[float, float]] = {}
        self.late = histogram(FINE)
        """How long after its due time, with its user free, each request was sent."""
        self.queued: float | None = None
        """Highest share of time after the warm-up that a process waited for a processor; None if unknown."""
        self._queued_since: dict[str, tuple[float, float]] = {}
        self._shares: dict[str, float] = {}
        self.beside: Callable[[], tuple[float, float | None]] | None = None
        """Returns the processor seconds that a sidecar of this process has used and waited."""

    def begin(self, counted_from: float) -> None:
        """Reset all measurements for another run."""
        self.__init__(counted_from)  # type: ignore[misc]

    def done(
        self,
        endpoint: str,
        operation: str,
        *,
        intended: float,
        ended: float,
        service_s: float,
        length: int = 0,
        late_s: float = 0.0,
    ) -> None:
        begin = self.cell(int(intended))
        begin.due += 1
        begin.unpack().record_value(_us(ended - intended))
        self.cell(int(ended)).done += 1
        if intended < self.counted_from:
            return
        tally = self.tally(endpoint, operation)
        tally.record(ended - intended, service_s)
        tally.bytes += length
        self.late.record_value(_us(late_s))

    def failed(self, endpoint: str, operation: str, error: str, *, intended: float, ended: float) -> None:
        """Record a failure. Its time is in no histogram, because it only shows how patient the caller was."""
        self.cell(int(intended)).due += 1
        self.cell(int(ended)).errors += 1
        self.error_counts[endpoint, operation, error] += 1
        if intended >= self.counted_from:
            self.tally(endpoint, operation).errors += 1

    def is_wrong(self, what: str) -> None:
        """Record a read that no correct store returns."""
        self.wrong_count += 1
        if len(self.wrong) < WRONG_MAX:
            self.wrong.append(what)

    def abandoned(self, intended: Iterable[float]) -> None:
        """Record operations that were due and never began."""
        for at in intended:
            self.cell(int(at)).due += 1

    def used(self, at: float, processor_s: float, who: str = "") -> None:
        """Record the processor time that a process, by default this one, has used until `at`."""
        if who not in self._used or at < self.counted_from:
            self._used[who] = at, processor_s
            return
        since, before_s = self._used[who]
        if at - since >= USE_S:
            self.busiest = max(self.busiest, round((processor_s - before_s) / (at - since), 3))
            self._used[who] = at, processor_s

    def waited(self, at: float, queued_s: float, who: str = "") -> None:
        """Record the time that a process has been runnable but waiting for a processor until `at`."""
        if who not in self._queued_since or at < self.counted_from:
            self._queued_since[who] = at, queued_s
            return
        since, before_s = self._queued_since[who]
        if at - since >= USE_S:
            self._shares[who] = round((queued_s - before_s) / (at - since), 3)
            self.queued = max(self._shares.values())

    def sample(self, at: float, processor_s: float) -> None:
        """Sample processor use. Call this every second."""
        self.used(at, processor_s)
        queued_s = queued_or_none()
        if queued_s is not None:
            self.waited(at, queued_s)
        if self.beside is not None:
            processor_s, queued_s = self.beside()
            self.used(at, processor_s, "beside")
            if queued_s is not None:
                self.waited(at, queued_s, "beside")

    def cell(self, second: int) -> TimelineSecond:
        found = self.cells.get(second)
        if found is None:
            found = self.cells[second] = TimelineSecond()
            self._ready.append(second)
            if len(self._ready) > UNPACKED_MAX:
                self.cells[self._ready.popleft()].pack()
        return found

    def tally(self, endpoint: str, operation: str) -> Tally:
        found = self.tallies.get((endpoint, operation))
        if found is None:
            found = self.tallies[endpoint, operation] = Tally()
        return found

    # ── between processes ──

    def take(self) -> dict[str, Any]:
        """Return and reset the measurements since the last call, as plain lists and bytes."""
        self.sample(time.time(), time.process_time())
        delta = {
            "cells": [
                [second, cell.due, cell.done, cell.errors, cell.responses.encode()]
                for second, cell in sorted(self.cells.items())
            ],
            "tallies": [
                [endpoint, operation, tally.errors, tally.bytes, tally.responses.encode(), tally.services.encode()]
                for (endpoint, operation), tally in sorted(self.tallies.items())
            ],
            "errors": [[*key, count] for key, count in sorted(self.error_counts.items())],
            "wrong": self.wrong,
            "wrong_count": self.wrong_count,
            "busiest": self.busiest,
            "late": self.late.encode(),
            "queued": self.queued,
        }
        self.late = histogram(FINE)
        self.cells, self.tallies, self.error_counts, self.wrong, self.wrong_count = {}, {}, Counter(), [], 0
        self._ready.clear()
        return delta

    def merge(self, delta: Mapping[str, Any]) -> None:
        """Add the measurements of another process."""
        for second, due, done, errors, responses in delta["cells"]:
            cell = self.cell(second)
            cell.due, cell.done, cell.errors = cell.due + due, cell.done + done, cell.errors + errors
            cell.unpack().decode_and_add(responses)
        for endpoint, operation, errors, length, responses, services in delta["tallies"]:
            tally = self.tally(endpoint, operation)
            tally.errors, tally.bytes = tally.errors + errors, tally.bytes + length
            tally.responses.decode_and_add(responses)
            tally.services.decode_and_add(services)
        for endpoint, operation, error, count in delta["errors"]:
            self.error_counts[endpoint, operation, error] += count
        self.wrong = [*self.wrong, *delta["wrong"]][:WRONG_MAX]
        self.wrong_count += delta["wrong_count"]
        self.busiest = max(self.busiest, delta["busiest"])
        self.late.decode_and_add(delta["late"])
        shares = [share for share in (self.queued, delta["queued"]) if share is not None]
        self.queued = max(shares, default=None)

    # ── figures ──

    def between(self, first: int, last: int) -> TimelineSecond:
        """Return seconds [first, last) merged into one cell."""
        whole = TimelineSecond()
        for second in range(first, last):
            cell = self.cells.get(second)
            if cell is not None:
                whole.due, whole.done, whole.errors = (
                    whole.due + cell.due,
                    whole.done + cell.done,
                    whole.errors + cell.errors,
                )
                whole.times.add(cell.responses)
        return whole


def percentiles(times: Any, shares: Iterable[float]) -> dict[str, float]:
    """Return percentiles of a histogram in milliseconds, by name: `p99_ms`."""
    return {f"p{each:g}_ms": times.get_value_at_percentile(each) / 1000 for each in shares}


def queued_or_none() -> float | None:
    """Return how long the main thread has waited for a processor since it started, in seconds, or None if unknown."""
    try:
        return int(QUEUED.read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def _us(seconds: float) -> int:
    return min(max(1, int(seconds * 1e6)), LATENCY_US_MAX)
