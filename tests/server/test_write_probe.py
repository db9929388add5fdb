"""The write probe finds disks that cannot be written to, on file systems that lack some operations."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.env.disk import PROBE_NAMES, DirectoryDisk
from kvstore.server import write_probe
from kvstore.server.write_probe import WriteProbe
from tests.waiting import PATIENCE_S

needs_mount = pytest.mark.skipif(os.geteuid() != 0, reason="a file system is mounted")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system with 8 inodes and megabytes of free space."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m,nr_inodes=8", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount a file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def probe_of(disk: DirectoryDisk) -> WriteProbe:
    return WriteProbe(disk, lambda: asyncio.get_running_loop().time(), asyncio.sleep)


async def anew(probe: WriteProbe) -> str:
    """Check without a recent result."""
    probe._known_at = None
    async with asyncio.timeout(PATIENCE_S):
        return await probe.check()


async def test_probe_of_healthy_disk_finds_and_leaves_nothing(tmp_path: Path) -> None:
    probe = probe_of(DirectoryDisk(tmp_path))
    for name in PROBE_NAMES:
        (tmp_path / name).write_text("left by a crash")
    assert await anew(probe) == ""
    assert (probe.troubles, os.listdir(tmp_path)) == ({}, [])


# docs/protocol.md P41
@needs_mount
async def test_probe_names_missing_inodes(small: Path) -> None:
    probe = probe_of(DirectoryDisk(small))
    assert await anew(probe) == ""
    for number in range(7):  # the root uses the eighth
        (small / f"{number}").touch(exist_ok=False)
    assert await anew(probe) == f"no inodes are free, although bytes are: {small}"
    (small / "0").unlink()
    assert await anew(probe) == ""


# docs/protocol.md P41
@needs_mount
async def test_probe_names_read_only_file_system(small: Path) -> None:
    probe = probe_of(DirectoryDisk(small))
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    assert await anew(probe) == f"the file system is read-only: {small}"


class Failing(DirectoryDisk):
    """A disk with a directory that fails, or does not answer."""

    failing: dict[str, OSError | None]

    def submit_probe(self, path: str, done: Callable[[OSError | None], None]) -> None:
        if path not in self.failing:
            super().submit_probe(path, done)
        elif (error := self.failing[path]) is not None:
            asyncio.get_running_loop().call_soon(done, error)


async def test_probe_ends_in_time_when_disk_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_probe, "PATIENCE_S", 0.05)
    disk = Failing(tmp_path)
    disk.failing = {"": None}
    probe = probe_of(disk)
    assert "has not answered" in await anew(probe)
    disk.failing = {}
    assert "has not answered" in await anew(probe), "the first probe is still under way, and no second one begins"


# docs/protocol.md P41
async def test_node_can_write_with_one_writable_bookie_directory(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    disk = Failing(tmp_path)
    disk.failing = {"a": OSError(errno.EDQUOT, "its disk quota is used up")}
    probe = probe_of(disk)
    probe.bookies = lambda: ["a", "b"]
    assert await anew(probe) == ""
    assert probe.troubles == {"a": "its disk quota is used up"}
    disk.failing["b"] = OSError(errno.EIO, "its disk fails")
    assert await anew(probe) == "the bookie cannot write: its disk quota is used up"


async def test_candidates_share_one_probe(tmp_path: Path) -> None:
    disk = Failing(tmp_path)
    disk.failing = {}
    begun = 0
    submit = disk.submit_probe

    def counted(path: str, done: Callable[[OSError | None], None]) -> None:
        nonlocal begun
        begun += 1
        submit(path, done)

    disk.submit_probe = counted  # type: ignore[method-assign]
    probe = probe_of(disk)
    assert set(await asyncio.gather(*(probe.check() for _ in range(100)))) == {""}
    assert begun == 1


# docs/protocol.md P41
async def test_candidate_probes_itself_if_the_first_one_was_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its replica may leave the server during the probe."""
    monkeypatch.setattr(write_probe, "PATIENCE_S", 0.05)
    disk = Failing(tmp_path)
    disk.failing = {"": None}
    probe = probe_of(disk)
    first, *others = (asyncio.ensure_future(probe.check()) for _ in range(3))
    await asyncio.sleep(0)
    first.cancel()
    for each in others:
        assert "has not answered" in await each


# docs/protocol.md B39
async def test_probe_without_a_thread_fails_and_the_next_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node's other processes may have used up the machine's threads. The node must not end, nor stop probing."""
    probe = probe_of(DirectoryDisk(tmp_path))

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        assert await anew(probe) == "a thread that tests the directory: can't start new thread"
    assert await anew(probe) == ""
