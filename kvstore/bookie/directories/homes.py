"""Finds which of a bookie's directories a ledger is in.

A ledger is entirely in one directory. This also holds for ledgers that wait for the metadata store before their first
record: all requests for one ledger go to one directory as long as any of them waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from kvstore.bookie.directories.choice import Candidate, choose
from kvstore.bookie.directories.directory_storage import DirectoryStorage

log = logging.getLogger(__name__)


class LedgerDirectories:
    """Maps each ledger of a bookie to the directory that has it."""

    def __init__(self, parts: Sequence[DirectoryStorage]) -> None:
        self._parts = parts
        self._in_flight: dict[int, tuple[DirectoryStorage, int]] = {}
        """Ledgers that no directory knows, with the directory that gets their requests and the number of waiting
        requests."""

    def check(self) -> None:
        """Put ledgers that are in two directories in limbo, and fence them. That happens only if another process has
        written to a directory."""
        seen: dict[int, DirectoryStorage] = {}
        for part in self._parts:
            for ledger in sorted(part.ledgers):
                other = seen.setdefault(ledger, part)
                if other is not part:
                    where = other.directory.path, part.directory.path
                    log.error(
                        "ledger is in two directories, it may lack records in either ledger=%d first=%s second=%s",
                        ledger,
                        *where,
                    )
                    for each in (other, part):
                        each.doubt(ledger)

    @property
    def alive(self) -> list[DirectoryStorage]:
        """The directories that have not failed."""
        return [each for each in self._parts if not each.reason]

    @property
    def doubted(self) -> list[int]:
        """The ledgers in limbo."""
        of_all = (each.storage.inventory.ledgers.values() for each in self.alive)
        return sorted(ledger.id for ledgers in of_all for ledger in ledgers if ledger.is_limbo)

    async def synced(self) -> None:
        """Wait until everything accepted before this call is on the disks."""
        for part in self.alive:
            await part.storage.synced()

    def knows(self, ledger: int) -> bool:
        """Return True if any directory has, had or is about to get a record of the ledger."""
        return ledger in self._in_flight or any(part.knows(ledger) for part in self._parts)

    def is_elsewhere(self, part: DirectoryStorage, ledger: int) -> bool:
        """Return True if a directory other than `part` has the ledger."""
        in_flight = self._in_flight.get(ledger)
        if in_flight is not None and in_flight[0] is not part:
            return True
        return any(other.knows(ledger) for other in self._parts if other is not part)

    def _home(self, ledger: int) -> DirectoryStorage | None:
        """Return the directory that the ledger is in, or belongs to as long as none has it; None if any will do."""
        for part in self._parts:
            if ledger in part.ledgers:
                return part
        for part in self._parts:
            if ledger in part.tombstones:
                return part
        if (in_flight := self._in_flight.get(ledger)) is not None:
            return in_flight[0]
        return next((part for part in self._parts if part.is_limbo), None)

    def asked(self, ledger: int) -> DirectoryStorage:
        """Return the directory to which a request about the ledger goes. If no directory has the ledger, any of them
        gives the same answer."""
        return self._home(ledger) or self.alive[0]

    def chosen(self, ledger: int) -> DirectoryStorage:
        """Return the directory that gets the ledger's first record."""
        home = self._home(ledger)
        if home is not None:
            return home
        alive = self.alive
        of_all = [Candidate(each.directory.number, each.free_bytes(), each.storage.is_readonly) for each in alive]
        number = choose(ledger, of_all)
        return next(each for each in alive if each.directory.number == number)

    def hold(self, ledger: int, done: Callable[..., Any]) -> tuple[DirectoryStorage, Callable[..., Any]]:
        """Return the directory for a record of the ledger, and the callback to use instead of `done`. Requests for a
        ledger that no directory knows go to the same directory until they are answered."""
        for part in self._parts:
            if ledger in part.ledgers:
                return part, done
        part = self.chosen(ledger)
        self._in_flight[ledger] = part, self._in_flight.get(ledger, (part, 0))[1] + 1

        def answer(*given: Any) -> None:
            count = self._in_flight[ledger][1] - 1
            if count:
                self._in_flight[ledger] = part, count
            else:
                del self._in_flight[ledger]
            done(*given)

        return part, answer
