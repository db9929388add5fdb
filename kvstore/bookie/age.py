"""How old a bookie's directories are: a count that rises while something is stored, in each of them and in the metadata
store, which comes last.

The starts alone (kvstore.bookie.identity) say nothing about a copy that was made since the last one, of a file system
or of a whole machine while it ran. Directories whose age is behind the metadata store's are such a copy, and lack what
was stored since.
"""

from __future__ import annotations

import asyncio
import logging

from kvstore.bookie.small_files import read_file
from kvstore.env.ports import Disk, File
from kvstore.os_errors import is_passing

log = logging.getLogger(__name__)

AGE = "AGE"
"""In each directory with a journal."""


def age_in(disk: Disk, directory: str) -> int:
    """0 if none is noted, what is there is no number, or the disk does not give it."""
    path = f"{directory}/{AGE}"
    if not disk.exists(path):
        return 0
    try:
        word = read_file(disk, path).strip()
    except OSError as error:
        if is_passing(error):
            raise
        log.error("%s cannot be read: %s", path, error)
        return 0
    return int(word) if word.isdigit() else 0


async def note_age(disk: Disk, directory: str, age: int) -> None:
    """Return once it is on the disk. In place, so that a full disk takes it too. Raises OSError."""
    path = f"{directory}/{AGE}"
    is_new = not disk.exists(path)
    file = disk.open(path, create=True)
    try:
        file.pwrite(0, b"%20d\n" % age)
        await _synced(file)
    finally:
        file.close()
    if is_new:
        disk.sync_dir(directory)


async def _synced(file: File) -> None:
    done = asyncio.get_running_loop().create_future()

    def told(error: OSError | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    file.submit_sync(told)
    await done
