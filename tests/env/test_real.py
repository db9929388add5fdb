"""The ports of a real process."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
from pathlib import Path

import pytest
import uvloop

from kvstore.env import real
from kvstore.env.real import EXIT_FATAL, best_syncs, real_env, run
from kvstore.env.syncs import ThreadSyncs


def test_main_runs_on_uvloop_and_returns() -> None:
    async def main() -> str:
        return type(asyncio.get_running_loop()).__module__

    interval = sys.getswitchinterval()
    assert run(main()) == uvloop.__name__
    sys.setswitchinterval(interval)


def test_garbage_collections_skip_imported_objects() -> None:
    """The collection took 30 ms of the event loop. Frozen objects stay frozen, because tests/conftest.py freezes what
    it collected: otherwise each full collection in this process takes a second."""

    async def main() -> int:
        return gc.get_freeze_count()

    interval, before = sys.getswitchinterval(), gc.get_freeze_count()
    imported = [[each] for each in range(10_000)]
    assert run(main()) >= before + len(imported)
    sys.setswitchinterval(interval)


def test_durations_count_from_boot_and_dates_from_1970(tmp_path: Path) -> None:
    clock = real_env(tmp_path).clock
    before, now = time.clock_gettime(time.CLOCK_BOOTTIME), clock.now()
    assert before - 1 < now < time.clock_gettime(time.CLOCK_BOOTTIME) + 1
    before, date = time.time(), clock.wall_ms() / 1000
    assert before - 10 < date < time.time() + 10


def test_files_are_below_the_root(tmp_path: Path) -> None:
    disk = real_env(tmp_path / "made" / "here").disk
    disk.open("f", create=True).pwrite(0, b"x")
    assert (tmp_path / "made" / "here" / "f").read_bytes() == b"x"
    assert disk.real_path("f") == str(tmp_path / "made" / "here" / "f")


def test_each_process_has_its_own_randomness(tmp_path: Path) -> None:
    assert real_env(tmp_path).random.random() != real_env(tmp_path).random.random()


def test_threads_sync_without_io_uring(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden() -> None:
        raise PermissionError("io_uring is forbidden here")

    monkeypatch.setattr(real, "RingSyncs", forbidden)
    assert isinstance(best_syncs(), ThreadSyncs)


def test_fatal_error_ends_the_process_at_once_and_logs_why() -> None:
    program = """
import asyncio, pathlib, tempfile
from kvstore.env.real import real_env, run

async def main():
    env = real_env(pathlib.Path(tempfile.mkdtemp()))
    try:
        env.fatal("the sync failed")
    finally:
        print("this must not be seen")

run(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (EXIT_FATAL, "")
    assert "fatal: the sync failed" in ended.stderr
