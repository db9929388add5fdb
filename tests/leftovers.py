"""Fails a test that leaves a thread behind, and the last test of a file whose tests leave a process, or its fixtures a
thread. Otherwise a later test that they disturb would fail instead."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from traceback import walk_stack

import pytest

from tests.beside import stack_of
from tests.schedule import file_of
from tests.waiting import wait_until_blocking

LEFT_S = 10.0
"""Time limit for the end of what a test has just ended, in seconds."""
LIVE_ON = ("(_poll_wrapper)", "fsspecIO", "(serve_forever)", "/py4j/", "kvstore/env/logs/writer.py")
"""Parts of the names, or of the paths of the functions, of threads that live as long as the process, or as Spark's
session: those of gRPC, fsspec, Spark (two) and the log."""
IDLE = ("concurrent/futures/thread.py", "kvstore/env/syncs.py")
"""Files in which workers wait for jobs. A worker without a job disturbs nobody, and may end with its executor."""
SERVING = ("tests.forked", "multiprocessing.resource_tracker", "pyspark-shell")
"""Words in the commands of processes that serve all tests."""


class Leftovers:
    """Compares what runs before and after each test and each file. The fixtures of a test end its threads. Those of a
    file end their own, and the processes of its tests, which may restart a part of the file's cluster."""

    def __init__(self, left_s: float = LEFT_S) -> None:
        self._left_s = left_s
        self._file = ""
        self._before_file, self._threads = set[threading.Thread](), set[threading.Thread]()
        self._processes = set[int]()
        """Started by tests of the file, and not by fixtures."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if file_of(item) != self._file:
            self._file, self._before_file = file_of(item), threads()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        before_threads, before_processes = threads(), processes()
        try:
            return (yield)
        finally:
            self._threads = threads() - before_threads
            self._processes |= processes() - before_processes

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, nextitem: pytest.Item | None) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            started, spawned = self._threads, set[int]()
            if nextitem is None or file_of(nextitem) != self._file:
                started, spawned, self._processes = threads() - self._before_file, self._processes, set()
            self._before_file |= self._threads  # which are named once
            self._threads = set()
            self._check(started, spawned)

    def _check(self, started: set[threading.Thread], spawned: set[int]) -> None:
        left: list[str] = []

        def is_over() -> bool:
            left[:] = [*filter(None, map(disturbing, started)), *filter(None, map(command_of, spawned & processes()))]
            return not left

        with suppress(TimeoutError):
            wait_until_blocking(is_over, timeout_s=self._left_s)
        if left:
            pytest.fail("left behind, see tests/beside.py:\n" + "\n".join(left), pytrace=False)


def threads() -> set[threading.Thread]:
    """Return the threads that Python code has started with `threading`."""
    return {each for each in threading.enumerate() if not isinstance(each, threading._DummyThread)}


def disturbing(thread: threading.Thread) -> str:
    """Return the name and the stack of a thread that may disturb later tests, or an empty string."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None or not thread.is_alive() or frame.f_code.co_filename.endswith(IDLE):
        return ""
    callers = [each.f_code.co_filename for each, _ in walk_stack(frame)]
    origin = next((each for each in reversed(callers) if each != threading.__file__), "")
    return "" if any(each in f"{thread.name} {origin}" for each in LIVE_ON) else stack_of(thread)


def processes() -> set[int]:
    """Return the pids of the children of this process."""
    found = set[int]()
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has just ended
            found |= set(map(int, children.read_text().split()))
    return found


def command_of(pid: int) -> str:
    """Return the pid and the command of a process that may disturb later tests, or an empty string."""
    try:
        command, status = (Path(f"/proc/{pid}/{name}").read_text() for name in ("cmdline", "stat"))
    except OSError:
        return ""
    has_ended = status.rpartition(")")[2].split()[0] == "Z"
    return "" if has_ended or any(each in command for each in SERVING) else f"{pid} {command}".replace("\0", " ")
