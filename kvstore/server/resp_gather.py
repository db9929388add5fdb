"""One command made of several operations: collects their results and makes one reply of them."""

from __future__ import annotations

from typing import Any, Protocol

from kvstore.server.backend import Backend
from kvstore.server.resp_commands import Several


class Answering(Protocol):
    """The connection that the command came on."""

    @property
    def backend(self) -> Backend: ...
    def answer(self, number: int, reply: bytes) -> None: ...
    def flush(self) -> None: ...


class Gather:
    """Several operations of one command: the sink of their results, which makes one reply of them."""

    __slots__ = ("_connection", "_missing", "_number", "_results", "_several")

    def __init__(self, connection: Answering, number: int, several: Several) -> None:
        self._connection, self._number, self._several = connection, number, several
        self._missing = len(several.ops)
        self._results: list[Any] = [None] * self._missing

    def submit(self) -> None:
        submit = self._connection.backend.submit
        for index, op in enumerate(self._several.ops):
            submit(op, self, index)

    def complete(self, token: int, result: Any) -> None:
        self._results[token] = result
        self._missing -= 1
        if not self._missing:
            self._connection.answer(self._number, self._several.combine(self._results))

    def flush(self) -> None:
        self._connection.flush()
