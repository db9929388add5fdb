"""The interface of the embedded store that holds a partition's state: sorted keys and values in bytes, with atomic
batches. Two drivers implement it, and both pass one conformance suite.

The partition's log is the write-ahead log, so an engine never syncs on its own. After a crash, an engine contains all
batches up to some point and none after it. That point is at or after the last completed flush.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

BEHIND_S = 0.01
"""Seconds between two checks whether an engine has caught up."""
RESERVE_BYTES = 128 << 20
"""Bytes that must be free on the disk. After a flush that found no space, an engine takes no writes until space is free
and it has flushed by itself, which it tries every 5 s. A compaction that finds no space does no harm."""
RESERVE_INODES = 64
"""Inodes that must be free, if the file system has a fixed number: each flush and each compaction creates files."""


class EngineBatch(Protocol):
    """Changes that are applied atomically, in the order in which they were added. A batch can be written only once."""

    def put(self, key: bytes, value: bytes) -> None: ...

    def delete(self, key: bytes) -> None:
        """Remove a key. Does nothing if the key is absent."""
        ...


class ViewCursor(Protocol):
    """Reads the rows of a view's range in order, in portions."""

    def take(self, rows_max: int, bytes_max: int) -> tuple[list[bytes], list[bytes]]:
        """Return the next keys and their values. The portion ends after `rows_max` rows, or after the row with which it
        reaches `bytes_max` bytes. At the end of the range, both lists are empty. Raises ViewClosed."""
        ...


class ViewClosed(Exception):
    """The view has been closed."""


class View(Protocol):
    """Ranges of rows as they were when the view was created. A view holds disk space until it is closed. The engine
    closes its views when the engine is closed or cleared."""

    def cursor(self, begin: bytes, end: bytes) -> ViewCursor:
        """Return a cursor at the first row in [begin, end), which must lie within one range of the view. Raises
        ViewClosed."""
        ...

    def close(self) -> None: ...


class Engine(Protocol):
    """A store of sorted keys and values, both bytes. Every method may raise OSError if the disk fails. After such an
    error the engine is unusable, unless the error is transient (kvstore/os_errors.py)."""

    stopped: OSError | None
    """The error because of which the engine accepts no more writes; None while it accepts writes. Reads keep
    working."""
    may_resume: bool
    """True if the engine has stopped and a test has shown that the disk accepts writes again."""

    def get(self, key: bytes) -> bytes | None: ...

    def multi_get(self, keys: list[bytes]) -> list[bytes | None]:
        """Return the values of the keys, in order; None for an absent key."""
        ...

    def batch(self) -> EngineBatch: ...

    def write(self, batch: EngineBatch) -> None:
        """Apply the batch completely or not at all. Every later call sees the changes, and the next flush makes them
        durable. After a transient error the engine has stopped, and earlier writes stay readable until `resume`."""
        ...

    def is_behind(self) -> bool:
        """Return True if the disk is full or cannot keep up, so that further writes would soon block the event loop or
        fail. Cheap to call."""
        ...

    def iterate(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over the keys and values in [begin, end) as they are now; later writes are not included. The iterator
        holds disk space until it is dropped, and must be dropped before the engine is cleared. To keep rows for longer,
        use a view."""
        ...

    def iterate_back(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Like `iterate`, but in descending order, from the last key before `end` down to `begin`."""
        ...

    def view(self, ranges: Sequence[tuple[bytes, bytes]]) -> View:
        """Return a view of the rows in the ranges [begin, end) as they are now. Takes microseconds, regardless of the
        number of rows."""
        ...

    def flush(self, done: Callable[[OSError | None], None]) -> None:
        """Make all written batches durable without blocking the event loop, then call `done` on the event loop with the
        error, or None. A transient error loses nothing and only costs time."""
        ...

    def resume(self) -> None:
        """Accept writes again after the engine has stopped. Writes since the last flush may be lost, as after a crash.
        Blocks for about ten milliseconds. Raises OSError if the engine cannot be reopened; it then serves no rows until
        `resume` succeeds."""
        ...

    def clear(self) -> None:
        """Remove all rows, durably. Blocks for some milliseconds."""
        ...

    def close(self) -> None:
        """Close the engine. Writes that were not flushed may be lost."""
        ...


async def wait_caught_up(engine: Engine) -> None:
    """Wait until the engine has caught up with its disk. Raises OSError if it has stopped."""
    while engine.is_behind():
        if engine.stopped is not None:
            raise engine.stopped
        await asyncio.sleep(BEHIND_S)


# docs/protocol.md P46
async def wait_resumable(engine: Engine) -> None:
    """Wait until the engine has caught up with its disk. If the engine has stopped, wait until it may resume."""
    # the engine's threads cannot notify the event loop
    while engine.is_behind() and not engine.may_resume:  # noqa: ASYNC110
        await asyncio.sleep(BEHIND_S)
