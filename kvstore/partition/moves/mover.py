"""Carries out planned moves. On the leader of a target, it copies the range, follows the source's log, requests the
release and changes the ring. On the leader of a source, it drops moved rows. import_steps.py decides the steps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from kvstore.env.events import wait_within
from kvstore.errors import NotLeader, StoreError
from kvstore.partition.leading.leader import Leader
from kvstore.partition.moves import import_steps
from kvstore.partition.moves.import_driver import Halted, ImportDriver, Means, MoveProgress
from kvstore.ring.moves import Move, MoveId, MoveState

log = logging.getLogger(__name__)

CHECK_S = 1.0
"""Seconds between two checks while there are moves. Changes of the ring or of the leader are noticed at once."""
TICK_S = 0.001
"""Seconds added to the end of a pause, because clocks are not fine enough to wake exactly at its end."""
RETRY_S, RETRY_MAX_S = 0.05, 1.0
PAUSE_SHARE, PAUSE_MAX_S = 4.0, 1.0
"""After a move, the next move to this partition waits for PAUSE_SHARE times its duration, at most PAUSE_MAX_S seconds.
Otherwise many small ranges would take the processor from all other keys."""


class Mover:
    """Moves ranges to and from the partition of one replica."""

    def __init__(self, means: Means) -> None:
        self.means = means
        self._changed = asyncio.Event()
        self._forget: Callable[[], None] = lambda: None
        self._drivers: dict[MoveId, ImportDriver] = {}
        self._unfrozen: Leader | None = None
        self._pauses_until = 0.0

    def start(self) -> None:
        """Start to follow the ring, until the nursery ends."""
        self._forget = self.means.rings.on_ring(self._changed.set)
        self.means.env.nursery.spawn(self._run(), name=f"{self.means.partition} moves")

    def close(self) -> None:
        self._forget()

    def wake(self) -> None:
        """Check the moves at once, because the leader has changed."""
        self._changed.set()

    def statistics(self) -> dict[str, dict[str, Any]]:
        """Return the statistics of the moves to this partition, by id of the move."""
        return {str(move): each.statistics() for move, each in sorted(self._drivers.items())}

    def progress(self) -> dict[MoveId, MoveProgress]:
        """Return the progress of the moves to this partition, by id of the move."""
        moves = self.means.rings.ring.moves.values()
        ownership = self.means.state.ownership
        parts = {
            move.id: import_steps.copied_part(ownership, move) for move in moves if move.target == self.means.partition
        }
        return {
            id: self._drivers[id].progress(part) if id in self._drivers else MoveProgress(part)
            for id, part in parts.items()
        }

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            leader = self.means.leading()
            if leader is None:
                self._unfrozen = None
                self.means.source.keep(())
            else:
                await self._advance_moves(leader)
            await wait_within(self._changed, self._check_in_s() if self._is_busy() else None)

    def _check_in_s(self) -> float:
        pause_s = self._pauses_until - self.means.env.clock.now()
        return min(pause_s + TICK_S, CHECK_S) if pause_s > 0 else CHECK_S

    def _is_busy(self) -> bool:
        ownership = self.means.state.ownership
        return bool(self.means.rings.ring.moves or ownership.frozen or ownership.imports or ownership.released)

    async def _advance_moves(self, leader: Leader) -> None:
        ring = self.means.rings.ring
        try:
            if self._unfrozen is not leader:
                await self.means.source.unfreeze_all(leader)
                self._unfrozen = leader
        except StoreError as error:
            log.info("partition=%s cannot unfreeze ranges: %r", self.means.partition, error)
        self.means.source.keep(ring.moves)
        coming = [move for move in ring.moves.values() if move.target == self.means.partition]
        is_pausing = self.means.env.clock.now() < self._pauses_until
        for move in coming:
            is_begun = move.state is not MoveState.PLANNED
            may_begin = not is_pausing and len(self._drivers) < ring.pace.parallel
            if move.state is not MoveState.FLIPPED and (is_begun or may_begin):
                self._begin(move)
        for move in ring.moves.values():
            if move.source == self.means.partition and move.state is MoveState.FLIPPED:
                self._begin(move)

    def _begin(self, move: Move) -> None:
        if move.id not in self._drivers:
            driver = self._drivers[move.id] = ImportDriver(self.means, move.id)
            work = self._run_driver(driver, pauses=move.target == self.means.partition)
            self.means.env.nursery.spawn(work, name=f"{self.means.partition} move {move.id}")

    async def _run_driver(self, driver: ImportDriver, *, pauses: bool) -> None:
        """Advance one move as far as possible in this leadership. If `pauses`, pause further moves to this partition
        afterwards."""
        clock = self.means.env.clock
        begun = clock.now()
        try:
            await self._advance(driver)
        finally:
            if pauses:
                self._pauses_until = clock.now() + min(PAUSE_SHARE * (clock.now() - begun), PAUSE_MAX_S)
            self._drivers.pop(driver.move, None)
            self._changed.set()
            await driver.close()

    async def _advance(self, driver: ImportDriver) -> None:
        pause_s = RETRY_S
        while True:
            try:
                if await driver.advance():
                    return
                pause_s = RETRY_S
            except (Halted, NotLeader):
                return
            except (StoreError, OSError, ValueError) as error:
                log.info("partition=%s move=%d step failed, retrying: %r", self.means.partition, driver.move, error)
                driver.failure = str(error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_MAX_S)
