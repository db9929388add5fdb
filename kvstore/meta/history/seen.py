"""The highest version of each node that this process has read or written. Decides only.

Versions of a node only rise while the metadata store keeps its history. A lower version than one seen before is either
an answer of a server that lags, or of an older copy of the metadata (docs/protocol.md B29).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from kvstore.meta.store import Stat

PATHS_MAX = 10_000
"""Number of paths that are remembered, some 2 MB. The path that was used least recently is forgotten first."""


class Version(NamedTuple):
    """A version of a node. A node that is deleted and created again has a later `created`."""

    created: int
    number: int


class SeenVersions:
    """The highest version seen of each path."""

    def __init__(self, paths_max: int = PATHS_MAX) -> None:
        self._paths_max = paths_max
        self._seen: OrderedDict[str, Version] = OrderedDict()

    def highest(self, path: str) -> Version | None:
        """Return the highest version seen, or None if the path is not remembered."""
        return self._seen.get(path)

    def note(self, path: str, stat: Stat) -> bool:
        """Remember a version that was read. Return False, and remember nothing, if a higher one was seen before."""
        found, known = Version(stat.created, stat.version), self.highest(path)
        if known is not None and found < known:
            return False
        self._seen[path] = found
        self._seen.move_to_end(path)
        if len(self._seen) > self._paths_max:
            self._seen.popitem(last=False)
        return True

    def note_written(self, path: str, number: int) -> None:
        """Remember a version that a write of this process has made of a node that was read before."""
        known = self.highest(path)
        if known is not None and number > known.number:
            self._seen[path] = Version(known.created, number)

    def forget(self) -> None:
        """Forget everything: some of it is from an older copy, over one connection or several."""
        self._seen.clear()
