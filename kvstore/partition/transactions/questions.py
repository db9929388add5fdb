"""Asks home about intents whose outcome this partition has not received (docs/protocol.md Tx6): once an operation has
waited for an intent for a moment, and in any case once the intent is old. The answer is logged as RESOLVED."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from kvstore.env.events import Alarm
from kvstore.errors import StoreError
from kvstore.partition.state.commands import Inquire, Op, Resolve, Result, Sink
from kvstore.partition.state.intents import Intent, IntentName, Intents
from kvstore.partition.transactions.lately_begun import LatelyBegun
from kvstore.partition.transactions.ports import Participants

WAITED_S = 0.05
"""Seconds for which an operation waits for an intent before home is asked. Most outcomes arrive earlier without a
question."""
OLD_S = 1.0
"""Seconds after which home is asked about an intent for which no operation waits."""
SWEEP_S = 0.5
AGAIN_S, AGAIN_MAX_S = 0.05, 1.0
"""Seconds until home is asked again: at first, and at most."""
AT_ONCE_MAX = 256
"""Maximum number of questions that begin between two sweeps. Further intents are asked about in a later sweep. Older
questions do not count, because homes that do not answer must not delay the questions to other homes."""


class Questions:
    """The questions of one leader about the intents in its state. `owns` is True for keys that the partition owns now,
    `mark` returns the number of the state's last pin, and `enqueue` puts an operation into the leader's own queue."""

    def __init__(
        self,
        intents: Callable[[], Intents],
        participants: Participants,
        owns: Callable[[bytes], bool],
        now: Callable[[], float],
        mark: Callable[[], int],
        enqueue: Callable[[Op, Sink, int], None],
    ) -> None:
        self.intents, self.participants, self.owns, self.mark = intents, participants, owns, mark
        self.enqueue = enqueue
        self.loop = asyncio.get_running_loop()
        self._now = now
        self._seen: dict[IntentName, float] = {}
        """When this leader first saw each intent, in seconds of the clock."""
        self._open: dict[IntentName, _Question] = {}
        self._lately: LatelyBegun[IntentName] = LatelyBegun(AT_ONCE_MAX, SWEEP_S)
        self._sweep = Alarm(self.loop, self._ask_about_old)
        self.is_stopped = False
        self.asked = 0
        """Number of questions sent so far."""

    def __len__(self) -> int:
        return len(self._open)

    def wait_for(self, intents: Iterable[Intent]) -> None:
        """Ask about these intents soon, because operations wait for their outcome."""
        for intent in intents:
            self._ask(intent, WAITED_S)

    def watch(self) -> None:
        """Ask about the state's intents once they are old."""
        if not self.is_stopped and len(self.intents()):
            self._sweep.set(SWEEP_S)

    def stop(self) -> None:
        """Stop asking, because the leadership has ended."""
        self.is_stopped = True
        self._sweep.cancel()
        self._open.clear()

    def ended(self, question: _Question) -> None:
        """Handle the end of a question."""
        self._open.pop(question.intent.name, None)
        self._lately.end(question.intent.name)

    def _ask(self, intent: Intent, after_s: float) -> None:
        now = self.loop.time()
        if self.is_stopped or intent.name in self._open or not self._lately.has_capacity(now):
            return
        self._lately.begin(intent.name, now)
        question = self._open[intent.name] = _Question(self, intent)
        self.loop.call_later(after_s, question.ask)

    def _ask_about_old(self) -> None:
        now, seen = self._now(), self._seen
        self._seen = {intent.name: seen.get(intent.name, now) for intent in self.intents() if self.owns(intent.key)}
        for name, since in self._seen.items():
            if now - since >= OLD_S and (intent := self.intents().find(*name)) is not None:
                self._ask(intent, 0.0)
        self.watch()


class _Question(Sink):
    """One question, and the sink of its answers. The token of INQUIRE is 0, the token of the RESOLVE that follows
    is 1."""

    def __init__(self, questions: Questions, intent: Intent) -> None:
        self.intent = intent
        self._questions = questions
        self._delay_s = AGAIN_S

    def ask(self) -> None:
        """Send the question, unless the intent is gone."""
        questions, intent = self._questions, self.intent
        if questions.is_stopped:
            return
        if questions.intents().find(intent.key, intent.seq) is None or not questions.owns(intent.key):
            return questions.ended(self)
        questions.asked += 1
        op = Inquire(intent.home, intent.attempt, intent.key, intent.seq, questions.mark())
        questions.participants.send(op, self, 0)

    def complete(self, token: int, result: Result | StoreError) -> None:
        questions, intent = self._questions, self.intent
        if questions.is_stopped:
            return
        if token:
            questions.ended(self)
        elif isinstance(result, list | tuple) and len(result) == 2:
            is_committed, mark = result
            questions.enqueue(Resolve(intent.key, intent.attempt, intent.seq, bool(is_committed), mark), self, 1)
        else:
            questions.loop.call_later(self._delay_s, self.ask)
            self._delay_s = min(2 * self._delay_s, AGAIN_MAX_S)

    def flush(self) -> None:
        """Do nothing, because nothing is sent."""
