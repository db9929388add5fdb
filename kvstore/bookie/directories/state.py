"""The state of one directory of a bookie, as operators are told it."""

from __future__ import annotations

from typing import NamedTuple


class DirectoryState(NamedTuple):
    """A value."""

    path: str
    failure: str
    """Why it has failed since the start; empty: it has not."""
    free_bytes: int
    """0 if its disk does not say."""
    readonly: bool
    """True if it takes no ordinary adds, because its disk is full but for the reserve."""
    why_readonly: str = ""
    """The reason, with the path; empty if it takes them."""
