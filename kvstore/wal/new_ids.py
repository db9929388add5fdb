"""Allocates ledger ids that no ledger of the cluster has had (docs/protocol.md, G27).

The metadata store counts ids. A metadata store that was restored from an older copy counts some of them again. The
creator therefore first learns the highest id that any bookie or list has seen, and then takes its own id from the
store. A metadata store that was never restored has allocated the seen id before, and therefore returns a higher one
now.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from contextlib import suppress
from typing import NamedTuple

from kvstore.env.ports import Clock, Nursery
from kvstore.errors import BookieError, MetadataLost, NotEnoughBookies
from kvstore.meta import paths
from kvstore.meta.layout import ClusterIdentity
from kvstore.meta.ledger_ids import RANGE_BITS, LedgerIdGenerator
from kvstore.meta.store import MetadataStore
from kvstore.types import NO_LEDGER, BookieId, LedgerId
from kvstore.wal.choice import BookieChoice
from kvstore.wal.ledger_list import LedgerList
from kvstore.wal.ports import BookieClient

log = logging.getLogger(__name__)

ANSWERS_S = 0.25
"""Maximum number of seconds to wait for further bookies after an ack quorum of the new ensemble has answered. A
takeover that waits for a lease waits longer than this anyway, at the same time."""


class SeenLedger(NamedTuple):
    """The highest ledger id that was seen, and a description of where it was seen."""

    ledger: LedgerId
    where: str


# docs/protocol.md G27
class NewLedgerIds:
    """Allocates the ids of the ledgers that this process creates."""

    def __init__(
        self,
        store: MetadataStore,
        bookies: BookieClient,
        choice: BookieChoice,
        identity: ClusterIdentity,
        *,
        clock: Clock,
        nursery: Nursery,
    ) -> None:
        self._store = store
        self._ids = LedgerIdGenerator(store)
        self._bookies = bookies
        self._choice = choice
        self._identity = identity
        self._clock = clock
        self._nursery = nursery
        self.seen = SeenLedger(NO_LEDGER, "nobody")

    def saw(self, ledger: LedgerId, where: str) -> None:
        """Record that the cluster has a ledger with this id. `where` is used in error messages."""
        if ledger > self.seen.ledger:
            self.seen = SeenLedger(ledger, where)

    def saw_list(self, listed: LedgerList) -> None:
        """Record the highest id in a partition's ledger list."""
        if listed.ledgers:
            self.saw(listed.ledgers[-1].id, "the list of a partition")

    async def next_id(self, after: LedgerId, ensemble: Collection[BookieId], ack: int) -> LedgerId:
        """Return an id greater than `after` and than all ids that this process and the bookies have seen. Asks all
        registered bookies, which takes up to ANSWERS_S after an ack quorum has answered.

        Raises NotEnoughBookies if fewer than `ack` bookies of the ensemble answer, MetadataLost if the metadata store
        returns a lower id or is marked as an older copy, and MetadataError.
        """
        self.saw(after, "the list of the partition")
        await self._identity.check()  # once proven, an older copy gives nobody an id
        await self._ask(ensemble, ack)
        seen = self.seen  # an id that is seen later may be higher than the new one
        ledger = await self._ids.next_id(seen.ledger)
        if ledger >> RANGE_BITS < seen.ledger >> RANGE_BITS:
            await self._store.sync(paths.LEDGERS)  # a lagging server may not know yet in which range ids are counted
            ledger = await self._ids.next_id(seen.ledger)
        if ledger <= seen.ledger:
            why = f"it gave ledger id {ledger}, but {seen.where} has ledger {seen.ledger}"
            log.error("the metadata store is an older copy of itself reason=%s", why)
            await self._identity.mark_older(why)
            raise MetadataLost(
                f"the metadata store is an older copy of itself: {why}; restore a later copy ("
                "docs/how-to/back-up-and-restore-metadata.md)"
            )
        return ledger

    async def _ask(self, ensemble: Collection[BookieId], ack: int) -> None:
        """Ask all registered bookies for the highest id that they have seen. Return after all have answered, or after
        an ack quorum of the ensemble and ANSWERS_S seconds."""
        answered: set[BookieId] = set()
        asked = sorted(self._choice.registered.union(ensemble))
        left, news = len(asked), asyncio.Event()

        async def ask(bookie: BookieId) -> None:
            nonlocal left
            try:
                self.saw(await self._bookies.newest_ledger(bookie), f"bookie {bookie}")
                answered.add(bookie)
            except BookieError as error:
                log.info("bookie did not report its newest ledger bookie=%s error=%s", bookie, error)
            finally:
                left -= 1
                news.set()

        for each in asked:
            self._nursery.spawn(ask(each), name=f"newest ledger of {each}")
        until = self._clock.now() + ANSWERS_S
        while left:
            is_enough = len(answered.intersection(ensemble)) >= ack
            if is_enough and self._clock.now() >= until:
                return
            news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.001, until - self._clock.now()) if is_enough else None):
                    await news.wait()
        silent = set(ensemble) - answered
        if len(ensemble) - len(silent) < ack:
            for each in silent:
                self._choice.failed(each)
            raise NotEnoughBookies(f"expected answers of {ack} bookies of a new ledger, got none from {sorted(silent)}")
