"""Measurements of a thread that is ready to run and has no processor."""

import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.env import starvation
from kvstore.env.starvation import SAMPLE_S, LoopStarvation
from tests.waiting import wait_until_blocking

SPIN = "while True: pass"


def told_by_kernel() -> bool:
    try:
        return int(Path(starvation.SCHEDSTAT).read_bytes().split()[0]) > 0
    except (OSError, ValueError, IndexError):
        return False


def spin(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def wait_for_events(seconds: float) -> None:
    select.select([], [], [], seconds)


@pytest.mark.skipif(not told_by_kernel(), reason="this kernel has no statistics of how long threads wait")
def test_thread_that_shares_a_processor_is_starved(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = os.sched_getaffinity(0)
    one = {min(allowed)}
    others = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(3)]
    try:
        for other in others:
            os.sched_setaffinity(other.pid, one)
        os.sched_setaffinity(0, one)
        with monkeypatch.context() as patch:
            now = time.monotonic()
            patch.setattr(starvation.time, "monotonic", lambda: now)
            starved = LoopStarvation()
            assert starved() == 0, "nothing is known yet"

        def is_told() -> bool:
            starved()  # from here on
            spin(5 * SAMPLE_S)
            return 0.4 < starved() <= 1

        wait_until_blocking(is_told, what="four threads share one processor")
    finally:
        os.sched_setaffinity(0, allowed)
        for other in others:
            other.kill()
            other.wait()


def test_thread_that_waits_for_events_is_not_starved() -> None:
    """On a full machine it also waits for a processor after the events, but not all the time."""
    starved = LoopStarvation()

    def is_told() -> bool:
        starved()  # from here on
        wait_for_events(2 * SAMPLE_S)
        return starved() < 0.2

    wait_until_blocking(is_told, what="who waits is not starved")


def told(monkeypatch: pytest.MonkeyPatch, path: Path, text: str | None) -> None:
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(starvation, "SCHEDSTAT", str(path))


def test_share_is_the_waiting_time_between_two_measurements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = 10.0
    monkeypatch.setattr(starvation.time, "monotonic", lambda: now)
    told(monkeypatch, tmp_path / "s", "5 1000000000 7\n")
    starved = LoopStarvation()
    told(monkeypatch, tmp_path / "s", "5 1050000000 7\n")
    now += SAMPLE_S / 2
    assert starved() == 0, "too early to say"
    now += SAMPLE_S
    assert starved() == pytest.approx(0.05 / (1.5 * SAMPLE_S))
    now += SAMPLE_S / 2
    assert starved() == pytest.approx(0.05 / (1.5 * SAMPLE_S)), "until the next look"


@pytest.mark.parametrize("text", [None, "", "5\n", "a b c\n"])
def test_failed_measurement_reports_no_starvation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None
) -> None:
    now = 10.0
    monkeypatch.setattr(starvation.time, "monotonic", lambda: now)
    told(monkeypatch, tmp_path / "s", "5 600000000000 7\n")
    starved = LoopStarvation()
    told(monkeypatch, tmp_path / "s", text)
    now += 2 * SAMPLE_S
    assert starved() == 0
    told(monkeypatch, tmp_path / "s", "5 600010000000 7\n")
    now += 2 * SAMPLE_S
    assert starved() == pytest.approx(0.01 / (2 * SAMPLE_S)), "the last value that was told counts"
