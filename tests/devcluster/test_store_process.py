"""A server that ends between two checks of its process: stopping or pausing it raises no error."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvstore.devcluster import store_process
from kvstore.devcluster.store_process import StoreProcess
from kvstore.places import is_same_place
from tests.waiting import wait_until_blocking


class _Sleeper(StoreProcess):
    """A process that does nothing and is recognized by its last argument."""

    program = "Sleeper"
    logs = ("sleeper.out",)
    mark = "sleeper"


class _Configured(StoreProcess):
    """A process that is recognized by its configuration, as ZooKeeper is."""

    @property
    def mark(self) -> str:
        return str(self.directory / "zoo.cfg")


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[_Sleeper]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "sleeper"]) as child:
        yield _Sleeper(tmp_path, "127.0.0.1:1", child.pid)
        child.kill()


def test_server_whose_number_cannot_be_written_down_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk each further start would leave one more unrecorded process."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store_process, "replace_file", full)
    command = [sys.executable, "-c", "import time; time.sleep(60)", "sleeper"]
    with pytest.raises(OSError, match="No space left"):
        store_process.launched(_Sleeper, tmp_path, "127.0.0.1:1", command, detached=False, environ={})
    assert store_process.process_with_or_none("sleeper") is None


@pytest.mark.parametrize("done", [StoreProcess.stop, StoreProcess.kill, StoreProcess.pause, StoreProcess.resume])
def test_server_that_ends_just_before_its_signal_is_no_error(
    sleeper: _Sleeper, monkeypatch: pytest.MonkeyPatch, done: object
) -> None:
    real = store_process.os.kill

    def late(pid: int, which: int) -> None:
        monkeypatch.setattr(store_process.os, "kill", real)
        psutil.Process(pid).kill()
        psutil.Process(pid).wait()
        real(pid, which)

    monkeypatch.setattr(store_process.os, "kill", late)
    assert callable(done)
    done(sleeper)
    assert not sleeper.is_running()


def test_server_that_ends_runs_until_its_last_thread_is_gone(tmp_path: Path) -> None:
    """The next steps would find its ports occupied."""
    code = """
import ctypes, platform, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # exit(2): of this thread alone
"""
    ending = _Sleeper(tmp_path, "127.0.0.1:1", subprocess.Popen([sys.executable, "-c", code, "sleeper"]).pid)
    process = psutil.Process(ending.pid)
    wait_until_blocking(lambda: process.status() == psutil.STATUS_ZOMBIE, what="the end of its first thread")
    assert ending.is_running()
    ending.stop()
    assert not ending.is_running()
    assert not psutil.pid_exists(ending.pid)


def test_server_is_known_by_every_path_to_its_directory(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    words = [[str(real / "zoo.cfg"), str(link)], [str(link / "zoo.cfg"), str(real)]]
    for started, asked in words:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", started])
        try:
            process = _Configured(Path(asked), "127.0.0.1:1", child.pid)
            assert process.is_running()
            assert store_process.process_with_or_none(str(Path(asked) / "zoo.cfg")) is not None
        finally:
            child.kill()
            child.wait()
    assert not is_same_place(real / "zoo.cfg", tmp_path / "zoo.cfg")
