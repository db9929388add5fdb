"""Runs a replica's tail while it follows the log, and bars the replica from leading if it cannot apply what it
reads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvstore.env import Env, Task
from kvstore.env.events import end_task
from kvstore.errors import Corrupted, StoreError, WrittenByNewer
from kvstore.partition.election import role_events
from kvstore.partition.election.role_machine import ReplicaRole, RoleMachine
from kvstore.partition.election.tail import Tail
from kvstore.partition.election.trials import Investigations
from kvstore.types import ServerId

log = logging.getLogger(__name__)

CHECK_S = 10.0
"""Seconds between two checks for a leader by a replica that has failed, in addition to those after reported
changes."""


class LogFollower:
    """Follows the log for one replica. The role machine says whether the replica may lead. `feed` notifies the role
    machine; `role_change(timeout_s)` returns when the role or the leader has changed."""

    def __init__(
        self,
        env: Env,
        tail: Tail,
        machine: RoleMachine,
        trials: Investigations,
        *,
        feed: Callable[[role_events.Event], None],
        role_change: Callable[[float], Awaitable[None]],
        server: ServerId,
        name: str,
    ) -> None:
        self.failure: StoreError | None = None
        """The error because of which the replica no longer applies entries; None while it is healthy."""
        self._env, self._tail, self._machine, self._trials, self._name = env, tail, machine, trials, name
        self._feed, self._role_change, self._server = feed, role_change, server
        self._task: Task | None = None
        self._should_be_barred = False
        trials.on_barred = self.bar_soon

    @property
    def is_running(self) -> bool:
        return self._task is not None

    def has_failed(self) -> bool:
        """Return True if the replica has stopped applying entries for good."""
        return self.failure is not None

    def start(self) -> None:
        """Start to follow the log, unless the replica has failed or stopped."""
        if self._task is None and self.failure is None and self._machine.role is not ReplicaRole.STOPPED:
            self._task = self._env.nursery.spawn(self._run(), name=f"{self._name} tail")

    async def stop(self) -> None:
        """Stop following the log, because the replica is about to lead."""
        task, self._task = self._task, None
        if task is not None:
            await end_task(task)

    async def _run(self) -> None:
        try:
            await self._tail.run()
        except StoreError as error:
            self.failure = error
            log.error("partition=%s this replica stops applying the log: %r", self._name, error)
            self._feed(role_events.Barred(True))
            if isinstance(error, Corrupted) and not isinstance(error, WrittenByNewer):
                while self._machine.leader in (None, self._server):
                    await self._role_change(CHECK_S)
                # another replica leads: it has applied what this one could not, or is further
                self._trials.on_outvoted()

    def bar_soon(self, is_barred: bool) -> None:
        """Bar the replica from leading, or free it, on the next turn of the event loop: not from inside the step that
        found the reason. A replica that has failed stays barred."""
        self._should_be_barred = is_barred
        asyncio.get_running_loop().call_soon(self._bar)

    def _bar(self) -> None:
        """Apply the last decision, since there may have been several within one turn of the event loop."""
        is_barred = self._should_be_barred or self.failure is not None
        if is_barred is not self._machine.is_barred:
            self._feed(role_events.Barred(is_barred))
