"""One directory of a bookie that has several: its storage, and the requests that wait for its answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Any

from kvstore.bookie.authority import MetadataAuthority
from kvstore.bookie.config import BookieConfig
from kvstore.bookie.directories.gathering import Directory, unreadable
from kvstore.bookie.directories.refusing import CANNOT_STORE, Refusing
from kvstore.bookie.statistics import Statistics
from kvstore.bookie.storage import BookieStorage
from kvstore.bookie.upkeep.limbo import Elsewhere, record_nothing, survey
from kvstore.os_errors import is_passing

log = logging.getLogger(__name__)


class DirectoryStorage:
    """The storage of one directory. spread.py sends requests to `calls`, which is `storage` until the directory
    fails."""

    __slots__ = ("_asked", "calls", "config", "directory", "ledgers", "reason", "storage", "tombstones")

    def __init__(self, directory: Directory, config: BookieConfig, storage: BookieStorage) -> None:
        self.directory, self.config = directory, config
        self.storage = storage
        self.calls: BookieStorage | Refusing = storage
        self.ledgers: Collection[int] = ()
        """The ledgers in the directory, or at the time of its failure."""
        self.tombstones: Collection[int] = ()
        self.reason = ""
        """Reason why the directory has failed; empty while it works."""
        self._asked: dict[object, Callable[[], Any]] = {}
        """How to refuse each unanswered request."""

    @property
    def is_limbo(self) -> bool:
        """True if records of unknown ledgers may have been lost in this directory."""
        return self.storage.inventory.is_limbo

    async def start(self) -> None:
        """Read the directory back. Raises a ConfigError that names the directory, or OSError if there is no space."""
        try:
            await self.storage.start(self.directory.doubts)
        except OSError as error:
            if is_passing(error):
                raise
            raise unreadable(self.directory.path, error) from error
        self.storage.adds.refusable = lambda done: self.asked(done, CANNOT_STORE)
        self.ledgers, self.tombstones = self.storage.inventory.ledgers, self.storage.inventory.tombstones

    def free_bytes(self) -> int:
        """Return the free bytes of the directory, or 0 if it has failed or its disk fails now."""
        if self.reason:
            return 0  # a disk that hangs is not asked
        try:
            return self.storage.free_bytes()
        except OSError:
            return 0

    def space(self) -> tuple[int, int]:
        """Return the total and the free bytes of the directory, or zeros if its disk fails."""
        try:
            return self.storage.space()
        except OSError:
            return 0, 0

    def refresh_statistics(self) -> Statistics:
        """Return the directory's statistics. Those of a failed directory stay as they were, without free bytes."""
        return self.storage.statistics if self.reason else self.storage.refresh_statistics()

    def knows(self, ledger: int) -> bool:
        return ledger in self.ledgers or ledger in self.tombstones

    def doubt(self, ledger: int) -> None:
        """Put the ledger in limbo, and fence it. Raises JournalFull."""
        found = self.storage.inventory.ledgers[ledger]
        self.storage.facts.set_limbo(found, True)
        self.storage.facts.fence(ledger, found.key)

    def asked(self, done: Callable[..., Any], *refusal: Any) -> Callable[..., None]:
        """Return a callback to use instead of `done`. It is called at most once, with `refusal` if the directory fails
        before the answer."""

        def answer(*given: Any) -> None:
            if self._asked.pop(answer, None) is not None:
                done(*given)

        self._asked[answer] = partial(done, *refusal)
        return answer

    def cancelling(self, answer: Callable[..., None], cancel: Callable[[], None]) -> Callable[[], None]:
        """Return a function that cancels the request of `answer`, as `cancel` does in the storage."""

        def both() -> None:
            self._asked.pop(answer, None)
            cancel()

        return both

    # docs/protocol.md B24
    def fail(self, reason: str) -> None:
        """Stop using the directory, because its disk has failed. `refuse_all` refuses the outstanding requests."""
        self.reason = reason
        self.calls = Refusing(self.storage.statistics)
        self.ledgers, self.tombstones = frozenset(self.ledgers), frozenset(self.tombstones)
        statistics = self.storage.statistics
        self.storage.inventory.count(statistics)
        statistics.free_bytes = 0

    def refuse_all(self) -> None:
        """Refuse the requests that wait for the metadata store, or for a sync that will never come. Their outcome is
        unknown."""
        for group in self.storage.journal.unreported():
            adds = list(group.adds)
            group.adds.clear()
            for add in adds:
                self._refuse(partial(add[5], CANNOT_STORE))
        self.storage.adds.pending_bytes = 0
        asked, self._asked = self._asked, {}
        for refuse in asked.values():
            self._refuse(refuse)

    # docs/protocol.md B24
    async def survey(self, authority: MetadataAuthority, is_elsewhere: Elsewhere) -> None:
        """Find out which ledgers this failed directory may lack records of, and refuse these too. Until then it refuses
        every ledger that no directory knows."""
        await survey(self.storage, authority, is_elsewhere, record_nothing)
        self.ledgers = frozenset(self.storage.inventory.ledgers)

    def _refuse(self, refuse: Callable[[], Any]) -> None:
        try:
            refuse()
        except Exception:  # an error of one client must not keep the others from their answers, nor the gate shut
            log.exception("callback of a refused request failed path=%s", self.directory.path)

    def stop(self) -> None:
        """Stop writing."""
        with suppress(OSError):
            self.storage.stop()
