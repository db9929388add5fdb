"""Checks paths of files and folders, refuses URLs, and compares places by where their paths lead.

Everything that is given a path reads and writes it as one of a file system that this machine has mounted. A URL would
become folders of the working directory, `s3:/bucket/x`, and a backup in it would be nowhere.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvstore.errors import ConfigError

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
"""Of one slash: Path has made one of two. One letter is no scheme."""


def fault_of(place: str | Path) -> str:
    """Why it is no path; empty if it is one."""
    match = _URL.match(str(place))
    if match is None:
        return ""
    want = "want a path on a file system that is mounted here, such as /backups or ./backups"
    return f"{want}, got {str(place)!r}: we do not read or write {match[1].lower()}: URLs"


def local_path(place: str | Path) -> Path:
    """Raises ConfigError for a URL."""
    if fault := fault_of(place):
        raise ConfigError(fault)
    return Path(place)


def is_same_place(one: str | Path, other: str | Path) -> bool:
    """Return True if both paths lead to one place: symbolic links give a place several paths."""
    return Path(one).resolve() == Path(other).resolve()


def is_within(place: str | Path, folder: str | Path) -> bool:
    """Return True if the place is the folder or below it, whichever paths lead to both."""
    return Path(place).resolve().is_relative_to(Path(folder).resolve())
