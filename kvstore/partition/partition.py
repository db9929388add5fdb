"""One replica of one partition on this node, as the server uses it: submit operations, start, stop, statistics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kvstore import versions
from kvstore.env import Env
from kvstore.errors import (
    ClusterTooNew,
    InvalidRequest,
    MetadataError,
    Moved,
    NotCaughtUp,
    NotLeader,
    StoreError,
    Unavailable,
)
from kvstore.meta.store import MetadataStore
from kvstore.namespaces import Book
from kvstore.partition import pinning
from kvstore.partition.config import PartitionConfig
from kvstore.partition.election import snapshots
from kvstore.partition.election.absences import ReplicaAbsences
from kvstore.partition.election.handover import HandoverTurns
from kvstore.partition.election.leader_znode import Claims
from kvstore.partition.election.replica import Replica
from kvstore.partition.election.tail import Tail
from kvstore.partition.election.trials import CHECKS, Investigations
from kvstore.partition.election.upkeep import ReplicaUpkeep, flush
from kvstore.partition.leading import queries
from kvstore.partition.leading.answers import NextTurnDelivery, Redirect
from kvstore.partition.leading.leader import Leader
from kvstore.partition.moves.import_driver import Means
from kvstore.partition.moves.mover import Mover
from kvstore.partition.moves.source import FLIPPED, FREEZE_S, METHODS, ROUTED_BYTES, Source
from kvstore.partition.pinning import Pinning
from kvstore.partition.ports import Peers
from kvstore.partition.state.commands import NOT_NOW, Level, NotNow, Op, Sink
from kvstore.partition.state.engine import Engine
from kvstore.partition.state.move_records import Founded
from kvstore.partition.state.scope import ELSEWHERE, bound, scope
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.tokens import NOTHING, Tokens, spans_of
from kvstore.partition.state.traits import KEYLESS, LEVEL_AT, SEQ_AT
from kvstore.partition.versioning import Versioning
from kvstore.ring import Rings
from kvstore.types import LedgerMetadata, PartitionId, Seq, ServerId
from kvstore.wal.lists import LedgerLists
from kvstore.wal.pins import Pins
from kvstore.wal.ports import ListedLedger, Logs

LOOK_S = 1.0
"""Seconds between two checks for other replicas, by a replica that has just started."""


class Partition:
    """Wires the parts of one replica together. Everything it starts ends with `stop`, or with the node's nursery."""

    def __init__(
        self,
        env: Env,
        config: PartitionConfig,
        partition: PartitionId,
        server: ServerId,
        store: MetadataStore,
        logs: Logs,
        peers: Peers,
        engine: Engine,
        replicas: Callable[[], tuple[ServerId, ...]],
        on_leader: Callable[[PartitionId, ServerId | None], None],
        turns: HandoverTurns | None = None,
        rings: Rings | None = None,
        turn_away: Redirect | None = None,
        known_versions: versions.Versions = versions.FIXED,
        book: Book | None = None,
    ) -> None:
        """`turns` belong to the server and are shared by all its partitions, and so is `book`, the server's namespaces.
        Without `rings` nothing says what the partition owns, and nothing moves. `turn_away` takes operations on keys
        that the partition does not own."""
        self.id = partition
        self._nursery = env.nursery.child(f"partition {partition}")
        server_env, env = env, replace(env, nursery=self._nursery)
        self._server, self._engine, self._peers = server, engine, peers
        self._replicas = replicas
        turns = turns or HandoverTurns()
        self._claims = Claims(store, partition, server)
        self.state = ReplicaState(partition, engine, config, known_versions.can)
        self._trials = Investigations(env, partition, server, peers, self.state, replicas, self._claims.trusted)
        self._tail = Tail(partition, self.state, logs, self._install_snapshot)
        self._replica = Replica(
            *(env, config, partition, server, self._claims, logs, peers, self.state, self._tail),
            *(replicas, self._note_leader, turns, self._leader_of, self._trials),
        )
        self._turn_away, self._on_leader, self._rings, self._book = turn_away, on_leader, rings, book
        self._assigned_at, self._assigned_tokens = -1, NOTHING
        self._source = Source(env, partition, self.state, self._leading, FREEZE_S)
        pins = Pins(store, LedgerLists(store))
        self._pinning = Pinning(env, partition, self.state, self._leading, pins)
        self._versioning = Versioning(env, partition, self.state, self._leading, known_versions)
        self.known_ledgers = partial(_known_ledgers, self._replica)
        self.mover: Mover | None = None
        if rings is not None:
            means = Means(env, server_env, partition, self.state, self._leading, rings, pins, logs, peers, self._source)
            self.mover = Mover(means)
        self._exports = snapshots.Exports(self.state, env.clock)
        absences = ReplicaAbsences(store, partition)
        self._upkeep = ReplicaUpkeep(
            env, config, partition, server, self._replica, self._claims, replicas, turns, absences
        )
        self._complete_soon, self._is_taken_back = NextTurnDelivery().give, False
        self._is_behind_start = True
        """True until the replica has applied what the others had when it started: until then it does not know what was
        there before."""

    async def start(self) -> None:
        """Start following the log and taking part in elections."""
        self._peers.serve(self.id, self._answer_peer)
        self._replica.start()
        self._upkeep.start()
        self._pinning.start()
        self._versioning.start()
        self._nursery.spawn(self._come_to_start(), name=f"{self.id} start")
        if self.mover is not None:
            self.mover.start()

    async def stop(self, *, hand_over: bool, keep_pins: bool = False) -> None:
        """Stop for good and sync the state. With `hand_over` a leader drains and releases its lease first. With
        `keep_pins` views at pinned positions stay readable until `let_go`."""
        if self.mover is not None:
            self.mover.close()
        await self._replica.stop(hand_over=hand_over)
        self._peers.forget(self.id)
        self._exports.close()
        await self._nursery.close()
        self._source.keep(())  # a running count would keep the engine's files open
        await flush(self.state)
        if not keep_pins:
            self.let_go()

    async def take_back(self) -> None:
        """After `stop`, make sure that neither the leader's znode nor the published progress names this replica. Raises
        MetadataError; call it again then, unless the server has another replica of the partition by that time."""
        if not self._is_taken_back:
            await self._replica.claiming.withdraw()
            self._is_taken_back = True

    def on_outvoted(self, outvoted: Callable[[], None]) -> None:
        """Call `outvoted` when this copy proves to be damaged and must be replaced by another replica's state."""
        self._trials.on_outvoted = outvoted

    @property
    def keeps_pins(self) -> bool:
        """True if a state at a pinned position is kept here."""
        return bool(self._pinning.held())

    async def follow_pins(self) -> None:
        """After `stop`, called periodically: keep views as long as their pins are wanted."""
        await self._pinning.follow_renewals()
        await self._pinning.end_given_back()

    def let_go(self) -> None:
        """Close the state and its views."""
        self.state.held.close()
        self._engine.close()

    @property
    def leader(self) -> ServerId | None:
        """The server to which operations on this partition go, as far as this replica knows."""
        return self._replica.leader_server

    @property
    def serving(self) -> bool:
        """True if this replica leads and answers."""
        leader = self._replica.leader
        return leader is not None and leader.serving

    def _leading(self) -> Leader | None:
        """Return the leader while it serves, else None."""
        leader = self._replica.leader
        return leader if leader is not None and leader.serving else None

    def _note_leader(self, leader: ServerId | None) -> None:
        """Publish the new leader, and check for moves at once when this replica becomes the leader, because operations
        may wait for a frozen range."""
        self._on_leader(self.id, leader)
        self._versioning.wake()
        if self.mover is not None:
            self.mover.wake()

    async def _leader_of(self, leader: Leader) -> None:
        """Start a new leader, with what the partition owns if its log does not say so yet."""
        if _is_ahead_of_ring(self._rings, self.state):
            raise Unavailable(f"partition {self.id}: the ring known here is too old to lead the partition")
        if self._book is not None:
            leader.usage.join(self._book)
        if self._rings is None or self.state.ownership.is_founded:
            return await leader.start(None, self._turn_away)
        ring = self._rings.ring
        if self.id not in ring.partitions:
            raise Unavailable(f"partition {self.id} is not in ring version {ring.version}")
        await leader.start(Founded(spans_of(ring, self.id)), self._turn_away)

    @property
    def _assigned(self) -> Tokens | None:
        """The tokens that the ring gives to the partition."""
        if self._rings is None:
            return None
        ring = self._rings.ring
        if self._assigned_at != ring.version:
            self._assigned_at, self._assigned_tokens = ring.version, Tokens(spans_of(ring, self.id))
        return self._assigned_tokens

    def submit(self, ops: Sequence[Op], sink: Sink, tokens: Sequence[int]) -> None:
        """Carry out operations of one sink, in order, or refuse them. They are refused with NotLeader unless this
        replica leads, or the operation is a read that any replica may answer. The sink gets the results later, never
        from inside this call."""
        leader = self._replica.leader
        for op in ops:
            if op[0] in KEYLESS:
                ops = self._bound(ops)
                break
        if leader is not None and leader.serving:
            return leader.submit(ops, sink, tokens)
        for op, token in zip(ops, tokens, strict=True):
            if _level_of(op) >= Level.SESSION:
                result = self._answer_here(op)
                if result.__class__ is Moved and self._turn_away is not None:
                    self._turn_away(op, sink, token, result)
                else:
                    self._complete_soon(sink, token, result)
            else:
                self._complete_soon(sink, token, NotLeader(self.id, self.leader or ""))

    def read_now(
        self, keys: list[bytes], tokens: list[int], now: float, *, in_turn: bool = False
    ) -> list[bytes | None] | NotNow:
        """Return the rows that linearizable GETs find at `now`, or NOT_NOW if the reads have to be submitted: see
        LeaderReads.now."""
        leader = self._replica.leader
        if leader is None or not leader.serving:
            return NOT_NOW
        return leader.reads.now(keys, tokens, now, in_turn=in_turn)

    def _bound(self, ops: Sequence[Op]) -> Sequence[Op]:
        """Limit operations without a key to the tokens that the ring gives to the partition."""
        assigned = self._assigned
        return ops if assigned is None else [bound(op, assigned) if op[0] in KEYLESS else op for op in ops]

    def expel(self) -> None:
        """Redirect waiting operations that belong to another partition by now. Later ones go there at once."""
        if self._replica.leader is not None:
            self._replica.leader.expel()

    def counts(self) -> tuple[int, int] | None:
        """Return the number of operations that this leadership has answered and of mutations that it has logged; None
        if this replica does not lead."""
        if self._replica.leader is None:
            return None
        counted = self._replica.leader.statistics()
        return counted["answers"], counted["mutations"]

    def statistics(self) -> dict[str, Any]:
        """Return this replica's numbers for an operator."""
        replica, state = self._replica, self.state
        leader = replica.leader
        return {
            "role": replica.role.name.lower(),
            "leader": self.leader,
            "seq": state.seq,
            "durable_seq": state.durable_seq,
            "epoch": state.epoch,
            "log_version": state.log_version,
            "position": list(state.position) if state.position else None,
            "keys": state.key_count,
            "elections": replica.elections,
            "entries_tailed": self._tail.entries,
            "snapshots_installed": self._tail.installs,
            "snapshots_served": self._exports.served,
            "pins_held": len(self.state.held.by_pin),
            "pins_taken": self._pinning.taken,
            "ledgers_trimmed": self._upkeep.trimmed,
            "flushes": self._upkeep.flushes,
            "owns": len(state.ownership.owned.spans) if state.ownership.is_founded else None,
            "move_counts_corrected": self._source.counts.corrected,
            "move_copies_wrong": self._source.counts.copies_wrong,
            "moves_stuck": len(self._source.counts.stuck),
            "moves": self.mover.statistics() if self.mover is not None else {},
            "failure": str(replica.following.failure or self._tail.lost or self._trials.why) or None,
            "lead_failure": replica.lead_failure,
            "is_in_doubt": self._trials.trial.since > 0,
            "leading": leader.statistics() if leader is not None else None,
            "log": led.statistics() if (led := replica.leading_log) is not None else None,
        }

    # ── inside ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _answer_here(self, op: Op) -> Any:
        """Answer a session or stale read from everything that is confirmed and here."""
        state = self.state
        self._tail.catch_up()
        if self._replica.following.failure is not None or state.position is None:
            return Unavailable(
                f"partition {self.id}: this replica has no state: {self._replica.following.failure or 'not yet'}"
            )
        if state.is_suspect:
            return Unavailable(f"partition {self.id}: {self._trials.why}")
        if self._is_behind_start:
            return NotCaughtUp(f"partition {self.id}: this replica has not caught up with the others since it started")
        at = SEQ_AT.get(op[0])
        wanted = op[at] if at is not None and _level_of(op) == Level.SESSION else 0
        if state.seq < wanted:
            return NotCaughtUp(f"partition {self.id}: expected sequence {wanted} applied, got {state.seq}")
        if _level_of(op) == Level.SESSION and state.seq < _owned_seq(self._rings, self.id):
            return NotCaughtUp(f"partition {self.id}: a range that moved to it has not arrived here yet")
        tokens = scope(op, state.ownership.owned)
        if tokens is None or _is_ahead_of_ring(self._rings, self.state):
            return ELSEWHERE
        try:
            return queries.answer(state, op, state.record_time_ms, tokens)
        except StoreError as error:
            return error

    async def _come_to_start(self) -> None:
        """Return when this replica has applied what the others had when it started (docs/protocol.md P27). If no other
        replica is up, a state from before the start is enough."""
        has_state = self.state.position is not None
        others = await self._others_have()
        while others is None or not (others or has_state):
            await asyncio.sleep(LOOK_S)
            others = await self._others_have()
        await self._tail.reach(max(others, default=Seq(0)))
        self._is_behind_start = False

    async def _others_have(self) -> list[Seq] | None:
        """Return the sequences of the other replicas; None if they are unknown."""
        try:
            published = await self._claims.published()
        except MetadataError:
            return None
        return [said.seq for server, said in published.items() if server != self._server]

    async def _answer_peer(self, server: ServerId, method: str, body: bytes) -> bytes:
        self._tail.catch_up()
        if method == CHECKS:
            return self._trials.answer(server, body)
        if method == snapshots.BEGIN:
            return self._exports.begin()
        if method == snapshots.NEXT:
            return self._exports.next(body.decode())
        if method in METHODS:
            return await self._source.answer(method, body)
        if method == FLIPPED:
            if self._rings is not None:
                self._rings.hint(_routed(body))
            return b""
        if method in pinning.METHODS:
            return await self._pinning.answer(method, body)
        return await self._replica.answer(server, method, body)

    async def _install_snapshot(self) -> None:
        """Replace the state by another replica's. Raises StoreError if no replica's state could be installed."""
        try:
            published = await self._claims.published()
        except MetadataError as error:
            raise Unavailable(f"partition {self.id}: {error}") from error
        failure: StoreError = Unavailable(f"partition {self.id}: no other replica is up to take the state from")
        for source in snapshots.best_sources(self._server, self.leader, published, self._replicas()):
            try:
                await snapshots.install(self._peers, self.id, source, self.state)
                await flush(self.state)
                return
            except StoreError as error:
                if not isinstance(failure, ClusterTooNew):
                    failure = error
        raise failure


def _is_ahead_of_ring(rings: Rings | None, state: ReplicaState) -> bool:
    """Return True if the partition owns a range whose move this ring does not know. A caller that uses such a ring
    might be sent to another partition by the next one (docs/protocol.md M16)."""
    return rings is not None and rings.ring.next_move <= state.ownership.newest


def _owned_seq(rings: Rings | None, partition: PartitionId) -> int:
    member = rings.ring.partitions.get(partition) if rings is not None else None
    return member.owned_seq if member is not None else 0


def _routed(body: bytes) -> int:
    """Decode the ring version that a server reports after a flip. Raises InvalidRequest."""
    if len(body) != ROUTED_BYTES:
        raise InvalidRequest(f"expected a version of {ROUTED_BYTES} bytes, got {len(body)}")
    return int.from_bytes(body, "big")


def _level_of(op: Op) -> int:
    """Return the level of a read; a mutation counts as linearizable."""
    at = LEVEL_AT.get(op[0])
    level: int = Level.LINEARIZABLE if at is None else op[at]
    return level


def _known_ledgers(replica: Replica) -> tuple[Sequence[ListedLedger], LedgerMetadata] | None:
    """Return the ledgers of the log that the replica leads, and the metadata of the open ledger; None if it does not
    lead."""
    led = replica.leading_log
    return led.known_ledgers() if led is not None else None
