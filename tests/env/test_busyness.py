"""Whether a thread that has work, or waits for a processor with it, is said to be busy."""

import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.env import busyness
from kvstore.env.busyness import SAMPLE_S, LoopBusyness

SPIN = "while True: pass"
needs_schedstat = pytest.mark.skipif(not Path(busyness.SCHEDSTAT).exists(), reason="this kernel does not tell")


def spin(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def wait_for_events(seconds: float) -> None:
    select.select([], [], [], seconds)


def test_who_works_is_busy_and_who_waits_for_events_is_not() -> None:
    busy = LoopBusyness()
    assert busy() == 0, "nothing is known yet"
    spin(2 * SAMPLE_S)
    assert busy() > 0.8
    wait_for_events(2 * SAMPLE_S)
    assert busy() < 0.2


def test_between_two_looks_what_was_found_stands() -> None:
    busy = LoopBusyness()
    spin(SAMPLE_S)
    found = busy()
    assert busy() == found


@needs_schedstat
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity")
def test_to_wait_for_a_processor_is_to_be_busy() -> None:
    """Four threads share one processor: each runs for a quarter of the time."""
    allowed = os.sched_getaffinity(0)
    one = {min(allowed)}
    others = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(3)]
    try:
        for other in others:
            os.sched_setaffinity(other.pid, one)
        os.sched_setaffinity(0, one)
        busy, ran, began = LoopBusyness(), time.thread_time(), time.monotonic()
        spin(5 * SAMPLE_S)
        assert busy() > 0.8
        assert (time.thread_time() - ran) / (time.monotonic() - began) < 0.6
    finally:
        os.sched_setaffinity(0, allowed)
        for other in others:
            other.kill()
            other.wait()


def test_where_the_kernel_does_not_tell_running_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(busyness, "SCHEDSTAT", str(tmp_path / "absent"))
    busy = LoopBusyness()
    assert busy._last.waited == 0
    wait_for_events(SAMPLE_S)
    assert busy() < 0.5
