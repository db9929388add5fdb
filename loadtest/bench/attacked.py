"""Measure the latency of GETs, newcomers and probes with and without unauthenticated peers on every endpoint.

    python -m loadtest.bench.attacked [--rounds 5] [--seconds 12]

One cluster of three nodes with TLS and access control is loaded by turns without and with the attack of
tests/cluster/access/attack.py, which holds all capacity that unauthenticated peers can get. A figure is the median over
the rounds of a phase's 99th percentile, so that other programs of the machine, which are busy for some seconds, do not
decide. The goal: the GETs' figure at most doubles. A GET passes two nodes and its client, and each of them may wait for
a time slice of every process that is ready to run on its processor. So the machine gets SHARED_MS more, times the
processes that were ready for each processor before the attack. The exit code is 1 if the goal is missed or if a call
fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from statistics import median
from typing import Any

from kvstore.cli.output import as_table
from kvstore.client import Client
from loadtest.bench import peers
from tests.cluster.access.attack import KEYS, LIMITS, Load, Repeated, attacked, redis_of, url_of
from tests.cluster.harness import Cluster, running_cluster

TIMES_CALM, SHARED_MS = 2.0, 10.0
GETS = "GET"


def p99_ms(took_s: Sequence[float]) -> float:
    """Return the 99th percentile in milliseconds. Raises ValueError if there is no duration."""
    if not took_s:
        raise ValueError("no call was done")
    return 1000 * sorted(took_s)[int(0.99 * len(took_s))]


def goal_ms(calm_ms: float, ready: float) -> float:
    """Return the highest allowed p99 of GETs under the attack. `ready`: ready processes for each processor."""
    return TIMES_CALM * calm_ms + SHARED_MS * max(1.0, ready)


class Figures:
    """The 99th percentiles of each kind of call in each phase, one for each round, and the failures."""

    def __init__(self) -> None:
        self._p99_ms: dict[str, dict[bool, list[float]]] = {}
        self._calls: dict[str, int] = {}
        self.failed: list[str] = []

    def add(self, kind: str, calls: Repeated, *, is_attacked: bool) -> None:
        """Add the calls of one phase."""
        self.failed += [f"{kind}: {type(error).__name__}: {error}" for error in calls.failed]
        self._calls[kind] = self._calls.get(kind, 0) + len(calls.took_s)
        if calls.took_s:
            self._p99_ms.setdefault(kind, {False: [], True: []})[is_attacked].append(p99_ms(calls.took_s))

    def usual_ms(self, kind: str, *, is_attacked: bool) -> float:
        return median(self._p99_ms[kind][is_attacked])

    def rows(self) -> list[dict[str, Any]]:
        """Return one row of the table for each kind of call."""
        return [
            {
                "call": kind,
                "calls": self._calls[kind],
                "calm_p99_ms": round(self.usual_ms(kind, is_attacked=False), 1),
                "attacked_p99_ms": round(self.usual_ms(kind, is_attacked=True), 1),
            }
            for kind in self._p99_ms
        ]


def measure(cluster: Cluster, rounds: int, seconds: float) -> tuple[Figures, float]:
    """Return the figures, and the ready processes for each processor before the attacks (median)."""
    figures, ready = Figures(), list[float]()
    with Client(url_of(cluster)) as store, closing(redis_of(cluster, "n1")) as client:
        for key in KEYS:
            store.put(key.encode(), b"1")
        for _ in range(rounds):
            for is_attacked in (False, True):
                with ExitStack() as stack:
                    stack.enter_context(attacked(cluster) if is_attacked else nullcontext())
                    load = stack.enter_context(Load(cluster, client).running())
                    threading.Event().wait(seconds)
                for kind, calls in {GETS: load.gets, **load.others}.items():
                    figures.add(kind, calls, is_attacked=is_attacked)
                if not is_attacked:
                    ready.append(os.getloadavg()[0] / (os.cpu_count() or 1))
    return figures, median(ready)


def main(words: list[str] | None = None) -> None:
    """Print the table. Exits with 1 if the goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.attacked", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each phase")
    parser.add_argument("--seconds", type=float, default=12.0, help="duration of a phase")
    options = parser.parse_args(words)
    with peers.scratch() as folder, running_cluster(folder, secure=True, settings=LIMITS) as cluster:
        figures, ready = measure(cluster, options.rounds, options.seconds)
    print(as_table(figures.rows()))
    calm, under = (figures.usual_ms(GETS, is_attacked=each) for each in (False, True))
    goal = goal_ms(calm, ready)
    print(f"GET: p99 {under:.1f} ms under the attack; the goal is at most {goal:.1f} ms; {ready:.1f} ready processes")
    if figures.failed:
        sys.exit(f"{len(figures.failed)} calls failed, the first: {figures.failed[0]}")
    if under > goal:
        sys.exit("the attack slows down GETs by more than the goal allows")


if __name__ == "__main__":
    main()
