"""Whether a process lives, by its number."""

from __future__ import annotations

import os
from contextlib import suppress

import psutil


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
