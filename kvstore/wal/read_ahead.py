"""Reads entries in batches before several tasks request them one by one, in ascending order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Generic, TypeVar

from kvstore.types import NO_ENTRY, EntryId

T = TypeVar("T")

ENTRIES_MAX = 64
"""Maximum number of entries in a batch."""


class ReadAhead(Generic[T]):
    """A buffer of entries that were read in batches. `following` returns the entries, from the given one on, that will
    be requested; `fetch` reads as many of them as it can."""

    def __init__(
        self,
        following: Callable[[EntryId], Sequence[EntryId]],
        fetch: Callable[[Sequence[EntryId]], Awaitable[Mapping[EntryId, T]]],
    ) -> None:
        self._following, self._fetch = following, fetch
        self._here: dict[EntryId, T] = {}
        """Entries that were read but not requested yet, from the last two batches."""
        self._tried = NO_ENTRY
        """Entries up to this one are not read in a batch again."""
        self._lock = asyncio.Lock()

    async def take(self, entry: EntryId) -> T | None:
        """Return the entry, possibly after reading the next batch. Return None if the caller must read the entry
        alone."""
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
