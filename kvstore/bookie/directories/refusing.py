"""The storage of a directory whose disk has failed while the bookie runs: it refuses everything, and denies nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvstore.bookie.adds import Done
from kvstore.bookie.reader import ReadDone
from kvstore.bookie.statistics import Statistics
from kvstore.proto.bookkeeper import LAST_ENTRY, Status

CANNOT_STORE = Status.IO_ERROR
STATE_UNKNOWN = Status.UNKNOWN_LEDGER_STATE
"""The answer that the entry is neither known to be here nor known to be absent, and that no fence was set."""


def _nothing() -> None:
    """Do nothing: there is no question to cancel."""


# docs/protocol.md B24
class Refusing:
    """A storage with the calls of kvstore.bookie.storage.BookieStorage that concern one ledger. It refuses all of
    them."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics

    def may_ask(self, _ledger: int, _key: bytes, _body: bytes | None = None, *, is_writers: bool = False) -> bool:
        """Return False: it never asks the metadata store."""
        return False

    def add(self, _ledger: int, _entry: int, _body: bytes, _key: bytes, *, recovery: bool, done: Done) -> None:
        done(CANNOT_STORE)

    def write_lac(self, _ledger: int, _body: bytes, _key: bytes, *, done: Done) -> None:
        done(CANNOT_STORE)

    def force(self, _ledger: int, *, done: Done) -> None:
        done(CANNOT_STORE)

    def read(self, _ledger: int, entry: int, *, key: bytes | None = None, fence: bool = False, done: ReadDone) -> None:
        done(self._unknown(), entry, None, -1)

    def read_on(
        self, _ledger: int, _entry: int, body: bytes, _limits: tuple[int, int], *, passes_over: bool = False
    ) -> list[bytes]:
        return [body]

    def read_lac(self, _ledger: int, *, done: Callable[[Status, bytes | None, bytes | None], Any]) -> None:
        done(self._unknown(), None, None)

    def long_poll(self, _ledger: int, _previous_lac: int, _timeout_ms: int, *, done: ReadDone) -> Callable[[], None]:
        done(self._unknown(), LAST_ENTRY, None, -1)
        return _nothing

    def listen(self, _ledger: int, _listener: object) -> None:
        return None

    def list_entries(self, _ledger: int, *, done: Callable[[Status, Sequence[tuple[int, int]]], Any]) -> None:
        done(self._unknown(), ())

    def _unknown(self) -> Status:
        self._statistics.refused_unknown += 1
        return STATE_UNKNOWN
