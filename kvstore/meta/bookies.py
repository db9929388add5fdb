"""The registered bookies as this process knows them, kept up to date. Lookups are plain calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvstore.env.events import wait_within
from kvstore.env.ports import Nursery
from kvstore.errors import MetadataError, MetadataUnavailable, MetadataUnknown
from kvstore.meta.registration import RegisteredBookies, RegistrationClient
from kvstore.meta.store import MetadataStore
from kvstore.types import BookieId

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 30.0


class BookieView:
    """The last set of bookies that was read. While the metadata store is away it stays as it was.

    An address or a zone once known is remembered when its bookie is gone from the set: a registration vanishes with a
    session, and the bookie may well be there. Whether it is, its connection tells.
    """

    def __init__(self, store: MetadataStore) -> None:
        self.current = RegisteredBookies({}, {})
        self._client = RegistrationClient(store)
        self._addresses: dict[BookieId, str] = {}
        self._zones: dict[BookieId, str] = {}
        self._hint = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []

    def address(self, bookie: BookieId) -> str | None:
        """Where the bookie listens, or last did; None if it was never seen."""
        return self._addresses.get(bookie)

    def zone(self, bookie: BookieId) -> str:
        """Where the bookie stands, or last did; empty: nowhere in particular, as far as is known."""
        return self._zones.get(bookie, "")

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` on the event loop whenever `current` has become another set."""
        self._listeners.append(listener)

    async def start(self, nursery: Nursery) -> None:
        """Read once, then keep up to date. Raises MetadataUnavailable, MetadataUnknown if that first read fails."""
        await self.refresh()
        nursery.spawn(self._keep(), name="watch bookies")

    async def refresh(self) -> None:
        """Read now. Raises MetadataUnavailable, MetadataUnknown; the view then stays as it was."""
        found = await self._client.bookies()
        self._addresses.update(found.all)
        self._zones.update((bookie, found.zones.get(bookie, "")) for bookie in found.all)
        if found == self.current:
            return
        self.current = found
        log.info("bookies writable=%s readonly=%s", sorted(found.writable), sorted(found.readonly))
        for listener in self._listeners:
            listener()

    async def _keep(self) -> None:
        watches = self._client.watch(self._hint.set)
        self._hint.set()  # what changed since the first read, before the watches stood
        try:
            while True:
                await wait_within(self._hint, LOOK_AGAIN_S)
                self._hint.clear()
                try:
                    await self.refresh()
                except MetadataError as error:  # the watches are called after the reconnect
                    if not isinstance(error, MetadataUnavailable | MetadataUnknown):
                        log.warning("the bookies cannot be read, going on with those that are known: %s", error)
        finally:
            for watch in watches:
                watch.close()
