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
    """The set of bookies as it was last read. It stays as it is while the metadata store is away.

    Addresses and zones of bookies that have left the set are remembered: a registration ends with a session, and the
    bookie may still run. Its connection shows whether it does.
    """

    def __init__(self, store: MetadataStore) -> None:
        self.current = RegisteredBookies({}, {})
        self._client = RegistrationClient(store)
        self._addresses: dict[BookieId, str] = {}
        self._zones: dict[BookieId, str] = {}
        self._hint = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []

    def address(self, bookie: BookieId) -> str | None:
        """Return the address at which the bookie listens or last did; None if it was never seen."""
        return self._addresses.get(bookie)

    def zone(self, bookie: BookieId) -> str:
        """Return the zone of the bookie, or its last one; empty if it is not known."""
        return self._zones.get(bookie, "")

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` on the event loop each time `current` has changed."""
        self._listeners.append(listener)

    async def start(self, nursery: Nursery) -> None:
        """Read once, then keep up to date. Raises MetadataUnavailable, MetadataUnknown if the first read fails."""
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
        self._hint.set()  # for changes between the first read and the watches
        try:
            while True:
                await wait_within(self._hint, LOOK_AGAIN_S)
                self._hint.clear()
                try:
                    await self.refresh()
                except MetadataError as error:  # the watches are called after the reconnect
                    if not isinstance(error, MetadataUnavailable | MetadataUnknown):
                        log.warning("cannot read the bookies, keeping those that are known: %s", error)
        finally:
            for watch in watches:
                watch.close()
