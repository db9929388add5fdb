"""Ledger metadata in the metadata store, in Apache BookKeeper's layout: create, read, compare-and-set, remove, list,
watch."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import suppress

from kvstore.errors import (
    Corrupted,
    MetadataError,
    NodeExists,
    NoSuchLedger,
    NoSuchNode,
    NotEmpty,
    UndecodableNode,
)
from kvstore.meta import ledger_metadata, paths
from kvstore.meta.layout import get_unless_closed
from kvstore.meta.store import MetadataStore, Watch, ensure_path
from kvstore.meta.update import until_known, update
from kvstore.types import BookieId, LedgerId, LedgerMetadata

_CREATE_ATTEMPTS_MAX = 8
_STEP = 200
"""Number of names that are processed between two turns of the event loop."""


class LedgerStore:
    """Reads and writes the metadata of all ledgers. Calls raise MetadataUnavailable or MetadataUnknown in addition
    to the errors that they name."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def create(self, metadata: LedgerMetadata) -> int:
        """Store a new ledger and return its version. Raises NodeExists if another creator has used the id.

        `metadata.token` must be a random number. It identifies this caller's own create if the create succeeded
        although the connection broke, or if an earlier attempt made it.
        """
        if not metadata.token:
            raise ValueError(f"ledger {metadata.ledger}: a create needs a token")
        return await until_known(lambda: self._create(metadata))

    async def _create(self, metadata: LedgerMetadata) -> int:
        path = paths.ledger(metadata.ledger)
        for _ in range(_CREATE_ATTEMPTS_MAX):
            try:
                await self._store.create(path, ledger_metadata.encode(metadata))
                return 0
            except NoSuchNode:
                await ensure_path(self._store, paths.parent(path))  # or it was removed as empty meanwhile
            except NodeExists:
                return await self._version_of_own(metadata)
        raise MetadataError(f"ledger {metadata.ledger}: its parent nodes were deleted during each attempt to create it")

    async def _version_of_own(self, metadata: LedgerMetadata) -> int:
        try:
            found, version = await self.read(metadata.ledger)
        except NoSuchLedger:
            raise NodeExists(paths.ledger(metadata.ledger)) from None  # of another creator, and removed meanwhile
        if found.token != metadata.token or version != 0:
            raise NodeExists(paths.ledger(metadata.ledger))  # of another creator, or taken over by a recovery already
        return version

    async def read(self, ledger: LedgerId) -> tuple[LedgerMetadata, int]:
        """Return the metadata of a ledger and their version. The result may be slightly old, which suffices for a
        compare-and-set.

        Raises NoSuchLedger, UndecodableNode.
        """
        try:
            data, stat = await get_unless_closed(self._store, paths.ledger(ledger))
        except NoSuchNode:
            raise NoSuchLedger(f"there is no ledger {ledger}") from None
        try:
            return ledger_metadata.decode(ledger, data), stat.version
        except Corrupted as error:
            raise UndecodableNode(str(error)) from error

    async def count_by_bookie(self) -> Counter[BookieId]:
        """Return the number of ledgers that name each bookie. Reads the metadata of every ledger; ledgers whose
        metadata cannot be decoded do not count."""
        found: Counter[BookieId] = Counter()
        for ledger in await self.list_ids():
            with suppress(NoSuchLedger, Corrupted):
                metadata, _ = await self.read(ledger)
                found.update({bookie for fragment in metadata.fragments for bookie in fragment.ensemble})
        return found

    async def read_latest(self, ledger: LedgerId) -> tuple[LedgerMetadata, int]:
        """Return the metadata of a ledger and their version, at least as new as this call. For callers that act on
        an absent ledger or on a state without writing. Raises NoSuchLedger, UndecodableNode."""
        await self._store.sync(paths.ledger(ledger))
        return await self.read(ledger)

    # docs/protocol.md A12
    async def younger_bookies(self, ledger: LedgerId, bookies: Collection[BookieId]) -> frozenset[BookieId]:
        """Return the given bookies whose cookie was created after the ledger. Cookies that were moved here from another
        store together with the ledger do not count, because the order of their creation is not known."""
        await self._store.sync(paths.COOKIES)
        made = max(await self._created(paths.ledger(ledger)), await self._created(paths.INSTANCE_ID))
        return frozenset([each for each in bookies if await self._created(paths.cookie(each)) > made])

    async def _created(self, path: str) -> int:
        """Return the id of the transaction that created the node, or 0 if it does not exist."""
        try:
            return (await self._store.get(path))[1].created
        except NoSuchNode:
            return 0

    async def write(self, metadata: LedgerMetadata, version: int) -> int:
        """Replace the metadata of a ledger if they have this version, and return the new version. Raises
        VersionConflict, NoSuchLedger, MetadataUnknown."""
        try:
            return await self._store.set(paths.ledger(metadata.ledger), ledger_metadata.encode(metadata), version)
        except NoSuchNode:
            raise NoSuchLedger(f"there is no ledger {metadata.ledger}") from None

    async def update(
        self, ledger: LedgerId, change: Callable[[LedgerMetadata], LedgerMetadata]
    ) -> tuple[LedgerMetadata, int]:
        """Replace the metadata by `change(metadata)`, using the compare-and-set loop of `kvstore.meta.update`.
        Raises the errors of that loop, and NoSuchLedger."""
        return await update(lambda: self.read(ledger), self.write, change)

    async def remove(self, ledger: LedgerId, version: int) -> None:
        """Delete the metadata of a ledger that has this version; -1 for any version. Succeeds if the ledger does not
        exist. Raises VersionConflict."""
        path = paths.ledger(ledger)
        await until_known(lambda: self._remove(path, version))
        while (path := paths.parent(path)) != paths.LEDGERS:
            try:
                await until_known(lambda: self._remove(path, -1))
            except NotEmpty:
                return

    async def _remove(self, path: str, version: int) -> None:
        try:
            await self._store.delete(path, version)
        except NoSuchNode:
            return

    async def list_ids(self) -> list[LedgerId]:
        """Return the ids of all ledgers, ascending.

        A listing that fails raises an error; it never looks like a shorter list. A ledger created while the listing
        runs may be absent, so a caller that deletes what is not listed first checks `read_latest`.
        """
        return sorted([ledger async for page in self.pages() for ledger in page])

    async def pages(self) -> AsyncIterator[list[LedgerId]]:
        """Yield the ids of all ledgers in pages of up to 10,000, which bounds the memory. Each page is ascending;
        short ids come first."""
        await self._store.sync(paths.LEDGERS)
        trees = [name for name in await self._store.children(paths.LEDGERS) if paths.is_ledger_tree(name)]
        levels = [iter(sorted((paths.join(paths.LEDGERS, name) for name in trees), key=lambda path: (len(path), path)))]
        while levels:
            path = next(levels[-1], None)
            if path is None:
                levels.pop()
                continue
            page, below = list[LedgerId](), list[str]()
            for number, name in enumerate(await self._children(path)):
                child = paths.join(path, name)
                if (ledger := paths.ledger_of(child)) is not None:
                    page.append(ledger)
                elif not name.startswith("L"):
                    below.append(child)
                if number % _STEP == _STEP - 1:
                    await asyncio.sleep(0)  # let other tasks run
            if page:
                yield page
            levels.append(iter(below))

    async def _children(self, path: str) -> list[str]:
        try:
            return await self._store.children(path)
        except NoSuchNode:
            return []  # it was empty and has been removed

    def watch(self, ledger: LedgerId, changed: Callable[[], None]) -> Watch:
        """Call `changed` soon after the ledger's metadata may have changed."""
        return self._store.watch(paths.ledger(ledger), changed)
