"""What a replica does on the side: sync its state to disk now and then, and as leader trim the log behind all
replicas."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvstore.env import Env
from kvstore.errors import StoreError
from kvstore.partition.claim import Claims
from kvstore.partition.config import PartitionConfig
from kvstore.partition.replica import Replica
from kvstore.partition.retention import Retention
from kvstore.partition.state import State
from kvstore.types import PartitionId, ServerId
from kvstore.wal.ports import LeaderLog

log = logging.getLogger(__name__)

COPIES_MIN = 2
"""Synced states that must hold what is trimmed from the log, on distinct nodes."""


class Upkeep:
    """Two loops of one replica; both end with the nursery."""

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
        self._env, self._config, self._partition = env, config, partition
        self._replica, self._claims, self._replicas = replica, claims, replicas

    def start(self) -> None:
        self._env.nursery.spawn(self._flush_now_and_then(), name=f"{self._partition} flush")
        self._env.nursery.spawn(self._trim_now_and_then(), name=f"{self._partition} trim")

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
