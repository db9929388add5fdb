"""Counts the copies of all ledgers for the whole cluster: one server reads every ledger's metadata, and the reports of
the cluster carry the numbers (docs/reference/health.md).

Every server has one; that of the first server by name counts. It asks nobody for an office: two that count at once
cost reads and give the same answer. A count reads one node of the metadata store per ledger, at most
`kvstore.autorecovery.walk.READS_PER_S` a second, and rests at least nine times as long as it took. Between two counts
the last one is judged by the bookies that are registered now, in memory.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from kvstore.autorecovery.walk import every_ledger
from kvstore.env import Env
from kvstore.errors import MetadataError, StoreError, Unavailable
from kvstore.meta.bookies import BookieView
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.store import MetadataStore, SessionState
from kvstore.proto import admin_pb2
from kvstore.server.cluster.topology import ClusterTopology
from kvstore.types import BookieId, ServerId
from kvstore.wal.census import Census, Shortage, Taken, is_due

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two checks of who is registered and whether a count is due."""
RETRY_S = 5.0
_STEP = 100
"""Kinds of ledgers judged in one turn of the event loop."""


class Counted(Protocol):
    """The node: kvstore.server.app.Node."""

    @property
    def id(self) -> ServerId: ...
    @property
    def store(self) -> MetadataStore: ...
    @property
    def topology(self) -> ClusterTopology: ...


def copies_report(census: Census, found: Shortage, age_s: float) -> admin_pb2.CopiesReport:
    """Return a count and what lacks copies by it as a message. Decides only."""
    report = admin_pb2.CopiesReport(
        age_s=age_s,
        ledgers=census.ledgers,
        foreign=census.foreign,
        unreadable=census.unreadable,
        lacking=found.lacking,
        lacking_foreign=found.lacking_foreign,
        at_risk=found.at_risk,
    )
    for bookie in found.away:
        report.away.add(
            bookie=bookie, closed=found.closed[bookie], open=found.open[bookie], lacking=found.lacking_at[bookie]
        )
    return report


class CopyCount:
    """One server's part in counting copies."""

    def __init__(self, env: Env, node: Counted, view: BookieView) -> None:
        self._env, self._node, self._view = env, node, view
        self._nursery = env.nursery.child("copy count")
        self._seen: set[BookieId] = set()
        """Bookies that were registered at some time since this process began."""
        self._last: Taken | None = None
        self._shortage: tuple[Taken, frozenset[BookieId], Shortage] | None = None
        """A count, the bookies that were registered, and what ledgers lacked then."""

    def start(self) -> None:
        self._nursery.spawn(self._run(), name="count copies")

    async def close(self) -> None:
        await self._nursery.close()

    def report(self) -> admin_pb2.CopiesReport | None:
        """Return the last count by the bookies that were registered a moment ago; None if this server does not count,
        or has not finished its first count."""
        if self._shortage is None:
            return None
        taken, _, found = self._shortage
        return copies_report(taken.census, found, max(0.0, self._env.clock.now() - taken.ended))

    async def _run(self) -> None:
        while True:
            wait_s = LOOK_S
            if not self._is_counting:
                self._last = self._shortage = None
            elif self._node.store.state is SessionState.CONNECTED:
                try:
                    await self._look()
                except StoreError as error:
                    log.info("the copies of ledgers are not counted now: %r", error)
                    wait_s = RETRY_S
            await self._env.beat.rest(wait_s)

    @property
    def _is_counting(self) -> bool:
        """True if this server counts for the cluster."""
        return self._node.id == min(self._node.topology.servers, default="")

    async def _look(self) -> None:
        """Count if a count is due, and judge the last count by who is registered. Raises MetadataError, Unavailable."""
        present = frozenset(self._view.current.all)
        self._seen |= present
        named = self._last.named if self._last is not None else frozenset()
        away = frozenset(self._seen.union(named).difference(present))
        if is_due(self._last, away, self._env.clock.now()):
            self._last = await self._count(away)
        if self._last is not None and (self._shortage is None or self._shortage[:2] != (self._last, present)):
            self._shortage = (self._last, present, await self._judged(self._last.census, present))

    async def _count(self, away: frozenset[BookieId]) -> Taken:
        """Read every ledger. Raises MetadataError, Unavailable."""
        began, census = self._env.clock.now(), Census()

        def unreadable(_: object) -> None:
            census.unreadable += 1

        async for metadata in every_ledger(LedgerStore(self._node.store), self._check_counting, unreadable):
            census.add(metadata)
        ended = self._env.clock.now()
        return Taken(census, ended, ended - began, away, census.named)

    def _check_counting(self) -> None:
        if not self._is_counting:
            raise Unavailable("another server counts the copies of ledgers now")
        if self._node.store.state is not SessionState.CONNECTED:
            raise MetadataError("the session with the metadata store was lost during the count")

    async def _judged(self, census: Census, present: frozenset[BookieId]) -> Shortage:
        found = Shortage(present)
        for number, (kind, ledgers) in enumerate(census.kinds.items()):
            found.add(kind, ledgers)
            if number % _STEP == _STEP - 1:
                await asyncio.sleep(0)  # the event loop also serves clients
        return found
