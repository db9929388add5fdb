"""Deletes keys past their expiry that nobody asks for, as leader, some at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvstore.env import Clock
from kvstore.errors import StoreError
from kvstore.partition.commands import Result, Sink
from kvstore.partition.config import PartitionConfig
from kvstore.partition.custody import Custody
from kvstore.partition.queries import overdue
from kvstore.partition.state import State

SWEEP_KEYS_MAX = 256
SWEEP_AGAIN_S = 0.02
"""Between two sweeps while there is more to delete: some thousands of keys in a second."""


class Sweeper:
    """`reap(keys, sink)` logs the deletes; the next sweep begins when they are logged. A Sink."""

    def __init__(
        self,
        state: State,
        custody: Custody,
        config: PartitionConfig,
        clock: Clock,
        serves: Callable[[], bool],
        reap: Callable[[list[bytes], Sink], None],
    ) -> None:
        self._state, self._custody, self._config, self._clock = state, custody, config, clock
        self._serves, self._reap = serves, reap
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._keys = 0
        self._stopped = False

    def start(self) -> None:
        self._later(self._config.expiry_sweep_s)

    def stop(self) -> None:
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def _later(self, delay_s: float) -> None:
        if self._config.expiry_sweep_s > 0 and not self._stopped:
            self._timer = self._loop.call_later(delay_s, self._sweep)

    def _sweep(self) -> None:
        writable, now_ms = self._custody.writable, self._clock.wall_ms()
        keys = overdue(self._state, now_ms, SWEEP_KEYS_MAX, writable) if self._serves() else []
        self._keys = len(keys)
        if keys:
            self._reap(keys, self)
        else:
            self._later(self._config.expiry_sweep_s)

    def complete(self, token: int, result: Result | StoreError) -> None:
        every = self._config.expiry_sweep_s
        self._later(min(every, SWEEP_AGAIN_S) if self._keys == SWEEP_KEYS_MAX else every)

    def flush(self) -> None:
        """There is nobody to send to."""
