"""Finds out which intents of a pinned view are committed at the pin, by asking the pinned views of the transactions'
home partitions (docs/protocol.md Tx13)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvstore.errors import NoSuchPin, NotLeader, StoreError, Unavailable
from kvstore.partition import pinning
from kvstore.partition.pinning import AskedIntent, DecidedRequest
from kvstore.partition.state.intents import Intent
from kvstore.partition.state.pinned_views import PinnedView
from kvstore.server.feed.pins import CALL_S, PinsSource
from kvstore.types import PartitionId


class PinnedOutcomes:
    """Resolves the intents of pinned views. A view is resolved once, by its first reader. A home that does not answer
    delays only the readers of views that need it."""

    def __init__(self, source: PinsSource) -> None:
        self._source = source
        self._turns: dict[int, asyncio.Lock] = {}
        """Identity of a view that is being resolved → the lock that lets its readers ask once."""

    async def resolve(self, held: PinnedView) -> None:
        """Find the outcomes of the view's intents, so that it can be read. Raises Unavailable if the outcome of an
        intent cannot be found now, and NoSuchPin if no server keeps the home's part of the pin any more."""
        if held.is_resolved:
            return
        turn = self._turns.setdefault(id(held), asyncio.Lock())
        try:
            async with turn:
                if not held.is_resolved:
                    held.resolve(await self._committed(held))
        finally:
            self._turns.pop(id(held), None)

    async def _committed(self, held: PinnedView) -> list[Intent]:
        committed: list[Intent] = []
        left: list[Intent] = []
        for intent in held.intents:
            outcome = held.outcome(intent.home, intent.attempt, intent.key, intent.seq)
            if outcome:
                committed.append(intent)
            elif outcome is None:
                left.append(intent)
        tried: set[PartitionId] = set()
        failure: StoreError | None = None
        while left:
            partition = self._next(left, tried)
            if partition is None:
                what = f"pin {held.pin!r}: cannot find the outcome of {len(left)} intents"
                if failure is None:
                    raise NoSuchPin(f"{what}, because no server keeps the pin of their homes; take another pin")
                raise Unavailable(f"{what} now; retry, or take another pin") from failure
            tried.add(partition)
            try:
                outcomes = await self._ask(partition, held, left)
            except NoSuchPin:
                continue
            except StoreError as error:
                failure = error
                continue
            asked, left = left, []
            for intent, outcome in zip(asked, outcomes, strict=True):
                if outcome:
                    committed.append(intent)
                elif outcome is None:
                    left.append(intent)
        return committed

    def _next(self, left: Sequence[Intent], tried: set[PartitionId]) -> PartitionId | None:
        """Return the partition to ask next: the present owner of a home key, else any other, because the range may have
        moved since the pin was taken."""
        ring = self._source.topology.ring
        for intent in left:
            owner = ring.partition_of(intent.home)
            if owner not in tried:
                return owner
        return next((each for each in sorted(ring.partitions) if each not in tried), None)

    async def _ask(self, partition: PartitionId, held: PinnedView, left: Sequence[Intent]) -> list[bool | None]:
        """Ask the replicas of a partition in turn until one of them keeps the pin, and then the other servers, which
        may keep it for a replica that has left (docs/protocol.md K5). Raises NoSuchPin if none keeps it, and another
        StoreError if one of them may."""
        topology = self._source.topology
        leader = topology.leaders.get(partition, (None, 0))[0]
        replicas = topology.ring.partitions[partition].replicas
        servers = sorted(topology.servers, key=lambda server: (server not in replicas, server != leader, server))
        asked = [AskedIntent(each.home, each.attempt, each.key, each.seq) for each in left]
        body = pinning.encode(DecidedRequest(held.pin, held.number, asked))
        is_one_down = any(each not in topology.servers for each in replicas)
        failure: StoreError = NotLeader(partition) if is_one_down else NoSuchPin(f"no pin {held.pin!r}")
        for server in servers:
            try:
                answer = await self._source.links.call(server, partition, pinning.DECIDED, body, CALL_S)
                return pinning.decided_of(answer)
            except NoSuchPin:
                continue
            except StoreError as error:
                if server in replicas or not isinstance(error, NotLeader):
                    failure = error
        raise failure
