"""One command made of several operations: collects their results and makes one reply of them."""

from __future__ import annotations

from typing import Any, Protocol

from kvstore.errors import InvalidRequest
from kvstore.partition.commands import Code
from kvstore.server.backend import Backend
from kvstore.server.resp_commands import Several

READS_AT_ONCE = 256
"""Reads of one command under way. Whether their values are too large together is known only when they come."""
REPLY_BYTES_MAX = 32 << 20
"""Of the values in one reply; half of what a client may leave unread."""
_GET = int(Code.GET)


class Answering(Protocol):
    """The connection that the command came on."""

    @property
    def backend(self) -> Backend: ...
    def answer(self, number: int, reply: bytes) -> None: ...
    def flush(self) -> None: ...


class Gather:
    """Several operations of one command: the sink of their results, which makes one reply of them."""

    __slots__ = ("_are_values", "_begun", "_bytes", "_connection", "_missing", "_number", "_results", "_several")

    def __init__(self, connection: Answering, number: int, several: Several) -> None:
        self._connection, self._number, self._several = connection, number, several
        self._missing = len(several.ops)
        self._results: list[Any] = [None] * self._missing
        self._are_values = self._missing > 0 and several.ops[0][0] == _GET
        self._begun = self._bytes = 0

    def submit(self) -> None:
        self._submit(READS_AT_ONCE if self._are_values else len(self._results))

    def _submit(self, count: int) -> None:
        begun, submit = self._begun, self._connection.backend.submit
        some = self._several.ops[begun : begun + count]
        self._begun = begun + len(some)
        for index, op in enumerate(some, begun):
            submit(op, self, index)

    def complete(self, token: int, result: Any) -> None:
        if self._are_values and isinstance(result, tuple):
            self._bytes += len(result[0])
            if self._bytes > REPLY_BYTES_MAX:
                result = _too_large()
        self._results[token] = result
        self._missing -= 1
        if not self._missing:
            self._connection.answer(self._number, self._several.combine(self._results))

    def flush(self) -> None:
        unbegun = len(self._results) - self._begun
        if unbegun and self._missing - unbegun <= READS_AT_ONCE // 2:
            if self._bytes > REPLY_BYTES_MAX:
                self._refuse_rest()
            else:
                self._submit(READS_AT_ONCE)
        self._connection.flush()

    def _refuse_rest(self) -> None:
        """The reply is too large already: nothing more is read for it."""
        rest = range(self._begun, len(self._results))
        self._begun = len(self._results)
        for token in rest:
            self.complete(token, _too_large())


def _too_large() -> InvalidRequest:
    return InvalidRequest(f"the reply would be larger than {REPLY_BYTES_MAX} bytes: ask for fewer keys at once")
