"""The list of bookies: bookies register themselves, and clients read the registrations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import NamedTuple

from kvstore.env.ports import Nursery
from kvstore.errors import Corrupted, MetadataError, NodeExists, NoSuchNode
from kvstore.meta import paths
from kvstore.meta.ephemeral import RETRY_S, KeptEphemeral
from kvstore.meta.layout import get_unless_closed
from kvstore.meta.service_info import check_bookie_id, decode_service_info, decode_zone, encode_service_info
from kvstore.meta.store import MetadataStore, Watch
from kvstore.types import BookieId

REGISTER_ATTEMPTS_MAX = 50
"""Maximum number of attempts to register, RETRY_S apart. They take longer than a session, so the registration of a
dead predecessor on another machine has expired by then."""


class BookieRegistration:
    """The registration of one bookie. It is kept in place, even if sessions are lost, from `start` until the nursery
    ends."""

    def __init__(self, store: MetadataStore, bookie: BookieId, address: str, zone: str = "") -> None:
        check_bookie_id(bookie)
        self._is_readonly = False
        self._unfinished = asyncio.Event()
        self._turn = asyncio.Lock()
        self._info = encode_service_info(address, zone)

        def is_former(found: bytes) -> bool:
            with suppress(Corrupted):
                return decode_service_info(bookie, found) == decode_service_info(bookie, self._info)
            return False

        # The process that registered this id with this address is gone, because this process listens there now.
        self._available = KeptEphemeral(store, paths.available(bookie), is_our_former=is_former)
        self._readonly = KeptEphemeral(store, paths.readonly(bookie), is_our_former=is_former)

    async def start(self, nursery: Nursery, *, readonly: bool = False) -> None:
        """Register as a writable or read-only bookie. Raises NodeExists if another live process has this id,
        MetadataUnavailable, MetadataUnknown."""
        self._is_readonly = readonly
        for attempt in range(REGISTER_ATTEMPTS_MAX):
            try:
                await self._move()
                break
            except NodeExists:
                if attempt == REGISTER_ATTEMPTS_MAX - 1:
                    raise
                await asyncio.sleep(RETRY_S)
        self._available.start(nursery)
        self._readonly.start(nursery)
        nursery.spawn(self._finish_moves(), name="bookie registration")

    async def set_readonly(self, readonly: bool) -> None:
        """Move the registration between the writable and the read-only bookies.

        If the store raises an error, the move stays pending and is made once the store can be reached.
        """
        self._is_readonly = readonly
        try:
            await self._move()
        except MetadataError:
            self._unfinished.set()
            raise

    async def stop(self) -> None:
        """Remove the bookie's registrations. Errors of the store are raised and may be ignored, because the end of
        the session also removes the registrations."""
        await self._available.publish(None)
        await self._readonly.publish(None)

    async def _move(self) -> None:
        """Register in the new place, then withdraw from the old one. So the bookie is always in at least one place.
        Moves are serialized, because each of two concurrent moves could remove the registration that the other has
        made."""
        async with self._turn:
            there, here = (self._readonly, self._available) if self._is_readonly else (self._available, self._readonly)
            await there.publish(self._info)
            await here.publish(None)

    async def _finish_moves(self) -> None:
        while True:
            await self._unfinished.wait()
            await asyncio.sleep(RETRY_S)
            with suppress(MetadataError):
                await self._move()
                self._unfinished.clear()


class RegisteredBookies(NamedTuple):
    """The registered bookies at one moment, each with its `host:port`."""

    writable: dict[BookieId, str]
    readonly: dict[BookieId, str]
    zones: Mapping[BookieId, str] = MappingProxyType({})
    """Zone of each bookie whose registration names one."""

    @property
    def all(self) -> dict[BookieId, str]:
        return {**self.readonly, **self.writable}


class RegistrationClient:
    """Reads which bookies are registered. `kvstore.meta.bookies` offers a view that is kept up to date."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def bookies(self) -> RegisteredBookies:
        """Return all registered bookies. Raises MetadataUnavailable or MetadataUnknown; neither does harm, because
        nothing is written."""
        zones: dict[BookieId, str] = {}
        writable = await self._registered(paths.AVAILABLE, zones)
        readonly = await self._registered(paths.READONLY, zones)
        # A bookie that has become writable meanwhile was in neither.
        writable |= await self._registered(paths.AVAILABLE, zones, besides=writable)
        return RegisteredBookies(writable, readonly, zones)

    async def names(self) -> frozenset[BookieId]:
        """Return the ids of all registered bookies, including bookies whose address this build cannot decode."""
        return frozenset().union(*await self.names_by_state())

    async def names_by_state(self) -> tuple[frozenset[BookieId], frozenset[BookieId]]:
        """Return the ids of the writable and of the read-only bookies, without reading their addresses.

        The writable bookies are read before and after the read-only ones, so a bookie that changes its state meanwhile
        is in one of the two sets.
        """
        await self._store.sync(paths.AVAILABLE)
        before = await self._names(paths.AVAILABLE)
        readonly = await self._names(paths.READONLY)
        writable = before | await self._names(paths.AVAILABLE)
        return writable, readonly - writable

    async def _names(self, directory: str) -> frozenset[BookieId]:
        with suppress(NoSuchNode):
            names = await self._store.children(directory)
            return frozenset(BookieId(each) for each in names if paths.join(directory, each) != paths.READONLY)
        return frozenset()

    async def _registered(
        self, directory: str, zones: dict[BookieId, str], *, besides: Container[BookieId] = ()
    ) -> dict[BookieId, str]:
        """Return the addresses of the bookies in a directory, except for those in `besides`. Adds the zones that
        they name to `zones`."""
        try:
            names = await self._store.children(directory)
        except NoSuchNode:
            return {}
        found: dict[BookieId, str] = {}
        for name in names:
            path = paths.join(directory, name)
            if (
                path != paths.READONLY
                and BookieId(name) not in besides
                and (info := await self._info(path)) is not None
            ):
                found[BookieId(name)], zone = info
                if zone:
                    zones[BookieId(name)] = zone
        return found

    async def _info(self, path: str) -> tuple[str, str] | None:
        """Return the address and the zone of a bookie, or None if the bookie has gone meanwhile or has no address
        that this build understands."""
        with suppress(NoSuchNode, Corrupted):
            data, _ = await get_unless_closed(self._store, path)
            bookie = BookieId(path.rpartition("/")[2])
            address = decode_service_info(bookie, data)
            return None if address is None else (address, decode_zone(bookie, data))
        return None

    def watch(self, changed: Callable[[], None]) -> list[Watch]:
        """Call `changed` soon after the set of writable or of read-only bookies may have changed."""
        return [self._store.watch(directory, changed) for directory in (paths.AVAILABLE, paths.READONLY)]
