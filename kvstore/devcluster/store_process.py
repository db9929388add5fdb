"""A server of the metadata store as a process: alive, ready, stopped, killed, paused. Real processes, real time,
blocking."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil

from kvstore.devcluster.processes import arguments_of, is_alive, spawn
from kvstore.devcluster.record import replace_file
from kvstore.errors import Unavailable
from kvstore.places import is_same_place

START_TIMEOUT_S = 60.0
"""Maximum seconds for a process of a local cluster to serve."""
STOP_TIMEOUT_S = 15.0
POLL_S = 0.02


class StoreProcess:
    """One running server, started by this process or found by its directory."""

    program = ""
    """The program's name for people; in lower case the name of its files."""
    logs: tuple[str, ...] = ()
    """The files of its log and output; the last one is that of its output."""
    log_mode = "wb"

    def __init__(self, directory: Path, address: str, pid: int) -> None:
        self.directory, self.address, self.pid = directory, address, pid

    def is_running(self) -> bool:
        """Return True if the process lives and is this directory's server, because pids are reused."""
        return is_alive(self.pid) and self._is_this_server()

    def _is_this_server(self) -> bool:
        try:
            return _names(arguments_of(psutil.Process(self.pid)), self.mark)
        except psutil.ZombieProcess:
            return True  # it is ending: its arguments are gone, but a thread still holds its ports
        except psutil.Error:
            return False

    @property
    def mark(self) -> str:
        """The argument that identifies its process."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Return True if the server serves clients."""
        raise NotImplementedError

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the server serves. Raises Unavailable, with its last output, if it ends or takes longer than
        `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while not self.is_ready():
            if not is_alive(self.pid):
                raise Unavailable(
                    f"{self.program} at {self.address} ended while starting; its last output:\n{self._last_output()}"
                )
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"{self.program} at {self.address} does not serve after {timeout_s} s; see {self.directory}"
                )
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Stop the server gracefully, or by force after STOP_TIMEOUT_S. Its data stay."""
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while self.is_running() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self.kill()

    def kill(self) -> None:
        """Kill the server at once, as a crash would."""
        while self.is_running():
            self._signal(signal.SIGKILL)
            time.sleep(POLL_S)
        pid_file(self.directory, self.program).unlink(missing_ok=True)

    def pause(self) -> None:
        """Suspend the process, and return once it is suspended. Its connections stay open and silent."""
        self._signal(signal.SIGSTOP)
        with suppress(psutil.NoSuchProcess):  # it has ended since
            while self.is_running() and psutil.Process(self.pid).status() != psutil.STATUS_STOPPED:
                time.sleep(POLL_S)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, which: signal.Signals) -> None:
        if self.is_running():
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, which)

    def _last_output(self) -> str:
        """Return the ends of its log and of its output, without stack traces."""
        texts = [path.read_text(errors="replace") for name in self.logs if (path := self.directory / name).exists()]
        return "\n".join(
            line for text in texts for line in [it for it in text.splitlines() if not it.startswith("\t")][-6:]
        )


Server = TypeVar("Server", bound=StoreProcess)


def pid_file(directory: Path, program: str) -> Path:
    """Return the file that records the pid and address of a directory's server."""
    return directory / f"{program.lower()}.pid"


def launched(
    kind: type[Server],
    directory: Path,
    address: str,
    command: Sequence[str],
    *,
    detached: bool,
    environ: Mapping[str, str],
) -> Server:
    """Start a server, and record its pid and address in its directory. If they cannot be recorded, for example on a
    full disk, kill the server, because each further start would leave another unknown one."""
    output = directory / kind.logs[-1]
    pid = spawn(command, output, kind.log_mode, directory=directory, detached=detached, environ=environ)
    process = kind(directory, address, pid)
    try:
        replace_file(pid_file(directory, kind.program), f"{process.pid} {address}\n")
    except BaseException:
        process.kill()
        raise
    return process


def ready_or_killed(processes: list[Server]) -> list[Server]:
    """Return the processes once all of them serve. If one does not, kill all. Raises Unavailable."""
    try:
        for process in processes:
            process.wait_ready()
    except BaseException:
        for process in processes:
            process.kill()
        raise
    return processes


def process_with_or_none(*words: str) -> tuple[int, list[str]] | None:
    """Return pid and arguments of the process that has all these words among its arguments: for a server that its
    directory's file does not record."""
    for process in psutil.process_iter(["cmdline"]):
        arguments = process.info["cmdline"] or []
        if all(_names(arguments, word) for word in words):
            return int(process.pid), arguments
    return None


def _names(arguments: Sequence[str], word: str) -> bool:
    if word in arguments:
        return True
    return word.startswith("/") and any(each.startswith("/") and is_same_place(each, word) for each in arguments)


def recorded_or_none(directory: Path, program: str) -> tuple[int, str] | None:
    """Return pid and address of the server that was last started in the directory."""
    try:
        pid, address = pid_file(directory, program).read_text().split()
        return int(pid), address
    except (FileNotFoundError, ValueError):
        return None


def found_or_none(
    kind: type[Server], directory: Path, unrecorded_or_none: Callable[[Path], tuple[int, str] | None]
) -> Server | None:
    """Return the server that runs in `directory`, even if another process started it. `unrecorded_or_none` finds a
    server by pid and address if the directory's file does not record it or records an earlier one."""
    directory = directory.resolve()
    for find in (partial(recorded_or_none, program=kind.program), unrecorded_or_none):
        if (found := find(directory)) is not None:
            pid, address = found
            process = kind(directory, address, pid)
            if process.is_running():
                return process
    return None
