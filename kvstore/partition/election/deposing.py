"""Watches a partition's leader from a replica that follows it, and decides when the replicas may depose it
(docs/protocol.md, P40).

A leader's session proves only that the leader reaches the metadata store. Here, the other replicas compare whether they
reach the leader. A single replica cannot tell whether the leader or the replica itself is cut off, so a majority of the
partition's replicas must agree. A refused connection is stronger evidence, because it shows that no process listens at
the leader's address. It is believed unless another replica reaches the leader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass

import orjson

from kvstore.env import Env
from kvstore.env.events import wait_within
from kvstore.errors import InvalidRequest, MetadataError, Overloaded, PeerRefused, StoreError
from kvstore.partition.election.leader_znode import Claims
from kvstore.partition.election.peer_replicas import HOLD, HOLD_S, SERVING, PeerReplicas
from kvstore.partition.election.ranking import RANK_DELAY_S
from kvstore.partition.election.role_events import LeaderLost
from kvstore.partition.ports import Peers
from kvstore.types import PartitionId, ServerId

SEES = "sees"
"""Method: returns what a replica sees of the leader, and whether it reaches the replica that asks."""
SILENT_S = 3.0
"""A replica that has received nothing from the leader for this many seconds asks the others. Equals the time for which
a link waits for due answers."""
CONFIRM_S = 2.0
"""Seconds without the leader from which on another replica confirms the loss. It may have received the leader a second
later, because links send a ping after one second of silence."""
AWAKE_S = 2.0
"""Seconds of one slice of a wait. A slice that takes longer shows that this process was paused."""
HOLD_PATIENCE_S = HOLD_S + 2.0
"""A leader that leaves the held request unanswered for this many seconds answers nothing, although its link is
alive."""
ASK_S = 0.5
REACH_BACK_S = 0.3
RETRY_S = (0.015, 0.075, 0.15, 0.3, 0.6, 1.0)
"""Seconds between two attempts to reach the leader, by the number of the attempt."""
OVERLOADED_RETRY_S, OVERLOADED_TRIES = 0.01, 20
"""Retries if the other server is overloaded: a leader of many partitions is lost to all of them at once, and a link
carries a limited number of calls."""


@dataclass(frozen=True, slots=True)
class ReachReport:
    """One replica's answer to SEES: whether the replica receives from the leader, and whether it reaches the replica
    that asked."""

    silent_s: float | None
    """Seconds for which the replica has received nothing from the leader. None if it receives from the leader, or
    cannot tell."""
    reaches_me: bool
    """True if the replica reaches the asking replica at its address. The replica has just tried; if it was not asked to
    try, it knows of no failure."""

    def encode(self) -> bytes:
        return orjson.dumps([self.silent_s, self.reaches_me])

    @staticmethod
    def decode(body: bytes) -> ReachReport:
        """Decode an answer. Raises InvalidRequest if it is malformed."""
        try:
            silent_s, reaches_me = orjson.loads(body)
            return ReachReport(None if silent_s is None else float(silent_s), bool(reaches_me))
        except (ValueError, TypeError) as error:
            raise InvalidRequest(f"expected [seconds or null, bool] as an answer to {SEES}, got {body!r}") from error


def may_depose(replicas: int, reports: Mapping[ServerId, ReachReport]) -> bool:
    """Return True if a replica that has received nothing from the leader for SILENT_S may replace it. `replicas` is
    the number of all replicas, including the leader and the asking one; `reports` are the others' answers.

    A majority, including the asking replica, must not receive anything from the leader, and a majority must reach the
    asking replica. Otherwise that replica would be deposed next, and leadership would change forever.
    """
    majority = replicas // 2 + 1
    silent = 1 + sum(report.silent_s is not None and report.silent_s >= CONFIRM_S for report in reports.values())
    reaching = 1 + sum(report.reaches_me for report in reports.values())
    return silent >= majority and reaching >= majority


def is_gone(
    others: Collection[ServerId], reports: Mapping[ServerId, ReachReport], registered: Collection[ServerId]
) -> bool:
    """Return True if a replica whose connections the leader's address refuses may replace the leader. `others` are all
    replicas but the leader and this one; `registered` are the servers whose replicas have a session.

    Every other replica that answers must confirm that it receives nothing from the leader either, and none that has a
    session may be silent: it may receive from the leader. At least half of those that answer must reach the asking
    replica.
    """
    is_received = any(report.silent_s is None for report in reports.values())
    is_reached = 2 * sum(report.reaches_me for report in reports.values()) >= len(reports)
    return is_reached and not is_received and all(each in reports or each not in registered for each in others)


class LeaderWatch:
    """Watches the leader for one replica: keeps a request open at the leader, and asks the other replicas if the leader
    stops answering."""

    def __init__(
        self,
        env: Env,
        partition: PartitionId,
        server: ServerId,
        peers: Peers,
        peer_replicas: PeerReplicas,
        claims: Claims,
        feed: Callable[[LeaderLost], None],
    ) -> None:
        self._env, self._partition, self._server, self._peers = env, partition, server, peers
        self._peer_replicas, self._claims, self._feed = peer_replicas, claims, feed
        self._watched: ServerId | None = None
        self._unanswered_since: float | None = None
        """When the first held request was sent that the leader left unanswered on a live link."""
        self._tries = 0

    async def run(self, leader: Callable[[], ServerId | None], change: Callable[[float], Awaitable[None]]) -> None:
        """Watch the current leader until cancelled. `leader` returns the current leader's server. `change(timeout_s)`
        returns when the role or the leader has changed."""
        while True:
            server = leader()
            if server != self._watched:
                self._watched, self._unanswered_since, self._tries = server, None, 0
            if server is None or server == self._server:
                await change(HOLD_S)
                continue
            asked_at = self._env.clock.now()
            answer, awake_s = await self._hold(server)
            if isinstance(answer, PeerRefused):
                await self._agree(server, is_refused=True)
            elif isinstance(answer, StoreError):
                self._note_unanswered(asked_at, awake_s)
                await self._agree(server, is_refused=False)
            else:
                self._unanswered_since, self._tries = None, 0
                if answer[:1] != b"1":
                    await asyncio.sleep(RANK_DELAY_S)

    # docs/protocol.md P40
    async def sees(self, asker: ServerId, body: bytes) -> bytes:
        """Answer another replica's question of whether this replica receives from the leader. Raises InvalidRequest."""
        try:
            leader, must_reach_back = orjson.loads(body)
        except (ValueError, TypeError) as error:
            raise InvalidRequest(f"expected [leader, bool] in {SEES}, got {body!r}") from error
        reaches = await self._reaches(asker) if must_reach_back else (self._peers.silent_s(asker) or 0.0) < CONFIRM_S
        return ReachReport(self._silent_s(ServerId(leader)), reaches).encode()

    async def _hold(self, server: ServerId) -> tuple[bytes | StoreError, float]:
        """Send the held request. Return the answer or the error, and the seconds of the wait for which this process was
        awake, as far as slices of AWAKE_S show it.

        After an unanswered request, ask what the leader answers at once. A held request would be answered after HOLD_S
        only. Until then this replica would report a leader as silent that has recovered.
        """
        method, patience_s = (HOLD, HOLD_PATIENCE_S) if self._unanswered_since is None else (SERVING, SILENT_S)
        clock, done, awake_s = self._env.clock, asyncio.Event(), 0.0
        answer: bytes | StoreError = b""

        async def ask() -> None:
            nonlocal answer
            try:
                answer = await self._peers.call(server, self._partition, method, b"", patience_s)
            except StoreError as error:
                answer = error
            finally:
                done.set()

        asking = self._env.nursery.spawn(ask(), name=f"{self._partition} hold")
        try:
            is_done = False
            while not is_done:
                began = clock.now()
                is_done = await wait_within(done, AWAKE_S)
                awake_s += min(clock.now() - began, AWAKE_S + 0.5)
        finally:
            asking.cancel()
        return answer, awake_s

    def _note_unanswered(self, asked_at: float, awake_s: float) -> None:
        """Note a held request that failed. If it timed out by itself, its link is alive. If this process was paused
        meanwhile, the failure says nothing about the leader."""
        if awake_s >= HOLD_PATIENCE_S - 0.5 and self._unanswered_since is None:
            self._unanswered_since = asked_at

    def _silent_s(self, server: ServerId) -> float | None:
        """Return for how many seconds this replica has received nothing from that server, if it is the leader or
        another replica's server."""
        silent_s = self._peers.silent_s(server)
        if server == self._watched and self._unanswered_since is not None:
            return max(silent_s or 0.0, self._env.clock.now() - self._unanswered_since)
        return silent_s

    async def _agree(self, leader: ServerId, *, is_refused: bool) -> None:
        """Ask the other replicas about the leader, and report it as lost if they agree; then wait a moment."""
        try:
            if is_refused or (self._silent_s(leader) or 0.0) >= SILENT_S:
                await self._ask_about(leader, is_refused=is_refused)
        except MetadataError:
            pass  # while the metadata store is away no replica can take the lead
        await asyncio.sleep(RETRY_S[min(self._tries, len(RETRY_S) - 1)])
        self._tries += 1

    async def _ask_about(self, leader: ServerId, *, is_refused: bool) -> None:
        """Report the leader as lost if the other replicas agree. Raises MetadataError."""
        reports = self._env.nursery.spawn(
            self._reports(leader, must_reach_back=not is_refused), name="ask about leader"
        )
        term = await self._claims.term()  # before the record: a claim that comes between the two voids this attempt
        record = await self._claims.leader()
        found: dict[ServerId, ReachReport] = await reports
        if record is None or record.server != leader:
            return
        others = [server for server in self._peer_replicas.servers if server != leader]
        if is_refused:
            silent = [server for server in others if server not in found]
            registered = await self._claims.published() if silent else ()
            is_lost = is_gone(others, found, registered)
        else:
            is_lost = may_depose(len(others) + 2, found)
        if is_lost:
            is_confirmed = any(report.silent_s is not None for report in found.values())
            self._feed(LeaderLost(record, term, is_confirmed))

    async def _reports(self, leader: ServerId, *, must_reach_back: bool) -> dict[ServerId, ReachReport]:
        """Ask all others at once; those that do not answer are left out."""
        body = orjson.dumps([leader, must_reach_back])
        others = [server for server in self._peer_replicas.servers if server != leader]
        spawn = self._env.nursery.spawn
        asked = {server: spawn(self._report(server, body), name=f"ask {server} about leader") for server in others}
        answers = {server: await answer for server, answer in asked.items()}
        return {server: report for server, report in answers.items() if report is not None}

    async def _report(self, server: ServerId, body: bytes) -> ReachReport | None:
        for _ in range(OVERLOADED_TRIES):
            try:
                return ReachReport.decode(await self._peers.call(server, self._partition, SEES, body, ASK_S))
            except Overloaded:
                await asyncio.sleep(OVERLOADED_RETRY_S)
            except StoreError:
                break
        return None

    async def _reaches(self, server: ServerId) -> bool:
        try:
            await self._peers.call(server, self._partition, SERVING, b"", REACH_BACK_S)
        except StoreError:
            return False
        return True
