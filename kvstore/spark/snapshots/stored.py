"""Opens the files of snapshots safely, because other programs and accounts may have changed them.

Everything that reads a snapshot (verify, restore, list, prune, diff, delta, Spark's tasks) opens its files here and
nowhere else. On a disk, no name below the directory of snapshots may be a symbolic link, and files must be regular. So
a snapshot consists of its own bytes, and no read leaves the directory or blocks on a pipe. Sizes are checked before
bytes are read.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kvstore.errors import Corrupted
from kvstore.os_errors import is_other_kind
from kvstore.spark.snapshots.manifest import DataFile
from kvstore.spark.snapshots.remote import Location, RemotePath

DOCUMENT_BYTES_MAX = 256 << 20
"""Maximum bytes of a manifest, which is enough for some 500,000 files."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A data file of a snapshot with its entry in the manifest. Spark sends it to tasks."""

    path: Location
    file: DataFile

    def open(self) -> BinaryIO:
        """Open the file for reading. Raises Corrupted if the file is missing, has another size than in the manifest,
        or is not a regular file. Raises OSError."""
        try:
            if isinstance(self.path, RemotePath):
                self._check_size(self.path.size())
                return self.path.open()
            found = open_regular(self.path, levels=3)
        except FileNotFoundError:
            raise Corrupted(f"{self.path} is missing; restore the file from a copy") from None
        try:
            self._check_size(os.fstat(found.fileno()).st_size)
        except Corrupted:
            found.close()
            raise
        return found

    def check(self) -> None:
        """Make the checks of `open` without reading the file. Raises Corrupted, OSError."""
        if not isinstance(self.path, RemotePath):
            self.open().close()
            return
        try:
            self._check_size(self.path.size())
        except FileNotFoundError:
            raise Corrupted(f"{self.path} is missing; restore the file from a copy") from None

    def _check_size(self, size: int) -> None:
        if size != self.file.size_bytes:
            raise Corrupted(
                f"{self.path}: expected {self.file.size_bytes} bytes as in the manifest, got {size}; restore the file "
                "from "
                "a copy"
            )


def open_regular(path: Location, *, levels: int) -> BinaryIO:
    """Open a regular file for reading. On a disk, none of the last `levels` names of the path may be a symbolic
    link. Raises Corrupted if one is, or if the file is not regular. Raises OSError."""
    if isinstance(path, RemotePath):
        return path.open()
    handle = os.open(path.parents[levels - 1], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    names = path.parts[-levels:]
    try:
        for number, name in enumerate(names, 1):
            below = os.open(name, _FILE if number == levels else _FOLDER, dir_fd=handle)
            os.close(handle)
            handle = below
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise _irregular(path)
        return os.fdopen(handle, "rb")
    except OSError as error:
        os.close(handle)
        if is_other_kind(error):
            raise _irregular(path) from None
        raise type(error)(error.errno, error.strerror, str(path)) from None
    except Corrupted:
        os.close(handle)
        raise


def read_document(path: Location, *, levels: int) -> bytes:
    """Return the content of a manifest or another document. Raises Corrupted for the same reasons as `open_regular` and
    for a document that is too large; OSError."""
    if isinstance(path, RemotePath):
        size = path.size()
        if size <= DOCUMENT_BYTES_MAX:
            return path.read_bytes()
    else:
        with open_regular(path, levels=levels) as file:
            data = file.read(DOCUMENT_BYTES_MAX + 1)
        if len(data) <= DOCUMENT_BYTES_MAX:
            return data
        size = len(data)
    raise Corrupted(f"{path}: expected at most {DOCUMENT_BYTES_MAX} bytes, got {size} or more")


def _irregular(path: Path) -> Corrupted:
    """Return the error for a file that is not regular, with the part of the path at fault if it is known."""
    for part in (*reversed(path.parents), path):
        with suppress(OSError):
            if stat.S_ISLNK(os.lstat(part).st_mode):
                return Corrupted(
                    f"{path}: expected a regular file, got a symbolic link at {part}; restore the file from a copy"
                )
    return Corrupted(f"{path}: expected a regular file, got another kind of file; restore the file from a copy")
