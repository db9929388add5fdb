"""Keeps the version of a partition's log at the cluster's version. The leader logs a new version before it writes
anything that depends on it (docs/protocol.md V4)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvstore import versions
from kvstore.env import Env
from kvstore.env.events import wait_within
from kvstore.errors import StoreError
from kvstore.partition.leading.leader import Leader
from kvstore.partition.state.move_records import LogVersion
from kvstore.partition.state.state import ReplicaState
from kvstore.types import PartitionId

log = logging.getLogger(__name__)

CHECK_S = 2.0
"""Seconds between two checks whether the cluster's version has risen."""
CHECK_AT_TOP_S = 30.0
"""Seconds between two checks if the log is at the highest version that this build supports: then the version can only
fall behind if the state is replaced by an older one."""


class Versioning:
    """Keeps the version of one replica's log up to date. `leading` returns the replica's leader, or None while the
    replica does not serve."""

    def __init__(
        self,
        env: Env,
        partition: PartitionId,
        state: ReplicaState,
        leading: Callable[[], Leader | None],
        known: versions.Versions,
    ) -> None:
        self._env, self._partition, self._state = env, partition, state
        self._leading, self._versions = leading, known
        self._lead_changed = asyncio.Event()

    def start(self) -> None:
        self._env.nursery.spawn(self._follow(), name=f"{self._partition} log version")

    @property
    def raised(self) -> LogVersion | None:
        """The record that raises the log to the cluster's version, or None if the log is there."""
        wanted = self._versions.cluster
        return LogVersion(wanted, versions.release_for(wanted)) if self._state.log_version < wanted else None

    def wake(self) -> None:
        """Check the version at once, because the cluster's version has risen, or because the leader has changed and
        rows that move to a new log may wait for its version."""
        self._lead_changed.set()

    async def _follow(self) -> None:
        while True:
            check_s = CHECK_S if self._state.log_version < self._versions.can else CHECK_AT_TOP_S
            await wait_within(self._lead_changed, self._env.beat.delay_s(check_s))
            self._lead_changed.clear()
            await self._raise()

    async def _raise(self) -> None:
        leader, record = self._leading(), self.raised
        if leader is None or record is None:
            return
        try:
            await leader.append_record(record)
        except StoreError as error:
            log.info("partition=%s log version stays at %d: %r", self._partition, self._state.log_version, error)
        else:
            log.info("partition=%s log version raised to %d", self._partition, record.version)
