"""Pins a source's log for a move, and releases the pin reliably. A pin ends with its server's session, which may last
for months, and a leaked pin would keep the log from being trimmed for as long."""

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
"""Seconds allowed for releasing a pin, and seconds between two attempts."""


class MovePin:
    """The pin of one move; there is at most one at a time. `numbers` belong to one leadership and make pin names
    unique, so that releasing a pin that may exist never ends a later pin. `env` belongs to the server, whose session
    bounds the lives of the pins, because a replica may stop while the metadata store is unavailable."""

    def __init__(self, env: Env, pins: Pins, numbers: Iterator[int]) -> None:
        self._env, self._pins, self._numbers = env, pins, numbers
        self._held: tuple[PartitionId, str] | None = None

    @property
    def is_held(self) -> bool:
        """True if the move holds a pin."""
        return self._held is not None

    async def hold(self, partition: PartitionId, name: str, ledger: LedgerId) -> None:
        """Pin the log from `ledger` on, in place of the pin held before. Raises NoSuchLedger if the ledger has been
        trimmed, and MetadataError."""
        pin = partition, f"{name}-{next(self._numbers)}"
        try:
            await self._pins.hold(*pin, ledger)
        except BaseException:
            self._release_later(*pin)  # the pin may exist, also if the task that waits for it is cancelled
            raise
        before, self._held = self._held, pin
        if before is not None:
            self._release_later(*before)

    async def release(self) -> None:
        """Release the pin, either now or as soon as the metadata store answers."""
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
        with contextlib.suppress(RuntimeError):  # the server stops, and the pin ends with the session
            self._env.nursery.spawn(self._release(partition, name), name=f"unpin {partition} {name}")

    async def _release(self, partition: PartitionId, name: str) -> None:
        while True:
            try:
                return await self._pins.release(partition, name)
            except StoreError as error:
                log.info("partition=%s cannot release pin %s, retrying: %r", partition, name, error)
                await asyncio.sleep(RELEASE_S)
