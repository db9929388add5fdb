"""The positions that replicas had published when a process started: the floor of the process's stale reads
(docs/protocol.md, P27)."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress

from kvstore.errors import StoreError
from kvstore.meta import paths
from kvstore.partition.election.ranking import Published
from kvstore.types import PartitionId, ServerId

LAG_S = 1.0
"""Maximum delay in seconds after which a process sees a change in the metadata store."""
_REPLICA = re.compile(re.escape(paths.PARTITIONS) + r"/([^/]+)/replicas/([^/]+)")
Change = tuple[float, ServerId, int | None]


class Starts:
    """Observes every write to the metadata store's tree (as an observer of MemoryTree) and remembers the published
    positions."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._changes: dict[PartitionId, list[Change]] = {}

    def __call__(self, path: str, old: bytes | None, new: bytes | None) -> None:
        match = _REPLICA.fullmatch(path)
        if match is None:
            return
        seq: int | None = None
        if new is not None:
            with suppress(StoreError):
                seq = Published.decode(new).seq
        self._changes.setdefault(PartitionId(match.group(1)), []).append((self._now(), ServerId(match.group(2)), seq))

    def floor(self, server: ServerId, partition: PartitionId, started_at: float) -> int:
        """Return the lowest floor that the replica on `server` may have computed. The replica read the positions of
        the other replicas at some unknown moment after `started_at`."""
        published: dict[ServerId, int] = {}
        floor: int | None = None
        for at, other, seq in self._changes.get(partition, []):
            if other == server:
                continue
            if floor is None and at >= started_at - LAG_S:
                floor = max(published.values(), default=0)
            if seq is None:
                published.pop(other, None)
            else:
                published[other] = seq
            if floor is not None:
                floor = min(floor, max(published.values(), default=0))
        return max(published.values(), default=0) if floor is None else floor
