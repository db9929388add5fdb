"""A server that ends between two looks at its process: whoever stops or pauses it meets no error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kvstore.devcluster import store_process
from kvstore.devcluster.store_process import StoreProcess


class _Sleeper(StoreProcess):
    """A process that does nothing, known by its last argument."""

    program = "Sleeper"
    mark = "sleeper"


@pytest.fixture
def sleeper(tmp_path: Path) -> _Sleeper:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "sleeper"])
    return _Sleeper(tmp_path, "127.0.0.1:1", child.pid)


@pytest.mark.parametrize("done", [StoreProcess.stop, StoreProcess.kill, StoreProcess.pause, StoreProcess.resume])
def test_a_server_that_ends_just_before_its_signal_is_no_error(
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
