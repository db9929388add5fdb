"""Files and names on a real directory with each way to sync, and on the simulated disk."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvstore.env import Disk, File, syncs
from kvstore.env.disk import LOCK_NAME, DirectoryDisk, lock_dir
from kvstore.env.syncs import Done, Syncs, ThreadSyncs, Write
from kvstore.env.uring import RingSyncs
from kvstore.errors import ConfigError
from tests.env.runners import LOOPS, Work
from tests.sim.world.disk import SimDisk
from tests.waiting import PATIENCE_S, wait_until_blocking


def ring() -> RingSyncs:
    try:
        return RingSyncs()
    except OSError as error:
        pytest.skip(f"no io_uring here: {error}")


@pytest.fixture(params=["ring", "threads", "simulated"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    if request.param == "simulated":
        yield SimDisk(Random(1))
        return
    real = DirectoryDisk(tmp_path, ring() if request.param == "ring" else ThreadSyncs())
    yield real
    real.close()


async def synced(file: File, times: int = 1) -> list[OSError | None]:
    """Submit this many syncs at once and return their results."""
    results: list[OSError | None] = []
    over = asyncio.get_running_loop().create_future()

    def done(error: OSError | None) -> None:
        results.append(error)
        if len(results) == times:
            over.set_result(None)

    for _ in range(times):
        file.submit_sync(done)
    async with asyncio.timeout(PATIENCE_S):
        await over
    return results


def test_written_data_can_be_read_at_any_offset(disk: Disk) -> None:
    file = disk.open("f", create=True)
    assert (file.size(), file.read(0, 10)) == (0, b"")
    file.pwrite(3, b"abc")
    file.pwrite(1, b"xy")
    assert file.size() == 6
    assert file.read(0, 100) == b"\0xyabc"
    assert file.read(4, 2) == b"bc"
    assert file.read(6, 1) == b""
    assert disk.open("f").read(0, 6) == b"\0xyabc", "every handle sees the same bytes"
    file.close()


def test_space_can_be_allocated_and_freed(disk: Disk) -> None:
    file = disk.open("f", create=True)
    file.pwrite(0, b"abc")
    file.allocate(10_000)
    assert (file.size(), file.read(0, 5), file.read(9_998, 10)) == (10_000, b"abc\0\0", b"\0\0")
    file.allocate(5)
    assert file.size() == 10_000, "never shorter"
    file.truncate(2)
    assert (file.size(), file.read(0, 5)) == (2, b"ab")
    file.truncate(4)
    assert file.read(0, 5) == b"ab\0\0", "what was cut off does not come back"


def test_file_is_created_only_on_request(disk: Disk) -> None:
    with pytest.raises(FileNotFoundError):
        disk.open("f")
    with pytest.raises(FileNotFoundError):
        disk.open("no such directory/f", create=True)
    disk.open("f", create=True).pwrite(0, b"kept")
    assert disk.open("f", create=True).read(0, 9) == b"kept"


def test_names_are_listed_sorted_and_one_level_deep(disk: Disk) -> None:
    disk.mkdir("a/b")
    disk.mkdir("a/b")
    for path in ("a/2", "a/10", "a/b/c", "z"):
        disk.open(path, create=True).close()
    assert disk.list("a") == ["10", "2", "b"]
    assert disk.list("") == ["a", "z"]
    assert disk.list("nowhere") == []
    assert [disk.exists(path) for path in ("", "a", "a/b/c", "a/c")] == [True, True, True, False]


def test_rename_replaces_and_remove_deletes(disk: Disk) -> None:
    disk.mkdir("d")
    disk.open("d/new", create=True).pwrite(0, b"new")
    disk.open("old", create=True).pwrite(0, b"old")
    held = disk.open("old")
    disk.rename("d/new", "old")
    assert disk.open("old").read(0, 9) == b"new"
    assert held.read(0, 9) == b"old", "an open file outlives its name"
    assert disk.list("d") == []
    disk.remove("old")
    disk.remove("d")
    assert disk.list("") == []
    for missing in ("old", "d"):
        with pytest.raises(FileNotFoundError):
            disk.remove(missing)
    with pytest.raises(FileNotFoundError):
        disk.rename("old", "new")


def test_directory_moves_with_its_contents_and_is_removed_only_when_empty(disk: Disk) -> None:
    disk.mkdir("d/e")
    disk.open("d/e/f", create=True).pwrite(0, b"x")
    disk.rename("d", "c")
    assert disk.open("c/e/f").read(0, 1) == b"x"
    with pytest.raises(OSError, match="c") as caught:
        disk.remove("c")
    assert caught.value.errno == errno.ENOTEMPTY


@pytest.mark.parametrize("path", ["/etc/passwd", "../f", "a/../../f", "a//f", "./f", "a/", "."])
def test_no_path_leads_out_of_the_root(disk: Disk, path: str) -> None:
    with pytest.raises(ValueError, match="relative to the"):
        disk.open(path, create=True)


@pytest.mark.parametrize("loop", LOOPS)
def test_syncs_are_reported_on_the_loop_in_order(disk: Disk, loop: str) -> None:
    async def work() -> None:
        files = [disk.open(f"f{number}", create=True) for number in range(10)]
        order: list[tuple[int, int]] = []
        over = asyncio.get_running_loop().create_future()

        def submit(number: int, turn: int) -> None:
            def done(error: OSError | None) -> None:
                assert error is None
                assert asyncio.get_running_loop() is over.get_loop()
                order.append((number, turn))
                if len(order) == 200:
                    over.set_result(None)

            files[number].pwrite(turn * 1000, bytes(1000))
            files[number].submit_sync(done)

        for turn in range(20):
            for number in range(10):
                submit(number, turn)
        assert order == [], "never before submit_sync has returned"
        async with asyncio.timeout(PATIENCE_S):
            await over
        assert sorted(order) == [(number, turn) for number in range(10) for turn in range(20)]
        for number in range(10):
            assert [turn for each, turn in order if each == number] == list(range(20))

    run_on(loop, disk, work)


def run_on(loop: str, disk: Disk, work: Work) -> None:
    if loop == "simulation" and not isinstance(disk, SimDisk):
        pytest.skip("the simulated loop has only simulated disks")
    LOOPS[loop](work)


def test_file_may_be_closed_while_it_syncs(disk: Disk) -> None:
    async def work() -> None:
        file = disk.open("f", create=True)
        file.pwrite(0, b"x")
        results: list[OSError | None] = []
        over = asyncio.get_running_loop().create_future()
        file.submit_sync(results.append)
        file.submit_sync(over.set_result)
        file.close()
        file.close()
        others = [disk.open(f"g{number}", create=True) for number in range(5)]  # would take its descriptor
        assert await over is None
        assert results == [None]
        for other in others:
            other.close()

    asyncio.run(work())


@pytest.mark.parametrize("use", [lambda f: f.read(0, 1), lambda f: f.pwrite(0, b"x"), lambda f: f.size()])
def test_closed_file_cannot_be_used(disk: Disk, use: Callable[[File], Any]) -> None:
    file = disk.open("f", create=True)
    file.close()
    with pytest.raises(OSError, match=r"descriptor|closed") as caught:
        use(file)
    assert caught.value.errno == errno.EBADF


def test_closed_file_is_not_synced(disk: Disk) -> None:
    async def work() -> None:
        file = disk.open("f", create=True)
        file.close()
        with pytest.raises((OSError, ValueError)):
            file.submit_sync(lambda error: None)

    asyncio.run(work())


def test_disk_reports_free_bytes_and_files(disk: Disk) -> None:
    assert disk.free_bytes() > 0


class StubbornSyncs:
    """Ends syncs on demand, in any order and with any error."""

    def __init__(self) -> None:
        self.submitted: list[Done] = []

    def submit(self, fd: int, done: Done, write: Write | None = None, *, is_synced: bool = True) -> None:
        self.submitted.append(done)

    def report(self) -> None:
        """Do nothing: these syncs report themselves."""

    def close(self) -> None:
        self.submitted.clear()


def test_forgotten_ring_leaves_no_descriptor() -> None:
    """With the rings of forgotten bookies a test process came to a thousand descriptors; systems give it 1,024."""

    def held() -> int:
        gc.collect()
        return sum("io_uring" in os.path.realpath(link) for link in Path("/proc/self/fd").iterdir())

    before, forgotten = held(), [ring() for _ in range(8)]
    assert held() > before
    forgotten.clear()
    assert held() == before


def test_early_sync_waits_for_those_before_it(tmp_path: Path) -> None:
    syncs = StubbornSyncs()
    file = DirectoryDisk(tmp_path, syncs).open("f", create=True)
    reports: list[tuple[int, OSError | None]] = []
    for number in range(3):
        file.submit_sync(partial(lambda number, error: reports.append((number, error)), number))
    syncs.submitted[2](None)
    syncs.submitted[1](broken := OSError(errno.EIO, "broken"))
    assert reports == []
    syncs.submitted[0](None)
    assert reports == [(0, None), (1, broken), (2, None)]


def test_closed_file_is_released_once_its_syncs_are_over(tmp_path: Path) -> None:
    def is_held() -> bool:
        links = Path("/proc/self/fd").iterdir()
        return any(os.path.realpath(link) == str(tmp_path / "f") for link in links)

    syncs = StubbornSyncs()
    file = DirectoryDisk(tmp_path, syncs).open("f", create=True)
    for _ in range(2):
        file.submit_sync(lambda error: None)
    file.close()
    syncs.submitted[1](None)
    assert is_held()
    syncs.submitted[0](None)
    assert not is_held()


@pytest.mark.parametrize("make", [ring, ThreadSyncs])
def test_failed_sync_is_reported(make: Callable[[], Syncs]) -> None:
    """A pipe cannot be synced."""

    async def work() -> None:
        syncs = make()
        reader, writer = os.pipe()
        over: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
        syncs.submit(writer, over.set_result)
        error = await over
        assert error is not None
        assert error.errno == errno.EINVAL
        for fd in (reader, writer):
            os.close(fd)
        syncs.close()

    asyncio.run(work())


def test_long_callback_can_have_syncs_reported_meanwhile(tmp_path: Path) -> None:
    async def work() -> None:
        syncs = ring()
        disk = DirectoryDisk(tmp_path, syncs)
        file = disk.open("f", create=True)
        reports: list[OSError | None] = []
        file.pwrite(0, bytes(1000))
        file.submit_sync(reports.append)

        def is_reported() -> bool:
            syncs.report()
            return bool(reports)

        wait_until_blocking(is_reported, what="the sync is reported without a turn of the loop")
        await asyncio.sleep(0)  # the loop finds nothing more to report
        assert reports == [None]
        disk.close()
        syncs.report()

    asyncio.run(work())


@pytest.mark.parametrize("make", [ring, ThreadSyncs])
def test_syncs_beyond_the_limit_wait_their_turn(make: Callable[[], Syncs], tmp_path: Path) -> None:
    async def work() -> None:
        disk = DirectoryDisk(tmp_path, make())
        file = disk.open("f", create=True)
        assert await synced(file, times=1000) == [None] * 1000
        disk.close()

    asyncio.run(work())


def test_no_write_is_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, pread = os.pwrite, os.pread
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:3], offset))
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, min(size, 4), offset))
    file = DirectoryDisk(tmp_path).open("f", create=True)
    file.pwrite(5, b"0123456789")
    assert file.read(0, 100) == b"\0\0\0\0\0" + b"0123456789"


def test_full_disk_refuses_a_write() -> None:
    disk = SimDisk(Random(1))
    disk.set_capacity(100)
    file = disk.open("f", create=True)
    file.allocate(60)
    file.pwrite(0, bytes(60))
    with pytest.raises(OSError, match="no space") as caught:
        file.pwrite(90, bytes(11))
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="no space"):
        file.allocate(101)
    assert disk.free_bytes() == 40
    disk.remove("f")
    disk.open("g", create=True).pwrite(0, bytes(100))


def test_directory_has_one_owner_at_a_time(tmp_path: Path) -> None:
    program = f"from pathlib import Path; from kvstore.env.disk import lock_dir; lock_dir(Path({str(tmp_path)!r}))"
    lock = lock_dir(tmp_path)
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"{tmp_path} is in use by another process .pid {os.getpid()}"):
            lock_dir(tmp_path)
    refused = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "ConfigError" in refused.stderr
    lock.close()
    lock.close()
    subprocess.run([sys.executable, "-c", program], check=True)
    lock_dir(tmp_path).close()


def test_directory_is_locked_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node starts on a full disk, and waits for free space."""
    (tmp_path / LOCK_NAME).write_text("4711\n")

    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "pwrite", full)
    lock = lock_dir(tmp_path)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"another process \(pid unknown\)"):
        lock_dir(tmp_path)
    lock.close()
    lock_dir(tmp_path).close()
    assert (tmp_path / LOCK_NAME).read_text().split() == [str(os.getpid())]


def test_unlockable_directory_is_not_reported_as_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none_left)
    with pytest.raises(OSError, match=f"cannot be locked: No locks available: '{tmp_path}/LOCK'"):
        lock_dir(tmp_path)


def test_hanging_device_delays_no_other_devices_syncs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hanging = [os.open(tmp_path / str(number), os.O_RDWR | os.O_CREAT) for number in range(2 * ThreadSyncs.THREADS)]
    sound = os.open(tmp_path / "sound", os.O_RDWR | os.O_CREAT)
    goes_on = threading.Event()

    def sync(fd: int) -> None:
        if fd in hanging:
            goes_on.wait(PATIENCE_S)

    monkeypatch.setattr(syncs, "device_of", lambda fd: int(fd in hanging))
    monkeypatch.setattr(os, "fdatasync", sync)

    async def work() -> None:
        threads, done = ThreadSyncs(), []
        over, all_over = asyncio.Event(), asyncio.Event()

        def hung(_: OSError | None) -> None:
            done.append(1)
            if len(done) == len(hanging):
                all_over.set()

        for fd in hanging:
            threads.submit(fd, hung)
        threads.submit(sound, lambda _: over.set())
        try:
            async with asyncio.timeout(PATIENCE_S / 4):
                await over.wait()
            assert not done
        finally:
            goes_on.set()
        await all_over.wait()
        threads.close()

    asyncio.run(work())
    for fd in (*hanging, sound):
        os.close(fd)


@pytest.mark.parametrize("startable", [0, 1])
def test_sync_is_refused_when_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, startable: int
) -> None:
    """As in a container with its maximum number of threads. One thread is enough."""
    start, left = threading.Thread.start, [None] * startable

    def bounded(thread: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(thread)

    async def work() -> None:
        threads, over = ThreadSyncs(), asyncio.Event()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", bounded)
            if not startable:
                with pytest.raises(OSError, match="can't start new thread"):
                    threads.submit(fd, lambda _: over.set())
            else:
                threads.submit(fd, lambda _: None)
        threads.submit(fd, lambda _: over.set())
        async with asyncio.timeout(PATIENCE_S):
            await over.wait()
        threads.close()

    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    asyncio.run(work())
    os.close(fd)


def test_other_directories_are_reached_by_their_own_paths_only(tmp_path: Path) -> None:
    other = tmp_path / "fast"
    disk = DirectoryDisk(tmp_path / "data", others=[other])
    disk.mkdir(f"{other}/j")
    file = disk.open(f"{other}/j/a", create=True)
    file.pwrite(0, b"x")
    file.close()
    assert disk.list(f"{other}/j") == ["a"]
    assert (other / "j" / "a").read_bytes() == b"x"
    assert disk.free_bytes(str(other)) > 0
    for path in (str(tmp_path / "else"), f"{other}x", f"{other}/../data", "/etc"):
        with pytest.raises(ValueError, match="below it"):
            disk.exists(path)
