"""Periodically checks for operations that take too long on other servers, and writes them to the slow log."""

from __future__ import annotations

import math

from kvstore.env import Env
from kvstore.partition.state.commands import Code
from kvstore.partition.state.traits import KEYLESS
from kvstore.server.routing.dispatch import Dispatcher
from kvstore.server.routing.overdue import Overdue

CHECK_S = 0.25


class OverdueWatch:
    """Watches the overdue operations of one server."""

    def __init__(self, env: Env, dispatcher: Dispatcher) -> None:
        self._env, self._dispatcher = env, dispatcher
        self._overdue = Overdue(env.slow.limit_s)
        self._nursery = env.nursery.child("overdue")

    def start(self) -> None:
        if self._env.slow.limit_s < math.inf:
            self._nursery.spawn(self._poll(), name="overdue operations")

    async def close(self) -> None:
        await self._nursery.close()

    async def _poll(self) -> None:
        while True:
            await self._env.beat.pause(CHECK_S)
            self.check()

    def check(self) -> None:
        """Check once and write the overdue operations that have ended to the slow log."""
        now = self._env.clock.now()
        for at, partition, op, since in self._overdue.check(now, *self._dispatcher.in_transit()):
            key = None if op.code in KEYLESS else op.key
            self._env.slow.note(at, Code(op.code).name, now - since, key=key, partition=partition)
