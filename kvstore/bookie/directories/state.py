"""The state of one directory of a bookie, as operators see it."""

from __future__ import annotations

from typing import NamedTuple


class DirectoryState(NamedTuple):
    """The state of one directory."""

    path: str
    failure: str
    """Why the directory has failed since the start; empty if it has not."""
    free_bytes: int
    """Free bytes; 0 if the disk fails."""
    readonly: bool
    """True if ordinary adds are refused, because only the reserve of the disk is left."""
    why_readonly: str = ""
    """Why ordinary adds are refused, with the path; empty if they are accepted."""
