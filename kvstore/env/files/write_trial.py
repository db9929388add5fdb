"""Tests whether files can be created in a directory, by creating one. Free bytes and permissions do not show a quota, a
limit on file sizes, a file system that has become read-only, or a failing disk; and root has every permission.

The trial takes each step that a node takes: create, write, sync, rename, sync the directory, delete. It leaves nothing
behind. A trial that a crash ends leaves its file. Commands give it a name that no directory of a node counts: it begins
with a dot and ends with `.new`. A node uses the same two names for each trial of a directory, so that the next trial
removes the file.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import EACCES, EDQUOT, ENOSPC, ENOTDIR, EPERM, EROFS, errorcode
from pathlib import Path

from kvstore.os_errors import is_no_space

PREFIX, SUFFIX = ".kvstore-trial-", ".new"
WRITTEN_BYTES = 512
"""Bytes of a trial's file that are written. The rest is only allocated."""
_ADVICE = {
    EROFS: "the file system is read-only: check the disk, then mount it writable",
    ENOSPC: "the disk is full: free space and inodes",
    EDQUOT: "the quota is used up: raise it, or free space and inodes",
    EACCES: "give the directory to the user that writes there",
    EPERM: "give the directory to the user that writes there",
    ENOTDIR: "name a directory",
}


@dataclass(frozen=True, slots=True)
class WriteFault:
    """The step of a trial that failed, and why."""

    place: str
    step: str
    errno: int
    reason: str

    @property
    def is_full(self) -> bool:
        """True if only space, inodes or a quota is missing."""
        return is_no_space(OSError(self.errno, self.reason))

    def __str__(self) -> str:
        name = errorcode.get(self.errno, str(self.errno))
        advice = _ADVICE.get(self.errno, "the disk may be failing: check it")
        return f"{self.place}: expected to {self.step}, got {name} ({self.reason}); {advice}"


class TrialFailed(OSError):
    """A step of a trial raised OSError."""

    def __init__(self, step: str, error: OSError) -> None:
        super().__init__(error.errno, error.strerror or str(error), error.filename)
        self.step = step


def try_file(directory: str, names: tuple[str, str], size: int = WRITTEN_BYTES) -> None:
    """Create a file of `size` bytes in a directory with the first name, sync it, rename it to the second name, and
    delete it. Blocks, and costs two syncs. Raises TrialFailed. No other file may have one of the names, and no other
    trial may use them at the same time."""
    first, second = (f"{directory}/{name}" for name in names)
    with _step("delete a file"):
        for each in (first, second):
            if os.path.lexists(each):
                os.unlink(each)  # only a new file shows that an inode is free
    try:
        with _step("create a file"):
            fd = os.open(first, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with _step("write to a file"):
                if size > WRITTEN_BYTES:
                    os.posix_fallocate(fd, 0, size)
                os.write(fd, bytes(min(size, WRITTEN_BYTES)))
            with _step("sync a file"):
                os.fsync(fd)
        finally:
            os.close(fd)
        with _step("rename a file"):
            os.rename(first, second)
        with _step("sync the directory"):
            _sync(directory)
        with _step("delete a file"):
            os.unlink(second)
    except TrialFailed:
        for each in (first, second):
            with suppress(OSError):
                os.unlink(each)
        raise


def write_fault(place: Path) -> WriteFault | None:
    """Return the reason why no files can be created in a directory, or None if they can. If the directory does not
    exist, the trial creates one in the nearest existing parent. Costs two syncs."""
    there = place.absolute()
    try:
        with _step("read the directory"):
            there = nearest(place)
            if not there.is_dir():
                raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR))
        if there == place.absolute():
            _try_file(there)
        else:
            _try_directory(there)
    except TrialFailed as failed:
        where = failed.filename if failed.step == "read the directory" else None
        return WriteFault(str(where or there), failed.step, failed.errno or 0, failed.strerror or str(failed))
    return None


def nearest(place: Path) -> Path:
    """Return the place itself, or its nearest existing parent. Raises OSError if it cannot be examined, for example on
    a failed disk."""
    place = place.absolute()
    for each in (place, *place.parents):
        try:
            each.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        return each
    return place


def _try_directory(there: Path) -> None:
    made = there / f"{PREFIX}{secrets.token_hex(8)}{SUFFIX}"
    with _step("make a directory"):
        made.mkdir()
    try:
        _try_file(made)
    finally:
        with _step("delete a directory"):
            made.rmdir()


def _try_file(there: Path) -> None:
    """Try with unique names, because a node may try the same directory now."""
    name = f"{PREFIX}{secrets.token_hex(8)}"
    try_file(str(there), (f"{name}-1{SUFFIX}", f"{name}-2{SUFFIX}"))


def _sync(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _step(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TrialFailed(what, error) from error
