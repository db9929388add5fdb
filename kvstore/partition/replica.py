"""Runs one replica of a partition: performs what owner.py decides, and keeps the log and the state in step."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import assert_never

from kvstore.env import Env, Task
from kvstore.errors import MetadataError, PeerRefused, StoreError
from kvstore.partition import owner
from kvstore.partition.claim import Claims
from kvstore.partition.config import PartitionConfig
from kvstore.partition.election import RANK_DELAY_S, LeaderRecord, Published, rank_of
from kvstore.partition.leader import Leader
from kvstore.partition.owner import Command, Event, Owner, Role
from kvstore.partition.ports import Peers
from kvstore.partition.state import State
from kvstore.partition.tail import Tail
from kvstore.types import PartitionId, Seq, ServerId
from kvstore.wal.ports import LeaderLog, Logs

log = logging.getLogger(__name__)

REREAD_S = 10.0
"""A watch is only a hint; this often the leader's znode is read without one."""
PUBLISH_S = 1.0
HOLD_S = 4.0
"""How long a leader holds a follower's question before it answers it: the follower learns of its death from the
link."""
OPEN_PATIENCE_S = 10.0
"""A candidate that applies nothing of the log for so long gives the lead back."""
WAKE_S_MIN = 0.001
"""No timer is shorter: the time left until a moment may be less than a clock can tell, and time would stand still."""
PENDING_MAX = 64


class Replica:
    """One replica: follower, candidate, leader. Everything it starts ends with its nursery."""

    def __init__(
        self,
        env: Env,
        config: PartitionConfig,
        partition: PartitionId,
        server: ServerId,
        claims: Claims,
        logs: Logs,
        peers: Peers,
        state: State,
        tail: Tail,
        replicas: Callable[[], tuple[ServerId, ...]],
        on_leader: Callable[[ServerId | None], None],
        begin: Callable[[Leader], Awaitable[None]],
    ) -> None:
        self.leader: Leader | None = None
        self._begin = begin
        self.state = state
        self.tail = tail
        self.failure: StoreError | None = None
        """Why this replica applies nothing any more; None while it is well."""
        self.elections = 0
        self._env, self._config, self._partition, self.server = env, config, partition, server
        self._claims, self._logs, self._peers = claims, logs, peers
        self._replicas, self._on_leader = replicas, on_leader
        self._nonce = env.random.randbytes(8).hex()
        self._owner = Owner(server, self._nonce)
        self._commands: asyncio.Queue[Command] = asyncio.Queue(PENDING_MAX)
        self._reread = asyncio.Event()
        self._role_changed = asyncio.Event()
        self._published: Published | None = None
        self._opening: Task | None = None
        self._tailing: Task | None = None
        self._log: LeaderLog | None = None
        self._claimed = LeaderRecord(server, 0, self._nonce)

    @property
    def role(self) -> Role:
        return self._owner.role

    @property
    def leader_server(self) -> ServerId | None:
        return self._owner.leader

    @property
    def leading_log(self) -> LeaderLog | None:
        """The log that this replica appends to; None unless it serves."""
        return self._log if self._serves() else None

    def start(self) -> None:
        """Begin to tail, to watch the leader's znode, and to stand when there is none."""
        spawn = self._env.nursery.spawn
        self._start_tail()
        self._claims.start(self._env.nursery)
        spawn(self._watch_leader(), name=f"{self._partition} leader znode")
        spawn(self._perform_metadata(), name=f"{self._partition} election")
        spawn(self._publish(), name=f"{self._partition} publish")
        spawn(self._hold_leader(), name=f"{self._partition} hold leader")

    async def stop(self, *, hand_over: bool) -> None:
        """Stop for good; with `hand_over` a leader first drains and releases its lease, so that the next need not
        wait."""
        if hand_over and self.leader is not None and self._serves():
            try:
                await self.leader.release()
            except StoreError as error:
                log.info("partition=%s was not handed over: %s", self._partition, error)
        self._feed(owner.Stop())
        if self._log is not None:
            self._log.close_for_good()
        try:
            await self._claims.release(self._claimed)
        except MetadataError as error:
            log.info("partition=%s leader znode not given back: %s", self._partition, error)

    async def yield_lead(self) -> None:
        """Hand the lead over to another replica. Raises StoreError if it could not be released; the lead is lost then
        all the same."""
        if self.leader is None or not self._serves():
            return
        try:
            await self.leader.release()
        finally:
            self._drop_lead()
            self._feed(owner.Yielded())

    async def answer(self, method: str) -> bytes:
        """Answer another replica: `serving`: whether this one serves; `hold`: the same, once that changes or HOLD_S is
        over."""
        if method == "hold" and self._serves():
            self._role_changed.clear()
            try:
                async with asyncio.timeout(HOLD_S):
                    await self._role_changed.wait()
            except TimeoutError:
                pass
        return b"1" if self._serves() else b"0"

    def _serves(self) -> bool:
        return self.leader is not None and self.leader.serving

    # ── deciding and performing ───────────────────────────────────────────────────────────────────────────────────────

    def _feed(self, event: Event) -> None:
        before = self._owner.role
        for command in self._owner.handle(event, self._env.clock.now()):
            self._perform(command)
        if self._owner.role is not before:
            log.info("partition=%s %s -> %s on %s", self._partition, before.name, self._owner.role.name, event)
            self._role_changed.set()

    def _perform(self, command: Command) -> None:
        match command:
            case owner.ReadLeader():
                self._reread.set()
            case owner.WakeAt(at):
                self._wake_at(at)
            case owner.Follow(server):
                self._on_leader(server)
                self._role_changed.set()
            case owner.OpenLog():
                self.elections += 1
                self._opening = self._env.nursery.spawn(self._open(), name=f"{self._partition} open")
            case owner.AbandonOpening():
                if self._opening is not None:
                    self._opening.cancel()
            case owner.PublishAndRank():
                self._env.nursery.spawn(self._rank(), name=f"{self._partition} rank")
            case owner.Claim() | owner.RemoveStale() | owner.GiveBack():
                self._enqueue(command)
            case _:
                assert_never(command)

    def _wake_at(self, at: float) -> None:
        """Tick at that time. The timer's clock may run ahead of ours; then the owner asks again."""
        delay = max(WAKE_S_MIN, at - self._env.clock.now())
        asyncio.get_running_loop().call_later(delay, self._feed, owner.Tick())

    def _enqueue(self, command: Command) -> None:
        if self._commands.full():
            self._reread.set()  # nothing is lost: the next reading of the znode decides again
        else:
            self._commands.put_nowait(command)

    async def _perform_metadata(self) -> None:
        """One at a time and in order, so that a claim never overtakes a give-back."""
        while True:
            command = await self._commands.get()
            try:
                await self._change_metadata(command)
            except StoreError as error:
                log.info("partition=%s %s: %r", self._partition, command, error)
                if isinstance(command, owner.Claim):
                    self._feed(owner.NotClaimed())
                await asyncio.sleep(RANK_DELAY_S)
                self._reread.set()

    async def _change_metadata(self, command: Command) -> None:
        match command:
            case owner.Claim():
                self._claimed = LeaderRecord(self.server, self.state.epoch, self._nonce)
                won = await self._claims.claim(self._claimed)
                self._feed(owner.Claimed() if won else owner.NotClaimed())
            case owner.RemoveStale(record):
                await self._claims.remove_stale(record)
                self._reread.set()
            case owner.GiveBack():
                await self._claims.release(self._claimed)
                self._reread.set()

    # ── the leader's znode and the other replicas ─────────────────────────────────────────────────────────────────────

    async def _watch_leader(self) -> None:
        self._claims.watch_leader(self._reread.set)
        prepared = False
        while True:
            self._reread.clear()
            try:
                if not prepared:
                    await self._claims.prepare()
                    prepared = True
                self._feed(owner.LeaderRead(await self._claims.leader()))
            except MetadataError as error:
                log.debug("partition=%s leader znode not read: %r", self._partition, error)
            try:
                async with asyncio.timeout(REREAD_S):
                    await self._reread.wait()
            except TimeoutError:
                continue

    async def _publish(self) -> None:
        while True:
            try:
                await self._publish_now()
            except MetadataError as error:
                log.debug("partition=%s not published: %r", self._partition, error)
                self._published = None
            await asyncio.sleep(PUBLISH_S)

    async def _publish_now(self, *, always: bool = False) -> None:
        mine = Published(self.state.seq, self.state.durable_seq, self.state.epoch, self._nonce)
        if always or mine != self._published:
            await self._claims.publish(mine)
            self._published = mine

    async def _rank(self) -> None:
        others = [server for server in self._replicas() if server != self.server]
        answers = [self._env.nursery.spawn(self._ask_serving(server), name="ask serving") for server in others]
        try:
            await self._publish_now(always=True)
            rank = rank_of(self.server, await self._claims.published(), self._replicas())
        except MetadataError as error:
            log.debug("partition=%s not ranked: %r", self._partition, error)
            rank = len(others)
        serves = False
        for answer in answers:
            serves |= await answer
        self._feed(owner.Ranked(rank, serves))

    async def _ask_serving(self, server: ServerId) -> bool:
        try:
            return await self._peers.call(server, self._partition, "serving", b"", RANK_DELAY_S) == b"1"
        except StoreError:
            return False

    async def _hold_leader(self) -> None:
        """Keep a question open at the leader: when its process dies, the link breaks, and the next try is refused."""
        while True:
            server = self._owner.leader
            if server is None or server == self.server:
                self._role_changed.clear()
                await self._role_changed.wait()
                continue
            try:
                serving = await self._peers.call(server, self._partition, "hold", b"", HOLD_S * 2)
            except PeerRefused:
                self._feed(owner.PeerGone(server))
                await asyncio.sleep(RANK_DELAY_S / 2)
            except StoreError:
                await asyncio.sleep(RANK_DELAY_S / 10)
            else:
                if serving == b"0":
                    await asyncio.sleep(RANK_DELAY_S)

    # ── tailing and leading ───────────────────────────────────────────────────────────────────────────────────────────

    def _start_tail(self) -> None:
        if self._tailing is None and self.failure is None and self.role is not Role.STOPPED:
            self._tailing = self._env.nursery.spawn(self._follow_log(), name=f"{self._partition} tail")

    async def _follow_log(self) -> None:
        try:
            await self.tail.run()
        except StoreError as error:
            self.failure = error
            log.error("partition=%s this replica stops: %r", self._partition, error)

    async def _stop_tail(self) -> None:
        tailing, self._tailing = self._tailing, None
        if tailing is not None:
            tailing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await tailing

    async def _open(self) -> None:
        opened = False
        try:
            self._log = await self._logs.open_as_leader(self._partition, self._config.lease_ms, self._next_seq)
            await self.tail.wait_applied(self._log.recovered_end, OPEN_PATIENCE_S)
            await self._stop_tail()
            leader = Leader(self._env, self._config, self.state, self._log, self._ended)
            self.leader = leader
            await self._begin(leader)
            opened = True
        except (StoreError, TimeoutError) as error:
            log.info("partition=%s could not take the lead: %r", self._partition, error)
        finally:
            if not opened:
                self._drop_lead()
        self._feed(owner.Opened() if opened else owner.OpenFailed())

    def _next_seq(self) -> Seq:
        return Seq(self.state.seq + 1)

    def _ended(self, reason: StoreError) -> None:
        log.info("partition=%s leads no more: %r", self._partition, reason)
        if self.role is Role.SERVING:
            self._drop_lead()
        self._feed(owner.Ended())

    def _drop_lead(self) -> None:
        if self._log is not None:
            self._log.close_for_good()
        self.leader = self._log = None
        self._start_tail()
