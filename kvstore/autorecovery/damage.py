"""Marks ledgers as under-replicated if a bookie has found damage to them on its own disk (docs/protocol.md, A9)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from kvstore.env import Env
from kvstore.errors import NoSuchLedger, StoreError, UndecodableNode
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.recovery_settings import RecoverySettings
from kvstore.meta.store import MetadataStore
from kvstore.meta.underreplication import Underreplication
from kvstore.types import BookieId, LedgerId
from kvstore.wal.repair import bookies_of

log = logging.getLogger(__name__)

RETRY_S = 30.0
WAITING_MAX = 10_000
"""Maximum number of ledgers that wait to be marked. A later scrub finds the ledgers again that did not fit."""


class DamageReports:
    """Queues the damaged ledgers of one bookie, and marks them while auto-recovery is enabled."""

    def __init__(self, env: Env, store: MetadataStore, bookie: BookieId) -> None:
        self.marked = 0
        """Number of ledgers marked."""
        self._env, self._bookie = env, bookie
        self._marks, self._ledgers = Underreplication(store), LedgerStore(store)
        self._settings = RecoverySettings(store)
        self._waiting: dict[LedgerId, None] = {}
        self._wake = asyncio.Event()
        self._nursery = env.nursery.child("damage")

    def found(self, ledgers: Iterable[int]) -> None:
        """Queue the ledgers to be marked. Returns at once."""
        for ledger in ledgers:
            if len(self._waiting) < WAITING_MAX:
                self._waiting[LedgerId(ledger)] = None
        self._wake.set()

    def start(self) -> None:
        self._nursery.spawn(self._run(), name="mark damage")

    async def close(self) -> None:
        await self._nursery.close()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                while self._waiting:
                    if not await self._settings.is_enabled():
                        break
                    del self._waiting[ledger := next(iter(self._waiting))]
                    await self._try(ledger)
            except StoreError as error:
                log.info("damaged ledgers not marked, retrying bookie=%s error=%r", self._bookie, error)
            if self._waiting:
                await self._env.beat.pause(RETRY_S)
                self._wake.set()

    async def _try(self, ledger: LedgerId) -> None:
        """Mark one ledger. If that raises StoreError, put the ledger at the end of the queue and raise the error."""
        try:
            await self._mark(ledger)
        except UndecodableNode as error:
            log.warning("damaged ledger cannot be marked bookie=%s error=%s", self._bookie, error)
        except StoreError:
            self._waiting[ledger] = None
            raise

    async def _mark(self, ledger: LedgerId) -> None:
        try:
            metadata, _ = await self._ledgers.read_latest(ledger)
        except NoSuchLedger:
            return
        if self._bookie in bookies_of(metadata):
            await self._marks.mark(ledger, [self._bookie], self._env.clock.wall_ms(), rewrite=True)
            self.marked += 1
