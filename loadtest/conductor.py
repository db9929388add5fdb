"""Leads a run: loads the records, moves the rate, sets the chaos going, and writes the report. One per run, in Locust's
master or, without workers, in its only process."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from random import Random
from typing import Any

from kvstore.client import Client
from loadtest import chaos_plan, resp_wire
from loadtest.baseline import Line, Tolerance, compare, differences
from loadtest.chaos import Chaos
from loadtest.doors import first_values
from loadtest.expectations import Expectations
from loadtest.figures import PERCENTILES, Run, document
from loadtest.options import Options
from loadtest.pulse import Pulse
from loadtest.recorder import Recorder
from loadtest.report import page
from loadtest.shapes import Knee, Seen, Shape, shape_of
from loadtest.workloads import Draws, Keyspace

SETTLE_S, LAG_S = 2, 2
"""Seconds after a change of the rate, and before now, that tell nothing: users start, reports are on their way."""
SPAWN_PER_S = 100.0
CHUNK = 1_000


class Conductor:
    """`began` is None until the users start."""

    def __init__(self, options: Options, recorder: Recorder) -> None:
        self.options, self.recorder = options, recorder
        self.began: float | None = None
        self.ended: float | None = None
        self.users: dict[int, int] = {}
        self.faults: list[str] = []
        """What went wrong besides operations."""
        self._shape: Shape = shape_of(options.shape, options.rate, options.seconds)
        self._rate, self._changed_at = 0.0, 0.0
        self._workers = self._workers_most = 0
        self._chaos: Chaos | None = None
        self._pulse: Pulse | None = None
        if options.shape == "chaos":
            faults = chaos_plan.plan(options.node_ids(), options.seconds, options.warmup, options.seed)
            self._chaos = Chaos(options.data_dir, options.report.parent, faults)

    def load_records(self, writer: int) -> None:
        """Find the cluster, and write every record. Raises StoreError."""
        options = self.options
        keyspace = Keyspace(options.prefix.encode(), options.keys, writer)
        draws = Draws(options.workloads[0], options.keys)
        records = first_values(keyspace, draws, Expectations(writer), Random(options.seed)) if options.preload else {}
        if options.is_redis_only:
            resp_wire.load_records(options.resp_nodes()[0], records)
            return
        with Client(options.client_config()) as client:
            keys = list(records)
            for first in range(0, len(keys), CHUNK):
                client.put_many({key: records[key] for key in keys[first : first + CHUNK]})

    def start(self) -> float:
        """The users are about to start: what is measured `warmup` seconds from now counts."""
        self._pulse = Pulse(self.options.report.parent)
        self.began = time.time()
        self.ended = None
        if self._chaos is not None:
            self._chaos.start(self.began)
        return self.began + self.options.warmup

    def target(self, now: float, running: int) -> tuple[int, float] | None:
        """How many users there should be, and how many to start per second; None: the run is over."""
        if self.began is not None:
            self.users[int(now)] = running
        at_s = 0.0 if self.began is None else now - self.began
        rate = self._shape.rate(at_s, self._seen(now))
        if rate is None:
            self.ended = self.ended or now
            return None
        if rate != self._rate:
            self._rate, self._changed_at = rate, now
        users = max(1, ceil(rate / self.options.rate_per_user))
        return users, min(SPAWN_PER_S, float(users))

    def note_workers(self, count: int) -> None:
        """So many are at work now. One may be heard of again that was not for some seconds."""
        self._workers, self._workers_most = count, max(count, self._workers_most)

    def finish(self, *, doors: str) -> int:
        """Write the report and say what came of it; returns the exit code."""
        pulse = self._pulse.finish() if self._pulse is not None else {}
        if self._chaos is not None:
            self._chaos.finish()
        if self.began is None:
            print("loadtest: the run never began", file=sys.stderr)
            return 2
        if self.ended is None:  # its workers are gone, or somebody has had enough
            ran_s = time.time() - self.began
            self.faults.append(f"the run was ended after {ran_s:.0f} of {self.options.seconds:g} s")
        if self._workers < self._workers_most:  # what they had measured since their last reports went with them
            self.faults.append(f"{self._workers_most - self._workers} of {self._workers_most} workers were lost")
        made = document(self.recorder, self._run(self.began, doors, pulse))
        lines = self._beside(made)
        path = self.options.report
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".json").write_text(json.dumps(made, indent=1), encoding="utf-8")
        path.write_text(page(made, lines), encoding="utf-8")
        reasons = made["verdict"]["reasons"] + [
            f"{line.figure} has fallen: {line.now:g}, baseline {line.stored:g}" for line in lines if line.is_fallen
        ]
        print(summary(made), file=sys.stderr)
        if made["knee"] is not None:
            print(f"loadtest: the knee: {made['knee']['carried_per_s']:g}/s were carried", file=sys.stderr)
        for reason in reasons:
            print(f"loadtest: {reason}", file=sys.stderr)
        print(f"loadtest: report in {path}", file=sys.stderr, flush=True)
        return 1 if reasons else 0

    def _seen(self, now: float) -> Seen | None:
        first, last = ceil(self._changed_at) + SETTLE_S, int(now) - LAG_S
        if not self._changed_at or last <= first:
            return None
        cell = self.recorder.between(first, last)
        return Seen(cell.done / (last - first), cell.responses.get_value_at_percentile(99) / 1000, cell.errors)

    def _run(self, began: float, doors: str, pulse: Mapping[str, float]) -> Run:
        knee: dict[str, Any] | None = None
        if isinstance(self._shape, Knee):
            trials = [trial._asdict() for trial in self._shape.trials]
            knee = {"carried_per_s": self._shape.carried_per_s, "trials": trials}
        return Run(
            began=began,
            ended=self.ended or time.time(),
            counted_from=began + self.options.warmup,
            options=self.options.document() | {"doors": doors},
            machine=machine() | dict(pulse),
            goals=self.options.goals,
            events=self._chaos.events if self._chaos is not None else (),
            knee=knee,
            users=self.users,
            faults=self.faults,
        )

    def _beside(self, made: Mapping[str, Any]) -> list[Line]:
        """The stored figures beside ours, if there are such and they can be compared."""
        path = self.options.baseline
        if path is None:
            return []
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            unlike = differences(stored, made)
        except (OSError, ValueError, KeyError) as error:
            self.faults.append(f"the baseline {path} cannot be read: {error!r}")
            made["verdict"]["reasons"].append(self.faults[-1])  # `is_met` stays: it may be the first baseline itself
            return []
        if unlike:
            print(f"loadtest: not compared with {path}: {'; '.join(unlike)}", file=sys.stderr)
            return []
        return compare(stored, made, Tolerance())


def summary(made: Mapping[str, Any]) -> str:
    """A run in one line."""
    total = made["total"]
    times = ", ".join(f"p{each:g} {total[f'p{each:g}_ms']:g} ms" for each in PERCENTILES)
    return (
        f"loadtest: {total['per_s']:g}/s, achieved {total['achieved']:.2%} of {total['due_per_s']:g}/s due; {times}; "
        f"{total['errors']} errors, {total['wrong']} wrong values"
    )


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "python": platform.python_version(),
        "load_1m": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
