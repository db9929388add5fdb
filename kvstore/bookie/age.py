"""The age of a bookie's directories: a counter that rises while the bookie stores entries. Each directory has it, and
the metadata store, which is updated last.

The start counter alone (kvstore.bookie.identity) does not reveal a copy that was made after the last start, for example
of a file system or of a running machine. Directories whose age is below the age in the metadata store are such a copy,
and lack what was stored after it was made.
"""

from __future__ import annotations

import asyncio
import logging

from kvstore.bookie.small_files import read_file
from kvstore.env.ports import Disk, File
from kvstore.os_errors import is_passing

log = logging.getLogger(__name__)

AGE = "AGE"
"""File name of the age, in each directory with a journal."""
_BYTES = 21
"""Length of the recorded age. A file that was damaged may be longer, and the age is written in place."""


def age_in(disk: Disk, directory: str) -> int:
    """Return the age recorded in a directory. Returns 0 if no age is recorded, or if it is not a number or cannot be
    read."""
    path = f"{directory}/{AGE}"
    if not disk.exists(path):
        return 0
    try:
        word = read_file(disk, path)[:_BYTES].strip()
    except OSError as error:
        if is_passing(error):
            raise
        log.error("file cannot be read path=%s error=%s", path, error)
        return 0
    return int(word) if word.isdigit() else 0


async def note_age(disk: Disk, directory: str, age: int) -> None:
    """Write the age in place, so that this works on a full disk. Returns once the age is on disk. Raises OSError."""
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

    def written(error: OSError | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    file.submit_sync(written)
    await done
