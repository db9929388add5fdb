"""One replica of one partition on this node. Servers use it to submit operations, to start and stop the replica, and to
read its statistics."""

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
from kvstore.os_errors import is_passing
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
from kvstore.partition.leading.held import is_undecided
from kvstore.partition.leading.leader import Leader
from kvstore.partition.moves.import_driver import Means
from kvstore.partition.moves.mover import Mover
from kvstore.partition.moves.source import FLIPPED, FREEZE_S, METHODS, ROUTED_BYTES, Source
from kvstore.partition.pinning import Pinning
from kvstore.partition.ports import Peers
from kvstore.partition.state.commands import NOT_NOW, Level, NotNow, Op, Sink
from kvstore.partition.state.engine import Engine
from kvstore.partition.state.intents import Intent
from kvstore.partition.state.move_records import Founded
from kvstore.partition.state.scope import ELSEWHERE, bound, scope
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.tokens import NOTHING, Tokens, spans_of
from kvstore.partition.state.traits import KEYLESS
from kvstore.partition.transactions.ports import Participants
from kvstore.partition.versioning import Versioning
from kvstore.ring import Rings
from kvstore.types import LedgerMetadata, PartitionId, Seq, ServerId
from kvstore.wal.lists import LedgerLists
from kvstore.wal.log import PartitionLogs
from kvstore.wal.pins import Pins
from kvstore.wal.ports import ListedLedger

CHECK_S = 1.0
"""Seconds between two checks for other replicas, by a replica that has just started."""


class Partition:
    """One replica of a partition, wired together from its parts: state, log follower, election, leader, moves and pins.
    Everything that the replica starts ends with `stop`, or with the node's nursery."""

    def __init__(
        self,
        env: Env,
        config: PartitionConfig,
        partition: PartitionId,
        server: ServerId,
        store: MetadataStore,
        logs: PartitionLogs,
        peers: Peers,
        engine: Engine,
        replicas: Callable[[], tuple[ServerId, ...]],
        on_leader: Callable[[PartitionId, ServerId | None], None],
        turns: HandoverTurns,
        rings: Rings,
        redirect: Redirect,
        known_versions: versions.Versions,
        book: Book,
        participants: Participants,
    ) -> None:
        """All partitions of a server share `turns` and `book`, the server's record of namespace usage. `rings` gives
        the key hash, and determines what the partition owns. `redirect` receives operations on keys that the partition
        does not own, and `participants` reaches the leaders of other partitions."""
        self.id = partition
        self._nursery = env.nursery.child(f"partition {partition}")
        server_env, env = env, replace(env, nursery=self._nursery)
        self._server, self._engine, self._peers = server, engine, peers
        self._replicas = replicas
        self._claims = Claims(store, partition, server)
        self.state = ReplicaState(partition, engine, config, rings.ring.hash, known_versions.can)
        self._trials = Investigations(env, partition, server, peers, self.state, replicas, self._claims.trusted)
        self._tail = Tail(partition, self.state, logs, self._install_snapshot)
        self._replica = Replica(
            env,
            config,
            partition,
            server,
            self._claims,
            logs,
            peers,
            self.state,
            self._tail,
            replicas,
            self._note_leader,
            turns,
            self._start_leader,
            self._trials,
        )
        self._redirect, self._on_leader, self._rings, self._book = redirect, on_leader, rings, book
        self._participants = participants
        self._assigned_at, self._assigned_tokens = -1, NOTHING
        self._source = Source(env, partition, self.state, self._leading, FREEZE_S)
        pins = Pins(store, LedgerLists(store))
        self._pinning = Pinning(env, partition, self.state, self._leading, pins)
        self._versioning = Versioning(env, partition, self.state, self._leading, known_versions)
        self.known_ledgers = partial(_known_ledgers, self._replica)
        means = Means(env, server_env, partition, self.state, self._leading, rings, pins, logs, peers, self._source)
        self.mover = Mover(means)
        self._exports = snapshots.Exports(self.state, env.clock)
        absences = ReplicaAbsences(store, partition)
        self._upkeep = ReplicaUpkeep(
            env, config, partition, server, self._replica, self._claims, replicas, turns, absences
        )
        self._complete_soon, self._is_withdrawn = NextTurnDelivery().deliver, False
        self._is_behind_start = True
        """True until the replica has applied everything that the other replicas had when it started. Until then it
        cannot know what it acknowledged before the start."""

    async def start(self) -> None:
        """Start following the log and taking part in elections."""
        self._peers.serve(self.id, self._answer_peer)
        self._replica.start()
        self._upkeep.start()
        self._pinning.start()
        self._versioning.start()
        self._nursery.spawn(self._catch_up_at_start(), name=f"{self.id} start")
        self.mover.start()

    async def stop(self, *, hand_over: bool, keep_pins: bool = False) -> None:
        """Stop the replica for good and sync its state to disk. With `hand_over`, a leader first answers its queued
        operations and releases its lease. With `keep_pins`, views at pinned positions stay readable until
        `close_state`."""
        self.mover.close()
        await self._replica.stop(hand_over=hand_over)
        self._peers.forget(self.id)
        self._exports.close()
        await self._nursery.close()
        self._source.keep(())  # a running count would keep the engine's files open
        await flush(self.state)
        if keep_pins:
            self._peers.serve(self.id, self._answer_about_decisions)
        else:
            self.close_state()

    async def withdraw(self) -> None:
        """Remove this replica from the leader's znode and from the published progress. Call it after `stop`. If it
        raises MetadataError, call it again, unless the server has started another replica of the partition in the
        meantime."""
        if not self._is_withdrawn:
            await self._replica.claiming.withdraw()
            self._is_withdrawn = True

    def on_outvoted(self, outvoted: Callable[[], None]) -> None:
        """Register a callback for when the other replicas prove this copy to be damaged. The copy must then be replaced
        by another replica's state."""
        self._trials.on_outvoted = outvoted

    @property
    def keeps_pins(self) -> bool:
        """True if this replica keeps the state at a pinned position."""
        return bool(self._pinning.held())

    async def follow_pins(self) -> None:
        """Keep each view for as long as its pin is wanted: extend the view's deadline when the pin is renewed, and drop
        the view when the pin is released. Call it periodically after `stop(keep_pins=True)`."""
        await self._pinning.follow_renewals()
        await self._pinning.end_released()

    def close_state(self) -> None:
        """Close the state, its engine and its pinned views."""
        self._peers.forget(self.id)
        self.state.pinned_views.close()
        self._engine.close()

    @property
    def leader(self) -> ServerId | None:
        """The server of the partition's leader, as far as this replica knows; None if no leader is known."""
        return self._replica.leader_server

    @property
    def serving(self) -> bool:
        """True if this replica is the leader and serves operations."""
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
        self.mover.wake()

    async def _start_leader(self, leader: Leader) -> None:
        """Start a new leader, with what the partition owns if its log does not say so yet."""
        if _is_ahead_of_ring(self._rings, self.state):
            raise Unavailable(f"partition {self.id}: the ring known here is too old to lead the partition")
        leader.usage.join(self._book)
        if self.state.ownership.is_founded:
            return await leader.start(None, self._redirect, self._participants)
        ring = self._rings.ring
        if self.id not in ring.partitions:
            raise Unavailable(f"partition {self.id} is not in ring version {ring.version}")
        founded = Founded(spans_of(ring, self.id))
        await leader.start(founded, self._redirect, self._participants, self._versioning.raised)

    def raise_log_version(self) -> None:
        """Raise the version of the log soon, because the cluster's version has risen."""
        self._versioning.wake()

    @property
    def _assigned(self) -> Tokens:
        """The tokens that the ring gives to the partition."""
        ring = self._rings.ring
        if self._assigned_at != ring.version:
            self._assigned_at, self._assigned_tokens = ring.version, Tokens(spans_of(ring, self.id))
        return self._assigned_tokens

    def submit(self, ops: Sequence[Op], sink: Sink, tokens: Sequence[int]) -> None:
        """Carry out the operations of one sink in order, or refuse them. `tokens` names the operations to the sink,
        which receives each result later, never from inside this call. If this replica does not lead, it answers reads
        of level SESSION or STALE itself, and refuses all other operations with NotLeader."""
        leader = self._replica.leader
        for op in ops:
            if op.code in KEYLESS:
                ops = self._bound(ops)
                break
        if leader is not None and leader.serving:
            return leader.submit(ops, sink, tokens)
        for op, token in zip(ops, tokens, strict=True):
            if op.level >= Level.SESSION:
                result = self._answer_here(op)
                if result.__class__ is Moved:
                    self._redirect(op, sink, token, result)
                else:
                    self._complete_soon(sink, token, result)
            else:
                self._complete_soon(sink, token, NotLeader(self.id, self.leader or ""))

    def read_now(
        self, keys: list[bytes], tokens: list[int], now: float, *, in_turn: bool = False
    ) -> list[bytes | None] | NotNow:
        """Return the rows of linearizable GETs at time `now`, or NOT_NOW if the reads must go through `submit`. See
        LeaderReads.now."""
        leader = self._replica.leader
        if leader is None or not leader.serving:
            return NOT_NOW
        return leader.reads.now(keys, tokens, now, in_turn=in_turn)

    def _bound(self, ops: Sequence[Op]) -> Sequence[Op]:
        """Limit operations without a key to the tokens that the ring gives to the partition."""
        assigned = self._assigned
        return [bound(op, assigned) if op.code in KEYLESS else op for op in ops]

    def redirect_moved(self) -> None:
        """Redirect waiting operations whose keys now belong to another partition. Operations that arrive later are
        redirected at once."""
        if self._replica.leader is not None:
            self._replica.leader.redirect_moved()

    def counts(self) -> tuple[int, int] | None:
        """Return how many operations this leadership has answered and how many mutations it has logged. Returns None if
        this replica does not lead."""
        if self._replica.leader is None:
            return None
        counted = self._replica.leader.statistics()
        return counted["answers"], counted["mutations"]

    def abandon(self, intents: Sequence[Intent], sink: Sink) -> None:
        """Declare the transactions of these intents aborted, although their home cannot say so: an operator knows that
        it is lost for good. The sink receives one result for each intent, with its place as the token. Raises NotLeader
        if this replica does not lead."""
        leader = self._leading()
        if leader is None or leader.transactor is None:
            raise NotLeader(self.id)
        leader.transactor.abandon(intents, sink)

    def statistics(self) -> dict[str, Any]:
        """Return the replica's statistics, for an operator."""
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
            "pins_held": len(self.state.pinned_views.by_pin),
            "pins_taken": self._pinning.taken,
            "ledgers_trimmed": self._upkeep.trimmed,
            "flushes": self._upkeep.flushes,
            "owns": len(state.ownership.owned.spans) if state.ownership.is_founded else None,
            "move_counts_corrected": self._source.counts.corrected,
            "move_copies_wrong": self._source.counts.copies_wrong,
            "moves_stuck": len(self._source.counts.stuck),
            "moves": self.mover.statistics(),
            "failure": str(replica.following.failure or self._tail.lost or self._trials.why) or None,
            "lead_failure": replica.lead_failure,
            "is_in_doubt": self._trials.trial.since > 0,
            "leading": leader.statistics() if leader is not None else None,
            "log": led.statistics() if (led := replica.leading_log) is not None else None,
        }

    # ── inside ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _answer_here(self, op: Op) -> Any:
        """Answer a session or stale read from the acknowledged entries that this replica has applied. Returns an error
        if the replica is not far enough or cannot be trusted."""
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
        wanted = op.seq if op.level == Level.SESSION else 0
        if state.seq < wanted:
            return NotCaughtUp(f"partition {self.id}: expected sequence {wanted} applied, got {state.seq}")
        if op.level == Level.SESSION and state.seq < _owned_seq(self._rings, self.id):
            return NotCaughtUp(f"partition {self.id}: a range that moved to it has not arrived here yet")
        if op.level == Level.SESSION and is_undecided(state, op):
            return NotCaughtUp(f"partition {self.id}: a transaction on the key is not resolved here yet")
        tokens = scope(op, state.ownership.owned)
        if tokens is None or _is_ahead_of_ring(self._rings, self.state):
            return ELSEWHERE
        try:
            return queries.answer(state, op, state.record_time_ms, tokens)
        except StoreError as error:
            return error
        except OSError as error:
            if not is_passing(error):
                raise
            return _cannot_read(self.id, error)

    async def _catch_up_at_start(self) -> None:
        """Wait until this replica has applied what the other replicas had when it started (docs/protocol.md P27). If no
        other replica is up, the state that this replica had before the start is enough."""
        has_state = self.state.position is not None
        others = await self._published_seqs()
        while others is None or not (others or has_state):
            await asyncio.sleep(CHECK_S)
            others = await self._published_seqs()
        await self._tail.reach(max(others, default=Seq(0)))
        self._is_behind_start = False

    async def _published_seqs(self) -> list[Seq] | None:
        """Return the sequences of the other replicas; None if they are unknown."""
        try:
            published = await self._claims.published()
        except MetadataError:
            return None
        return [replica.seq for server, replica in published.items() if server != self._server]

    async def _answer_peer(self, server: ServerId, method: str, body: bytes) -> bytes:
        try:
            return await self._answer_method(server, method, body)
        except OSError as error:  # any other exception closes the link between the two servers
            if not is_passing(error):
                raise
            raise _cannot_read(self.id, error) from error

    async def _answer_method(self, server: ServerId, method: str, body: bytes) -> bytes:
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
            self._rings.hint(_routed(body))
            return b""
        if method in pinning.METHODS:
            return await self._pinning.answer(method, body)
        return await self._replica.answer(server, method, body)

    # docs/protocol.md K5, Tx13
    async def _answer_about_decisions(self, server: ServerId, method: str, body: bytes) -> bytes:
        """Answer other servers after `stop(keep_pins=True)`."""
        if method != pinning.DECIDED:
            raise NotLeader(self.id)
        return await self._pinning.answer(method, body)

    async def _install_snapshot(self, least: int) -> None:
        """Replace the state by that of another replica, which must have applied at least sequence `least`. Raises
        StoreError if no replica's state could be installed."""
        try:
            published = await self._claims.published()
        except MetadataError as error:
            raise Unavailable(f"partition {self.id}: {error}") from error
        failure: StoreError = Unavailable(f"partition {self.id}: no other replica is up to take the state from")
        for source in snapshots.best_sources(self._server, self.leader, published, self._replicas()):
            try:
                await snapshots.install(self._peers, self.id, source, self.state, least)
                await flush(self.state)
                return
            except StoreError as error:
                if not isinstance(failure, ClusterTooNew):
                    failure = error
        raise failure


def _cannot_read(partition: PartitionId, error: OSError) -> Unavailable:
    return Unavailable(f"partition {partition}: this replica cannot read its engine now: {error}")


def _is_ahead_of_ring(rings: Rings, state: ReplicaState) -> bool:
    """Return True if the partition owns a range whose move this ring does not know. A caller that uses such a ring
    might be sent to another partition by the next one (docs/protocol.md M16)."""
    return rings.ring.next_move <= state.ownership.newest


def _owned_seq(rings: Rings, partition: PartitionId) -> int:
    member = rings.ring.partitions.get(partition)
    return member.owned_seq if member is not None else 0


def _routed(body: bytes) -> int:
    """Decode the ring version that a server reports after a flip. Raises InvalidRequest."""
    if len(body) != ROUTED_BYTES:
        raise InvalidRequest(f"expected a version of {ROUTED_BYTES} bytes, got {len(body)}")
    return int.from_bytes(body, "big")


def _known_ledgers(replica: Replica) -> tuple[Sequence[ListedLedger], LedgerMetadata] | None:
    """Return the ledgers of the log that the replica leads, and the metadata of the open ledger; None if it does not
    lead."""
    led = replica.leading_log
    return led.known_ledgers() if led is not None else None
