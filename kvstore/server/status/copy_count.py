"""Counts the copies of all ledgers for the whole cluster: one server reads the metadata of every ledger, and cluster
reports carry the result (docs/how-to/check-health.md).

Every server runs this code, but only the first registered server by name counts. There is no election: two servers that
count at once cost reads and give the same answer. A count reads one node of the metadata store per ledger, at most
`kvstore.autorecovery.traversal.READS_PER_S` per second, and pauses at least nine times as long as it took. Between
counts, the last one is compared in memory with the bookies that are registered now.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from kvstore.autorecovery.traversal import every_ledger
from kvstore.env import Env
from kvstore.errors import MetadataError, StoreError, Unavailable
from kvstore.meta.bookies import BookieView
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.store import MetadataStore, SessionState
from kvstore.proto import admin_pb2
from kvstore.server.cluster.topology import ClusterTopology
from kvstore.types import BookieId, ServerId
from kvstore.wal.census import Census, CompletedCount, Shortage, is_due

log = logging.getLogger(__name__)

CHECK_S = 1.0
"""Interval in seconds of the check of registered bookies and of whether a count is due."""
RETRY_S = 5.0
_STEP = 100
"""Ledger kinds evaluated in one turn of the event loop."""


class ClusterNode(Protocol):
    """The node, and its view of the cluster. Implemented by kvstore.server.app.Node."""

    @property
    def id(self) -> ServerId: ...
    @property
    def store(self) -> MetadataStore: ...
    @property
    def topology(self) -> ClusterTopology: ...


def copies_report(census: Census, found: Shortage, age_s: float) -> admin_pb2.CopiesReport:
    """Return a message with a count and with the copies that are missing according to it. Decides only."""
    report = admin_pb2.CopiesReport(
        age_s=age_s,
        ledgers=census.ledgers,
        foreign=census.foreign,
        unreadable=census.unreadable,
        lacking=found.lacking,
        lacking_foreign=found.lacking_foreign,
        at_risk=found.at_risk,
        at_risk_foreign=found.at_risk_foreign,
    )
    for bookie in found.away:
        report.away.add(
            bookie=bookie, closed=found.closed[bookie], open=found.open[bookie], lacking=found.lacking_at[bookie]
        )
    return report


class CopyCount:
    """The part of one server in counting the copies."""

    def __init__(self, env: Env, node: ClusterNode, view: BookieView) -> None:
        self._env, self._node, self._view = env, node, view
        self._nursery = env.nursery.child("copy count")
        self._seen: set[BookieId] = set()
        """Bookies that were registered at any time since this process started."""
        self._last: CompletedCount | None = None
        self._shortage: tuple[CompletedCount, frozenset[BookieId], Shortage] | None = None
        """The last count, the bookies that were registered when it was evaluated, and the copies that were missing."""

    def start(self) -> None:
        self._nursery.spawn(self._run(), name="count copies")

    async def close(self) -> None:
        await self._nursery.close()

    def report(self) -> admin_pb2.CopiesReport | None:
        """Return the last count, evaluated with the bookies that were registered a moment ago. Return None if this
        server does not count or has not finished its first count."""
        if self._shortage is None:
            return None
        taken, _, found = self._shortage
        return copies_report(taken.census, found, max(0.0, self._env.clock.now() - taken.ended))

    async def _run(self) -> None:
        while True:
            wait_s = CHECK_S
            if not self._is_counting:
                self._last = self._shortage = None
            elif self._node.store.state is SessionState.CONNECTED:
                try:
                    await self._count_if_due()
                except StoreError as error:
                    log.info("cannot count the copies of ledgers now: %r", error)
                    wait_s = RETRY_S
            await self._env.beat.pause(wait_s)

    @property
    def _is_counting(self) -> bool:
        """True if this server counts the copies for the cluster."""
        return self._node.id == min(self._node.topology.servers, default="")

    async def _count_if_due(self) -> None:
        """Count the copies if a count is due, and evaluate the last count with the registered bookies. Raises
        MetadataError, Unavailable."""
        present = frozenset(self._view.current.all)
        self._seen |= present
        named = self._last.named if self._last is not None else frozenset()
        away = frozenset(self._seen.union(named).difference(present))
        if is_due(self._last, away, self._env.clock.now()):
            self._last = await self._count(away)
        if self._last is not None and (self._shortage is None or self._shortage[:2] != (self._last, present)):
            self._shortage = (self._last, present, await self._judged(self._last.census, present))

    async def _count(self, away: frozenset[BookieId]) -> CompletedCount:
        """Read the metadata of every ledger. Raises MetadataError, Unavailable."""
        began, census = self._env.clock.now(), Census()

        def unreadable(_: object) -> None:
            census.unreadable += 1

        async for metadata in every_ledger(LedgerStore(self._node.store), self._check_counting, unreadable):
            census.add(metadata)
        ended = self._env.clock.now()
        return CompletedCount(census, ended, ended - began, away, census.named)

    def _check_counting(self) -> None:
        if not self._is_counting:
            raise Unavailable("another server now counts the copies of ledgers")
        if self._node.store.state is not SessionState.CONNECTED:
            raise MetadataError("the session with the metadata store was lost during the count")

    async def _judged(self, census: Census, present: frozenset[BookieId]) -> Shortage:
        found = Shortage(present)
        for number, (kind, ledgers) in enumerate(census.kinds.items()):
            found.add(kind, ledgers)
            if number % _STEP == _STEP - 1:
                await asyncio.sleep(0)  # the event loop also serves clients
        return found
