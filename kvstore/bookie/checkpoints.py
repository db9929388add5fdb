"""The index directory: a checkpoint for each full segment, and, once, a list of the segments that there are.

The list stands beside the newest checkpoint only; an older one goes when a newer one is synced. Were each checkpoint to
have one, all together would grow with the square of the disk (docs/protocol.md, B22).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from kvstore.bookie.checkpoint import Checkpoint, decode_checkpoint, decode_list, encode_checkpoint, encode_list
from kvstore.env.ports import Disk

log = logging.getLogger(__name__)

INDEX, LIST = ".index", ".files"


def checkpoint_path(directory: str, file: int) -> str:
    return f"{directory}/{file:08d}{INDEX}"


def list_path(directory: str, file: int) -> str:
    return f"{directory}/{file:08d}{LIST}"


def indexed(disk: Disk, directory: str, suffix: str = INDEX) -> list[int]:
    """The segments with a file of a checkpoint's name, or of a list's."""
    stems = [name.removesuffix(suffix) for name in disk.list(directory) if name.endswith(suffix)]
    return sorted(int(stem) for stem in stems if stem.isdigit())


def read_checkpoint(disk: Disk, directory: str, file: int) -> Checkpoint | None:
    """A segment's checkpoint, if it is there and whole; with the segments that there were, if a list is there too.
    Raises ValueError that names the file for a format that this build does not know, OSError."""
    path = checkpoint_path(directory, file)
    try:
        checkpoint = decode_checkpoint(_read(disk, path))
        if checkpoint is not None and not checkpoint.files:
            path = list_path(directory, file)
            checkpoint.files = decode_list(_read(disk, path), checkpoint.file) or []
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return checkpoint


def _read(disk: Disk, path: str) -> bytes:
    if not disk.exists(path):
        return b""
    file = disk.open(path)
    try:
        return file.read(0, file.size())
    finally:
        file.close()


def write_checkpoint(disk: Disk, directory: str, checkpoint: Checkpoint) -> None:
    """Write a full segment's checkpoint, if the disk takes it. Without it, or with a bad one, a start reads the segment
    itself."""
    listed = list_path(directory, checkpoint.file)

    def on_list_synced() -> None:
        for older in indexed(disk, directory, LIST):
            if older < checkpoint.file:
                disk.remove(list_path(directory, older))

    try:
        _write(disk, directory, checkpoint_path(directory, checkpoint.file), encode_checkpoint(checkpoint))
        _write(disk, directory, listed, encode_list(checkpoint.file, checkpoint.files), on_list_synced)
    except OSError as error:
        log.warning("segment=%d no checkpoint, the next start will read it whole: %s", checkpoint.file, error)


def _write(disk: Disk, directory: str, path: str, data: bytes, done: Callable[[], None] = lambda: None) -> None:
    file = disk.open(path, create=True)

    def on_synced(error: OSError | None) -> None:
        file.close()
        if error is None:
            with suppress(OSError):
                disk.sync_dir(directory)
                done()

    try:
        file.pwrite(0, data)
        file.truncate(len(data))
        file.submit_sync(on_synced)
    except OSError:
        file.close()
        raise


def remove_checkpoint(disk: Disk, directory: str, file: int) -> None:
    """The segment is gone. Raises OSError."""
    for path in (checkpoint_path(directory, file), list_path(directory, file)):
        if disk.exists(path):
            disk.remove(path)
