"""Holds a source's log for a move, and gives it back for certain: a server's session, with which pins end, may last for
months, and nothing of the log would go meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

from kvstore.env import Env
from kvstore.errors import StoreError
from kvstore.types import LedgerId, PartitionId
from kvstore.wal.pins import Pins

log = logging.getLogger(__name__)

RELEASE_S = 1.0
"""For giving a pin back, and between two tries."""


class MovePin:
    """The pin of one move: one at a time. `numbers` are one leadership's: no pin has the name of another, since giving
    back one that may be there must not end its successor. `env` is the server's, whose session the pins live as long
    as: a replica may stop while the metadata store is away."""

    def __init__(self, env: Env, pins: Pins, numbers: Iterator[int]) -> None:
        self._env, self._pins, self._numbers = env, pins, numbers
        self._held: tuple[PartitionId, str] | None = None

    @property
    def is_held(self) -> bool:
        return self._held is not None

    async def hold(self, partition: PartitionId, name: str, ledger: LedgerId) -> None:
        """Hold the log from `ledger` on, instead of what was held before. Raises NoSuchLedger, MetadataError."""
        pin = partition, f"{name}-{next(self._numbers)}"
        try:
            await self._pins.hold(*pin, ledger)
        except BaseException:
            self._release_later(*pin)  # perhaps it is there, also where whoever waits for it is cancelled
            raise
        before, self._held = self._held, pin
        if before is not None:
            self._release_later(*before)

    async def give_back(self) -> None:
        """Hold nothing any more: now, or as soon as the metadata store answers."""
        pin, self._held = self._held, None
        if pin is None:
            return
        try:
            async with asyncio.timeout(RELEASE_S):
                await self._pins.release(*pin)
        except (TimeoutError, StoreError):
            self._release_later(*pin)
        except asyncio.CancelledError:
            self._release_later(*pin)
            raise

    def _release_later(self, partition: PartitionId, name: str) -> None:
        with contextlib.suppress(RuntimeError):  # the server stops: the pin ends with the session
            self._env.nursery.spawn(self._release(partition, name), name=f"unpin {partition} {name}")

    async def _release(self, partition: PartitionId, name: str) -> None:
        while True:
            try:
                return await self._pins.release(partition, name)
            except StoreError as error:
                log.info("partition=%s pin %s is left for now: %r", partition, name, error)
                await asyncio.sleep(RELEASE_S)
