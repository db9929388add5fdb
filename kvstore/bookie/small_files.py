"""Small files in a bookie's directories, which are read and replaced as a whole."""

from __future__ import annotations

from kvstore.env.ports import Disk
from kvstore.os_errors import SyncFailed

_ASIDE = ".new"


def contents(disk: Disk, directory: str) -> set[str]:
    """List the files that count: not the root of a file system's own, nor what a crash left half written."""
    return {name for name in disk.list(directory) if name != "lost+found" and not name.endswith(_ASIDE)}


def read_file(disk: Disk, path: str) -> bytes:
    """A small file as a whole. Raises OSError."""
    file = disk.open(path)
    try:
        return file.read(0, file.size())
    finally:
        file.close()


def replace_file(disk: Disk, path: str, data: bytes) -> None:
    """Replace a small file as a whole: after a crash there is the former one or this one. Raises OSError. A failed sync
    of the new file keeps the meaning of its errno, because nothing depends on the new file yet, and the next attempt
    writes it again."""
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
        file.close()  # a node that waits for room tries again and again
    disk.rename(aside, path)
    disk.sync_dir(directory)
