"""The admin calls about transactions over several partitions: what is in the replicas of this node, and the end of
what a lost home has left undecided (docs/how-to/when-a-transaction-hangs.md)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvstore.env.ports import Clock
from kvstore.errors import InvalidRequest, MetadataError, NoSuchNode, OutcomeUnknown, StoreError, Unavailable
from kvstore.meta import paths
from kvstore.meta.store import MetadataStore
from kvstore.partition.partition import Partition
from kvstore.partition.state.commands import Result, Sink
from kvstore.partition.state.decisions import Decision
from kvstore.partition.state.intents import Intent
from kvstore.proto import admin_pb2
from kvstore.server.cluster.topology import ClusterTopology
from kvstore.types import PartitionId, ServerId

log = logging.getLogger(__name__)

ABANDON_S = 30.0
"""Seconds within which the logs must acknowledge that intents are aborted."""
LOST_S = 60.0
"""Seconds for which a home must have had no leader before it counts as lost. A change of leaders takes a few."""


class TransactionSource(Protocol):
    """The node whose transactions are shown."""

    @property
    def id(self) -> ServerId: ...
    @property
    def topology(self) -> ClusterTopology: ...
    @property
    def store(self) -> MetadataStore: ...
    def hosted(self) -> Mapping[PartitionId, Partition]: ...


class TransactionAdmin:
    """Answers the calls of one node. `clock` counts the ages of transactions, and the time without a leader.
    `on_topology` registers a callback for changes of the topology."""

    def __init__(
        self, source: TransactionSource, clock: Clock, on_topology: Callable[[Callable[[], None]], object]
    ) -> None:
        self._source, self._clock = source, clock
        self._leaderless: dict[PartitionId, float] = {}
        """Since when this node has known no leader of a partition, in seconds of the clock."""
        self._note_leaders()
        on_topology(self._note_leaders)

    def _note_leaders(self) -> None:
        now, topology, known = self._clock.now(), self._source.topology, self._leaderless
        self._leaderless = {
            each: known.get(each, now) for each in topology.ring.partitions if each not in topology.leaders
        }

    def standing(self) -> admin_pb2.TransactionsResponse:
        """Return the intents and decisions of all local replicas."""
        response = admin_pb2.TransactionsResponse()
        for partition, replica in self._source.hosted().items():
            state = replica.state
            response.replicas.add(
                partition=partition,
                is_leader=replica.serving,
                sequence=state.seq,
                intents=map(self._shown_intent, state.intents),
                decisions=map(self._shown_decision, state.decisions),
            )
        return response

    # docs/protocol.md Tx15
    async def abandon(self, request: admin_pb2.AbandonTransactionsRequest) -> admin_pb2.AbandonTransactionsResponse:
        """Abort the undecided transactions of a home in the partitions that this node leads. Raises InvalidRequest if
        the home is unknown, has a leader or had one within the last minute. Raises Unavailable if the metadata store
        does not confirm that it has none, and OutcomeUnknown if a log did not acknowledge in time."""
        home, topology = PartitionId(request.home), self._source.topology
        if home not in topology.ring.partitions:
            known = ", ".join(sorted(topology.ring.partitions))
            raise InvalidRequest(f"expected a partition of the ring as home, one of {known}; got {request.home!r}")
        await self._check_lost(home, is_forced=request.force)
        response = admin_pb2.AbandonTransactionsResponse()
        own = self._source.hosted().get(home)
        committed = {str(each.attempt) for each in own.state.decisions} if own is not None else set()
        if request.attempt in committed or (committed and not request.attempt):
            raise InvalidRequest(
                f"the replica of {home} on this node has decided to commit {', '.join(sorted(committed)[:9])}; "
                "serve this replica again, or abandon only other attempts"
            )
        for partition, replica in self._source.hosted().items():
            if not replica.serving:
                continue
            self._check_leaderless(home)
            intents = [
                each
                for each in replica.state.intents
                if self._home_of(each) == home and request.attempt in ("", str(each.attempt))
            ]
            if intents:
                await _abandoned(partition, replica, intents)
                response.intents.extend(map(self._shown_intent, intents))
        return response

    async def _check_lost(self, home: PartitionId, *, is_forced: bool) -> None:
        """Raise InvalidRequest or Unavailable unless the home has had no leader for a minute; with `is_forced`, unless
        this node knows of no leader now. Between two leaders nobody may speak for the home: the next one may find
        committed transactions in its log."""
        self._check_leaderless(home)
        if is_forced:
            return
        lost_s = self._clock.now() - self._leaderless.get(home, self._clock.now())
        if lost_s < LOST_S:
            raise InvalidRequest(
                f"expected a home that has had no leader for {LOST_S:g} s, because it may be changing leaders; "
                f"{self._source.id} has known none of {home} for {lost_s:.0f} s; wait, or pass --force"
            )
        path = paths.partition_leader(home)
        try:
            await self._source.store.sync(path)
            await self._source.store.get(path)
        except NoSuchNode:
            return self._check_leaderless(home)
        except MetadataError as error:
            raise Unavailable(
                f"the metadata store does not say if {home} has a leader: {error}; repair it, or pass --force"
            ) from error
        raise InvalidRequest(f"partition {home} has a leader again; expected a home that is lost for good")

    def _check_leaderless(self, home: PartitionId) -> None:
        """Raise InvalidRequest if the home has a leader."""
        if (leader := self._source.topology.leaders.get(home)) is not None:
            raise InvalidRequest(
                f"partition {home} has a leader, {leader[0]}, which alone knows what is committed; "
                "expected a home that is lost for good"
            )

    def _home_of(self, intent: Intent) -> PartitionId:
        return self._source.topology.ring.partition_of(intent.home)

    def _age_s(self, written_ms: int) -> float:
        return max(0, self._clock.date_ms() - written_ms) / 1000

    def _shown_intent(self, intent: Intent) -> admin_pb2.StandingIntent:
        return admin_pb2.StandingIntent(
            key=intent.key,
            sequence=intent.seq,
            attempt=str(intent.attempt),
            home_key=intent.home,
            home=self._home_of(intent),
            is_exclusive=intent.is_exclusive,
            age_s=self._age_s(intent.record.written_ms),
        )

    def _shown_decision(self, decision: Decision) -> admin_pb2.StandingDecision:
        return admin_pb2.StandingDecision(
            home_key=decision.home,
            sequence=decision.seq,
            attempt=str(decision.attempt),
            age_s=self._age_s(decision.record.written_ms),
            keys=[name.key for name in decision.intents],
        )


async def _abandoned(partition: PartitionId, replica: Partition, intents: Sequence[Intent]) -> None:
    """Log that the attempts of these intents are aborted. Raises StoreError."""
    for each in intents:
        log.warning(
            "abandoned a transaction partition=%s attempt=%s sequence=%d exclusive=%s",
            partition,
            each.attempt,
            each.seq,
            each.is_exclusive,
        )
    sink = _AllDone(len(intents))
    replica.abandon(intents, sink)
    try:
        async with asyncio.timeout(ABANDON_S):
            await sink.done.wait()
    except TimeoutError:
        raise OutcomeUnknown(f"partition {partition} did not acknowledge within {ABANDON_S:g} s; ask again") from None
    if sink.error is not None:
        raise sink.error


class _AllDone(Sink):
    """Waits for the results of several operations."""

    def __init__(self, left: int) -> None:
        self.done = asyncio.Event()
        self.error: StoreError | None = None
        self._left = left

    def complete(self, token: int, result: Result | StoreError) -> None:
        if isinstance(result, StoreError):
            self.error = result
        self._left -= 1
        if not self._left:
            self.done.set()

    def flush(self) -> None:
        """Do nothing, because nothing is sent."""
