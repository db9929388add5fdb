"""The file names and the reading of the index directory: a checkpoint for each full segment, and one list of the
existing segments.

Only the newest checkpoint has a list beside it; an older list is removed when a newer one is synced. If each checkpoint
had one, their total size would grow with the square of the disk (docs/protocol.md, B22).
"""

from __future__ import annotations

import logging

from kvstore.bookie.index.checkpoint import (
    HEADER_SIZE,
    Checkpoint,
    decode_checkpoint,
    decode_complete,
    decode_list,
    table_span,
)
from kvstore.bookie.small_files import read_file
from kvstore.env.ports import Disk
from kvstore.os_errors import is_passing

log = logging.getLogger(__name__)

INDEX, LIST, ASIDE = ".index", ".files", ".new"
"""Suffixes of a checkpoint, of a list, and of either while it is being written."""


def checkpoint_path(directory: str, file: int) -> str:
    return f"{directory}/{file:08d}{INDEX}"


def list_path(directory: str, file: int) -> str:
    return f"{directory}/{file:08d}{LIST}"


def indexed(disk: Disk, directory: str, suffix: str = INDEX) -> list[int]:
    """Return the segments with a file that has a checkpoint's name, or a list's."""
    stems = [name.removesuffix(suffix) for name in disk.list(directory) if name.endswith(suffix)]
    return sorted(int(stem) for stem in stems if stem.isdigit())


def read_checkpoint(disk: Disk, directory: str, file: int) -> Checkpoint | None:
    """Return a segment's checkpoint if it exists and is intact, with the segments that existed if there is a list too.
    A checkpoint of the current format is returned without its entries, which are not verified. A file that the disk
    cannot read counts as missing: it is rebuilt from the segment.

    Raises a ValueError that names the file for a format that this version does not know.
    """
    path = checkpoint_path(directory, file)
    try:
        checkpoint = _checkpoint(disk, path)
        if checkpoint is not None and not checkpoint.files:
            path = list_path(directory, file)
            checkpoint.files = decode_list(_read(disk, path), checkpoint.file) or []
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return checkpoint


def _checkpoint(disk: Disk, path: str) -> Checkpoint | None:
    if not disk.exists(path):
        return None
    try:
        file = disk.open(path)
    except OSError as error:
        _log_unreadable(path, error)
        return None
    try:
        head, size = file.read(0, HEADER_SIZE), file.size()
        span = table_span(head)
        if span is None:
            return decode_complete(file.read(0, size))
        return decode_checkpoint(head, file.read(*span)) if sum(span) == size else None
    except OSError as error:
        _log_unreadable(path, error)
        return None
    finally:
        file.close()


# docs/protocol.md B31
def _log_unreadable(path: str, error: OSError) -> None:
    """Log a bad sector, which does not prevent a start. Raises a temporary error, because the file is intact then."""
    if is_passing(error):
        raise error
    log.error("index file cannot be read, rebuilding it from the segment path=%s error=%s", path, error)


def _read(disk: Disk, path: str) -> bytes:
    if not disk.exists(path):
        return b""
    try:
        return read_file(disk, path)
    except OSError as error:
        _log_unreadable(path, error)
        return b""


def remove_checkpoint(disk: Disk, directory: str, file: int) -> None:
    """Remove the checkpoint of a segment that is gone. Raises OSError."""
    for path in (checkpoint_path(directory, file), list_path(directory, file)):
        for each in (path, path + ASIDE):
            if disk.exists(each):
                disk.remove(each)


def remove_unfinished(disk: Disk, directory: str) -> None:
    """Remove files that a crash left half written. Raises OSError."""
    for name in disk.list(directory):
        if name.endswith((INDEX + ASIDE, LIST + ASIDE)):
            disk.remove(f"{directory}/{name}")
