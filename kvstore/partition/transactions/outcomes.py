"""Carries out decisions: sends RESOLVE to the owner of each intent until all owners have answered RESOLVED, then
removes the decision (docs/protocol.md Tx8). A new home leader continues from the decisions in its state."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from kvstore.env.events import Alarm
from kvstore.errors import StoreError
from kvstore.partition.state.commands import Op, Resolve, Result, Sink
from kvstore.partition.state.decisions import Decision
from kvstore.partition.state.intents import IntentName
from kvstore.partition.state.internal import Attempt
from kvstore.partition.transactions.attempts import End
from kvstore.partition.transactions.lately_begun import LatelyBegun
from kvstore.partition.transactions.ports import Participants

AT_ONCE_MAX = 256
"""Maximum number of decisions that are carried out at the same time. Further decisions wait, and their intents stay."""
SLOW_S = 0.5
"""Seconds after which a decision no longer counts toward AT_ONCE_MAX, because the owner of an intent does not
answer."""
AGAIN_S, AGAIN_MAX_S = 0.05, 1.0
"""Seconds until RESOLVE is sent again to an owner that has not answered RESOLVED: at first, and at most."""
END_S = 1.0
"""Seconds for which decisions whose intents are all resolved are collected, so that one entry of the log removes all of
them. No client waits for their removal."""


class Outcomes:
    """The decisions that one home leader carries out. `owns` is True for keys that the partition owns now, `mark`
    returns the number of the state's last pin, and `enqueue` puts an operation into the leader's own queue."""

    def __init__(
        self,
        participants: Participants,
        owns: Callable[[bytes], bool],
        mark: Callable[[], int],
        enqueue: Callable[[Op, Sink, int], None],
    ) -> None:
        self.participants, self.owns, self.mark, self.enqueue = participants, owns, mark, enqueue
        self.loop = asyncio.get_running_loop()
        self._lately: LatelyBegun[Attempt] = LatelyBegun(AT_ONCE_MAX, SLOW_S)
        self._next = Alarm(self.loop, self._begin)
        self._waiting: deque[Decision] = deque()
        self._known: set[Attempt] = set()
        self._resolved: list[_Outcome] = []
        self._ends = Alarm(self.loop, self._end_all)
        self.is_stopped = False

    def __len__(self) -> int:
        return len(self._known)

    def carry_out(self, decision: Decision) -> None:
        """Send RESOLVE to the owners of the decision's intents until all have answered. Does nothing if that is under
        way."""
        if self.is_stopped or decision.attempt in self._known:
            return
        self._known.add(decision.attempt)
        self._waiting.append(decision)
        self._begin()

    def resolved(self, outcome: _Outcome) -> None:
        """Remove a decision soon, because all of its intents are resolved."""
        self._lately.end(outcome.decision.attempt)
        self._resolved.append(outcome)
        self._ends.set(END_S)
        self._begin()

    def _end_all(self) -> None:
        resolved, self._resolved = self._resolved, []
        for outcome in resolved:
            outcome.end()

    def ended(self, outcome: _Outcome) -> None:
        """Handle the end of a decision: it is removed, or another partition carries it out."""
        self._known.discard(outcome.decision.attempt)
        self._lately.end(outcome.decision.attempt)
        self._begin()

    def stop(self) -> None:
        """Stop sending, because the leadership has ended."""
        self.is_stopped = True
        self._next.cancel()
        self._ends.cancel()
        self._resolved.clear()
        self._waiting.clear()
        self._known.clear()

    def _begin(self) -> None:
        now = self.loop.time()
        while self._waiting and not self.is_stopped and self._lately.has_capacity(now):
            decision = self._waiting.popleft()
            self._lately.begin(decision.attempt, now)
            _Outcome(self, decision).notify_all()
        if self._waiting:
            self._next.set(SLOW_S)


class _Outcome(Sink):
    """One decision that is carried out, and the sink of its RESOLVEs. The token of a RESOLVE is the place of its intent
    in the decision; the token of END is -1."""

    def __init__(self, outcomes: Outcomes, decision: Decision) -> None:
        self.decision = decision
        self._outcomes = outcomes
        self._left = set(range(len(decision.intents)))
        self._delays: dict[int, float] = {}
        self._mark = 0
        """The highest pin number that an owner has sent."""

    def notify_all(self) -> None:
        if not self._left:
            self._outcomes.resolved(self)
        for place in sorted(self._left):
            self._notify(place)

    def complete(self, token: int, result: Result | StoreError) -> None:
        if self._outcomes.is_stopped:
            return
        if token < 0:
            if isinstance(result, StoreError):
                self._again(token)
            else:
                self._outcomes.ended(self)
        elif isinstance(result, int):
            self._mark = max(self._mark, result)
            self._left.discard(token)
            if not self._left:
                self._outcomes.resolved(self)
        else:
            self._again(token)

    def flush(self) -> None:
        """Do nothing, because nothing is sent."""

    def _notify(self, place: int) -> None:
        name: IntentName = self.decision.intents[place]
        op = Resolve(name.key, self.decision.attempt, name.seq, True, self._outcomes.mark())
        self._outcomes.participants.send(op, self, place)

    def end(self) -> None:
        """Queue the removal of the decision."""
        self._outcomes.enqueue(End(self.decision.home, self.decision.attempt, 0, True, self._mark), self, -1)

    def _again(self, token: int) -> None:
        delay_s = self._delays.get(token, AGAIN_S)
        self._delays[token] = min(2 * delay_s, AGAIN_MAX_S)
        self._outcomes.loop.call_later(delay_s, self._retry, token)

    def _retry(self, token: int) -> None:
        if self._outcomes.is_stopped:
            return
        if not self._outcomes.owns(self.decision.home):
            self._outcomes.ended(self)  # the partition that owns the home key now carries it out
        elif token < 0:
            self.end()
        else:
            self._notify(token)
