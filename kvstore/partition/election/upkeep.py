"""Background work of a replica. Every replica syncs its state to disk. The leader also trims the log up to what all
replicas have synced. It hands the lead back to the replica that the ring prefers, so that leaders stay spread over the
servers, or to any other replica while its own disk is full."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable
from random import Random

from kvstore.env import Env
from kvstore.errors import MetadataError, StoreError, Unavailable, VersionConflict
from kvstore.os_errors import is_passing
from kvstore.partition.config import PartitionConfig
from kvstore.partition.election.absences import ReplicaAbsences
from kvstore.partition.election.handover import HandoverTurns, PreferredStability
from kvstore.partition.election.leader_znode import Claims
from kvstore.partition.election.ranking import Published
from kvstore.partition.election.replica import Replica
from kvstore.partition.election.retention import LogRetention
from kvstore.partition.state.state import ReplicaState
from kvstore.ranges import PERIOD_MIN_S
from kvstore.types import PartitionId, Seq, ServerId
from kvstore.wal.leading.leader_log import LeaderLog

log = logging.getLogger(__name__)

CHECK_S = 1.0
"""Seconds between two checks whether this replica is the preferred leader."""
IDLE_S = 10.0
"""Seconds between two checks of a replica that does not lead. It is notified of role changes; the check is a safety
net."""
BEHIND_CHECKS = 3
"""Number of consecutive checks at which a leader's engine takes no writes before it hands over."""
CHECKS_SKIPPED_MAX = 5
"""Maximum number of consecutive checks of replicas and ledgers that are skipped while nothing is written. A replica
that goes away meanwhile counts as away from the next check on."""
CHECKS_MISSED_MAX = 2
"""A leader counts at most this many check intervals of absence at once, because it has not observed more."""
COPIES_MIN = 2
"""Synced states, on distinct nodes, that must contain what is trimmed from the log."""


class ReplicaUpkeep:
    """The four background loops of one replica. They end with the nursery."""

    def __init__(
        self,
        env: Env,
        config: PartitionConfig,
        partition: PartitionId,
        server: ServerId,
        replica: Replica,
        claims: Claims,
        replicas: Callable[[], tuple[ServerId, ...]],
        turns: HandoverTurns,
        absences: ReplicaAbsences,
    ) -> None:
        self.flushes = 0
        self.trimmed = 0
        self.yielded = 0
        self._env, self._config, self._partition = env, config, partition
        self._replica, self._claims, self._replicas, self._turns = replica, claims, replicas, turns
        self._absences = absences
        self._retention: LogRetention | None = None
        """The retention of the current leadership; None before its first check."""
        self._checked_at = 0.0
        self._settled_at: Seq | None = None
        """The sequence up to which all replicas, none of them away, had synced the log at the last check, if there was
        nothing to trim then."""
        # Replicas that were started at the same time would otherwise write and compact files at the same moment, which
        # would leave no quorum with idle disks.
        self._spread = Random(f"{partition} at {server}")

    def start(self) -> None:
        """Start the background loops."""
        self._env.nursery.spawn(self._flush_periodically(), name=f"{self._partition} flush")
        self._env.nursery.spawn(self._trim_periodically(), name=f"{self._partition} trim")
        self._env.nursery.spawn(self._hand_lead_back(), name=f"{self._partition} lead back")
        self._env.nursery.spawn(self._hand_over_when_stuck(), name=f"{self._partition} disk")

    async def _flush_periodically(self) -> None:
        while True:
            await asyncio.sleep(self._config.flush_s * (0.5 + self._spread.random()))
            if self._replica.state.durable_seq < self._replica.state.seq:
                await flush(self._replica.state)
                self.flushes += 1

    async def _trim_periodically(self) -> None:
        leading: LeaderLog | None = None
        skipped = 0
        while True:
            await self._env.beat.pause(self._config.trim_s)
            mine = self._replica.leading_log
            if mine is not leading:
                leading, self._retention, self._settled_at = mine, None, None
            if leading is None:
                continue
            if self._settled_at == self._replica.state.seq and skipped < CHECKS_SKIPPED_MAX:
                skipped, self._checked_at = skipped + 1, self._now()
                continue
            skipped = 0
            await self._trim(leading)

    async def _hand_lead_back(self) -> None:
        """While this replica leads, hand over to the preferred replica if that is another one."""
        stability = PreferredStability(self._config.lead_back_s)
        spread = zlib.crc32(self._partition.encode()) / (1 << 32)
        check_s = max(PERIOD_MIN_S, min(CHECK_S, self._config.lead_back_s / 3))
        while True:
            if self._replica.leading_log is None:
                stability.reset()
                await self._replica.role_change(IDLE_S)
                continue
            await self._env.beat.pause(check_s)
            preferred = self._preferred_other()
            if preferred is None:
                stability.reset()
            elif stability.is_due(
                await self._published_by(preferred), self._replica.state.seq, self._now(), spread=spread
            ):
                await self._hand_over(preferred, stability)

    async def _hand_over_when_stuck(self) -> None:
        checks = 0
        while True:
            if self._replica.leading_log is None:
                checks = 0
                await self._replica.role_change(IDLE_S)
                continue
            await self._env.beat.pause(CHECK_S)
            is_stuck = self._replica.leading_log is not None and self._replica.state.engine.is_behind()
            checks = checks + 1 if is_stuck else 0
            if checks >= BEHIND_CHECKS:
                why = self._replica.state.engine.stopped or "its disk is full, or too slow"
                log.warning("partition=%s this server should not lead, handing over: %s", self._partition, why)
                await self._replica.hand_over_to_any()
                leader = self._replica.leader
                if leader is not None and self._replica.state.engine.may_resume:  # which only followers do (P46)
                    leader.lose(Unavailable(f"partition {self._partition}: {why}"))
                checks = 0

    def _preferred_other(self) -> ServerId | None:
        """Return the replica that should lead, if this one leads and should not."""
        replicas = self._replicas()
        leads_instead = self._replica.leading_log is not None and replicas and replicas[0] != self._replica.server
        return replicas[0] if leads_instead else None

    async def _published_by(self, server: ServerId) -> Published | None:
        try:
            return await self._claims.published_by(server)
        except MetadataError:
            return None

    async def _hand_over(self, preferred: ServerId, stability: PreferredStability) -> None:
        if not self._turns.take(self._now()):
            return
        leading = self._replica.leading_log
        log.info("partition=%s handing the lead back to %s", self._partition, preferred)
        try:
            await self._replica.hand_over(preferred, stability.nonce, is_planned=True)
            self.yielded += 1
        except StoreError as error:
            log.info("partition=%s lead not handed back: %r", self._partition, error)
        stability.tried(self._now(), released=self._replica.leading_log is not leading)

    def _now(self) -> float:
        return self._env.clock.now()

    async def _trim(self, leading: LeaderLog) -> None:
        replicas = self._replicas()
        try:
            seq, self._settled_at = self._replica.state.seq, None
            retention = await self._note_absences(replicas)
            floor = retention.floor(replicas, min(COPIES_MIN, len(replicas)))
            trimmed = 0
            if floor and self._replica.leading_log is leading:
                trimmed = await leading.trim(floor, self._config.retention_ms)
                self.trimmed += trimmed
            if not trimmed and not retention.away and floor >= seq:
                self._settled_at = seq
        except StoreError as error:
            log.info("partition=%s log not trimmed: %r", self._partition, error)

    async def _note_absences(self, replicas: tuple[ServerId, ...]) -> LogRetention:
        """Note which replicas are away, and for how long this leader and former leaders have seen them away
        (docs/protocol.md, G20)."""
        published = await self._claims.published()
        now = self._now()
        if self._retention is None:
            self._retention, self._checked_at = await self._absences.load(), now
        # A process that was paused, or could not check, has not seen that a replica was away all the time.
        elapsed_s = min(now - self._checked_at, CHECKS_MISSED_MAX * self._config.trim_s)
        self._checked_at = now
        durable = {server: replica.durable_seq for server, replica in published.items() if not replica.is_stopped}
        stopped = {server: replica.durable_seq for server, replica in published.items() if replica.is_stopped}
        self._retention.note(replicas, durable, elapsed_s, stopped)
        try:
            await self._absences.save(self._retention.away)
        except VersionConflict:
            self._retention = await self._absences.load()  # another leader's count is the valid one
            self._retention.note(replicas, durable, 0.0, stopped)
        return self._retention


async def flush(state: ReplicaState) -> None:
    """Sync the state to disk without blocking the event loop. After a transient error the state is not synced, which is
    safe because the log still contains all of it. Raises OSError if the engine failed."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def flushed(error: OSError | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        elif is_passing(error):
            log.warning("partition=%s state not synced: %s", state.partition, error)
            done.set_result(None)
        else:
            done.set_exception(error)

    state.submit_flush(flushed)
    await done
