"""The engines of one simulated node: in memory, kept over crashes. After a crash, each falls back to its flushed
state or to some later state."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from random import Random

from kvstore.partition.state import rows
from kvstore.partition.state.engine import EngineBatch
from kvstore.types import PartitionId, Position
from tests.partition.state.engine_memory import MemoryEngine
from tests.sim.judges.probes import declare, probe

declare("engine.fell_back", "engine.taken_back", "engine.resumed", "engine.flush_hung")

WEDGED_S = 0.1
"""Seconds between two checks whether an engine is still wedged."""


class SimEngine(MemoryEngine):
    """A MemoryEngine that knows the position of its last flushed state."""

    def __init__(
        self, flush_s: float, refusal: Callable[[], int] = lambda: 0, is_wedged: Callable[[], bool] = lambda: False
    ) -> None:
        """`refusal`: the errno with which the engine's files refuse to grow, found by each write; 0 if they grow.
        `is_wedged`: True while no flush ends and memory has no free space, without any error."""
        super().__init__(flush_s)
        self._refusal, self._is_wedged = refusal, is_wedged
        self.durable: Position | None = None
        """The minimum that a crash leaves."""

    def write(self, batch: EngineBatch) -> None:
        self._find_refusal()
        super().write(batch)

    def _find_refusal(self) -> None:
        """Like RocksDB, take nothing after a refusal until the engine is opened again."""
        if self.stopped is None and (number := self._refusal()):
            self.stopped = OSError(number, f"engine: {os.strerror(number)}")

    def is_behind(self) -> bool:
        self.may_resume = self.stopped is not None and not self._refusal() and not self._is_wedged()
        return super().is_behind() or self._is_wedged()

    def resume(self) -> None:
        if self.stopped is not None:
            probe("engine.resumed")
            self.crash()
            self.durable = self.position

    def flush(self, done: Callable[[OSError | None], None]) -> None:
        position = self.position
        self._find_refusal()

        def flushed(error: OSError | None) -> None:
            if error is None:
                self.durable = position
            done(error)

        super().flush(flushed)

    def _mark(self, written: int, life: int, done: Callable[[OSError | None], None]) -> None:
        if self._is_wedged():
            probe("engine.flush_hung")
            asyncio.get_running_loop().call_later(WEDGED_S, self._mark, written, life, done)
        else:
            super()._mark(written, life, done)

    def clear(self) -> None:
        super().clear()
        self.durable = None

    @property
    def position(self) -> Position | None:
        """Return the current position of the state."""
        row = self.get(rows.META_KEY)
        return None if row is None else rows.meta_of(row).position

    def fall_back(self, random: Random) -> None:
        """Fall back after the death of the process: keep the flushed state, and sometimes a part of what came after
        it."""
        unflushed = len(self._unflushed)
        if unflushed:
            probe("engine.fell_back")
        self.crash(keep=random.choice((0, unflushed, random.randint(0, unflushed))))
        self.durable = self.position


class Engines:
    """The engines by partition. A power cut and a kill leave the same state, because engines sync nothing by
    themselves."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.refusal = 0
        """The errno with which no engine's files grow, although bytes are free; 0 if they grow."""
        self.are_wedged = False
        """True while no engine completes a flush or takes more rows, although the disk works."""
        self._engines: dict[PartitionId, SimEngine] = {}
        self.retired: dict[PartitionId, tuple[SimEngine, int]] = {}
        """Engines that were set aside, with their age."""

    def open(self, partition: PartitionId) -> SimEngine:
        """Return the partition's engine. The process that had it before is dead."""
        if partition not in self._engines and partition in self.retired:
            self._engines[partition], _ = self.retired.pop(partition)
            probe("engine.taken_back")
        if partition not in self._engines:
            flush_s = self._random.choice((0.001, 0.05, 0.3))
            self._engines[partition] = SimEngine(flush_s, lambda: self.refusal, lambda: self.are_wedged)
        engine = self._engines[partition]
        engine.fall_back(self._random)
        return engine

    def retire(self, partition: PartitionId) -> None:
        """Set the state aside, because the partition's replica moved elsewhere."""
        if partition in self._engines:
            self.retired[partition] = self._engines.pop(partition), 0

    def set_damaged_aside(self, partition: PartitionId) -> None:
        """Damage the replica's copy: it begins with nothing."""
        self._engines.pop(partition, None)

    def age_retired(self, seconds: int, keep_s: float) -> None:
        aged = {partition: (engine, age + seconds) for partition, (engine, age) in self.retired.items()}
        self.retired = {partition: each for partition, each in aged.items() if each[1] < keep_s}

    def find(self) -> list[PartitionId]:
        """Return the partitions with a state that is not set aside."""
        return sorted(self._engines)

    def durable(self, partition: PartitionId) -> Position | None:
        """Return the position of the state that a crash would leave now."""
        return self._engines[partition].durable if partition in self._engines else None

    def wipe(self) -> None:
        """Remove the engines: their disk is gone."""
        self._engines.clear()
        self.retired.clear()
