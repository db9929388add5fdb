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
    fails: the engine is of no use from then on."""

    def get(self, key: bytes) -> bytes | None: ...

    def multi_get(self, keys: list[bytes]) -> list[bytes | None]:
        """The values in the order of `keys`."""
        ...

    def batch(self) -> Batch: ...

    def write(self, batch: Batch) -> None:
        """Apply `batch`, all of it or nothing. It is seen by every later call, and durable with a later flush. An
        OSError with ENOSPC passes: what was written stays readable, and once there is room the engine takes more."""
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
        """Make all that is written durable, off the event loop; then call `done` on it. An OSError with ENOSPC costs
        only time: nothing was tried."""
        ...

    def clear(self) -> None:
        """Remove everything, durably. Blocks for some milliseconds."""
        ...

    def close(self) -> None:
        """Use it no more. What was not flushed may be lost."""
        ...


async def wait_caught_up(engine: Engine) -> None:
    """Wait until the engine has caught up with its disk."""
    while engine.is_behind():  # noqa: ASYNC110  # its threads have nobody to tell
        await asyncio.sleep(BEHIND_S)
