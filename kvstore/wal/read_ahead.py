"""Entries that several tasks will ask for one by one, in rising order, read many at once before they do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Generic, TypeVar

from kvstore.types import NO_ENTRY, EntryId

T = TypeVar("T")

ENTRIES_MAX = 64
"""Read at once."""


class ReadAhead(Generic[T]):
    """`following` says which entries, from a given one on, will be asked for; `fetch` brings those of them that it
    can."""

    def __init__(
        self,
        following: Callable[[EntryId], Sequence[EntryId]],
        fetch: Callable[[Sequence[EntryId]], Awaitable[Mapping[EntryId, T]]],
    ) -> None:
        self._following, self._fetch = following, fetch
        self._here: dict[EntryId, T] = {}
        """What has come and is not taken: of one batch, and of the one before that its askers have not reached."""
        self._tried = NO_ENTRY
        """Of the entries up to this one none will come any more."""
        self._lock = asyncio.Lock()

    async def take(self, entry: EntryId) -> T | None:
        """None: it has not come, and is to be asked for alone."""
        if entry not in self._here:
            async with self._lock:
                if entry > self._tried:
                    await self._read(self._following(entry))
        return self._here.pop(entry, None)

    async def _read(self, entries: Sequence[EntryId]) -> None:
        found = await self._fetch(entries) if len(entries) > 1 else {}
        self._here.update(found)
        # What an answer had no room for is asked for again; if nothing came at all, each is asked for alone.
        self._tried = max(found, default=entries[-1])
