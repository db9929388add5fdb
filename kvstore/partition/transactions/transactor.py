"""Carries out transactions over several partitions for one leader, as home of some and as participant of others
(docs/protocol.md, Transactions).

    begin → PREPARE at every participant → DECIDE here → answer → RESOLVE at every participant → END here

The leader evaluates and logs; this module sends, waits and decides when an attempt is over. Everything here is in
memory: a new leader continues from the decisions in its state, and attempts without a decision are aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from kvstore.env.slow_log import SlowLog
from kvstore.errors import (
    Conflict,
    Moved,
    NotCaughtUp,
    NotEnoughBookies,
    NotLeader,
    OutcomeUnknown,
    StoreError,
    Unavailable,
)
from kvstore.partition.state.commands import Op, Resolve, Result, Sink, Transact
from kvstore.partition.state.intents import Intent
from kvstore.partition.state.internal import Attempt
from kvstore.partition.state.overlay import TransactionChanges
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.transactions.attempts import Attempts, Decide, Part, RunningAttempt, prepared_of
from kvstore.partition.transactions.outcomes import Outcomes
from kvstore.partition.transactions.ports import Participants
from kvstore.partition.transactions.questions import Questions
from kvstore.types import PartitionId

PREPARE_S = 2.0
"""Seconds after which home drops an attempt whose participants have not all prepared."""
AGAIN_S = 0.05
"""Seconds until a participant whose answer was lost receives PREPARE again."""


class Transactor:
    """The transactions of one leadership. `owns` is True for keys that the partition owns now. `enqueue` puts an
    operation to the front of the leader's queue, `deliver` passes a result to a client, and `unclaim` frees home's keys
    when an attempt has ended."""

    def __init__(
        self,
        state: ReplicaState,
        epoch: int,
        participants: Participants,
        now: Callable[[], float],
        owns: Callable[[bytes], bool],
        enqueue: Callable[[Op, Sink, int], None],
        deliver: Callable[[Sink, int, Result | StoreError], None],
        unclaim: Callable[[Transact], None],
        slow: SlowLog | None = None,
        traced: Callable[[Sink, Sink, str, PartitionId], Sink] = lambda parent, sink, step, partition: sink,
    ) -> None:
        """Arguments: `slow` records attempts that take longer than its limit. `traced` takes the sink of the request
        and a second sink. It returns a sink that passes results on to the second one and ends the span of a step in the
        request's trace."""
        self._state, self._participants, self._owns = state, participants, owns
        self._enqueue, self._deliver, self._unclaim, self._now = enqueue, deliver, unclaim, now
        self._slow, self._traced = slow or SlowLog(), traced
        self._loop = asyncio.get_running_loop()
        self.attempts = Attempts(state.partition, epoch)
        self.outcomes = Outcomes(participants, owns, self._mark, enqueue)
        self.questions = Questions(lambda: state.intents, participants, owns, now, self._mark, enqueue)
        self.begun = self.committed = self.dropped = self.conflicts = 0
        """Numbers of attempts: begun, committed, dropped, and dropped because of a conflict."""
        self.resolved = 0
        """Number of intents of this partition that were resolved."""

    def statistics(self) -> dict[str, int]:
        """Return the numbers of this leadership's transactions, for an operator."""
        return {
            "running": len(self.attempts),
            "attempts": self.begun,
            "outcomes": len(self.outcomes),
            "questions": len(self.questions),
            "committed": self.committed,
            "dropped": self.dropped,
            "conflicts": self.conflicts,
            "resolved": self.resolved,
            "asked": self.questions.asked,
        }

    def stop(self, reason: StoreError) -> None:
        """Drop all attempts, because the leadership ends. Attempts whose decision has been sent have an unknown
        outcome, which the leader reports."""
        self.outcomes.stop()
        self.questions.stop()
        self.drop_all(reason)

    def drop_all(self, reason: StoreError) -> None:
        """Drop the attempts whose decision has not been sent."""
        for running in self.attempts:
            if not running.is_sent:
                self._fail(running, reason)

    def resume(self) -> None:
        """Carry out the state's decisions and ask about its intents, because they may be new to this leader: it has
        just begun to serve, or its tokens have changed. A leader that does not serve yet sends no outcome, because a
        former leader may still answer reads (docs/protocol.md Tx10)."""
        for decision in [*self._state.decisions]:
            if self._owns(decision.home):
                self.outcomes.carry_out(decision)
        self.questions.watch()

    def applied(self, changes: TransactionChanges) -> None:
        """Handle the intents and decisions of an entry that has been applied."""
        self.resolved += len(changes.resolved)
        for decision in changes.decisions:
            self.outcomes.carry_out(decision)
        if changes.intents:
            self.questions.watch()

    # docs/protocol.md Tx14
    def drop_foreign(self, error: StoreError) -> None:
        """Drop the attempts whose home key the partition no longer owns."""
        for running in self.attempts:
            if not running.is_sent and not self._owns(running.op.key):
                self._fail(running, error)

    def wait_for(self, intents: Iterable[Intent]) -> None:
        """Ask home soon about intents for which operations wait."""
        self.questions.wait_for(intents)

    # docs/protocol.md Tx15
    def abandon(self, intents: Iterable[Intent], sink: Sink) -> None:
        """Declare the attempts of these intents aborted, without asking home. If home has decided to commit a
        transaction, half of it is lost, so only an operator may do this, and only if home is lost for good. The sink
        receives one result for each intent, with the intent's place as the token."""
        for place, intent in enumerate(intents):
            self._enqueue(Resolve(intent.key, intent.attempt, intent.seq, False, self._mark()), sink, place)

    def is_under_way(self, attempt: Attempt) -> bool:
        """Return True if this leader has the attempt in memory."""
        return attempt in self.attempts.alive

    # docs/protocol.md Tx16
    def is_home_last(self, op: Transact) -> bool:
        """Return True if this partition follows all others that own keys of the transaction, in the order in which keys
        are locked."""
        own = self._state.partition
        return all(self._participants.owner_of(each.key) < own for each in op.ops if not self._owns(each.key))

    # ── attempts ──────────────────────────────────────────────────────────────────────────────────────────────────────

    # docs/protocol.md Tx2, Tx3
    def begin(self, op: Transact, sink: Sink, token: int) -> None:
        """Begin an attempt at a transaction whose home key is here, or join the running attempt of the request."""
        try:
            if self.attempts.join(op, (sink, token)):
                return self._unclaim(op)  # its claims, if it has waited beside the request that it repeats
            running = self.attempts.begin(op, (sink, token), self._owns, self._participants.owner_of)
        except StoreError as error:
            self._unclaim(op)
            return self._deliver(sink, token, error)
        self.begun += 1
        own = self._state.partition
        if any(part.partition == own for part in running.parts):
            return self._fail(running, Unavailable(f"partition {own}: keys of the transaction are moving; retry"))
        running.began_s, running.begun_ms = self._now(), self._state.record_time_ms
        running.deadline = self._loop.call_later(PREPARE_S, self._expire, running)
        for place in range(1 if running.is_in_turn else len(running.parts)):
            self._prepare(running, place)

    def _prepare(self, running: RunningAttempt, place: int) -> None:
        """Ask a participant to prepare."""
        (begun_by, _), part = running.waiters[0], running.parts[place]
        traced = self._traced(begun_by, _PreparedSink(self, running), "prepare", part.partition)
        self._participants.send(running.prepare(part, self._mark()), traced, place)

    def prepared(self, running: RunningAttempt, place: int, result: Any) -> None:
        """Handle a participant's answer to PREPARE."""
        part = running.parts[place]
        if part.prepared is not None:
            return  # the same answer, to an earlier message
        if isinstance(result, OutcomeUnknown):  # a participant that has prepared gives its first answer again
            self._loop.call_later(AGAIN_S, self._prepare_again, running, place)
            return
        try:
            if isinstance(result, StoreError):
                raise result
            self.attempts.take(running, part, prepared_of(part, result))
        except StoreError as error:
            if running.is_alive and not running.is_sent:
                self._fail(running, _error_for_client(error, part))
            return
        if not running.is_alive:
            self._abort(running, part)
        elif running.is_prepared:
            decide = Decide(
                running.op.key, running.home.ops, int(running.op.flags), running.op.request, running=running
            )
            running.prepared_s = self._now()
            begun_by, _ = running.waiters[0]
            decided = self._traced(begun_by, _DecidedSink(self, running), "decide", self._state.partition)
            self._enqueue(decide, decided, 0)
        elif running.is_in_turn:
            self._prepare(running, place + 1)

    def _prepare_again(self, running: RunningAttempt, place: int) -> None:
        if running.is_alive:
            prepare = running.prepare(running.parts[place], self._mark())
            self._participants.send(prepare, _PreparedSink(self, running), place)

    def decided(self, running: RunningAttempt, result: Any) -> None:
        """Handle the acknowledgement or the refusal of DECIDE."""
        if not running.is_alive:
            return
        if isinstance(result, StoreError) and not (running.is_sent and isinstance(result, OutcomeUnknown)):
            return self._fail(running, result)
        if not isinstance(result, StoreError):
            self.committed += 1
        self._note(running)
        self.attempts.drop(running)
        for sink, token in running.waiters:
            self._deliver(sink, token, result)

    def _expire(self, running: RunningAttempt) -> None:
        if running.is_alive and not running.is_sent:
            slow = " and ".join(part.partition for part in running.parts if part.prepared is None) or "the home key"
            self._fail(running, Unavailable(f"{slow} did not prepare the transaction within {PREPARE_S:g} s"))

    # docs/protocol.md Tx6
    def _fail(self, running: RunningAttempt, error: StoreError) -> None:
        """Drop an attempt whose decision was not sent, so that it is aborted. Nothing is logged about it here."""
        self._note(running)
        self.attempts.drop(running)
        self._unclaim(running.op)
        self.dropped += 1
        self.conflicts += isinstance(error, Conflict)
        for part in running.parts:
            self._abort(running, part)
        for sink, token in running.waiters:
            self._deliver(sink, token, error)

    def _note(self, running: RunningAttempt) -> None:
        """Record in the slow log that an attempt has ended, if it was slow."""
        now = self._now()
        if now - running.began_s <= self._slow.limit_s or not running.began_s:
            return
        prepared = running.prepared_s or now
        self._slow.note(
            "leader",
            "transaction",
            now - running.began_s,
            key=running.op.key,
            partition=self._state.partition,
            operations=len(running.op.ops),
            prepare=prepared - running.began_s,
            decide=now - prepared,
        )

    def _abort(self, running: RunningAttempt, part: Part) -> None:
        """Tell a participant that has prepared that the attempt is aborted. This needs no proof of leadership, because
        only this leader could have decided its attempt. A participant that receives no outcome asks for it."""
        for name in () if part.prepared is None else part.prepared.intents:
            op = Resolve(name.key, running.name, name.seq, False, self._mark())
            self._participants.send(op, _IgnoredAnswer(), 0)

    def _mark(self) -> int:
        return self._state.mark


class _PreparedSink(Sink):
    """The sink of an attempt's PREPAREs. The token is the place of the participant."""

    def __init__(self, transactor: Transactor, running: RunningAttempt) -> None:
        self._transactor, self._running = transactor, running

    def complete(self, token: int, result: Result | StoreError) -> None:
        self._transactor.prepared(self._running, token, result)

    def flush(self) -> None:
        """Do nothing, because nothing is sent."""


class _DecidedSink(Sink):
    """The sink of an attempt's DECIDE."""

    def __init__(self, transactor: Transactor, running: RunningAttempt) -> None:
        self._transactor, self._running = transactor, running

    def complete(self, token: int, result: Result | StoreError) -> None:
        self._transactor.decided(self._running, result)

    def flush(self) -> None:
        """Do nothing, because the clients' sinks are flushed by the leader."""


class _IgnoredAnswer(Sink):
    """The sink of a message whose answer does not matter."""

    def complete(self, token: int, result: Result | StoreError) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing."""


def _error_for_client(error: StoreError, part: Part) -> StoreError:
    """Return the error for a client whose transaction a participant did not prepare. The attempt is dropped, so it is
    definitely not done, whatever the participant logged."""
    if isinstance(error, Moved | NotCaughtUp | NotEnoughBookies | NotLeader | OutcomeUnknown | Unavailable):
        return Unavailable(f"participant {part.partition} did not prepare the transaction: {error}")
    return error
