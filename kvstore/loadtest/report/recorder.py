"""Measurements of a run: histograms and a timeline, in deltas that workers send and a master merges.

Each process calls `look` every second; it asks the system for how long the process used a processor and waited for one.

Two latencies of each operation, in microseconds. *Response*: from when it should have begun; that is what a caller with
a timetable of its own sees. *Service*: from when it did begin. An operation counts as done in the second in which it
ended, and as due in the second in which it should have begun; its response belongs there, too: a stall shows as what
callers of each of its seconds met.
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
"""Of the main thread, in which all users of a process run: nanoseconds on a processor, and ready without one."""
LATENCY_US_MAX = 600_000_000
WRONG_MAX = 50
"""Wrong values that are told in full; all are counted."""
FINE, COARSE = 3, 2
"""Significant digits: of the whole run, and of one second."""
UNPACKED_MAX = 600
"""Seconds whose histograms are held ready, at 24 KiB each; those of older ones are packed."""
USE_S = 5.0
"""Over so many seconds the use of a processor is taken. A single busy second is nobody's limit."""


def histogram(digits: int) -> Any:
    return HdrHistogram(1, LATENCY_US_MAX, digits)


@dataclass(slots=True)
class Cell:
    """One second, by the wall clock."""

    due: int = 0
    done: int = 0
    errors: int = 0
    times: Any = field(default_factory=lambda: histogram(COARSE))
    """The histogram, or its bytes while it is packed."""

    @property
    def responses(self) -> Any:
        """To read; what is recorded in it may be lost."""
        return HdrHistogram.decode(self.times) if isinstance(self.times, bytes) else self.times

    def unpack(self) -> Any:
        """To record in."""
        self.times = self.responses
        return self.times

    def pack(self) -> None:
        self.times = self.times if isinstance(self.times, bytes) else self.times.encode()


@dataclass(slots=True)
class Tally:
    """One kind of operation through one door, after the warm-up."""

    errors: int = 0
    bytes: int = 0
    responses: Any = field(default_factory=lambda: histogram(FINE))
    services: Any = field(default_factory=lambda: histogram(FINE))


class Recorder:
    """A process's measurements. Times are seconds of the wall clock."""

    def __init__(self, counted_from: float = 0.0) -> None:
        self.counted_from = counted_from
        """What should have begun before is in the timeline and nowhere else."""
        self.cells: dict[int, Cell] = {}
        self._ready: deque[int] = deque()
        self.tallies: dict[tuple[str, str], Tally] = {}
        self.error_counts: Counter[tuple[str, str, str]] = Counter()
        self.wrong: list[str] = []
        self.wrong_count = 0
        self.busiest = 0.0
        """The highest share of a processor that a process of the load used over USE_S, after the warm-up."""
        self._used: dict[str, tuple[float, float]] = {}
        self.late = histogram(FINE)
        """How long after it was due and its user free each request went out."""
        self.queued: float | None = None
        """The highest share of the time after the warm-up in which a process waited for a processor; None: unknown."""
        self._queued_since: dict[str, tuple[float, float]] = {}
        self._shares: dict[str, float] = {}
        self.beside: Callable[[], tuple[float, float | None]] | None = None
        """Of a process that does some of this one's work: the seconds that it has used, and waited, of a processor."""

    def begin(self, counted_from: float) -> None:
        """Forget the run before: another one starts."""
        self.__init__(counted_from)  # type: ignore[misc]

    def done(
        self,
        door: str,
        operation: str,
        *,
        intended: float,
        ended: float,
        service_s: float,
        length: int = 0,
        late_s: float = 0.0,
    ) -> None:
        response_us = _us(ended - intended)
        begin = self.cell(int(intended))
        begin.due += 1
        begin.unpack().record_value(response_us)
        self.cell(int(ended)).done += 1
        if intended < self.counted_from:
            return
        tally = self.tally(door, operation)
        tally.responses.record_value(response_us)
        tally.services.record_value(_us(service_s))
        tally.bytes += length
        self.late.record_value(_us(late_s))

    def failed(self, door: str, operation: str, error: str, *, intended: float, ended: float) -> None:
        """It raised. Its time is in no histogram: it says how patient the caller was."""
        self.cell(int(intended)).due += 1
        self.cell(int(ended)).errors += 1
        self.error_counts[door, operation, error] += 1
        if intended >= self.counted_from:
            self.tally(door, operation).errors += 1

    def is_wrong(self, what: str) -> None:
        """A read that no correct store gives."""
        self.wrong_count += 1
        if len(self.wrong) < WRONG_MAX:
            self.wrong.append(what)

    def abandoned(self, intended: Iterable[float]) -> None:
        """These were due and never begun."""
        for at in intended:
            self.cell(int(at)).due += 1

    def used(self, at: float, processor_s: float, who: str = "") -> None:
        """By then a process, this one if it is not said, had used so much processor time."""
        if who not in self._used or at < self.counted_from:
            self._used[who] = at, processor_s
            return
        since, before_s = self._used[who]
        if at - since >= USE_S:
            self.busiest = max(self.busiest, round((processor_s - before_s) / (at - since), 3))
            self._used[who] = at, processor_s

    def waited(self, at: float, queued_s: float, who: str = "") -> None:
        """By then it had waited so long for a processor while it was ready to run."""
        if who not in self._queued_since or at < self.counted_from:
            self._queued_since[who] = at, queued_s
            return
        since, before_s = self._queued_since[who]
        if at - since >= USE_S:
            self._shares[who] = round((queued_s - before_s) / (at - since), 3)
            self.queued = max(self._shares.values())

    def look(self, at: float, processor_s: float) -> None:
        """To be called every second."""
        self.used(at, processor_s)
        queued_s = queued_or_none()
        if queued_s is not None:
            self.waited(at, queued_s)
        if self.beside is not None:
            processor_s, queued_s = self.beside()
            self.used(at, processor_s, "beside")
            if queued_s is not None:
                self.waited(at, queued_s, "beside")

    def cell(self, second: int) -> Cell:
        found = self.cells.get(second)
        if found is None:
            found = self.cells[second] = Cell()
            self._ready.append(second)
            if len(self._ready) > UNPACKED_MAX:
                self.cells[self._ready.popleft()].pack()
        return found

    def tally(self, door: str, operation: str) -> Tally:
        found = self.tallies.get((door, operation))
        if found is None:
            found = self.tallies[door, operation] = Tally()
        return found

    # ── between processes ──

    def take(self) -> dict[str, Any]:
        """Return and forget the measurements since the last call, as plain lists and bytes."""
        self.look(time.time(), time.process_time())
        delta = {
            "cells": [
                [second, cell.due, cell.done, cell.errors, cell.responses.encode()]
                for second, cell in sorted(self.cells.items())
            ],
            "tallies": [
                [door, operation, tally.errors, tally.bytes, tally.responses.encode(), tally.services.encode()]
                for (door, operation), tally in sorted(self.tallies.items())
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
        """Add what another process measured."""
        for second, due, done, errors, responses in delta["cells"]:
            cell = self.cell(second)
            cell.due, cell.done, cell.errors = cell.due + due, cell.done + done, cell.errors + errors
            cell.unpack().decode_and_add(responses)
        for door, operation, errors, length, responses, services in delta["tallies"]:
            tally = self.tally(door, operation)
            tally.errors, tally.bytes = tally.errors + errors, tally.bytes + length
            tally.responses.decode_and_add(responses)
            tally.services.decode_and_add(services)
        for door, operation, error, count in delta["errors"]:
            self.error_counts[door, operation, error] += count
        self.wrong = [*self.wrong, *delta["wrong"]][:WRONG_MAX]
        self.wrong_count += delta["wrong_count"]
        self.busiest = max(self.busiest, delta["busiest"])
        self.late.decode_and_add(delta["late"])
        shares = [share for share in (self.queued, delta["queued"]) if share is not None]
        self.queued = max(shares, default=None)

    # ── figures ──

    def between(self, first: int, last: int) -> Cell:
        """The cells of seconds [first, last) as one."""
        whole = Cell()
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


def queued_or_none() -> float | None:
    """How long the main thread has waited for a processor since it began, in seconds; None where nobody counts it."""
    try:
        return int(QUEUED.read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def _us(seconds: float) -> int:
    return min(max(1, int(seconds * 1e6)), LATENCY_US_MAX)
