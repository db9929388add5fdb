"""Publishes a replica's progress, and ranks the replica among those that have published."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvstore.env.beat import Beat
from kvstore.errors import MetadataError
from kvstore.partition.election.leader_znode import Claims
from kvstore.partition.election.ranking import Published, rank_of
from kvstore.partition.election.trials import Investigations
from kvstore.partition.state.state import ReplicaState
from kvstore.types import ServerId

log = logging.getLogger(__name__)

PUBLISH_S = 1.0
TAKEN_S = 60.0
"""Seconds between two publications if the only news are applied entries without a sequence, such as rows of a move:
needed by those that wait for a newcomer to catch up (docs/protocol.md H6)."""


class Publishing:
    """Publishes one replica's progress, and ranks the replica."""

    def __init__(
        self,
        beat: Beat,
        claims: Claims,
        state: ReplicaState,
        trials: Investigations,
        server: ServerId,
        nonce: str,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_stopped` returns True if the replica has failed and no longer applies entries."""
        self._is_stopped = is_stopped
        self._beat, self._claims, self._state, self._trials = beat, claims, state, trials
        self._server, self._nonce = server, nonce
        self._last_published: tuple[int, ...] = ()
        """The last publication by `run` without a doubt; empty if anything else was published since."""

    async def run(self) -> None:
        """Publish changes periodically."""
        taken, silent_s = self._taken(), 0.0
        while True:
            state = self._state
            installed = state.installed_bytes if state.position is None else 0
            present = state.seq, state.durable_seq, state.epoch, self._is_stopped(), installed
            silent_s += PUBLISH_S
            is_further = silent_s >= TAKEN_S and self._taken() != taken
            try:
                if present != self._last_published or self._trials.trial.since or is_further:
                    taken, silent_s = self._taken(), 0.0
                    await self._claims.publish(self._progress())
                    self._last_published = () if self._trials.trial.since else present
            except MetadataError as error:
                log.debug("partition=%s not published: %r", self._state.partition, error)
            await self._beat.pause(PUBLISH_S)

    async def rank(self, replicas: tuple[ServerId, ...]) -> int:
        """Publish this replica's progress, and return how many replicas are further. Raises MetadataError."""
        self._last_published = ()
        await self._claims.publish(self._progress(), always=True)
        return rank_of(self._server, await self._claims.published(), replicas)

    def _progress(self) -> Published:
        trial, state = self._trials.trial, self._state
        doubt = (trial.since, *list(state.checks.items())[-1]) if trial.is_barred and state.checks else None
        is_stopped = self._is_stopped()
        return Published(state.seq, state.durable_seq, state.epoch, self._nonce, doubt, is_stopped, self._taken())

    def _taken(self) -> tuple[int, int]:
        position = self._state.position
        return (0, self._state.installed_bytes) if position is None else (position.ledger, position.entry)
