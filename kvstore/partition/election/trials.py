"""Investigates a replica whose state differs from another replica's: asks the other replicas for their checksums, and
carries out what jury.py decides."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import orjson

from kvstore.env import Env
from kvstore.env.events import wait_within
from kvstore.errors import InvalidRequest, MetadataError, StoreError
from kvstore.partition.election.jury import (
    Checks,
    Investigation,
    Origins,
    StateVerdict,
    Trusted,
    is_copy_confirmed,
    judge,
)
from kvstore.partition.ports import Peers
from kvstore.partition.state.rows import NOTHING_REPORTED, ReportedDifference
from kvstore.partition.state.state import ReplicaState
from kvstore.types import PartitionId, Seq, ServerId

log = logging.getLogger(__name__)

CHECKS = "checks"
_MEANING = {
    StateVerdict.RIGHT: "a majority has the same",
    StateVerdict.OUTVOTED: "a majority has the other state, this copy is replaced",
    StateVerdict.SPLIT: "there is no majority; declare one right with `kvstore partition trust`",
    StateVerdict.OPEN: "too few replicas are up to tell; declare one right with `kvstore partition trust`",
}
ASK_S = 2.0
CHECK_S = 1.0
CHECK_IDLE_S = 5.0
"""Seconds between two rounds once all replicas have reported, because only an operator changes the outcome then, and
while nothing is in doubt, because a doubt is reported at once."""


class Investigations:
    """Runs the investigations of one replica. `on_barred` is called with True when the replica must stop leading, and
    with False when it may lead again. `on_outvoted` is called when its copy is damaged and must be replaced."""

    def __init__(
        self,
        env: Env,
        partition: PartitionId,
        server: ServerId,
        peers: Peers,
        state: ReplicaState,
        replicas: Callable[[], tuple[ServerId, ...]],
        trusted: Callable[[], Awaitable[Trusted | None]],
    ) -> None:
        self.trial = Investigation()
        self.rounds = 0
        self.on_barred: Callable[[bool], None] = lambda _: None
        self.on_outvoted: Callable[[], None] = lambda: None
        self._env, self._partition, self._server, self._peers = env, partition, server, peers
        self._state, self._replicas, self._trusted = state, replicas, trusted
        self._wake = asyncio.Event()
        self._verdict = StateVerdict.OPEN
        self._logged = Seq(0), StateVerdict.RIGHT
        self._differed = False
        self._replaced = state.replaced
        self._origins: dict[ServerId, frozenset[ServerId]] = {}
        """Origins of the replicas whose state is a copy, as they last reported them."""
        state.on_doubt = self._doubt
        state.is_suspect = state.doubt is not None or state.reported.is_barred  # restored from before a restart

    @property
    def why(self) -> str:
        """The reason why this replica is barred; empty if it is not barred."""
        if not self.trial.is_barred:
            return ""
        return f"its state and another replica's differ since sequence {self.trial.since}: {_MEANING[self._verdict]}"

    async def run(self) -> None:
        """Run until cancelled, or until this replica is outvoted."""
        self._resume()
        if self._state.doubt is not None:
            self._doubt()
        while True:
            await wait_within(self._wake, self._env.beat.delay_s(self._interval_s))
            self._wake.clear()
            is_replaced = self._replaced != self._state.replaced
            if is_replaced or (self._differed and self._state.doubt is None):
                self._replaced, self._differed = self._state.replaced, False
                self.trial.end()  # a later check of the log agrees, or the check was of a state that is gone
                self._publish_outcome()
            if self.trial.since and await self._investigate() is StateVerdict.OUTVOTED:
                log.error("partition=%s this replica is outvoted: its copy is replaced", self._partition)
                self.on_outvoted()
                return
            if not self.trial.since and self._state.origins and self._state.checks:
                await self._confirm_copy()
            self._store_reported()

    def answer(self, server: ServerId, body: bytes) -> bytes:
        """Return this replica's checksums to the replica on `server`, which investigates a difference. The request may
        report the sequence at which the state of `server` differs from the log. The report is ignored if the ring does
        not list `server` as a replica."""
        try:
            since = Seq(int(orjson.loads(body)["since"]))
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise InvalidRequest(f"expected where a replica differs, got {body[:64]!r}: {error!r}") from None
        if since and server in self._replicas():
            # otherwise the next round is due anyway: two replicas that wake each other would never pause
            if not self.trial.since:
                self._replaced = self._state.replaced  # earlier replacements have nothing to do with this difference
                self._wake.set()
            self.trial.note_report(since, self._env.clock.now())
        return orjson.dumps({"checks": list(self._state.checks.items()), "origins": sorted(self._state.origins)})

    @property
    def _interval_s(self) -> float:
        is_quiet = not self.trial.since and not self._differed and not self._state.origins
        return CHECK_IDLE_S if is_quiet or self._verdict is StateVerdict.SPLIT else CHECK_S

    def _resume(self) -> None:
        """Restore a difference that was reported before a restart, because the replicas that reported it may be down
        now."""
        reported = self._state.reported
        if reported.since:
            self.trial.resume(reported.since, self._env.clock.now(), is_barred=reported.is_barred)
            self._publish_outcome()
            self._wake.set()

    def _doubt(self) -> None:
        """Note that the state has just reached a check of its log from which it differs."""
        doubt = self._state.doubt
        assert doubt is not None
        if not self._differed:
            log.error("partition=%s %s", self._partition, doubt)
        self._differed = True
        if not self.trial.since:
            self._replaced = self._state.replaced
        self.trial.doubt(doubt.seq, self._env.clock.now())
        self._publish_outcome()
        self._wake.set()

    async def _investigate(self) -> StateVerdict:
        self.rounds += 1
        since, doubt = self.trial.since, self._state.doubt
        differs = doubt is not None
        checks: dict[ServerId, Checks] = {self._server: dict(self._state.checks)}
        checks |= await self._ask_all(since if differs else Seq(0))
        origins = self._known_origins()
        verdict = judge(self._server, since, self._replicas(), checks, None, origins)
        if verdict in (StateVerdict.OPEN, StateVerdict.SPLIT):
            verdict = judge(self._server, since, self._replicas(), checks, await self._declared(), origins)
        if self._state.doubt != doubt:
            self._wake.set()
            return (
                StateVerdict.OPEN
            )  # the log's next check has come meanwhile, and this verdict is about the one before it
        newest = {server: found[max(found)] for server, found in checks.items() if found}
        if (since, verdict) != self._logged:
            log.warning("partition=%s differs since=%d: %s, %s", self._partition, since, verdict.name, newest)
        self._verdict, self._logged = verdict, (since, verdict)
        if verdict is StateVerdict.RIGHT and differs:
            self._differed = False
            self._state.clear_doubt()
        since = self.trial.since  # another replica may have reported an earlier difference meanwhile
        has_met = self._state.seq > since or any(each >= since for each in self._state.checks)
        self.trial.decide(verdict, self._env.clock.now(), differs=differs, has_met=has_met)
        self._publish_outcome()
        return verdict

    async def _confirm_copy(self) -> None:
        """Confirm a copy once replicas of other origins agreed with it at a later check; it then counts on its own."""
        state, replaced = self._state, self._state.replaced
        checks: dict[ServerId, Checks] = {self._server: dict(state.checks)}
        checks |= await self._ask_all(Seq(0))
        if state.replaced != replaced or self.trial.since:
            return  # the answers are about a former state, or another replica has reported a difference meanwhile
        if is_copy_confirmed(self._server, self._replicas(), checks, self._known_origins()):
            state.mark_confirmed()

    def _known_origins(self) -> Origins:
        return self._origins | {self._server: self._state.origins}

    async def _ask_all(self, since: Seq) -> dict[ServerId, Checks]:
        """Ask all others at once, so that silent replicas delay none of the others."""
        others = [server for server in self._replicas() if server != self._server]
        asked = {server: self._env.nursery.spawn(self._ask(server, since), name="ask checks") for server in others}
        return {server: await answer for server, answer in asked.items()}

    async def _ask(self, server: ServerId, since: Seq) -> Checks:
        """Return the replica's checks; nothing if it does not answer."""
        body = orjson.dumps({"since": since})
        try:
            answer = orjson.loads(await self._peers.call(server, self._partition, CHECKS, body, ASK_S))
            checks = {Seq(seq): crc for seq, crc in answer["checks"]}
            self._origins[server] = frozenset(map(ServerId, answer["origins"]))
            return checks
        except (StoreError, orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            log.info("partition=%s no checksums from %s: %r", self._partition, server, error)
            return {}

    async def _declared(self) -> Trusted | None:
        try:
            return await self._trusted()
        except MetadataError:
            return None

    def _publish_outcome(self) -> None:
        self.trial.check()
        self._state.is_suspect = self.trial.is_barred
        self._store_reported()
        self.on_barred(self.trial.is_barred)

    def _store_reported(self) -> None:
        """Store a reported difference so that it survives a restart. A difference from the log is stored in a row of
        its own, and ends otherwise."""
        trial = self.trial
        is_reported = trial.since > 0 and not self._differed
        self._state.keep_reported(ReportedDifference(trial.since, trial.is_barred) if is_reported else NOTHING_REPORTED)
