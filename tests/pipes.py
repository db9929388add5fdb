"""A pipe that nobody reads, for the standard error of a process under test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def full_pipe() -> Iterator[int]:
    """Yield the writing end of a pipe that accepts no further byte, and blocks."""
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        for size in (1 << 16, 1):  # whole pages first, then what is left of the last one
            with suppress(BlockingIOError):
                while True:
                    os.write(writer, b"x" * size)
        os.set_blocking(writer, True)
        yield writer
    finally:
        os.close(reader)
        os.close(writer)
