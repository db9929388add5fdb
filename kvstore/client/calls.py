"""Attempts, outcomes and request ids: what a client may conclude from what it hears. Decides only.

A mutation keeps its request id (client, sequence) over all attempts, so that it is applied once. What was sent and got
no answer may have been carried out: it is tried again under the same id until the deadline, and is *unknown* after it.
A refusal means "not done" only if no earlier attempt may have been carried out: a late duplicate of that one could
still arrive and find what it needs.

Request ids are numbered per partition, each numbering under a client id of its own. A request keeps the numbering it
began with, also when its key has moved, so one partition that stands still never holds back what others may forget.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvstore.backoff import delays
from kvstore.client.operations import Operation
from kvstore.errors import NotLeader, OutcomeUnknown, Refused, RequestExpired, Retryable, StoreError, Unavailable
from kvstore.limits import CLIENT_BYTES

if TYPE_CHECKING:
    from random import Random

IN_FLIGHT_MAX = 1_024
"""Operations of one partition that a client has under way; also the span of its open request sequences."""
IN_FLIGHT_BYTES_MAX = 32 << 20
RENUMBER_MAX = 3
"""How often a request may get another id because the store had forgotten how old the client is."""
SEEN_STEP_MS = 1_000
"""The leader time that requests carry moves in steps, so that requests of one time share a lane. Too old is safe."""
MISTAKEN_MS = 60_000
"""Servers that are well tell times that are seconds apart; one that had told so much more was wrong."""


class Nobody(Unavailable):
    """There was no server that could be asked; says nothing of why. Callers of clients get Unavailable itself."""

    def __init__(self) -> None:
        super().__init__("no server can be reached")


class Numbering:
    """The request ids of one client at one partition, and what it has under way there."""

    __slots__ = ("_count", "_floor", "_next", "_open", "_size", "client", "seen_ms")

    def __init__(self, client: bytes) -> None:
        if len(client) != CLIENT_BYTES:
            raise ValueError(f"want a client id of {CLIENT_BYTES} bytes, got {len(client)}")
        self.client = client
        self.seen_ms = 0
        """The leader time that new requests carry."""
        self._next = 1
        self._floor = 1
        """No more than `first_unacknowledged`, which costs a search."""
        self._open: dict[int, None] = {}
        """Sequences under way, in order."""
        self._count = 0
        self._size = 0

    @property
    def first_unacknowledged(self) -> int:
        """The caller waits for nothing below."""
        return next(iter(self._open), self._next)

    def has_room(self) -> bool:
        """Whether another operation may begin."""
        if self._next - self._floor >= IN_FLIGHT_MAX:
            self._floor = self.first_unacknowledged
        return (
            self._next - self._floor < IN_FLIGHT_MAX
            and self._count < IN_FLIGHT_MAX
            and self._size < IN_FLIGHT_BYTES_MAX
        )

    def begin(self, operation: Operation) -> None:
        """Take an operation in; a mutation gets its sequence."""
        self._count += 1
        self._size += operation.size
        operation.numbering, operation.seen_ms = self, self.seen_ms
        if not operation.is_read:
            self._number(operation)

    def end(self, operation: Operation) -> None:
        """Nobody waits for the operation any more."""
        self._count -= 1
        self._size -= operation.size
        self._open.pop(operation.sequence, None)

    def renumber(self, operation: Operation) -> None:
        """Give a mutation that was definitely not done another id, with a younger time."""
        self._open.pop(operation.sequence, None)
        self._number(operation)

    def see(self, time_ms: int) -> None:
        """A server has told the partition's time. A time of the future that a server once told is not kept: leaders
        refuse what carries it, for as long as it is ahead."""
        if time_ms >= self.seen_ms + SEEN_STEP_MS or 0 < time_ms < self.seen_ms - MISTAKEN_MS:
            self.seen_ms = time_ms

    def _number(self, operation: Operation) -> None:
        operation.sequence, operation.seen_ms = self._next, self.seen_ms
        self._open[self._next] = None
        self._next += 1


def failed_for_good(operation: Operation, error: StoreError) -> StoreError | None:
    """What to raise for an attempt that was answered with `error`; None: try again under the same id."""
    operation.is_sent = False
    if isinstance(error, OutcomeUnknown):
        operation.is_unknown = not operation.is_read
        return None
    if isinstance(error, Retryable):
        return None
    if operation.is_unknown and isinstance(error, Refused):
        return OutcomeUnknown(f"an attempt may have been carried out; a later one was refused: {error}")
    if isinstance(error, RequestExpired) and operation.attempts < RENUMBER_MAX:
        operation.numbering.renumber(operation)
        return None
    return error


def too_late(operation: Operation, last: StoreError | None, timeout_s: float) -> StoreError:
    """What to raise when the time is up. `last`: how the latest attempt failed, if it did."""
    why = f"; the last attempt: {last}" if last is not None else ""
    if not operation.is_read and (operation.is_unknown or operation.is_sent):
        return OutcomeUnknown(f"no outcome within {timeout_s:g} s{why}")
    if isinstance(last, Retryable) and not isinstance(last, Nobody):
        return last
    return Unavailable(f"no answer within {timeout_s:g} s{why}")


def lost(operation: Operation, why: str) -> StoreError:
    """How an attempt ends whose connection is gone."""
    if operation.is_sent and not operation.is_read:
        return OutcomeUnknown(why)
    return Unavailable(f"{why}; nothing was sent" if not operation.is_sent else why)


def pauses(random: Random) -> Iterator[float]:
    """Seconds before each further attempt of one operation, if nothing is learnt meanwhile."""
    yield 0.0
    yield from delays(random, first_s=0.02, cap_s=0.25)


def is_hint(error: StoreError) -> bool:
    """Whether the error names where to go, so that there is nothing to wait for."""
    return isinstance(error, NotLeader) and bool(error.address)
