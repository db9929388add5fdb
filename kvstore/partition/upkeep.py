"""What a replica does on the side: sync its state to disk now and then; as leader trim the log behind all replicas, and
hand the lead back to the one that the ring prefers, so that leaders stay spread over the servers."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from kvstore.env import Env
from kvstore.errors import MetadataError, StoreError
from kvstore.partition.claim import Claims
from kvstore.partition.config import PartitionConfig
from kvstore.partition.replica import Replica
from kvstore.partition.retention import Retention
from kvstore.partition.state import State
from kvstore.types import PartitionId, ServerId
from kvstore.wal.ports import LeaderLog

log = logging.getLogger(__name__)

LEAD_BACK_S = 3.0
"""How long the preferred replica must have been up and close behind before it gets the lead. Doubles with each time, so
that one which cannot keep it does not get it again and again."""
LEAD_BACK_MAX_S = 600.0
CLOSE_BEHIND = 10_000
"""Mutations: applied in well under a second."""
COPIES_MIN = 2
"""Synced states that must hold what is trimmed from the log, on distinct nodes."""


class Upkeep:
    """Three loops of one replica; they end with the nursery."""

    def __init__(
        self,
        env: Env,
        config: PartitionConfig,
        partition: PartitionId,
        replica: Replica,
        claims: Claims,
        replicas: Callable[[], tuple[ServerId, ...]],
    ) -> None:
        self.flushes = 0
        self.trimmed = 0
        self.yielded = 0
        self._env, self._config, self._partition = env, config, partition
        self._replica, self._claims, self._replicas = replica, claims, replicas

    def start(self) -> None:
        self._env.nursery.spawn(self._flush_now_and_then(), name=f"{self._partition} flush")
        self._env.nursery.spawn(self._trim_now_and_then(), name=f"{self._partition} trim")
        self._env.nursery.spawn(self._lead_back_now_and_then(), name=f"{self._partition} lead back")

    async def _flush_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(self._config.flush_s)
            if self._replica.state.durable_seq < self._replica.state.seq:
                await flush(self._replica.state)
                self.flushes += 1

    async def _trim_now_and_then(self) -> None:
        leading: LeaderLog | None = None
        retention = Retention(self._env.clock.now())
        while True:
            await asyncio.sleep(self._config.trim_s)
            mine = self._replica.leading_log
            if mine is not leading:
                leading, retention = mine, Retention(self._env.clock.now())
            if leading is not None:
                await self._trim(leading, retention)

    async def _lead_back_now_and_then(self) -> None:
        patience_s, since = LEAD_BACK_S, math.inf
        while True:
            await asyncio.sleep(LEAD_BACK_S / 3)
            now = self._env.clock.now()
            if not await self._prefers_another():
                since = math.inf
            elif since == math.inf:
                since = now
            elif now - since >= patience_s:
                patience_s, since = min(patience_s * 2, LEAD_BACK_MAX_S), math.inf
                await self._yield_lead()

    async def _prefers_another(self) -> bool:
        """Whether this replica leads though the ring prefers another one, which is up and close behind."""
        replicas = self._replicas()
        if self._replica.leading_log is None or not replicas or replicas[0] == self._replica.server:
            return False
        try:
            preferred = (await self._claims.published()).get(replicas[0])
        except MetadataError:
            return False
        return preferred is not None and preferred.seq + CLOSE_BEHIND >= self._replica.state.seq

    async def _yield_lead(self) -> None:
        log.info("partition=%s hands the lead back to %s", self._partition, self._replicas()[0])
        try:
            await self._replica.yield_lead()
            self.yielded += 1
        except StoreError as error:
            log.info("partition=%s lead not handed back: %r", self._partition, error)

    async def _trim(self, leading: LeaderLog, retention: Retention) -> None:
        now = self._env.clock.now()
        replicas = self._replicas()
        try:
            published = await self._claims.published()
            retention.observe({server: said.durable_seq for server, said in published.items()}, now)
            floor = retention.floor(replicas, min(COPIES_MIN, len(replicas)), now)
            if floor and self._replica.leading_log is leading:
                self.trimmed += await leading.trim(floor, self._config.retention_ms)
        except StoreError as error:
            log.info("partition=%s log not trimmed: %r", self._partition, error)


async def flush(state: State) -> None:
    """Sync the state to disk, off the event loop. Raises OSError if the engine could not."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def flushed(error: OSError | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    state.submit_flush(flushed)
    await done
