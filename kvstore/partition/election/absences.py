"""How long a partition's replicas have been away, kept over leaders: the document at /partitions/<id>/away
(docs/protocol.md, G20)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from kvstore.errors import Corrupted, NodeExists, NoSuchNode, VersionConflict
from kvstore.meta import codec, paths
from kvstore.meta.store import MetadataStore
from kvstore.partition.election.retention import Away, Retention
from kvstore.types import PartitionId, Seq, ServerId

log = logging.getLogger(__name__)

SAVE_S = 60.0
"""What is counted is written when so much has come together; the end of a lead loses less than that."""


@dataclass(frozen=True, slots=True)
class AwayDocument:
    """The replicas that are away: what each had synced, and for how long it has been away."""

    durable: dict[str, int] = field(default_factory=dict)
    away_s: dict[str, float] = field(default_factory=dict)


class Absences:
    """One leader's count; it goes on where the former one's was. Calls raise MetadataError."""

    def __init__(self, store: MetadataStore, partition: PartitionId) -> None:
        self._store = store
        self._path = paths.partition_away(partition)
        self._saved: dict[ServerId, Away] = {}
        self._version = -1
        """Of what is saved; -1: there is nothing."""

    async def load(self) -> Retention:
        """Load the absences that former leaders have seen. One that cannot be read counts as nothing: the log is kept
        for longer."""
        self._saved, self._version = {}, -1
        with suppress(NoSuchNode):
            data, stat = await self._store.get(self._path)
            self._version = stat.version
            try:
                document = codec.decode(AwayDocument, data, what=self._path)
            except Corrupted as error:
                log.warning("how long replicas were away is counted from now on: %s", error)
            else:
                self._saved = {
                    ServerId(server): Away(Seq(document.durable.get(server, 0)), away_s)
                    for server, away_s in document.away_s.items()
                }
        return Retention(self._saved)

    async def save(self, away: Mapping[ServerId, Away]) -> None:
        """Write what has been seen, if it is news: who has come back at once, the others now and then. Raises
        VersionConflict if another leader has written, or it was deleted."""
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
                raise VersionConflict(self._path) from error  # somebody has deleted it
        self._saved = dict(away)

    def _is_news(self, away: Mapping[ServerId, Away]) -> bool:
        if self._saved.keys() - away.keys():
            return True
        counted = (each.away_s - self._saved.get(server, Away(Seq(0), 0.0)).away_s for server, each in away.items())
        return any(seconds >= SAVE_S for seconds in counted)
