"""A view of the registered bookies that is kept up to date. Lookups need no request to the metadata store."""

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

RECHECK_S = 30.0


class BookieView:
    """The set of registered bookies as last read. It stays unchanged while the metadata store is unreachable.

    The view remembers the addresses and zones of bookies that have left the set. A registration ends with its session,
    while the bookie may still run; only a connection to the bookie shows whether it does.
    """

    def __init__(self, store: MetadataStore) -> None:
        self.current = RegisteredBookies({}, {})
        self._client = RegistrationClient(store)
        self._addresses: dict[BookieId, str] = {}
        self._zones: dict[BookieId, str] = {}
        self._hint = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []

    def address(self, bookie: BookieId) -> str | None:
        """Return the last known address of the bookie, or None if the bookie was never seen."""
        return self._addresses.get(bookie)

    def zone(self, bookie: BookieId) -> str:
        """Return the last known zone of the bookie, or an empty string if no zone is known."""
        return self._zones.get(bookie, "")

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` on the event loop whenever `current` has changed."""
        self._listeners.append(listener)

    async def start(self, nursery: Nursery) -> None:
        """Read the bookies once, then keep the view up to date until the nursery ends. Raises MetadataUnavailable,
        MetadataUnknown if the first read fails."""
        await self.refresh()
        nursery.spawn(self._keep(), name="watch bookies")

    async def refresh(self) -> None:
        """Read the bookies now. Raises MetadataUnavailable, MetadataUnknown; the view then stays unchanged."""
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
                await wait_within(self._hint, RECHECK_S)
                self._hint.clear()
                try:
                    await self.refresh()
                except MetadataError as error:  # the watches are called after the reconnect
                    if not isinstance(error, MetadataUnavailable | MetadataUnknown):
                        log.warning("cannot read the bookies, keeping those that are known: %s", error)
        finally:
            for watch in watches:
                watch.close()
