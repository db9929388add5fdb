"""Processors in a measurement: what a process has used of them, and their assignment. The client has one, the servers
have the others, and none sleeps.

A processor that has nothing to do goes to sleep, and takes some 30 µs to come back; one that two programs share has the
other one's bytes in its caches. Both would make the same server slower for a program that takes longer between two
requests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

AUTOGROUP = Path("/proc/self/autogroup")
LEAST_NICE = "19"
IS_LINUX = sys.platform == "linux"
"""Only Linux can restrict processes to processors. Elsewhere this module does nothing."""


def spent_s(pid: int) -> float:
    """Return the processor time of a process so far, in seconds."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def of_askers() -> Set[int]:
    """Return the processor for clients: one of those that this process may use."""
    return set(sorted(_usable())[:1])


def of_answerers() -> Set[int]:
    """Return the processors for servers: all others, or the only one."""
    return _usable() - of_askers() or _usable()


def _usable() -> Set[int]:
    return os.sched_getaffinity(0) if IS_LINUX else set()


@contextmanager
def on(processors: Set[int]) -> Iterator[None]:
    """Restrict processes that are started meanwhile to these processors."""
    before = _usable()
    if IS_LINUX:
        os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        if IS_LINUX:
            os.sched_setaffinity(0, before)


@contextmanager
def awake() -> Iterator[None]:
    """Keep all processors awake: on each runs a process that has the lowest priority."""
    command = [sys.executable, "-m", "loadtest.bench.processors", str(os.getpid())]
    running = [subprocess.Popen(command, start_new_session=True) for _ in _usable()]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


def turn_until_orphaned(parent: int) -> None:
    """Loop without work until the parent process has ended."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):  # kernels that share processors out among sessions first do not look at the class there
        AUTOGROUP.write_text(LEAST_NICE)
    while os.getppid() == parent:
        for _ in range(100_000):
            pass


if __name__ == "__main__":
    turn_until_orphaned(int(sys.argv[1]))
