"""Tracks for how long a partition's replicas have been away, across leaders, in the document at /partitions/<id>/away
(docs/protocol.md, G20)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from kvstore.errors import Corrupted, NodeExists, NoSuchNode, VersionConflict
from kvstore.meta import codec, paths
from kvstore.meta.store import MetadataStore
from kvstore.partition.election.retention import Away, LogRetention
from kvstore.types import PartitionId, Seq, ServerId

log = logging.getLogger(__name__)

SAVE_S = 60.0
"""Seconds of newly counted absence after which the count is written. The end of a leadership loses less than that."""


@dataclass(frozen=True, slots=True)
class AwayDocument:
    """The replicas that are away: the last sequence that each had synced, and for how many seconds it has been away."""

    durable: dict[str, int] = field(default_factory=dict)
    away_s: dict[str, float] = field(default_factory=dict)


class ReplicaAbsences:
    """One leader's record of absences, which continues the former leader's record. All methods raise MetadataError."""

    def __init__(self, store: MetadataStore, partition: PartitionId) -> None:
        self._store = store
        self._path = paths.partition_away(partition)
        self._saved: dict[ServerId, Away] = {}
        self._version = -1
        """Version of the saved document; -1 if there is none."""

    async def load(self) -> LogRetention:
        """Load the absences that former leaders have recorded. An unreadable document counts as empty, which keeps the
        log for longer."""
        self._saved, self._version = {}, -1
        with suppress(NoSuchNode):
            data, stat = await self._store.get(self._path)
            self._version = stat.version
            try:
                document = codec.decode(AwayDocument, data, what=self._path)
            except Corrupted as error:
                log.warning("cannot read absences of replicas, counting from zero: %s", error)
            else:
                self._saved = {
                    ServerId(server): Away(Seq(document.durable.get(server, 0)), away_s)
                    for server, away_s in document.away_s.items()
                }
        return LogRetention(self._saved)

    async def save(self, away: Mapping[ServerId, Away]) -> None:
        """Write the absences if a replica has returned, or if SAVE_S seconds of absence have been added. Raises
        VersionConflict if another leader has written the document or it was deleted."""
        if not self._is_news(away):
            return
        document = AwayDocument(
            {server: each.durable_seq for server, each in sorted(away.items())},
            {server: each.away_s for server, each in sorted(away.items())},
        )
        data = codec.encode(document)
        if self._version < 0:
            try:
                await self._store.create(self._path, data)
            except NodeExists as error:
                raise VersionConflict(self._path) from error
            self._version = 0
        else:
            try:
                self._version = await self._store.set(self._path, data, self._version)
            except NoSuchNode as error:
                raise VersionConflict(self._path) from error  # another process has deleted it
        self._saved = dict(away)

    def _is_news(self, away: Mapping[ServerId, Away]) -> bool:
        if self._saved.keys() - away.keys():
            return True
        counted = (each.away_s - self._saved.get(server, Away(Seq(0), 0.0)).away_s for server, each in away.items())
        return any(seconds >= SAVE_S for seconds in counted)
