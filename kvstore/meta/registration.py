"""Which bookies there are: registration by the bookies themselves, their cookies, and the clients' view of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from kvstore.env.ports import Nursery
from kvstore.errors import Corrupted, MetadataError, NodeExists, NoSuchNode
from kvstore.meta import paths
from kvstore.meta.cookies import Cookie, decode_cookie, encode_cookie
from kvstore.meta.ephemeral import RETRY_S, KeptEphemeral
from kvstore.meta.service_info import check_bookie_id, decode_service_info, encode_service_info
from kvstore.meta.store import MetadataStore, Watch, ensure_path
from kvstore.meta.update import until_known
from kvstore.types import BookieId

REGISTER_ATTEMPTS_MAX = 50
"""Times RETRY_S: longer than a session, so that the registration of a dead predecessor elsewhere has expired."""


class BookieRegistration:
    """One bookie's registration, kept in place from `start` until its nursery ends, over lost sessions."""

    def __init__(self, store: MetadataStore, bookie: BookieId, address: str) -> None:
        check_bookie_id(bookie)
        self._is_readonly = False
        self._unfinished = asyncio.Event()
        self._info = encode_service_info(address)
        # Whoever registered this id with this address is gone: this process listens there now.
        self._available = KeptEphemeral(store, paths.available(bookie), is_our_former=self._info.__eq__)
        self._readonly = KeptEphemeral(store, paths.readonly(bookie), is_our_former=self._info.__eq__)

    async def start(self, nursery: Nursery, *, readonly: bool = False) -> None:
        """Register. Raises NodeExists if another live process holds this id, MetadataUnavailable, MetadataUnknown."""
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
        """Move between the writable and the read-only bookies.

        On an error of the store the move stays wanted, and is made when the store can be reached.
        """
        self._is_readonly = readonly
        try:
            await self._move()
        except MetadataError:
            self._unfinished.set()
            raise

    async def stop(self) -> None:
        """Withdraw from both. Errors of the store are passed on; the session's end does the same."""
        await self._available.publish(None)
        await self._readonly.publish(None)

    async def _move(self) -> None:
        """First there, then no more here: between the two it is in both, and never in neither."""
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


class RegistrationManager:
    """Cookies: which directories belong to which bookie id. Versions as in MetadataStore."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def write_cookie(self, cookie: Cookie, version: int | None) -> int:
        """Compare-and-set, or create if `version` is None; returns the new version.

        Raises NodeExists (created before, with other contents), VersionConflict, NoSuchNode.
        """
        path, data = paths.cookie(cookie.bookie), encode_cookie(cookie)
        if version is not None:
            return await self._store.set(path, data, version)
        return await until_known(lambda: self._create_cookie(path, data))

    async def _create_cookie(self, path: str, data: bytes) -> int:
        await ensure_path(self._store, paths.COOKIES)
        try:
            await self._store.create(path, data)
            return 0
        except NodeExists:
            found, stat = await self._store.get(path)
            if found != data:
                raise
            return stat.version

    async def read_cookie(self, bookie: BookieId) -> tuple[Cookie, int]:
        """Cookie and version as of now: from an older version a bookie would conclude that its directory is a copy.
        Raises NoSuchNode, Corrupted."""
        path = paths.cookie(bookie)
        await self._store.sync(path)
        await self._store.sync(path)
        data, stat = await self._store.get(path)
        return decode_cookie(data, what=path), stat.version

    async def delete_cookie(self, bookie: BookieId, version: int) -> None:
        """Raises VersionConflict, NoSuchNode."""
        await self._store.delete(paths.cookie(bookie), version)

    async def cookies(self) -> list[BookieId]:
        """Every bookie id that was ever formatted and not decommissioned, whether it runs or not; sorted."""
        await self._store.sync(paths.LEDGERS)
        try:
            return [BookieId(name) for name in await self._store.children(paths.COOKIES)]
        except NoSuchNode:
            return []


class Bookies(NamedTuple):
    """The registered bookies at one moment, and the `host:port` of each."""

    writable: dict[BookieId, str]
    readonly: dict[BookieId, str]

    @property
    def all(self) -> dict[BookieId, str]:
        return {**self.readonly, **self.writable}


class RegistrationClient:
    """Reads which bookies are registered. For a view that is kept up to date see `kvstore.meta.bookies`."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def bookies(self) -> Bookies:
        """Raises MetadataUnavailable, or MetadataUnknown (harmless: nothing was written); never a part of the set."""
        writable = await self._registered(paths.AVAILABLE)
        return Bookies(writable, await self._registered(paths.READONLY))

    async def _registered(self, directory: str) -> dict[BookieId, str]:
        try:
            names = await self._store.children(directory)
        except NoSuchNode:
            return {}
        found: dict[BookieId, str] = {}
        for name in names:
            path = paths.join(directory, name)
            if path != paths.READONLY and (address := await self._address(path)) is not None:
                found[BookieId(name)] = address
        return found

    async def _address(self, path: str) -> str | None:
        """None if it has gone meanwhile, or names no address that we understand."""
        with suppress(NoSuchNode, Corrupted):
            data, _ = await self._store.get(path)
            return decode_service_info(BookieId(path.rpartition("/")[2]), data)
        return None

    def watch(self, changed: Callable[[], None]) -> list[Watch]:
        """Call `changed` soon after the set of writable or of read-only bookies may have changed."""
        return [self._store.watch(directory, changed) for directory in (paths.AVAILABLE, paths.READONLY)]
