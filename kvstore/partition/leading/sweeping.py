"""Deletes expired keys that no client reads, in portions, on the leader."""

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
from kvstore.partition.state.rows import expiry_key
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.tokens import Tokens

SWEEP_KEYS_MAX = 256
SWEEP_AGAIN_S = 0.02
"""Seconds between two sweeps while there is more to delete: some thousands of keys per second."""
SETTLED_MS = 10_000
"""Keys that were past their expiry for longer than this when everything had been deleted are not searched for again:
the engine would step over the remains of each delete. Entries in flight, which could add such keys, take less time."""
RESTART_S = 600.0
"""Seconds after which a sweep starts from the beginning again."""
SKIPPED_AGAIN_S = 0.1
"""Seconds until the next sweep after one that found many expired keys but none that may be deleted. Such keys are on
their way to or from another partition, and must not hide others."""


class Sweeper(Sink):
    """Sweeps one leader's partition. `reap(keys, sink)` logs the deletes. The next sweep begins after they are logged.
    `cannot_read` receives the error if the engine cannot be read. No further sweep begins then."""

    def __init__(
        self,
        state: ReplicaState,
        serving_ranges: ServingRanges,
        config: PartitionConfig,
        clock: Clock,
        beat: Beat,
        serves: Callable[[], bool],
        reap: Callable[[list[bytes], Sink], None],
        cannot_read: Callable[[OSError], None],
    ) -> None:
        self._state, self._serving_ranges, self._config, self._clock = state, serving_ranges, config, clock
        self._beat, self._serves, self._reap, self._cannot_read = beat, serves, reap, cannot_read
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._next = b""
        """The expiry row at which the next sweep continues."""
        self._settled = b""
        """No expired key is left before this row. Empty if unknown."""
        self._owned: Tokens | None = None
        """The tokens for which `_settled` holds."""
        self._has_passed_over = False
        """True if this sweep has found an expired key that a transaction holds. The key stays, so it must be found
        again."""
        self._restart_at = 0.0
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
            self._has_passed_over = self._has_passed_over and bool(self._next)
            begin = self._next or self._known_begin(writable)
            try:
                keys, self._next = overdue(self._state, now_ms, SWEEP_KEYS_MAX, writable, begin)
            except OSError as error:
                return self._cannot_read(error)
            held = self._state.intents.by_key
            self._has_passed_over = self._has_passed_over or not held.keys().isdisjoint(keys)
            if not self._next and not self._has_passed_over:
                self._settled = expiry_key(max(0, now_ms - SETTLED_MS), b"")
        if keys:
            self._reap(keys, self)
        else:
            self._pause(SKIPPED_AGAIN_S)

    def _known_begin(self, writable: Tokens) -> bytes:
        """Return the first row that can hold an expired key. That is the very beginning if a sweep skipped keys that
        could not be deleted, or if keys have come from another partition."""
        owned, now = self._state.ownership.owned, self._clock.now()
        may_pass_over = writable.spans != owned.spans or self._state.ownership.has_foreign_rows
        if may_pass_over or owned is not self._owned or now >= self._restart_at:
            self._settled, self._restart_at = b"", now + RESTART_S
            self._owned = None if may_pass_over else owned
        return self._settled

    def complete(self, token: int, result: Result | StoreError) -> None:
        if isinstance(result, StoreError):
            self._owned = None  # the keys are still there
        self._pause(SWEEP_AGAIN_S)

    def _pause(self, again_s: float) -> None:
        every = self._config.expiry_sweep_s
        self._later(min(every, again_s) if self._next else every)

    def flush(self) -> None:
        """Do nothing, because nothing is sent."""
