"""Administration of the ring: shows and makes plans, and watches and steers moves and replicas."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from kvstore.env import Env
from kvstore.env.events import wait_within
from kvstore.errors import InvalidRequest, NotLeader, StoreError
from kvstore.meta.store import MetadataStore
from kvstore.partition.election.leader_znode import Claims
from kvstore.partition.election.ranking import Published
from kvstore.partition.state.commands import Count, Level, Op, Result, ScanTokens, Sink
from kvstore.proto import admin_pb2
from kvstore.ring import Member, Move, MoveId, MoveState, Ring, Rings
from kvstore.ring import replicas as replica_steps
from kvstore.ring.once import once, plan_token
from kvstore.ring.operations import find
from kvstore.server.cluster import proposal
from kvstore.server.cluster.topology import ClusterTopology
from kvstore.server.load.load import PartitionLoad, suggest
from kvstore.server.placement.assign import homeless
from kvstore.server.routing.backend import Backend
from kvstore.types import PartitionId, ServerId
from kvstore.versions import Versions
from kvstore.wal.lists import LedgerLists
from kvstore.wal.pins import FEED_PIN, Pins

log = logging.getLogger(__name__)

ASK_S, ASK_FOR_STATUS_S = 4.0, 1.0
"""Seconds to collect the number of keys of all partitions and samples of them."""
SAMPLE_KEYS = 100
_OVERHEAD_BYTES = 32
"""Bytes of a record in addition to its key and value: versions, times, its index entry."""


PLANS = frozenset(
    (admin_pb2.ChangeRingRequest.ADD, admin_pb2.ChangeRingRequest.REMOVE, admin_pb2.ChangeRingRequest.MOVE)
)
"""Actions that plan changes of the ring. The others end, pause or pace existing ones."""


class RingSource(Protocol):
    """The node behind the service."""

    @property
    def id(self) -> ServerId: ...
    @property
    def store(self) -> MetadataStore: ...
    @property
    def topology(self) -> ClusterTopology: ...
    @property
    def rings(self) -> Rings: ...
    @property
    def versions(self) -> Versions: ...
    async def reread_servers(self) -> None:
        """Read again which servers are up. Raises MetadataError."""
        ...

    async def loads(self) -> dict[PartitionId, PartitionLoad]:
        """Return the load of every partition whose leader answers."""
        ...

    async def copied(self) -> dict[MoveId, float]:
        """Return the copied fraction of each open move whose target's leader answers."""
        ...


class RingAdmin:
    """Answers admin calls about the ring. All methods raise StoreError."""

    def __init__(self, env: Env, source: RingSource, backend: Backend) -> None:
        self._env, self._source = env, source
        self._backend = backend

    async def change(self, request: admin_pb2.ChangeRingRequest) -> admin_pb2.ChangeRingResponse:
        """Make the requested change of the ring, or only return what it would change if the request is a preview. A
        request with an id is applied only once."""
        only_shown = request.dry_run or request.action == admin_pb2.ChangeRingRequest.SHOW
        if not only_shown:
            await self._source.reread_servers()
        step = proposal.step_of(request, self._servers(), self._env.clock.date_ms())
        before = self._source.rings.ring
        if only_shown:
            after = _checked(lambda: step(before))
            answer = await self._propose(before, after)
            answer.plan = plan_token(before, after)
            return answer
        asked = proposal.asked(request)

        def note(ring: Ring) -> Ring:
            nonlocal before
            before = ring
            return once(ring, request.operation, asked, step)

        try:
            after = await self._source.rings.change(note, plans=request.action in PLANS)
        except ValueError as error:
            raise proposal.refused(error) from None
        done = find(after.operations, request.operation)
        if done is not None and done.before != before.version:
            await self._hold_logs_of(done.joined, before)  # the server that made the change may have died before that
            moves = proposal.open_moves(done, after)
            return proposal.recalled(done, after, *await self._sizes_for(moves, after))
        await self._hold_logs_of(sorted(after.partitions.keys() - before.partitions.keys()), before)
        answer = await self._propose(before, after)
        answer.version = after.version
        return answer

    async def _hold_logs_of(self, joined: Collection[PartitionId], before: Ring) -> None:
        """Hold the logs of new partitions for readers that hold all logs, so that they can read these logs later
        (F6)."""
        pins = Pins(self._source.store, LedgerLists(self._source.store))
        others = [each for each in before.partitions if each not in joined]
        try:
            await pins.hold_as_others(joined, others if joined else (), FEED_PIN, self._env.clock.passed_ms())
        except StoreError as error:  # the ring has already changed, as requested
            log.warning("logs of new partitions may not be held for readers of feeds partitions=%s: %r", joined, error)

    async def change_replicas(self, request: admin_pb2.ChangeReplicasRequest) -> admin_pb2.RingStatusResponse:
        """Move a replica or a lead, or start or stop draining a server."""
        await self._source.reread_servers()
        up = self._source.topology.servers
        change, asked = _replica_step(request, self._servers(), up), proposal.asked(request)

        def step(ring: Ring) -> Ring:
            proposal.check_version(request.ring_version, ring)
            return change(ring)

        try:
            await self._source.rings.change(lambda ring: once(ring, request.operation, asked, step), plans=True)
        except ValueError as error:
            raise proposal.refused(error) from None
        return await self.status()

    async def status(self) -> admin_pb2.RingStatusResponse:
        """Return the moves and their progress."""
        ring = self._source.rings.ring
        copied = await self._source.copied() if ring.moves else {}
        done, left_s = proposal.eta_s(ring, self._env.clock.date_ms(), copied)
        answer = admin_pb2.RingStatusResponse(
            version=ring.version,
            paused=ring.pace.paused,
            bytes_per_s=ring.pace.bytes_per_s,
            parallel=ring.pace.parallel,
            moves=await self._move_statuses(ring, copied),
            moves_planned=ring.journey.moves,
            moves_done=max(0, ring.journey.moves - len(ring.moves)),
            progress=done,
            eta_s=left_s,
            draining=ring.draining,
        )
        servers = self._servers()
        for server in ring.draining:
            answer.homeless.extend(each for each in homeless(ring, servers, server) if each not in answer.homeless)
        for member in ring.partitions.values():
            if member.replacing:
                await self._add_replacing(member, answer)
        return answer

    async def _move_statuses(self, ring: Ring, copied: Mapping[MoveId, float]) -> list[admin_pb2.MoveStatus]:
        sources = {move.source for move in ring.moves.values()}
        owning = sorted(sources & set(ring.tokens.values()))
        keys, sizes = await self._sizes_of(owning, ring, ASK_FOR_STATUS_S, sample=True)
        shares = ring.shares()
        return [
            proposal.move_status(
                move,
                proposal.keys_of(move, shares, keys),
                sizes.get(move.source, 0.0),
                1.0 if move.state is MoveState.FLIPPED else copied.get(move.id, 0.0),
            )
            for move in ring.moves.values()
        ]

    async def loads(self) -> admin_pb2.LoadsResponse:
        """Return the load of each partition, and the moves that would balance it."""
        loads = await self._source.loads()
        answer = admin_pb2.LoadsResponse()
        for partition in sorted(loads):
            load = loads[partition]
            row = answer.partitions.add(
                id=partition,
                ops_per_s=load.ops_per_s,
                writes_per_s=load.writes_per_s,
                written_bytes_per_s=load.written_bytes_per_s,
            )
            for hot in load.hot:
                row.hot_keys.add(key=hot.key, share=hot.share)
        for each in suggest(self._source.rings.ring, loads):
            answer.suggestions.add(
                source=each.source,
                target=each.target,
                first=each.first,
                last=each.last,
                ops_per_s=each.ops_per_s,
                text=each.text,
            )
        return answer

    async def _add_replacing(self, member: Member, answer: admin_pb2.RingStatusResponse) -> None:
        published: dict[ServerId, Published] | None = None
        with suppress(StoreError):  # the progress is unknown; the request has taken effect all the same
            published = await Claims(self._source.store, member.id, self._source.id).published()
        for newcomer, leaving in member.replacing:
            row = answer.replacing.add(partition=member.id, newcomer=newcomer, leaving=leaving)
            if published is not None:
                state = published.get(newcomer)
                row.newcomer_sequence = state.seq if state else 0
                row.leader_sequence = max((each.seq for each in published.values()), default=0)

    def _servers(self) -> dict[ServerId, str]:
        """Return the servers that may hold replicas, with their zones."""
        servers: Mapping[ServerId, Any] = self._source.topology.servers
        at = self._source.versions.cluster  # docs/protocol.md V2
        return {ServerId(id): each.zone for id, each in servers.items() if not each.draining and each.can >= at}

    async def _propose(self, before: Ring, after: Ring) -> admin_pb2.ChangeRingResponse:
        keys, sizes = await self._sizes_for(proposal.changed_moves(before, after), before)
        return proposal.proposal(before, after, keys, sizes)

    async def _sizes_for(
        self, moves: Collection[Move], ring: Ring
    ) -> tuple[dict[PartitionId, int], dict[PartitionId, float]]:
        """Return the number of keys and the mean record size in bytes of the partitions from which the moves copy.
        Without moves, return these numbers for all partitions."""
        wanted = {move.source for move in moves} or set(ring.partitions)
        owning = sorted(wanted & set(ring.tokens.values()))
        return await self._sizes_of(owning, ring, ASK_S, sample=bool(moves))

    async def _sizes_of(
        self, owning: Iterable[PartitionId], ring: Ring, within_s: float, *, sample: bool
    ) -> tuple[dict[PartitionId, int], dict[PartitionId, float]]:
        """Return the number of keys and, if `sample`, the mean bytes of a record, for the partitions that answer in
        time. All are asked at once."""
        starts: dict[PartitionId, int] = {}
        for span in ring.ranges():  # a partition's first range: its last may hold too few records
            starts.setdefault(span.owner, span.start + 1 if span.start < span.end else 0)
        asked: list[tuple[PartitionId, Op]] = []
        for partition in owning:
            asked.append((partition, Count(level=int(Level.STALE))))
            if sample:
                asked.append((partition, _sample(starts[partition], Level.STALE)))
        answers = await self._ask_all(asked, within_s)
        long = [  # left to the leader (docs/protocol.md P37)
            (partition, _sample(op.token, Level.LINEARIZABLE))
            for partition, op, result in answers
            if isinstance(op, ScanTokens) and isinstance(result, NotLeader)
        ]
        answers += await self._ask_all(long, within_s)
        succeeded = [each for each in answers if not isinstance(each[2], StoreError)]
        keys = {partition: result for partition, op, result in succeeded if isinstance(op, Count)}
        sizes = {
            partition: _record_bytes(result[0]) for partition, op, result in succeeded if isinstance(op, ScanTokens)
        }
        return keys, sizes

    async def _ask_all(
        self, asked: Sequence[tuple[PartitionId, Op]], within_s: float
    ) -> list[tuple[PartitionId, Op, Any]]:
        """Submit all operations at once. Return the operations that end within `within_s` seconds, each with its
        result or error."""
        answers = _CollectingSink(len(asked))
        for number, (partition, op) in enumerate(asked):
            self._backend.submit((op,), answers, (number,), 0, partition)
        await wait_within(answers.all_done, within_s)
        return [(*asked[number], result) for number, result in answers.found.items()]


class _CollectingSink(Sink):
    """Collects the results of several operations."""

    def __init__(self, count: int) -> None:
        self.found: dict[int, Any] = {}
        self.all_done = asyncio.Event()
        self._missing = count
        if not count:
            self.all_done.set()

    def complete(self, token: int, result: Result | StoreError) -> None:
        self.found[token] = result
        self._missing -= 1
        if not self._missing:
            self.all_done.set()

    def flush(self) -> None:
        """Do nothing, because the last result wakes the caller."""


def _sample(token: int, level: Level) -> Op:
    return ScanTokens(token, SAMPLE_KEYS, int(level), 0)


def _record_bytes(items: Sequence[tuple[bytes, Any]]) -> float:
    """Return the mean size in bytes of some records."""
    if not items:
        return 0.0
    return sum(len(key) + len(record[0]) + _OVERHEAD_BYTES for key, record in items) / len(items)


def _replica_step(
    request: admin_pb2.ChangeReplicasRequest, servers: dict[ServerId, str], up: Collection[ServerId]
) -> Callable[[Ring], Ring]:
    """Return the function that makes the requested change of the ring. `servers` maps the servers that may hold
    replicas to their zones, and `up` are all running servers. Raises InvalidRequest."""
    if request.drain:
        server = ServerId(request.drain)

        def drain(ring: Ring) -> Ring:
            _check_known(ring, servers, server)
            stuck = homeless(ring, servers, server)
            if stuck:
                raise ValueError(f"no other server can take the replicas of {', '.join(stuck)}; add a server first")
            return replica_steps.drain(ring, server)

        return drain
    if request.undrain:
        server = ServerId(request.undrain)

        def undrain(ring: Ring) -> Ring:
            _check_known(ring, up, server)
            return replica_steps.undrain(ring, server)

        return undrain
    if request.lead:
        return lambda ring: replica_steps.prefer_leader(ring, PartitionId(request.partition), ServerId(request.lead))
    newcomer = ServerId(request.newcomer)
    if newcomer not in servers:
        takers = ", ".join(sorted(servers))
        raise InvalidRequest(f"expected one of the servers that are up and not draining ({takers}), got {newcomer!r}")
    partition, leaving = PartitionId(request.partition), ServerId(request.leaving)

    def begin(ring: Ring) -> Ring:
        if newcomer in ring.draining:
            raise ValueError(f"expected a server that may hold replicas, got {newcomer}, which is draining")
        return replica_steps.begin_replacing(ring, partition, newcomer, leaving)

    return begin


def _check_known(ring: Ring, servers: Collection[ServerId], server: ServerId) -> None:
    """Raise ValueError if the server is unknown: it is not running, holds no replica and is not draining."""
    known = {*servers, *ring.draining, *(each for member in ring.partitions.values() for each in member.replicas)}
    if server not in known:
        raise ValueError(f"expected one of the servers {', '.join(sorted(known))}, got {server}")


def _checked(work: Callable[[], Ring]) -> Ring:
    try:
        return work()
    except ValueError as error:
        raise proposal.refused(error) from None
