"""Processes of a local cluster: whether one lives, by its number, and which files its arguments name."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil

from kvstore.places import is_same_place


def is_alive(pid: int) -> bool:
    """Tell whether there is such a process. Not one that has ended and that nobody has asked about yet."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # if it is a child that has ended
    try:
        return has_threads(psutil.Process(pid))
    except psutil.Error:
        return False


def has_threads(process: psutil.Process) -> bool:
    """Tell whether some thread is left. A killed process is there, ports, locks and all, until its last one is gone;
    only then is it a mere zombie. Raises psutil.Error."""
    return process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1


def place_of(process: psutil.Process, word: str) -> Path:
    """Return the path that an argument of the process names: a relative one begins at its working directory. Raises
    psutil.Error."""
    return Path(word) if word.startswith("/") else Path(process.cwd()) / word


def names_place(process: psutil.Process, word: str, place: str) -> bool:
    """Return True if an argument of the process names this place, by any path that leads there. Raises psutil.Error."""
    return word == place or is_same_place(place_of(process, word), place)
