"""A real process's end is published when the kernel reports it, and not before."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from kvstore.env.death import watcher
from tests.waiting import wait_until_blocking

SOON_S = 0.5
PATIENCE_S = 60.0

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the kernel has no pidfds")


@contextmanager
def watched(message: str = "it is dead") -> Iterator[tuple[subprocess.Popen[str], int, socket.socket]]:
    """Run a process with a death watch. Yield it, the process id of the watcher, and the socket that receives the
    message."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = "{}:{}".format(*listener.getsockname())
        command = [sys.executable, "-m", "tests.env.death.watched", address, message]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                yield process, int(process.stdout.readline()), listener
            finally:
                process.kill()


def received(listener: socket.socket) -> bytes:
    listener.settimeout(PATIENCE_S)
    connection, _ = listener.accept()
    with connection:
        data = connection.recv(1024)
        connection.sendall(b"+OK\r\n")
    return data


def is_silent(listener: socket.socket) -> bool:
    """Return True if nobody connects for SOON_S."""
    listener.settimeout(SOON_S)
    try:
        listener.accept()
    except TimeoutError:
        return True
    return False


def ignores_signals(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(mask, 16) >> (signal.SIGUSR2 - 1) & 1)


# docs/protocol.md G28
def test_last_message_is_sent_after_kill_and_watcher_ends() -> None:
    with watched() as (process, pid, listener):
        process.kill()
        assert received(listener) == b"it is dead"
        wait_until_blocking(lambda: not psutil.pid_exists(pid), what="end of the watcher")


# docs/protocol.md G28
def test_nothing_is_sent_while_process_is_stopped() -> None:
    with watched() as (process, _, listener):
        process.send_signal(signal.SIGSTOP)
        assert is_silent(listener)
        process.send_signal(signal.SIGCONT)
        assert is_silent(listener)
        process.kill()
        assert received(listener) == b"it is dead"


def test_watcher_survives_the_signals_of_a_stopping_service() -> None:
    with watched() as (process, pid, listener):
        wait_until_blocking(lambda: ignores_signals(pid), what="start of the watcher")
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGABRT, signal.SIGUSR1):
            os.kill(pid, each)
        assert is_silent(listener)
        process.kill()
        assert received(listener) == b"it is dead"


@pytest.mark.parametrize("free", [2, 4, 6, 8])
def test_start_without_free_files_leaks_none(free: int) -> None:
    """Each failed start leaked up to four files of a process that had hardly any left, every ten seconds."""
    command = [sys.executable, "-m", "tests.env.death.exhausted", str(free)]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    assert found == {"before": found["before"], "after": found["before"], "failures": 3}


# docs/protocol.md G28
def test_end_of_input_proves_nothing_and_last_complete_line_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    readable, writable = os.pipe()
    os.write(writable, b'{"message": "00"}\n{"message": "01"}\n{"mess')
    os.close(writable)
    saved = os.dup(0)
    with subprocess.Popen(["sleep", "60"]) as process:
        pidfd = os.pidfd_open(process.pid)
        os.dup2(readable, 0)
        try:
            polled = []
            real = watcher.select.poll

            class Poll:
                """Ends the process once everything was read."""

                def __init__(self) -> None:
                    self._poll = real()
                    self.register, self.unregister = self._poll.register, self._poll.unregister

                def poll(self) -> list[tuple[int, int]]:
                    ready = self._poll.poll(100)
                    polled.append(ready)
                    if not ready:
                        process.kill()
                    return ready

            monkeypatch.setattr(watcher.select, "poll", Poll)
            assert watcher.last_words(pidfd) == {"message": "01"}
            assert [] in polled, "the process lived on after the end of input"
        finally:
            process.kill()
            os.dup2(saved, 0)
            for each in (saved, readable, pidfd):
                os.close(each)
