"""Keeps one ephemeral node of this process in place, even if sessions expire or other processes delete the node.

The caller sets the desired value: the node's data, or None for an absent node. Every hint (a watch, a reconnect, half a
minute) makes the keeper compare the current node with the desired value, so it need not see every event.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvstore.env.events import wait_within
from kvstore.env.ports import Nursery
from kvstore.errors import (
    MetadataError,
    MetadataUnavailable,
    MetadataUnknown,
    NodeExists,
    NoSuchNode,
    VersionConflict,
)
from kvstore.meta import paths
from kvstore.meta.store import Create, Delete, MetadataStore, SessionState, ensure_path

log = logging.getLogger(__name__)
pause = asyncio.sleep

CHECK_S = 30.0
RETRY_S = 0.2
"""Delay before a retry, in seconds. It is also the first delay after the keeper has replaced the node of another
session. That delay doubles up to CHECK_S, because a live process with the same name on another machine would
also replace the node."""
_ATTEMPTS_MAX = 8


def never(_: bytes) -> bool:
    """Return False. Use this for nodes that several processes may rightfully hold: the keeper then waits until the
    other process's node is gone."""
    return False


class KeptEphemeral:
    """Keeps `path` as an ephemeral node of this process. `publish` sets the desired value, and `start` keeps it in
    place.

    If a node of another session exists at `path`, the keeper replaces it if `is_our_former` returns True for its data.
    Such a node was created by an earlier session of this process, or by its dead predecessor, and exists until that
    session expires. Otherwise the keeper waits until the node is gone.
    """

    def __init__(
        self,
        store: MetadataStore,
        path: str,
        *,
        is_our_former: Callable[[bytes], bool] = never,
        on_placed: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_placed` is called whenever the node has been created or changed so that it has the desired value."""
        self._store, self._path, self._is_our_former, self._on_placed = store, path, is_our_former, on_placed
        self._wanted: bytes | None = None
        self._placed: bytes | None = None
        """The value for which `on_placed` was last called, unless a write has been sent since."""
        self._has_replaced, self._pause_s = False, RETRY_S
        self._turn = asyncio.Lock()
        self._hint = asyncio.Event()

    async def publish(self, data: bytes | None) -> None:
        """Set the desired data of the node (None: absent), and write it now.

        Raises NodeExists while another session holds the path, MetadataUnavailable, MetadataUnknown. After an error,
        the value stays desired, and a keeper that was started retries.
        """
        self._wanted = data
        try:
            await self._reconcile()
        except BaseException:
            self._hint.set()
            raise

    def start(self, nursery: Nursery) -> None:
        """Keep the node in place in the background until the nursery ends."""
        nursery.spawn(self._keep(), name=f"keep {self._path}")

    async def _keep(self) -> None:
        watch = self._store.watch(self._path, self._hint.set)
        self._hint.set()  # for changes before the watch was set
        try:
            while True:
                if not await wait_within(self._hint, CHECK_S):
                    self._pause_s = RETRY_S
                self._hint.clear()
                await self._try_once()
                if self._has_replaced:
                    self._has_replaced = False
                    await pause(self._pause_s)
                    self._pause_s = min(2 * self._pause_s, CHECK_S)
        finally:
            watch.close()

    async def _try_once(self) -> None:
        try:
            await self._reconcile()
        except (MetadataUnavailable, MetadataUnknown):
            if self._store.state is SessionState.CONNECTED:  # else the watch is called after the reconnect
                await asyncio.sleep(RETRY_S)
                self._hint.set()
        except NodeExists:
            return  # the watch is called when it is deleted
        except MetadataError as error:
            log.warning("cannot keep path=%s: %s", self._path, error)

    async def _reconcile(self) -> None:
        async with self._turn:
            for _ in range(_ATTEMPTS_MAX):
                try:
                    return await (self._remove() if self._wanted is None else self._place(self._wanted))
                except NoSuchNode:
                    await ensure_path(self._store, paths.parent(self._path))
                except VersionConflict:
                    continue
            raise MetadataError(f"{self._path} was changed by another process during each attempt to write it")

    async def _place(self, data: bytes) -> None:
        try:
            found, stat = await self._store.get(
                self._path
            )  # first, because a refused create costs the store a sync, and a read none
        except NoSuchNode:
            await self._create(data)
            return
        if stat.owner == self._store.session:
            if found != data:
                self._placed = None
                await self._store.set(self._path, data, stat.version)
            self._note_placed(data)  # also if the answer to an earlier write was lost
        elif self._is_our_former(found):
            self._placed, self._has_replaced = None, True
            await self._store.multi([Delete(self._path, stat.version), Create(self._path, data, ephemeral=True)])
            log.info("replaced the ephemeral of an earlier session path=%s", self._path)
            self._note_placed(data)
        else:
            raise NodeExists(self._path)

    def _note_placed(self, data: bytes) -> None:
        if self._placed != data:
            self._placed = data
            self._on_placed()

    async def _create(self, data: bytes) -> None:
        self._placed = None
        try:
            await self._store.create(self._path, data, ephemeral=True)
        except NodeExists:
            raise VersionConflict(self._path) from None  # the node was created since the read: read again
        self._note_placed(data)

    async def _remove(self) -> None:
        try:
            found, stat = await self._store.get(self._path)
        except NoSuchNode:
            return
        if stat.owner == self._store.session or self._is_our_former(found):
            await self._store.delete(self._path, stat.version)
