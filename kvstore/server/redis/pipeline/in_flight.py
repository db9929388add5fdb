"""Tracks the commands that one Redis connection has in flight, and decides whether more may begin.

Decides only, except that `settle` also sends the replies that are due, because answered commands stop counting at that
moment.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.partition.state.commands import Append, Op, Put
from kvstore.server.redis.pipeline.in_flight_limit import InFlightLimit
from kvstore.server.redis.pipeline.key_hazards import KeyHazards, parts_of
from kvstore.server.redis.pipeline.latency import CommandLatency, Timed
from kvstore.server.redis.pipeline.reply_queue import ReplyQueue
from kvstore.server.redis.plans import Several, Single


class InFlight:
    """The commands of one connection that have begun and are not answered: their share of the limit of all connections,
    the keys that they read and write, and the round that is timed."""

    def __init__(self, limit: InFlightLimit, rounds: CommandLatency, replies: ReplyQueue) -> None:
        self.limit, self.rounds, self._replies = limit, rounds, replies
        self.hazards = KeyHazards()
        self.timed: Timed | None = None
        """The round that is timed, or None."""
        self.accounted = 0
        """Number of commands that the limit does not count: answered commands, and commands whose replies wait for
        other replies."""
        self.value_bytes = 0
        """Bytes of values that the limit counts, of all commands since nothing was in flight."""
        self.alone = -1
        """Number of the last command that submits its writes in portions. No other command begins before it is
        answered, because a later write of one of its keys could overtake it."""
        self._more_operations = 0
        """Number of operations that the limit counts in addition to one for each command, since nothing was in flight.
        """

    def must_wait(self, operations: int = 1) -> bool:
        """Return True if a command with this many operations must wait."""
        replies = self._replies
        in_flight = replies.issued - replies.answered
        return (
            replies.is_full
            or (self.limit.is_full and (in_flight > 0 or not self.limit.has_spare(operations)))
            or in_flight >= replies.in_flight_max
            or replies.answered < replies.rereads.below
            or replies.answered <= self.alone
        )

    def note(self, plan: Single | Several, ops: Sequence[Op]) -> None:
        """Record which keys the next command reads and writes. `plan` is the plan with which the command may be
        repeated when its turn comes."""
        number = self._replies.issued
        self.hazards.note(ops, number)
        self._replies.rereads.note(plan, number)
        for op in parts_of(ops):
            if op.__class__ is Put or op.__class__ is Append:
                self.value_bytes += len(op.value)

    def note_more(self, operations: int) -> None:
        """Count the operations of a command after its first. Call this at once, because the next command checks the
        limit."""
        self._more_operations += operations
        self.limit.begin(0, 0, operations)

    def settle(self) -> None:
        """Send the replies that are due, and stop counting the answered commands. Values stop counting when all
        commands are answered."""
        replies, size, more = self._replies, 0, 0
        answered = replies.answered
        if self.timed is not None and answered > self.timed[0]:
            self.rounds.end(self.timed)
            self.timed = None
        if replies.write():
            self.hazards.answered(replies.issued, answered)
        if replies.rereads.numbers:  # the client reads too slowly: reads that wait for their turn are not in flight
            answered += len(replies.rereads.numbers) + len(replies.early)
        if replies.issued == answered:
            size, self.value_bytes = self.value_bytes, 0
            more, self._more_operations = self._more_operations, 0
        newly, self.accounted = answered - self.accounted, answered
        if newly < 0:  # a postponed read is in flight again
            self.limit.begin(-newly, 0)
        elif newly or size or more:
            self.limit.end(newly, size, more)
