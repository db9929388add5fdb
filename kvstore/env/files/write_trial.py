"""Tries whether a directory takes files, by making one. Permissions say nothing of a file system that has gone
read-only, a full disk, a quota, or a disk that fails; root has every permission.

The trial takes each step that a node takes: create, write, sync, rename, sync the directory, delete. It leaves nothing
behind. What a crash leaves has a name that no directory of a node counts: it begins with a dot and ends with `.new`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import EACCES, EDQUOT, ENOSPC, ENOTDIR, EPERM, EROFS, errorcode
from pathlib import Path

from kvstore.os_errors import is_no_room

PREFIX, SUFFIX = ".kvstore-trial-", ".new"
_TEXT = b"kvstore tries whether this directory can be written\n"
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
        return is_no_room(OSError(self.errno, self.reason))

    def __str__(self) -> str:
        name = errorcode.get(self.errno, str(self.errno))
        advice = _ADVICE.get(self.errno, "the disk may be failing: check it")
        return f"{self.place}: expected to {self.step}, got {name} ({self.reason}); {advice}"


class _StepFailed(Exception):
    """A step of the trial raised OSError."""

    def __init__(self, step: str, error: OSError) -> None:
        super().__init__(step)
        self.step, self.error = step, error


def write_fault(place: Path) -> WriteFault | None:
    """Return why no files can be made in a directory, or None if they can. A directory that does not exist is tried by
    making one in the nearest directory above. Costs two syncs."""
    there = place.absolute()
    try:
        with _step("look at the directory"):
            there = nearest(place)
            if not there.is_dir():
                raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR))
        if there == place.absolute():
            _try_file(there)
        else:
            _try_directory(there)
    except _StepFailed as failed:
        number = failed.error.errno or 0
        where = failed.error.filename if failed.step == "look at the directory" else None
        return WriteFault(str(where or there), failed.step, number, failed.error.strerror or str(failed.error))
    return None


def nearest(place: Path) -> Path:
    """Return the place itself, or the nearest one above it that exists. Raises OSError if it cannot be looked at, as on
    a disk that has failed."""
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
    name = f"{PREFIX}{secrets.token_hex(8)}"
    first, second = there / f"{name}-1{SUFFIX}", there / f"{name}-2{SUFFIX}"
    try:
        with _step("create a file"):
            fd = os.open(first, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with _step("write to a file"):
                os.write(fd, _TEXT)
            with _step("sync a file"):
                os.fsync(fd)
        finally:
            os.close(fd)
        with _step("rename a file"):
            first.rename(second)
        with _step("sync the directory"):
            _sync(there)
        with _step("delete a file"):
            second.unlink()
    except _StepFailed:
        for each in (first, second):
            with suppress(OSError):
                each.unlink()
        raise


def _sync(directory: Path) -> None:
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
        raise _StepFailed(what, error) from error
