"""Makes parts of a running process hang: its event loop alone, or the file system below its data directory."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import wait_until_blocking

SIZE = 2 << 30
"""Size of a file system in bytes, most of which are never written."""
_DETACH, _SEIZE, _INTERRUPT = 17, 0x4206, 0x4207
_WALL = 0x40000000
_EPOLL = ("232 ", "281 ", "22 ")
"""First word of /proc/…/syscall in epoll_wait and epoll_pwait of x86_64, and in epoll_pwait of aarch64."""

_ptrace = ctypes.CDLL(None, use_errno=True).ptrace
_ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_ptrace.restype = ctypes.c_long


def _trace(request: int, pid: int) -> None:
    if _ptrace(request, pid, None, None) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


@contextmanager
def blocked_loop(pid: int) -> Iterator[None]:
    """Stop the main thread of a process, and no other, while it waits for events: it holds no lock of the interpreter
    then. Raises OSError (EPERM) where the kernel does not allow that."""
    stopped = False

    def stop() -> bool:
        nonlocal stopped
        _trace(_SEIZE, pid)
        _trace(_INTERRUPT, pid)
        os.waitpid(pid, _WALL)
        stopped = Path(f"/proc/{pid}/task/{pid}/syscall").read_text(encoding="ascii").startswith(_EPOLL)
        if not stopped:
            _trace(_DETACH, pid)
        return stopped

    wait_until_blocking(stop, what="an event loop that waits")
    try:
        yield
    finally:
        _trace(_DETACH, pid)


def may_freeze() -> bool:
    """Return True if this process may mount and freeze file systems."""
    tools = ("mkfs.ext4", "mount", "umount", "fsfreeze")
    return os.geteuid() == 0 and Path("/dev/loop-control").exists() and all(shutil.which(each) for each in tools)


@contextmanager
def mounted(place: Path, image: Path) -> Iterator[None]:
    """Mount a separate file system at `place`, in the file `image`."""
    place.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(SIZE)
    _run("mkfs.ext4", "-q", "-F", str(image))
    _run("mount", "-o", "loop", str(image), str(place))
    try:
        (place / "lost+found").rmdir()
        yield
    finally:
        _run("umount", "--lazy", str(place))


@contextmanager
def frozen(place: Path) -> Iterator[None]:
    """Make every write into the file system at `place` hang without an error."""
    _run("fsfreeze", "--freeze", str(place))
    try:
        yield
    finally:
        _run("fsfreeze", "--unfreeze", str(place))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
