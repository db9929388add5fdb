"""The embedded store under a partition's state: sorted bytes with atomic batches. Two drivers implement it and pass one
conformance suite.

The partition's log is the write-ahead log, so an engine syncs nothing by itself. After a crash an engine contains all
batches up to some point and none after it. That point is at or after the last completed flush.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

BEHIND_S = 0.01
"""Seconds between two checks whether an engine has caught up."""
ROOM_BYTES = 128 << 20
"""Bytes that must be free on the disk. After a flush that found no space, an engine takes no writes until space is free
and it has flushed by itself, which it tries every 5 s. A compaction that finds no space does no harm."""
ROOM_INODES = 64
"""Inodes that must be free, if the file system has a fixed number: each flush and each compaction creates files."""


class EngineBatch(Protocol):
    """Changes that take effect atomically, in the order in which they were added. Can be written once."""

    def put(self, key: bytes, value: bytes) -> None: ...

    def delete(self, key: bytes) -> None:
        """Remove a key. No error if it is absent."""
        ...


class ViewCursor(Protocol):
    """Reads the rows of a range of a view, some at a time."""

    def take(self, rows_max: int, bytes_max: int) -> tuple[list[bytes], list[bytes]]:
        """Return the next keys and values: at most `rows_max`, ending with the row that reaches `bytes_max`. Both lists
        are empty at the end. Raises ViewClosed."""
        ...


class ViewClosed(Exception):
    """The view has been closed."""


class View(Protocol):
    """Ranges of rows as they were when the view was made. A view holds disk space and must be closed. The engine closes
    its views when it is closed or cleared."""

    def cursor(self, begin: bytes, end: bytes) -> ViewCursor:
        """Start at the first row in [begin, end), which must lie within one range of the view. Raises ViewClosed."""
        ...

    def close(self) -> None: ...


class Engine(Protocol):
    """Sorted keys and values, both bytes. Every call may raise OSError when the disk fails. The engine is unusable from
    then on, unless the error is transient (kvstore/os_errors.py)."""

    stopped: OSError | None
    """Why the engine has taken no writes since a write or a flush failed; None if it takes writes. Reads work
    meanwhile."""
    may_resume: bool
    """True if the engine has stopped and a trial has shown that the disk accepts writes again."""

    def get(self, key: bytes) -> bytes | None: ...

    def multi_get(self, keys: list[bytes]) -> list[bytes | None]:
        """Return the values in the order of `keys`."""
        ...

    def batch(self) -> EngineBatch: ...

    def write(self, batch: EngineBatch) -> None:
        """Apply `batch` completely or not at all. Every later call sees it, and a later flush makes it durable. After a
        transient error the engine has stopped: earlier writes stay readable until `resume`."""
        ...

    def is_behind(self) -> bool:
        """Return True if the disk is full or cannot keep up, so that further writes would soon block the event loop or
        fail. Cheap to call."""
        ...

    def iterate(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over the keys and values in [begin, end) as they are now, without later writes. The iterator holds
        disk space until it is dropped, and must be dropped before the engine is cleared. Use a view to keep rows for
        longer."""
        ...

    def iterate_back(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Like `iterate`, from the last key before `end` down to `begin`."""
        ...

    def view(self, ranges: Sequence[tuple[bytes, bytes]]) -> View:
        """Return a view of the rows in ranges [begin, end) as they are now. Takes microseconds, whatever their
        number."""
        ...

    def flush(self, done: Callable[[OSError | None], None]) -> None:
        """Make everything written durable, off the event loop, then call `done` on it. A transient error only costs
        time."""
        ...

    def resume(self) -> None:
        """Take writes again after the engine has stopped. Writes since the last flush may be lost, as after a crash.
        Blocks for some ten milliseconds. Raises OSError; the engine then serves no rows until the next call."""
        ...

    def clear(self) -> None:
        """Remove everything, durably. Blocks for some milliseconds."""
        ...

    def close(self) -> None:
        """Close the engine. Unflushed writes may be lost."""
        ...


async def wait_caught_up(engine: Engine) -> None:
    """Wait until the engine has caught up with its disk. Raises OSError if it has stopped."""
    while engine.is_behind():
        if engine.stopped is not None:
            raise engine.stopped
        await asyncio.sleep(BEHIND_S)


# docs/protocol.md P46
async def wait_resumable(engine: Engine) -> None:
    """Wait until the engine has caught up with its disk or, if it has stopped, may resume."""
    # the engine's threads cannot notify the event loop
    while engine.is_behind() and not engine.may_resume:  # noqa: ASYNC110
        await asyncio.sleep(BEHIND_S)
