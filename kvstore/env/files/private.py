"""Files and folders that only their owner can use, and the only check of files that hold a secret. Blocking.

Each process of kvstore runs with PRIVATE_UMASK (`kvstore/__main__.py`), so that libraries that create files by
themselves, for example RocksDB, create them for the owner alone. Processes that kvstore starts get the same umask.
"""

from __future__ import annotations

import os
import stat
import tempfile
from errno import EPERM
from pathlib import Path
from typing import BinaryIO

PRIVATE_UMASK = 0o077
FILE_MODE, FOLDER_MODE = 0o600, 0o700
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_OF_ROOT = _OTHERS & ~stat.S_IRGRP


def open_private(path: Path) -> BinaryIO:
    """Open a file that holds a secret. Raises OSError; PermissionError if other accounts can use the file."""
    file = path.open("rb")
    try:
        _check(path, os.fstat(file.fileno()))
    except OSError:
        file.close()
        raise
    return file


def check_private(path: Path) -> None:
    """Check a secret that a library opens by its name. Raises OSError as `open_private` does."""
    _check(path, path.stat())


def read_private(path: Path) -> bytes:
    """Return the content of a file that holds a secret. Raises OSError as `open_private` does."""
    with open_private(path) as file:
        return file.read()


def write_private(path: Path, data: bytes) -> None:
    """Replace a file with one of mode 0600, as a whole and synced. Raises OSError."""
    draft = draft_of(path, data)
    try:
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


def draft_of(path: Path, data: bytes) -> str:
    """Write a synced file of mode 0600 beside `path`, and return its name. Raises OSError: then no file is left."""
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # of mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        os.unlink(draft)
        raise
    return draft


def private_opener(path: str, flags: int) -> int:
    """Create files of mode 0600: the `opener` of `open()`."""
    return os.open(path, flags | os.O_CLOEXEC, FILE_MODE)


def private_folder(path: Path) -> None:
    """Make a folder of mode 0700 if it is absent. Close an existing one to other accounts if this account owns it; a
    folder of another owner, or one that everybody may write to (sticky), stays as it is. Raises OSError."""
    path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid == os.geteuid() and found.st_mode & _OTHERS and not found.st_mode & stat.S_ISVTX:
        path.chmod(FOLDER_MODE)


def _check(path: Path, found: os.stat_result) -> None:
    """A secret that root owns may be readable by its group, because Kubernetes shows secrets to pods that way."""
    is_roots = found.st_uid == 0 and os.geteuid() != 0
    forbidden = _OTHERS_OF_ROOT if is_roots else _OTHERS
    if stat.S_ISREG(found.st_mode) and found.st_mode & forbidden:
        raise PermissionError(
            EPERM,
            f"other accounts can use this secret: expected mode 0600, got {stat.S_IMODE(found.st_mode):04o}; run "
            f"chmod 600 {path}",
            str(path),
        )
