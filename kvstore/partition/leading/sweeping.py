"""Deletes keys past their expiry that nobody asks for, as leader, some at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvstore.env import Clock
from kvstore.env.beat import Beat
from kvstore.errors import StoreError
from kvstore.partition.config import PartitionConfig
from kvstore.partition.leading.queries import overdue
from kvstore.partition.leading.serving_ranges import ServingRanges
from kvstore.partition.state.commands import Result, Sink
from kvstore.partition.state.state import State

SWEEP_KEYS_MAX = 256
SWEEP_AGAIN_S = 0.02
"""Between two sweeps while there is more to delete: some thousands of keys in a second."""
LOOK_ON_S = 0.1
"""After a look at many keys past their expiry of which none may be deleted: they are on their way to or from another
partition, and must not keep others from being found."""


class Sweeper(Sink):
    """Sweeps one leader's partition. `reap(keys, sink)` logs the deletes; the next sweep begins when they are logged. A
    Sink."""

    def __init__(
        self,
        state: State,
        serving_ranges: ServingRanges,
        config: PartitionConfig,
        clock: Clock,
        beat: Beat,
        serves: Callable[[], bool],
        reap: Callable[[list[bytes], Sink], None],
    ) -> None:
        self._state, self._serving_ranges, self._config, self._clock = state, serving_ranges, config, clock
        self._beat, self._serves, self._reap = beat, serves, reap
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._next = b""
        """Where to look on."""
        self._stopped = False

    def start(self) -> None:
        self._later(self._config.expiry_sweep_s)

    def stop(self) -> None:
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def _later(self, delay_s: float) -> None:
        if self._config.expiry_sweep_s > 0 and not self._stopped:
            self._timer = self._loop.call_later(self._beat.delay_s(delay_s), self._sweep)

    def _sweep(self) -> None:
        writable, now_ms = self._serving_ranges.writable, self._clock.date_ms()
        keys: list[bytes] = []
        if self._serves():
            keys, self._next = overdue(self._state, now_ms, SWEEP_KEYS_MAX, writable, self._next)
        if keys:
            self._reap(keys, self)
        else:
            self._pause(LOOK_ON_S)

    def complete(self, token: int, result: Result | StoreError) -> None:
        self._pause(SWEEP_AGAIN_S)

    def _pause(self, again_s: float) -> None:
        every = self._config.expiry_sweep_s
        self._later(min(every, again_s) if self._next else every)

    def flush(self) -> None:
        """Nothing is sent."""
