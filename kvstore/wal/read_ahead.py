"""Reads entries in batches before several tasks ask for them one by one, in rising order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Generic, TypeVar

from kvstore.types import NO_ENTRY, EntryId

T = TypeVar("T")

ENTRIES_MAX = 64
"""Maximum number of entries in a batch."""


class ReadAhead(Generic[T]):
    """A read-ahead. `following` returns the entries, from a given one on, that will be asked for; `fetch` reads those
    of them that it can."""

    def __init__(
        self,
        following: Callable[[EntryId], Sequence[EntryId]],
        fetch: Callable[[Sequence[EntryId]], Awaitable[Mapping[EntryId, T]]],
    ) -> None:
        self._following, self._fetch = following, fetch
        self._here: dict[EntryId, T] = {}
        """Entries that were read and not taken: of one batch, and of the batch before as far as it was not asked
        for."""
        self._tried = NO_ENTRY
        """No batch will contain entries up to this one any more."""
        self._lock = asyncio.Lock()

    async def take(self, entry: EntryId) -> T | None:
        """Return the entry, or None if it must be read alone."""
        if entry not in self._here:
            async with self._lock:
                if entry > self._tried:
                    await self._read(self._following(entry))
        return self._here.pop(entry, None)

    async def _read(self, entries: Sequence[EntryId]) -> None:
        found = await self._fetch(entries) if len(entries) > 1 else {}
        self._here.update(found)
        # Entries for which an answer had no space are requested again. If nothing was returned, each is read alone.
        self._tried = max(found, default=entries[-1])
