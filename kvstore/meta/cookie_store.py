"""Bookies' cookies in the metadata store, which tie directories to a bookie id, and the ages of these directories."""

from __future__ import annotations

from contextlib import suppress

from kvstore.errors import Corrupted, NodeExists, NoSuchNode
from kvstore.meta import paths
from kvstore.meta.cookies import Cookie, decode_cookie, encode_cookie
from kvstore.meta.store import Check, Create, Delete, MetadataStore, ensure_path
from kvstore.meta.update import until_known
from kvstore.types import BookieId

AGE_DIGITS = 18


class CookieStore:
    """Reads and writes the cookies of all bookies. Calls raise MetadataUnavailable or MetadataUnknown in addition to
    the errors that they name."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def write(self, cookie: Cookie, version: int | None) -> int:
        """Replace a cookie that has this version, or create the cookie if `version` is None. Returns the new version.

        Raises NodeExists if the cookie exists with other contents, VersionConflict, NoSuchNode.
        """
        path, data = paths.cookie(cookie.bookie), encode_cookie(cookie)
        if version is not None:
            return await self._store.set(path, data, version)
        return await until_known(lambda: self._create(path, data))

    async def _create(self, path: str, data: bytes) -> int:
        await ensure_path(self._store, paths.COOKIES)
        try:
            await self._store.create(path, data)
            return 0
        except NodeExists:
            found, stat = await self._store.get(path)
            if found != data:
                raise
            return stat.version

    async def read(self, bookie: BookieId) -> tuple[Cookie, int]:
        """Return the current cookie of a bookie and its version. The read is up to date, because an older cookie
        would lead the bookie to conclude that its directory is a copy. Raises NoSuchNode, Corrupted."""
        path = paths.cookie(bookie)
        await self._store.sync(path)
        data, stat = await self._store.get(path)
        return decode_cookie(data, what=path), stat.version

    async def delete(self, bookie: BookieId, version: int) -> None:
        """Delete a cookie and the bookie's age in one transaction. If the age remained, another bookie with this id
        would distrust its new directories. Raises VersionConflict, NoSuchNode."""
        attempts = 0

        async def delete() -> None:
            nonlocal attempts
            attempts += 1
            try:
                await self._delete(bookie, version)
            except NoSuchNode:
                if attempts == 1:  # otherwise it was our own delete, whose answer was lost
                    raise

        await until_known(delete)

    async def _delete(self, bookie: BookieId, version: int) -> None:
        going = [Delete(paths.cookie(bookie), version)]
        with suppress(NoSuchNode):
            _, stat = await self._store.get(paths.age(bookie))
            going.append(Delete(paths.age(bookie), stat.version))
        await self._store.multi(going)

    async def age(self, bookie: BookieId) -> tuple[int, int | None]:
        """Return the age of the bookie's directories and the version of the age's node, or 0 and None if there is no
        age. Raises Corrupted."""
        path = paths.age(bookie)
        await self._store.sync(path)
        try:
            data, stat = await self._store.get(path)
        except NoSuchNode:
            return 0, None
        if not (data.isdigit() and len(data) <= AGE_DIGITS):
            raise Corrupted(f"{path}: expected at most {AGE_DIGITS} digits, got {data[:40]!r}")
        return int(data), stat.version

    async def set_age(self, bookie: BookieId, age: int, version: int | None) -> None:
        """Replace the age if its node has this version, or create it if `version` is None. The bookie must have a
        cookie. Raises NodeExists, VersionConflict, NoSuchNode."""
        path, data = paths.age(bookie), b"%d" % age
        if version is not None:
            await self._store.set(path, data, version)
            return
        await ensure_path(self._store, paths.AGES)
        await self._store.multi([Check(paths.cookie(bookie), -1), Create(path, data)])

    async def bookies(self) -> list[BookieId]:
        """Return the ids of all bookies that were formatted and not decommissioned, sorted. They need not be
        running."""
        await self._store.sync(paths.LEDGERS)
        try:
            return [BookieId(name) for name in await self._store.children(paths.COOKIES)]
        except NoSuchNode:
            return []
