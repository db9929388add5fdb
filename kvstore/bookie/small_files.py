"""Reads and replaces small files in a bookie's directories, each as a whole."""

from __future__ import annotations

from kvstore.env.ports import Disk
from kvstore.os_errors import SyncFailed

_ASIDE = ".new"


def contents(disk: Disk, directory: str) -> set[str]:
    """Return the names of the files in a directory. Files of the file system's root, and files that a crash left half
    written, are left out."""
    return {name for name in disk.list(directory) if name != "lost+found" and not name.endswith(_ASIDE)}


def read_file(disk: Disk, path: str) -> bytes:
    """Return the content of a small file. Raises OSError."""
    file = disk.open(path)
    try:
        return file.read(0, file.size())
    finally:
        file.close()


def replace_file(disk: Disk, path: str, data: bytes) -> None:
    """Replace a small file atomically: after a crash, either the former file or the new one exists. Raises OSError. If
    the sync of the new file fails, the error keeps its errno, because nothing depends on the new file yet and the
    caller may retry."""
    directory, _, name = path.rpartition("/")
    aside = f"{directory}/{name}{_ASIDE}"
    file = disk.open(aside, create=True)
    try:
        file.truncate(0)
        file.pwrite(0, data)
        file.sync()
    except SyncFailed as error:
        raise OSError(*error.args) from error
    finally:
        file.close()  # a node that waits for free space retries repeatedly
    disk.rename(aside, path)
    disk.sync_dir(directory)
