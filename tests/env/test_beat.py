"""The alignment of periodic jobs."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.env.beat import BEAT_S, Beat, SharedBeat

PHASE_S = 0.07


@pytest.mark.parametrize("seconds", [0.25, 0.3, 0.55, 1.0, 1.17, 10.0])
async def test_jobs_of_one_process_run_together(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1234.5
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    beat = SharedBeat(PHASE_S)
    first_s = beat.delay_s(seconds)
    assert abs(first_s - seconds) <= BEAT_S / 2 + 1e-9
    now += first_s
    beats = (now - PHASE_S) / BEAT_S
    assert beats == pytest.approx(round(beats)), "at a moment at which others come too"
    for late_s in (0.0, 0.003, -0.0005):
        now += late_s
        again_s = beat.delay_s(seconds)
        assert again_s + late_s == pytest.approx(round(seconds / BEAT_S) * BEAT_S), "and so it goes on"
        now += again_s


async def test_job_due_before_the_next_beat_is_not_aligned() -> None:
    assert SharedBeat(PHASE_S).delay_s(0.02) == 0.02
    assert Beat().delay_s(1.234) == 1.234
