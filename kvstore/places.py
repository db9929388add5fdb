"""Checks paths, rejects URLs and compares paths by where they lead.

Every path names a file system that this machine has mounted. A URL would become folders of the working directory, such
as `s3:/bucket/x`, and a backup there would be lost.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvstore.errors import ConfigError

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
"""Matches one slash, because Path has already merged two. A single letter is not a scheme."""


def fault_of(place: str | Path) -> str:
    """Return why this is not a path; empty if it is one."""
    if "\0" in str(place):
        return f"expected a path, got {str(place)!r}"
    match = _URL.match(str(place))
    if match is None:
        return ""
    want = "expected a path on a file system that is mounted here, such as /backups or ./backups"
    return f"{want}, got {str(place)!r}; kvstore does not read or write {match[1].lower()}: URLs"


def local_path(place: str | Path) -> Path:
    """Return the path. Raises ConfigError for a URL."""
    if fault := fault_of(place):
        raise ConfigError(fault)
    return Path(place)


def is_same_place(one: str | Path, other: str | Path) -> bool:
    """Return True if both paths lead to the same place. Symbolic links can give a place several paths."""
    return Path(one).resolve() == Path(other).resolve()


def is_within(place: str | Path, folder: str | Path) -> bool:
    """Return True if the place is the folder or below it, after symbolic links are resolved."""
    return Path(place).resolve().is_relative_to(Path(folder).resolve())
