"""Ties a process to the supervisor that started it: the kernel kills it when the supervisor has ended, however that
ended. Otherwise it would keep its ports and its data directory, and a new supervisor could not start it."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
from collections.abc import Mapping

LINK = "KVSTORE_SUPERVISOR_FD"
"""Environment variable with the descriptor of a process's end of the socket pair that its supervisor made."""
_PR_SET_PDEATHSIG = 1
_CREDENTIALS = struct.Struct("3i")


def end_with_parent(environ: Mapping[str, str]) -> bool:
    """Return True if a supervisor of this package started this process, and end the process with it from now on. Ends
    the process at once if the supervisor has ended already. Raises OSError if the descriptor is none."""
    if LINK not in environ:
        return False
    be_killed_with_parent()
    fd = int(environ[LINK])
    os.set_inheritable(fd, False)
    with socket.socket(fileno=os.dup(fd)) as link:
        supervisor, _, _ = _CREDENTIALS.unpack(
            link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
    if os.getppid() != supervisor:
        os._exit(1)
    return True


def be_killed_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it has ended. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot be ended with its parent")
