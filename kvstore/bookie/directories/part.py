"""One directory of a bookie that has several: its storage, and who waits for an answer of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Any

from kvstore.bookie.config import BookieConfig
from kvstore.bookie.directories.gathering import Directory, unreadable
from kvstore.bookie.directories.refusing import CANNOT_STORE, Refusing
from kvstore.bookie.storage import BookieStorage
from kvstore.os_errors import is_passing

log = logging.getLogger(__name__)


class DirectoryStorage:
    """Asked by spread.py: `calls` takes them, as long as the directory lives its own storage."""

    __slots__ = ("_asked", "calls", "config", "directory", "ledgers", "reason", "storage", "tombstones")

    def __init__(self, directory: Directory, config: BookieConfig, storage: BookieStorage) -> None:
        self.directory, self.config = directory, config
        self.storage = storage
        self.calls: BookieStorage | Refusing = storage
        self.ledgers: Collection[int] = ()
        """What it has, or had when it failed."""
        self.tombstones: Collection[int] = ()
        self.reason = ""
        """Why it has failed; empty: it has not."""
        self._asked: dict[object, Callable[[], Any]] = {}
        """How to refuse each question that was not answered yet."""

    @property
    def is_limbo(self) -> bool:
        """Records of ledgers that nobody knows here may have been lost in it."""
        return self.storage.inventory.is_limbo

    async def start(self) -> None:
        """Read it back. Raises ConfigError that names it, OSError (no room)."""
        try:
            await self.storage.start(self.directory.doubts)
        except OSError as error:
            if is_passing(error):
                raise
            raise unreadable(self.directory.path, error) from error
        self.ledgers, self.tombstones = self.storage.inventory.ledgers, self.storage.inventory.tombstones

    def free_bytes(self) -> int:
        """Bytes that are free in it; 0 if its disk does not say."""
        try:
            return self.storage.free_bytes()
        except OSError:
            return 0

    def space(self) -> tuple[int, int]:
        """Bytes in all, and bytes that are free; none if its disk does not say."""
        try:
            return self.storage.space()
        except OSError:
            return 0, 0

    def knows(self, ledger: int) -> bool:
        return ledger in self.ledgers or ledger in self.tombstones

    def doubt(self, ledger: int) -> None:
        """Neither show nor deny what is not found of the ledger, and let no writer add to it. Raises JournalFull."""
        found = self.storage.inventory.ledgers[ledger]
        self.storage.facts.set_limbo(found, True)
        self.storage.facts.fence(ledger, found.key)

    def asked(self, done: Callable[..., Any], *refusal: Any) -> Callable[..., None]:
        """Returns what answers in place of `done`: once, and with `refusal` if the directory fails before."""

        def answer(*given: Any) -> None:
            if self._asked.pop(answer, None) is not None:
                done(*given)

        self._asked[answer] = partial(done, *refusal)
        return answer

    def taken_back(self, answer: Callable[..., None], take_back: Callable[[], None]) -> Callable[[], None]:
        """Returns what takes back the question that `answer` is to answer, as `take_back` does in the storage."""

        def both() -> None:
            self._asked.pop(answer, None)
            take_back()

        return both

    # docs/protocol.md B24
    def fail(self, reason: str) -> None:
        """Its disk has failed: take nothing more. What was asked for is refused by `refuse_all`."""
        self.reason = reason
        self.calls = Refusing(self.storage.statistics)
        self.ledgers, self.tombstones = frozenset(self.ledgers), frozenset(self.tombstones)

    def refuse_all(self) -> None:
        """Refuse what waits for a sync that never comes, and for the metadata store. What was stored of it, nobody
        knows."""
        for group in self.storage.journal.unreported():
            adds = list(group.adds)
            group.adds.clear()
            for add in adds:
                self._refuse(partial(add[5], CANNOT_STORE))
        self.storage.adds.pending_bytes = 0
        asked, self._asked = self._asked, {}
        for refuse in asked.values():
            self._refuse(refuse)

    def _refuse(self, refuse: Callable[[], Any]) -> None:
        try:
            refuse()
        except Exception:  # a fault of one client's must not keep the others from their answers, nor the door shut
            log.exception("%s whoever waited for it failed", self.directory.path)

    def stop(self) -> None:
        """Write nothing more."""
        with suppress(OSError):
            self.storage.stop()
