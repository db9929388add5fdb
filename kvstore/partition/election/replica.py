"""Runs one replica of a partition: carries out what role_machine.py decides, and keeps the state in step with the
log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from typing import assert_never

from kvstore.env import Env, Task
from kvstore.env.events import wait_within
from kvstore.errors import (
    InvalidRequest,
    MetadataError,
    MetadataLost,
    NotEnoughBookies,
    NotLeader,
    StoreError,
    Unavailable,
)
from kvstore.partition.config import PartitionConfig
from kvstore.partition.election import deposing, peer_replicas, role_events
from kvstore.partition.election.candidate_fitness import CandidateFitness
from kvstore.partition.election.claiming import Claiming
from kvstore.partition.election.date_fitness import DateFitness
from kvstore.partition.election.deposing import LeaderWatch
from kvstore.partition.election.following import LogFollower
from kvstore.partition.election.handover import DRAIN_S, PREPARE_S, TAKE_S, HandoverTurns, Prepare, Take
from kvstore.partition.election.leader_znode import Claims
from kvstore.partition.election.peer_replicas import HOLD_S, PeerReplicas
from kvstore.partition.election.publishing import Publishing
from kvstore.partition.election.ranking import furthest
from kvstore.partition.election.role_events import Command, Event
from kvstore.partition.election.role_machine import ReplicaRole, RoleMachine
from kvstore.partition.election.tail import Tail
from kvstore.partition.election.trials import Investigations
from kvstore.partition.leading.leader import Leader
from kvstore.partition.ports import Peers
from kvstore.partition.state.state import ReplicaState
from kvstore.types import PartitionId, Seq, ServerId
from kvstore.wal.leading.leader_log import LeaderLog
from kvstore.wal.log import PartitionLogs

log = logging.getLogger(__name__)

REREAD_S = 10.0
"""Seconds between two reads of the leader's znode without a notification, because watches are best effort."""
PROVEN_S = 1.0
"""Seconds after a proof until the leader's znode is read again."""
FAILED_RANK_MAX = 400
"""Rank of a replica that could not lead many times in a row; it waits about a minute."""
OPEN_PATIENCE_S = 10.0
"""Seconds after which a candidate that applies nothing of the log resigns."""
WAKE_S_MIN = 0.001
"""Minimum seconds of a timer. The time left until a moment may be less than a clock can resolve, and a shorter timer
would never advance."""


class Replica:
    """One replica of a partition, as follower, candidate or leader. Everything that it starts ends with its nursery."""

    def __init__(
        self,
        env: Env,
        config: PartitionConfig,
        partition: PartitionId,
        server: ServerId,
        claims: Claims,
        logs: PartitionLogs,
        peers: Peers,
        state: ReplicaState,
        tail: Tail,
        replicas: Callable[[], tuple[ServerId, ...]],
        on_leader: Callable[[ServerId | None], None],
        turns: HandoverTurns,
        begin: Callable[[Leader], Awaitable[None]],
        trials: Investigations,
    ) -> None:
        self.leader: Leader | None = None
        self.state, self.tail = state, tail
        self.elections = 0
        self._env, self._config, self._partition, self.server = env, config, partition, server
        self._claims, self._logs = claims, logs
        self._peer_replicas = PeerReplicas(env, partition, server, peers, replicas)
        self._replicas, self._on_leader, self._turns, self._begin = replicas, on_leader, turns, begin
        self._candidate_fitness = CandidateFitness(env, tail, state.engine, self._peer_replicas)
        self._watch = LeaderWatch(env, partition, server, peers, self._peer_replicas, claims, self._feed)
        self._nonce = env.random.randbytes(8).hex()
        self._machine = RoleMachine(server, self._nonce)
        self._trials = trials
        self._reread = asyncio.Event()
        feed = self._feed
        self.following = LogFollower(
            env,
            tail,
            self._machine,
            trials,
            feed=feed,
            role_change=self.role_change,
            server=server,
            name=partition,
        )
        self.claiming = Claiming(
            claims,
            state,
            server,
            self._nonce,
            feed=feed,
            reread=self._reread,
            is_stopped=lambda: self.role is ReplicaRole.STOPPED,
        )
        self._publishing = Publishing(env.beat, claims, state, trials, server, self._nonce, self.following.has_failed)
        self._fitness = DateFitness(
            env.clock,
            self._feed,
            lambda: self._machine.leader is not None,
            lambda: self.serves,
            self.hand_over_to_any,
        )
        self._role_changed = asyncio.Event()
        """Set once, at the next change; then a new event replaces it."""
        self._yielding = asyncio.Lock()
        self._opening: Task | None = None
        self._log: LeaderLog | None = None
        self.lead_failure = ""
        """Why the last attempt to take the lead failed; empty once a leader is known."""
        self._failed_takeovers = 0
        """Times in a row that the replica opened the log and could not lead. It then runs for election later
        (docs/protocol.md, G22)."""

    @property
    def role(self) -> ReplicaRole:
        return self._machine.role

    @property
    def leader_server(self) -> ServerId | None:
        """The server of the current leader, or None if no leader is known."""
        return self._machine.leader

    @property
    def leading_log(self) -> LeaderLog | None:
        """The log to which this replica appends; None unless it serves."""
        return self._log if self.serves else None

    @property
    def serves(self) -> bool:
        """True if this replica leads and answers."""
        return self.leader is not None and self.leader.serving

    def start(self) -> None:
        """Start to follow the log, to watch the leader's znode, and to become a candidate when there is no leader."""
        spawn = self._env.nursery.spawn
        self.tail.on_lost = lambda position: self._peer_replicas.report_further(self._machine.leader, position)
        self._fitness.update()
        self.following.start()
        self._claims.start(self._env.nursery)
        spawn(self._watch_leader(), name=f"{self._partition} leader znode")
        spawn(self._fitness.run(), name=f"{self._partition} date")
        spawn(self.claiming.run(), name=f"{self._partition} election")
        spawn(self._publishing.run(), name=f"{self._partition} publish")
        spawn(self._trials.run(), name=f"{self._partition} trials")
        watch = self._watch.run(lambda: self._machine.leader, self.role_change)
        spawn(watch, name=f"{self._partition} hold leader")

    async def stop(self, *, hand_over: bool) -> None:
        """Stop for good. With `hand_over`, a leader first hands over to another replica. If that fails, the leader at
        least answers its queued operations and releases its lease, so that the next leader does not have to wait."""
        if hand_over:
            await self._release_lead()
        leader = self.leader
        self._feed(role_events.StopReplica())
        if self._log is not None:
            self._log.close_for_good()
        if leader is not None:
            leader.stop(NotLeader(self._partition))  # also without work in flight, because its timers must end
        await self.claiming.resign()

    async def _release_lead(self) -> None:
        await self.hand_over_to_any()
        async with self._yielding:  # a handover that began before drains and completes first
            try:
                if self.leader is not None and self.serves:
                    await self.leader.release()
            except StoreError as error:
                log.info("partition=%s lead not handed over: %s", self._partition, error)

    async def hand_over(self, successor: ServerId, nonce: str, *, is_planned: bool) -> None:
        """Hand the lead to the replica on `successor`, in the process with this nonce. Raises StoreError if this
        replica has kept the lead. After a failure that follows the release, an election decides."""
        await self._peer_replicas.prepare(successor, Prepare(self.server, nonce, self.state.seq, is_planned))
        log.info("partition=%s %s is ready to lead", self._partition, successor)
        await self.yield_lead(successor)

    async def yield_lead(self, successor: ServerId) -> None:
        """Release the lead and notify `successor`, which has been prepared. If it does not take over, this replica
        leads again. Raises StoreError if the lead could not be released; this replica then keeps the lead, unless the
        log was lost in the meantime."""
        take = Take(self.claiming.claimed, await self._claims.term())
        async with self._yielding:
            leader = self.leader
            if leader is None or not leader.serving:
                raise Unavailable(f"partition {self._partition}: there is no lead to hand over")
            try:
                await leader.release(DRAIN_S)
            except StoreError:
                if not self.serves:
                    self._drop_lead()
                    self._feed(role_events.LeadEnded())
                raise
            self._drop_lead()
            self._feed(role_events.Yielded(successor))
            try:
                await self._peer_replicas.take(successor, take)
            except StoreError as error:
                log.info("partition=%s %s did not take the lead, keeping it: %r", self._partition, successor, error)
                self._feed(role_events.NotTaken())
            self._reread.set()

    async def hand_over_to_any(self) -> None:
        """Hand the lead to the replica that is furthest. If that fails, try the other replicas in descending order of
        their sequence. If no replica takes the lead, this replica keeps it."""
        try:
            published = await self._claims.published() if self.serves else {}
        except MetadataError as error:
            log.info("partition=%s lead not handed over: %r", self._partition, error)
            return
        for server in furthest(published, excluding=self.server):
            if not self.serves:
                return
            try:
                await self.hand_over(server, published[server].nonce, is_planned=False)
            except StoreError as error:
                log.info("partition=%s lead not handed to %s: %r", self._partition, server, error)

    async def answer(self, server: ServerId, method: str, body: bytes) -> bytes:
        """Answer a request of the replica on another server. `serving` returns whether this replica serves, and whether
        it fails to reach that server. `hold` returns whether this replica serves, as soon as that changes or after
        HOLD_S. handover.py and deposing.py describe the other methods."""
        match method:
            case "prepare":
                return await self._prepare(Prepare.decode(body))
            case "take":
                return await self._take(Take.decode(body))
            case peer_replicas.HOLD:
                if self.serves:
                    await self.role_change(HOLD_S)
            case peer_replicas.SERVING:
                return (b"1" if self.serves else b"0") + self._peer_replicas.says_unreached(server)
            case deposing.SEES:
                return await self._watch.sees(server, body)
            case peer_replicas.APPLIED:
                return peer_replicas.encode_position(self.state.position)
            case peer_replicas.FURTHER:
                return peer_replicas.answer_further(self._log, body)
            case _:
                raise InvalidRequest(f"expected a method of replicas, got {method!r}")
        return b"1" if self.serves else b"0"

    async def _prepare(self, asked: Prepare) -> bytes:
        """Get ready to lead soon. Raises Unavailable if this replica is not the right one, or the time is not right."""
        is_fit = not self._machine.is_barred and self._fitness.update()
        if self.role is not ReplicaRole.FOLLOWING or not is_fit or asked.nonce != self._nonce:
            raise Unavailable(f"partition {self._partition}: {self.server} is not ready to lead: {self.role.name}")
        if why := await self._candidate_fitness.why_refuse(is_planned=asked.is_planned):
            raise Unavailable(f"partition {self._partition}: {self.server} is not fit to lead: {why}")
        if asked.is_planned and not self._turns.take(self._env.clock.now()):
            raise Unavailable(f"{self.server} has a part in another hand-over")
        try:
            async with asyncio.timeout(PREPARE_S):
                await self.tail.wait_seq(asked.seq)
                await self._logs.prepare(self._partition)
        except TimeoutError:
            raise Unavailable(f"{self.server} has not caught up to sequence {asked.seq}") from None
        return b"1"

    async def _take(self, offer: Take) -> bytes:
        """Take the lead; answer once this replica serves. Raises Unavailable if it does not serve in time."""
        self._feed(role_events.Offered(offer.record, offer.term))
        until = self._env.clock.now() + TAKE_S
        while self.role in (ReplicaRole.CLAIMING, ReplicaRole.OPENING) and self._env.clock.now() < until:
            await self.role_change(TAKE_S)
        if not self.serves:
            raise Unavailable(f"partition {self._partition}: {self.server} has not taken the lead: {self.role.name}")
        return b"1"

    async def role_change(self, timeout_s: float) -> None:
        """Wait until the role or the leader changes, or for at most `timeout_s`."""
        await wait_within(self._role_changed, timeout_s)

    def _notify_role_change(self) -> None:
        self._role_changed.set()
        self._role_changed = asyncio.Event()

    # ── deciding and performing ───────────────────────────────────────────────────────────────────────────────────────

    def _feed(self, event: Event) -> None:
        before = self._machine.role
        for command in self._machine.handle(event, self._env.clock.now()):
            self._perform(command)
        if self._machine.role is not before:
            log.info("partition=%s %s -> %s on %s", self._partition, before.name, self._machine.role.name, event)
            self._notify_role_change()

    def _perform(self, command: Command) -> None:
        match command:
            case role_events.ReadLeaderZnode():
                self._reread.set()
            case role_events.WakeAt(at):
                self._wake_at(at)
            case role_events.FollowLeader(server):
                self._peer_replicas.last_leader = server or self._peer_replicas.last_leader
                self._fitness.note_leader()
                self.lead_failure = "" if server is not None else self.lead_failure
                self._on_leader(server)
                self._notify_role_change()
            case role_events.OpenAsLeader():
                self.elections += 1
                self._opening = self._env.nursery.spawn(self._open(), name=f"{self._partition} open")
            case role_events.AbandonOpening():
                if self._opening is not None:
                    self._opening.cancel()
            case role_events.EndLead():
                if self.leader is not None:
                    self.leader.stop(NotLeader(self._partition))
                self._drop_lead()
            case role_events.Prove():
                self._prove()
            case role_events.PublishAndRank(asks):
                self._env.nursery.spawn(self._rank(asks), name=f"{self._partition} rank")
            case role_events.Claim() | role_events.ReplaceLeader() | role_events.RemoveStale() | role_events.Resign():
                self.claiming.enqueue(command)
            case _:
                assert_never(command)

    def _wake_at(self, at: float) -> None:
        """Send a Tick at that time. The timer's clock may run ahead of the boot-time clock; the role machine then asks
        again."""
        delay = max(WAKE_S_MIN, at - self._env.clock.now())
        asyncio.get_running_loop().call_later(delay, self._feed, role_events.Tick())

    # ── the leader's znode and the other replicas ─────────────────────────────────────────────────────────────────────

    async def _watch_leader(self) -> None:
        prepared = False
        with closing(self._claims.watch_leader(self._reread.set)):
            while True:
                self._reread.clear()
                try:
                    if not prepared:
                        await self._claims.prepare()
                        prepared = True
                    self._feed(role_events.LeaderRead(*await self._claims.leader_seen(self._nonce)))
                except MetadataError as error:
                    log.debug("partition=%s leader znode not read: %r", self._partition, error)
                await wait_within(self._reread, REREAD_S)

    async def _rank(self, asks: bool) -> None:
        survey = self._env.nursery.spawn(self._candidate_fitness.survey(asks=asks), name="ask serving")
        try:
            rank = await self._publishing.rank(self._replicas())
        except MetadataError as error:
            log.debug("partition=%s not ranked: %r", self._partition, error)
            rank = len(self._peer_replicas.servers)
        rank += min((1 << self._failed_takeovers) - 1, FAILED_RANK_MAX)
        incumbent, why = await survey
        if why and why != self.lead_failure:
            self.lead_failure = why
            log.warning("partition=%s is not fit to lead: %s", self._partition, why)
        self._feed(role_events.Ranked(rank, incumbent, is_fit=not why))

    # ── tailing and leading ───────────────────────────────────────────────────────────────────────────────────────────

    async def _open(self) -> None:
        opened = False
        try:
            self._log = await self._logs.open_as_leader(
                self._partition,
                self._config.listed_lease_ms,
                lambda: Seq(self.state.seq + 1),
                lambda: self.state.position,
                self._peer_replicas.furthest,
            )
            self._failed_takeovers += 1  # reset if it succeeds: the list has one ledger more
            await self.tail.wait_applied(self._log.recovered_end, OPEN_PATIENCE_S)
            await self.following.stop()
            self.leader = leader = Leader(self._env, self._config, self.state, self._log, self._ended)
            await self._begin(leader)
            opened, self._failed_takeovers, self.lead_failure = True, 0, ""
        except MetadataLost as error:
            self.lead_failure = str(error)
            log.error("partition=%s cannot be led from here: %s", self._partition, error)
        except (StoreError, TimeoutError) as error:
            self.lead_failure = str(error) or type(error).__name__
            log.info("partition=%s could not take the lead: %r", self._partition, error)
        finally:
            if not opened:
                self._drop_lead()
        self._feed(role_events.Opened() if opened else role_events.OpenFailed())

    def _prove(self) -> None:
        """Prove the lead by an append: a fenced leader ends. Otherwise another replica may be about to fence it, so
        read the znode again soon."""
        if self.leader is not None:
            self._env.nursery.spawn(_prove(self.leader), name=f"{self._partition} proof")
        asyncio.get_running_loop().call_later(PROVEN_S, self._reread.set)

    def _ended(self, reason: StoreError) -> None:
        log.info("partition=%s lost the lead: %r", self._partition, reason)
        is_broken = self.leader is not None and self.leader.is_broken
        if self.role is ReplicaRole.SERVING:
            self._drop_lead()
        self._feed(role_events.LeadEnded(has_failed=is_broken or isinstance(reason, NotEnoughBookies)))

    def _drop_lead(self) -> None:
        if self._log is not None:
            self._log.close_for_good()
        if self.leader is not None:
            self.leader.usage.leave()
        self.leader = self._log = None
        self.following.start()


async def _prove(leader: Leader) -> None:
    if leader.serving:  # nothing may follow a release record
        with suppress(StoreError):
            await leader.prove()
