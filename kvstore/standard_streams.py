"""Opens the standard streams of a command and makes them able to print any text."""

from __future__ import annotations

import codecs
import os
import sys
from contextlib import suppress

ESCAPES = "kvstore.escapes"
"""Name of the error handler for characters that a stream's encoding lacks."""


def prepare_standard_streams() -> None:
    """Open every closed standard descriptor on /dev/null, and make the output streams print any text.

    Otherwise the next file or socket would get the number 0, 1 or 2: gRPC aborts when it closes such a socket, and a
    message would be written into a node's lock file. A character that the terminal's encoding lacks is printed as
    \\uNNNN, which JSON reads as the character. Call this before anything else is opened.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is this one, because the lower ones are open.
            os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
    codecs.register_error(ESCAPES, _escape)
    for stream in (sys.stdout, sys.stderr):
        # A stream of a test has no encoding to change, and a stream with a replaced descriptor may not seek.
        with suppress(AttributeError, OSError):
            stream.reconfigure(errors=ESCAPES)  # type: ignore[union-attr]


def _escape(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2)), error.end
