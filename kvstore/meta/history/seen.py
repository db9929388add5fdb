"""The highest version of each node that this process has read or written. Decides only.

Versions of a node only rise while the metadata store keeps its history. A version that is lower than one seen before
comes from a server that lags, or from an older copy of the metadata (docs/protocol.md B29).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from kvstore.meta.store import Stat

PATHS_MAX = 10_000
"""Number of paths that are remembered, which take about 2 MB. The least recently used path is forgotten first."""


class Version(NamedTuple):
    """A version of a node. If a node is deleted and created again, the new node has a later `created`."""

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
        """Remember a version that was read, and return True. If a higher version was seen before, return False and
        remember nothing."""
        found, known = Version(stat.created, stat.version), self.highest(path)
        if known is not None and found < known:
            return False
        self._seen[path] = found
        self._seen.move_to_end(path)
        if len(self._seen) > self._paths_max:
            self._seen.popitem(last=False)
        return True

    def note_written(self, path: str, number: int) -> None:
        """Remember the version that a write of this process gave to a node. The node must have been read before."""
        known = self.highest(path)
        if known is not None and number > known.number:
            self._seen[path] = Version(known.created, number)

    def forget(self) -> None:
        """Forget all versions, because some of them came from an older copy."""
        self._seen.clear()
