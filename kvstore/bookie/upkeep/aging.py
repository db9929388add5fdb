"""Raises the age of a bookie's directories while it stores entries, so that a copy of the directories is recognized as
a copy when it is started."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from kvstore.bookie.age import age_in, note_age
from kvstore.env.ports import Env
from kvstore.errors import Corrupted, MetadataError
from kvstore.meta.cookie_store import CookieStore
from kvstore.types import BookieId

log = logging.getLogger(__name__)

AGE_S = 5.0
"""Seconds between two increments. A copy that is less old than this may be taken for the original. Each increment costs
a write to the metadata store and a sync of the disk."""


# docs/protocol.md B34
class Aging:
    """The aging of one bookie's directories while it runs."""

    def __init__(
        self,
        env: Env,
        cookies: CookieStore,
        bookie: BookieId,
        directories: Callable[[], Sequence[str]],
        stored_bytes: Callable[[], int],
    ) -> None:
        """`directories` returns the directories with a journal. It must return none while one of them has failed,
        because that directory would fall behind although a restart finds everything that it had stored. `stored_bytes`
        returns the number of bytes stored since the start."""
        self._env, self._cookies, self._bookie = env, cookies, bookie
        self._directories, self._stored_bytes = directories, stored_bytes
        self._stored = 0
        self._is_failing = False
        self._age: int | None = None
        """The age that this process last recorded, or None if it has recorded none."""

    async def run(self) -> None:
        while True:
            await asyncio.sleep(AGE_S)
            try:
                await self.poll()
                self._is_failing = False
            except (MetadataError, Corrupted, OSError) as error:
                if not self._is_failing:
                    log.warning("directories do not age bookie=%s error=%r", self._bookie, error)
                self._is_failing = True

    async def poll(self) -> None:
        """Raise the age if anything was stored since the last call. Raises MetadataError, Corrupted or OSError."""
        stored, directories = self._stored_bytes(), self._directories()
        if stored == self._stored or not directories:
            return
        disk = self._env.disk
        known, version = await self._cookies.age(self._bookie)
        if self._age is not None and known > self._age:
            self._env.fatal(f"another process has started as bookie {self._bookie} on a copy of its directories")
            return
        age = max(known, *(age_in(disk, each) for each in directories)) + 1
        for each in directories:
            await note_age(disk, each, age)
        self._age = age  # whether or not the metadata store gets it
        await self._cookies.set_age(self._bookie, age, version)
        self._stored = stored
