"""Leads a run: loads the records, sets the rate, starts the chaos, and writes the report. One per run, in Locust's
master or, without workers, in its only process."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from math import ceil
from pathlib import Path
from random import Random
from typing import Any

from kvstore.client import Client
from kvstore.loadtest import pulse
from kvstore.loadtest.generator import resp_wire
from kvstore.loadtest.generator.chaos import chaos_of
from kvstore.loadtest.generator.endpoints import first_values
from kvstore.loadtest.generator.expectations import Expectations
from kvstore.loadtest.generator.options import Options, read_json
from kvstore.loadtest.generator.shapes import KneeShape, RecentResults, Shape, shape_of
from kvstore.loadtest.generator.workloads import Draws, Keyspace
from kvstore.loadtest.report.baseline import Comparison, Tolerance, compare, differences
from kvstore.loadtest.report.figures import PERCENTILES, Run, add_figures, document
from kvstore.loadtest.report.recorder import Recorder
from kvstore.loadtest.report.report import page
from kvstore.loadtest.report.spoiled import EXIT, SHAPES
from kvstore.loadtest.report.words import last_line, progress, two_digits

SETTLE_S, LAG_S = 2, 2
"""Seconds to ignore: after all users of a rate have started, while they connect; and before now, while reports
arrive."""
SATURATED = 0.90
"""A process that uses a larger share of a processor delays callers itself. Locust warns at the same share."""
SPAWN_PER_S = 100.0
PROGRESS_S = 10
"""Seconds between two lines about a run in progress. Each line is about the seconds since the line before."""


class Conductor:
    """The conductor of one run. `began` is None until the users start."""

    def __init__(self, options: Options, recorder: Recorder) -> None:
        """Raises ValueError for errors that would otherwise only show after the run."""
        options.check_paths()
        self.options, self.recorder = options, recorder
        self.began: float | None = None
        self.ended: float | None = None
        self.users: dict[int, int] = {}
        self.faults: list[str] = []
        """Failures of the run other than failed operations."""
        self._shape: Shape = shape_of(options.shape, options.rate, options.seconds)
        self._rate, self._users = 0.0, 0
        self.verdict = "loadtest: the run never started"
        """The verdict in one line, which is printed last."""
        self._shown = 0
        """Number of progress lines printed."""
        self._settled_at: float | None = None
        """When exactly the users of the current rate were running; None until then."""
        self._workers = self._workers_most = 0
        self._chaos = chaos_of(options) if options.shape == "chaos" else None
        self._pulse: Mapping[str, float] = {}
        self._cluster: dict[str, int | None] = {"nodes": None, "partitions": None}

    def load_records(
        self,
        writer: int,
        *,
        has_records: bool = True,
        prepare: Sequence[Callable[[Client, bytes], None]] = (),
    ) -> None:
        """Find the cluster, measure the machine's pulse while it is idle, and write the records that users need and the
        data of custom users. Raises StoreError."""
        options = self.options
        keyspace = Keyspace(options.prefix.encode(), options.keys, writer)
        draws = Draws(options.workloads[0], options.keys)
        records: Iterator[dict[bytes, bytes]] = iter(())
        if options.preload and has_records:
            records = first_values(keyspace, draws, Expectations(writer), Random(options.seed))
        print_line(f"writing {options.keys:,} records" if options.preload and has_records else "preparing")
        if options.is_redis_only:
            self._pulse = pulse.measure(options.pulse_folder)
            resp_wire.load_records(options.resp_nodes()[0], records)
            return
        with Client(options.client_config()) as client:
            self._cluster["partitions"] = len(client.cluster.partitions())
            self._cluster["nodes"] = None if options.store else len(options.node_ids())
            self._pulse = pulse.measure(options.pulse_folder)
            for part in records:
                client.put_many(part)
            for each in prepare if options.preload else ():
                each(client, keyspace.prefix)

    def start(self) -> float:
        """Start the run: operations that are due `warmup` seconds from now or later count. Returns that time."""
        self.began = time.time()
        self.ended = None
        if self._chaos is not None:
            self._chaos.start(self.began)
        return self.began + self.options.warmup

    def target(self, now: float, running: int) -> tuple[int, float] | None:
        """Return the wanted number of users and how many to start per second; None if the run is over."""
        self.recorder.sample(now, time.process_time())
        if self.began is not None:
            self.users[int(now)] = running
        at_s = 0.0 if self.began is None else now - self.began
        if at_s >= (self._shown + 1) * PROGRESS_S and self.ended is None:
            self._shown = int(at_s // PROGRESS_S)
            self._show_progress(now, at_s)
        rate = self._shape.rate(at_s, partial(self._seen, now))
        if rate is None:
            self.ended = self.ended or now
            return None
        if rate != self._rate:
            self._rate, self._users = rate, max(1, ceil(rate / self.options.rate_per_user))
            self._settled_at = None
        if self._settled_at is None and running == self._users:
            self._settled_at = now
        return self._users, min(SPAWN_PER_S, float(self._users))

    def note_workers(self, count: int) -> None:
        """Record the number of workers. A worker may be missing for some seconds and return."""
        self._workers, self._workers_most = count, max(count, self._workers_most)

    def finish(self, *, endpoints: str) -> int:
        """Write the report and print a summary. Return the exit code."""
        if self._chaos is not None:
            self._chaos.finish()
        if self.began is None:
            return 2
        self._judge_frame(self.began)
        made = document(self.recorder, self._run(self.began, endpoints))
        comparison = self._beside(made)
        verdict = made["verdict"]  # `is_met` stays: this run may become the first baseline
        add_figures(verdict, comparison.falls)
        verdict["notes"] += comparison.notes
        self.options.figures.write_text(json.dumps(made, indent=1), encoding="utf-8")
        self.options.report.write_text(page(made, comparison.lines), encoding="utf-8")
        print(summary(made), file=sys.stderr)
        for line in (*verdict["notes"], *(f"SPOILED: {each}" for each in verdict["spoiled"]), *verdict["reasons"]):
            print_line(line)
        self.verdict = last_line(made, self.options.report)
        return 1 if verdict["reasons"] else EXIT if verdict["spoiled"] else 0

    def _show_progress(self, now: float, at_s: float) -> None:
        last = int(now) - LAG_S
        cell = self.recorder.between(last - PROGRESS_S, last)
        seen = {
            "done_per_s": cell.done / PROGRESS_S,
            "due_per_s": self._users * self.options.rate_per_user,  # cells count an operation as due once it has ended
            "p50_ms": cell.responses.get_value_at_percentile(50) / 1000,
            "p99_ms": cell.responses.get_value_at_percentile(99) / 1000,
            "errors": cell.errors,
        }
        print(progress(at_s, self.options.seconds, self.options.warmup, seen), file=sys.stderr, flush=True)

    def _judge_frame(self, began: float) -> None:
        """Record the faults of the run that are not failed operations."""
        if self.ended is None:  # its workers are gone, or it was interrupted
            ran_s = time.time() - began
            self.faults.append(f"the run ended after {ran_s:.0f} of {self.options.seconds:g} s")
        if self._workers < self._workers_most:  # their measurements since their last reports are lost
            self.faults.append(f"{self._workers_most - self._workers} of {self._workers_most} workers were lost")
        if isinstance(self._shape, KneeShape) and self._shape.missing:
            self.faults.append(self._shape.missing)

    def _seen(self, now: float, seconds: float) -> RecentResults | None:
        last = int(now) - LAG_S
        first = last - ceil(seconds)
        if self._settled_at is None or first < ceil(self._settled_at) + SETTLE_S:
            return None
        cell = self.recorder.between(first, last)
        done = cell.responses.get_total_count()
        due_per_s = self._users * self.options.rate_per_user  # cells count an operation as due only once it has ended
        return RecentResults(
            due_per_s, done / (last - first), cell.responses.get_value_at_percentile(99) / 1000, cell.errors
        )

    def _run(self, began: float, endpoints: str) -> Run:
        return Run(
            began=began,
            ended=self.ended or time.time(),
            counted_from=began + self.options.warmup,
            options=self.options.document() | {"endpoints": endpoints, "workers": self._workers_most} | self._cluster,
            machine=machine()
            | dict(self._pulse)
            | {"generator_busiest": self.recorder.busiest, "generator_queued": self.recorder.queued},
            goals=self.options.goals,
            events=self._chaos.events if self._chaos is not None else (),
            knee=_knee(self._shape) if isinstance(self._shape, KneeShape) else None,
            users=self.users,
            faults=self.faults,
            notes=self._notes(),
            is_spoilable=self.options.shape in SHAPES,
        )

    def _notes(self) -> list[str]:
        notes = []
        if isinstance(self._shape, KneeShape) and not self._shape.missing:
            notes.append(
                f"the knee: {self._shape.sustained_per_s:g}/s were sustained, {self._shape.failed_per_s:g}/s were not"
            )
        if self.recorder.busiest > SATURATED:
            what = (
                "the knee may be the generator's"
                if isinstance(self._shape, KneeShape)
                else "part of the latency may be the generator's"
            )
            notes.append(
                f"the load generator is saturated: one of its processes used {self.recorder.busiest:.0%} of a "
                f"processor, and {what}; share the load with --processes"
            )
        return notes

    def _beside(self, made: Mapping[str, Any]) -> Comparison:
        """Compare the figures with the baseline. Empty without a baseline, or if the two cannot be compared."""
        path = self.options.baseline
        if path is None:
            return Comparison([], [])
        try:
            stored = read_json(path)
            unlike = differences(stored, made)
            if unlike:
                return Comparison([], [f"not compared with {path}: {'; '.join(unlike)}"])
            return compare(stored, made, Tolerance())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            made["verdict"]["reasons"].append(f"cannot compare with the baseline {path}: {reason}")
            return Comparison([], [])


def _knee(shape: KneeShape) -> dict[str, Any]:
    return {
        "sustained_per_s": shape.sustained_per_s,
        "failed_per_s": shape.failed_per_s,
        "missing": shape.missing,
        "trials": [trial._asdict() for trial in shape.trials],
    }


def summary(made: Mapping[str, Any]) -> str:
    """Return the summary of a run in one line."""
    total = made["total"]
    times = ", ".join(f"p{each:g} {two_digits(total[f'p{each:g}_ms'])} ms" for each in PERCENTILES)
    return (
        f"loadtest: {two_digits(total['per_s'])}/s, achieved {total['achieved']:.2%} of "
        f"{two_digits(total['due_per_s'])}/s due; {times}; late p99 {two_digits(total['late_p99_ms'])} ms; "
        f"{total['errors']} errors, {total['wrong']} wrong values"
    )


def print_line(line: str) -> None:
    """Print a line about the run."""
    print(f"loadtest: {line}", file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """Return the properties of this machine that the figures depend on, and the version of the load generator."""
    return {
        "version": _version(),
        "cores": os.cpu_count(),
        "processor": _processor(),
        "python": platform.python_version(),
        "load_1m": round(os.getloadavg()[0], 2),
    }


def _version() -> str:
    """Return the version of the package, and the commit if it is a checkout."""
    try:
        found = version("kvstore-log")
    except PackageNotFoundError:
        found = "unknown"
    folder = Path(__file__).parent
    try:
        git = ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"]
        done = subprocess.run(git, capture_output=True, text=True, timeout=5, check=False)
        is_tracked = subprocess.run(
            ["git", "-C", str(folder), "ls-files", "--error-unmatch", Path(__file__).name],
            capture_output=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return found
    if done.returncode or is_tracked.returncode:  # also in an environment below the checkout of something else
        return found
    return f"{found}, commit {done.stdout.strip()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
