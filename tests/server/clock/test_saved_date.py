"""The file that passes the cluster time on to the next process (docs/protocol.md, P28; docs/reference/formats.md)."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.env import Env
from kvstore.env.clock import SystemClock
from kvstore.server.clock.saved_date import PATH, STALE_MS, SavedDate, saved_offset


def keep(env: Env, offset_ms: float) -> None:
    SavedDate(env.disk, env.clock).keep(offset_ms)


async def test_next_process_continues_with_the_date(env: Env) -> None:
    assert saved_offset(env) is None
    keep(env, 1_790_000_000_123.5)
    assert saved_offset(replace(env, clock=SystemClock())) == 1_790_000_000_123.5


async def test_date_that_moves_is_saved_again(env: Env) -> None:
    kept = SavedDate(env.disk, env.clock)
    kept.keep(1_000.0)
    kept.keep(1_000.0 + STALE_MS / 2)
    assert saved_offset(env) == 1_000.0
    kept.keep(1_000.0 + STALE_MS)
    assert saved_offset(env) == 1_000.0 + STALE_MS


@pytest.mark.parametrize("boot_id", ["another", ""])
async def test_date_does_not_survive_a_reboot(env: Env, boot_id: str) -> None:
    keep(env, 1_000.0)
    clock = SystemClock()
    clock.boot_id = boot_id
    assert saved_offset(replace(env, clock=clock)) is None


async def test_date_of_later_monotonic_clock_is_ignored(env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(env, 1_000.0)
    monkeypatch.setattr(env.clock, "now", lambda: 0.0)
    assert saved_offset(env) is None


@pytest.mark.parametrize("data", [b"", b"[", b'["boot"]', b"\xff"])
async def test_undecodable_date_file_counts_as_absent(env: Env, tmp_path: Path, data: bytes) -> None:
    keep(env, 1_000.0)
    (tmp_path / PATH).write_bytes(data)
    assert saved_offset(env) is None


async def test_saving_is_retried_when_disk_accepts_no_file(env: Env, tmp_path: Path) -> None:
    (tmp_path / "clock").write_bytes(b"no directory")
    kept = SavedDate(env.disk, env.clock)
    kept.keep(1_000.0)
    (tmp_path / "clock").unlink()
    kept.keep(1_000.0)
    assert saved_offset(env) == 1_000.0


def test_boot_id_matches_the_monotonic_clock() -> None:
    clock = SystemClock()
    assert clock.boot_id == SystemClock().boot_id != ""
    assert str(os.stat("/proc/self/ns/time").st_ino) in clock.boot_id
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= clock.now() <= time.clock_gettime(time.CLOCK_BOOTTIME)
