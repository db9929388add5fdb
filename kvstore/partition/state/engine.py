"""The embedded store under a partition's state: sorted bytes with atomic batches. Two drivers, one conformance suite.

The partition's log is the write-ahead log, so an engine syncs nothing by itself. What survives a crash is all batches
up to some point and none after it: at the latest those before the last completed flush, possibly more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

BEHIND_S = 0.01
"""Between two looks whether an engine has caught up."""
ROOM_BYTES = 128 << 20
"""What must be free on the disk: after a flush that found no room an engine takes no write until, with room again, it
has flushed by itself, which it tries every 5 s. A compaction that finds none costs nothing."""
ROOM_INODES = 64
"""What must be free of a file system's inodes, if their number is fixed: each flush and each compaction makes files."""


class Batch(Protocol):
    """Changes that take effect together, in the order in which they were added. Written once."""

    def put(self, key: bytes, value: bytes) -> None: ...

    def delete(self, key: bytes) -> None:
        """Remove a key; no error if it is absent."""
        ...


class Cursor(Protocol):
    """Rows in a range of a view, taken bit by bit."""

    def take(self, rows_max: int, bytes_max: int) -> tuple[list[bytes], list[bytes]]:
        """The next keys and values, at most so many; they end with the first that reaches `bytes_max`. Both empty: the
        end. Raises ViewClosed."""
        ...


class ViewClosed(Exception):
    """The view has been closed."""


class View(Protocol):
    """Ranges of rows as they were when the view was made. It holds space, and must be closed; the engine closes it when
    it is closed or cleared itself."""

    def cursor(self, begin: bytes, end: bytes) -> Cursor:
        """From the first row in [begin, end), which is part of one range of the view. Raises ViewClosed."""
        ...

    def close(self) -> None: ...


class Engine(Protocol):
    """Keys and values are bytes, in the order of the keys' bytes. Every call may raise OSError when the disk
    fails: the engine is of no use from then on, unless the error passes (kvstore/os_errors.py)."""

    stopped: OSError | None
    """Why it takes no writes, since a write or a flush failed; None if it takes them. It gives all rows meanwhile."""
    may_resume: bool
    """True if the engine has stopped, and a trial has shown that the disk takes writes again."""

    def get(self, key: bytes) -> bytes | None: ...

    def multi_get(self, keys: list[bytes]) -> list[bytes | None]:
        """The values in the order of `keys`."""
        ...

    def batch(self) -> Batch: ...

    def write(self, batch: Batch) -> None:
        """Apply `batch`, all of it or nothing. It is seen by every later call, and durable with a later flush. After an
        error that passes the engine has stopped: what was written stays readable, until `resume`."""
        ...

    def is_behind(self) -> bool:
        """Whether the disk cannot keep up, or is full: to go on writing would soon block the event loop, or fail. Cheap
        to ask."""
        ...

    def iterate(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values in [begin, end), as they are now: writes made while the iterator is used do not show.
        It holds space until it is dropped, and must be before the engine is cleared; what is kept for longer is a
        view."""
        ...

    def iterate_back(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The same from the last key before `end` down to `begin`."""
        ...

    def view(self, ranges: Sequence[tuple[bytes, bytes]]) -> View:
        """Rows in ranges [begin, end) as they are now. Takes microseconds, however many they are."""
        ...

    def flush(self, done: Callable[[OSError | None], None]) -> None:
        """Make all that is written durable, off the event loop; then call `done` on it. An error that passes costs only
        time."""
        ...

    def resume(self) -> None:
        """Take writes again after the engine has stopped. What was written since the last flush may be gone, as after a
        crash. Blocks for some ten milliseconds. Raises OSError; then the engine gives no rows until the next call."""
        ...

    def clear(self) -> None:
        """Remove everything, durably. Blocks for some milliseconds."""
        ...

    def close(self) -> None:
        """Use it no more. What was not flushed may be lost."""
        ...


async def wait_caught_up(engine: Engine) -> None:
    """Wait until the engine has caught up with its disk. Raises OSError if it has stopped."""
    while engine.is_behind():
        if engine.stopped is not None:
            raise engine.stopped
        await asyncio.sleep(BEHIND_S)


# docs/protocol.md P46
async def wait_resumable(engine: Engine) -> None:
    """Wait until the engine has caught up with its disk, or may resume if it has stopped."""
    while engine.is_behind() and not engine.may_resume:  # noqa: ASYNC110  # its threads have nobody to tell
        await asyncio.sleep(BEHIND_S)
