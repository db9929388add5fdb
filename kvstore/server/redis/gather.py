"""One command made of several operations: collects their results and makes one reply of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from kvstore.errors import InvalidRequest
from kvstore.namespaces.rates import Rates
from kvstore.partition.state.commands import Code, Sink
from kvstore.server.redis.plans import Several
from kvstore.server.redis.replies import failure
from kvstore.server.routing.backend import Backend

READS_AT_ONCE = 256
"""Reads of one command that are under way at a time. Whether their values are too large together is known only when
they come."""
REPLY_BYTES_MAX = 32 << 20
"""Bytes of the values in one reply."""
_GET = int(Code.GET)


class Answering(Protocol):
    """Takes the reply, and bounds what is held for it: kvstore.server.redis.reply_queue.ReplyQueue."""

    @property
    def backend(self) -> Backend: ...
    @property
    def line(self) -> object: ...
    @property
    def is_gone(self) -> bool: ...
    @property
    def rates(self) -> Callable[[], Rates | None]: ...
    def admit(self, number: int, size: int) -> bool: ...
    def put_off(self, number: int, size: int) -> None: ...
    def gather(self, size: int) -> bool: ...
    def gathered(self, size: int) -> None: ...
    def answer(self, number: int, reply: bytes) -> None: ...
    def flush(self) -> None: ...


class Gather(Sink):
    """Several operations of one command: the sink of their results, which makes one reply of them.

    Reads whose values do not fit in what the connection may hold are given up. The connection does them again, with a
    Gather for which there `is_reserved` room. Rates have let all of them pass before.
    """

    __slots__ = (
        *("_are_values", "_begun", "_bytes", "_connection", "_counted", "_is_reserved", "_missing", "_number"),
        *("_results", "_several"),
    )

    def __init__(self, connection: Answering, number: int, several: Several, *, is_reserved: bool = False) -> None:
        self._connection, self._number, self._several = connection, number, several
        self._missing = len(several.ops)
        self._results: list[Any] = [None] * self._missing
        self._are_values = self._missing > 0 and several.ops[0][0] == _GET
        self._is_reserved = is_reserved
        self._counted = 0
        """Bytes of values that the connection counts for this command."""
        self._begun = self._bytes = 0

    @property
    def line(self) -> object:
        return self._connection.line

    @property
    def is_gone(self) -> bool:
        return self._connection.is_gone

    @property
    def at_once(self) -> int:
        """How many of its operations are under way at a time."""
        return min(READS_AT_ONCE, self._missing) if self._are_values else self._missing

    def submit(self) -> None:
        self._submit(self.at_once)

    def _submit(self, count: int) -> None:
        begun = self._begun
        some = self._several.ops[begun : begun + count]
        self._begun = begun + len(some)
        with paid(self._connection.rates()):
            self._connection.backend.submit(some, self, range(begun, self._begun))

    def complete(self, token: int, result: Any) -> None:
        if self._are_values and isinstance(result, tuple):
            self._count(result)
        self._missing -= 1
        if self._results:
            self._results[token] = result
        if not self._missing:
            self._end()

    def _count(self, record: Any) -> None:
        """Count a record's value. All records are let go once they are too large together, or find no room."""
        self._bytes += len(record[0])
        if self._bytes > REPLY_BYTES_MAX:
            self._results.clear()
        if self._results and not self._is_reserved:
            if self._connection.gather(len(record[0])):
                self._counted += len(record[0])
            else:
                self._results.clear()
                self._uncount()

    def _uncount(self) -> None:
        self._connection.gathered(self._counted)
        self._counted = 0

    def _end(self) -> None:
        connection, number = self._connection, self._number
        self._uncount()
        if self._bytes > REPLY_BYTES_MAX:
            connection.answer(number, failure(_too_large()))
        elif not self._results:
            connection.put_off(number, REPLY_BYTES_MAX)
        elif connection.admit(number, 0):
            connection.answer(number, self._several.combine(self._results))

    def flush(self) -> None:
        unbegun = len(self._several.ops) - self._begun
        if unbegun and self._missing - unbegun <= READS_AT_ONCE // 2:
            if not self._results or self.is_gone:
                self._give_up_rest()
            else:
                self._submit(READS_AT_ONCE)
        self._connection.flush()

    def _give_up_rest(self) -> None:
        """The values are too large, or the client is gone: nothing more is read."""
        rest = range(self._begun, len(self._several.ops))
        self._begun = len(self._several.ops)
        for token in rest:
            self.complete(token, None)


def paid(rates: Rates | None) -> AbstractContextManager[None]:
    """Have what is submitted within not counted: rates have let it pass before."""
    return nullcontext() if rates is None else rates.paid()


def _too_large() -> InvalidRequest:
    return InvalidRequest(f"the reply would be larger than {REPLY_BYTES_MAX} bytes: ask for fewer keys at once")
