"""The processes of a local cluster: starts them, and checks if one lives and which files its arguments name."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from kvstore.env.files.private import PRIVATE_UMASK, private_opener
from kvstore.places import is_same_place
from kvstore.rpc.login import without_login

LOADING_S = 5.0
"""Maximum seconds to wait for the arguments of a process that is loading its program."""
POLL_S = 0.02


def is_alive(pid: int) -> bool:
    """Return True if the process exists and has not ended; a zombie has ended."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # if it is a child that has ended
    try:
        return has_threads(psutil.Process(pid))
    except psutil.Error:
        return False


def has_threads(process: psutil.Process) -> bool:
    """Return True if a thread is left. A killed process keeps its ports and locks until its last thread has ended; only
    then it is a mere zombie. Raises psutil.Error."""
    return process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1


def arguments_of(process: psutil.Process, wait_s: float = LOADING_S) -> list[str]:
    """Return the arguments of the process. It has none while its program is loaded, which a full machine may interrupt,
    so they are awaited for up to `wait_s` seconds. Raises psutil.Error."""
    until = time.monotonic() + wait_s
    while not (arguments := process.cmdline()) and time.monotonic() < until:
        time.sleep(POLL_S)
    return arguments


def place_of(process: psutil.Process, word: str) -> Path:
    """Return the path that an argument of the process names. A relative path starts at its working directory. Raises
    psutil.Error."""
    return Path(word) if word.startswith("/") else Path(process.cwd()) / word


def names_place(process: psutil.Process, word: str, place: str) -> bool:
    """Return True if an argument of the process names this place, by any path to it. Raises psutil.Error."""
    return word == place or is_same_place(place_of(process, word), place)


def spawn(
    command: Sequence[str],
    output: Path,
    mode: str = "ab",
    *,
    directory: Path | None = None,
    detached: bool = True,
    environ: Mapping[str, str] = os.environ,
) -> int:
    """Start a process, and return its pid. Its output goes to a private file, opened with this mode. It gets no login
    from the environment. A `detached` process survives signals to this process's group."""
    with open(output, mode, opener=private_opener) as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            cwd=directory,
            start_new_session=detached,
            umask=PRIVATE_UMASK,
            env=without_login(environ),
        )
    process.returncode = 0  # its pid is watched instead; silences subprocess's warning
    return process.pid
