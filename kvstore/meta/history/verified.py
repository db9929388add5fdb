"""A metadata store that refuses every call while its driver is connected to an older copy of the metadata than was
seen before. All calls of a node pass through this store, whatever the driver (docs/protocol.md B29)."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Sequence

from kvstore.env.ports import Disk, Nursery
from kvstore.meta.history.seen import Version
from kvstore.meta.history.verifier import Verifier
from kvstore.meta.store import Change, Create, MetadataStore, SessionState, SetData, Stat, Watch
from kvstore.meta.watch_call import WatchCall


# docs/protocol.md B29
class VerifiedStore:
    """A MetadataStore that verifies the store of a driver. Call `open` before any other method. `close` also closes
    the driver's store."""

    def __init__(self, inner: MetadataStore, disk: Disk, node: str) -> None:
        self.history = inner.history
        self._inner = inner
        self._verifier = Verifier(inner, disk, node, self._changed)
        self._reported = SessionState.SUSPENDED
        self._watches: list[_VerifiedWatch] = []
        self._listeners: list[tuple[Callable[[SessionState], None], contextvars.Context]] = []

    async def open(self, nursery: Nursery) -> None:
        """Verify the store now, and verify each later connection in the background. Raises MetadataLost if the store
        is an older copy, MetadataUnavailable, MetadataUnknown."""
        await self._verifier.start(nursery)

    @property
    def state(self) -> SessionState:
        state = self._inner.state
        if state is not SessionState.CONNECTED or self._verifier.is_open:
            return state
        return SessionState.OLDER if self._verifier.older else SessionState.SUSPENDED

    @property
    def session(self) -> int:
        return self._inner.session

    async def get(self, path: str) -> tuple[bytes, Stat]:
        self._verifier.check(path)
        seen = self._verifier.seen
        before = seen.highest(path)
        data, stat = await self._inner.get(path)
        if not seen.note(path, stat):
            return await self._verifier.judge(path)
        if before is not None and before < Version(stat.created, stat.version):
            self._verifier.news += 1
        return data, stat

    async def children(self, path: str) -> list[str]:
        self._verifier.check(path)
        return await self._inner.children(path)

    async def create(self, path: str, data: bytes = b"", *, ephemeral: bool = False, sequential: bool = False) -> str:
        self._verifier.check(path)
        created = await self._inner.create(path, data, ephemeral=ephemeral, sequential=sequential)
        self._verifier.news += not ephemeral
        return created

    async def set(self, path: str, data: bytes, version: int) -> int:
        self._verifier.check(path)
        written = await self._inner.set(path, data, version)
        self._verifier.seen.note_written(path, written)
        self._verifier.news += 1
        return written

    async def delete(self, path: str, version: int) -> None:
        self._verifier.check(path)
        await self._inner.delete(path, version)

    async def multi(self, changes: Sequence[Change]) -> None:
        if not changes:
            return
        self._verifier.check(changes[0].path)
        await self._inner.multi(changes)
        for each in changes:
            if isinstance(each, SetData):  # a write of any version, -1, says nothing about the new one: 0 is never news
                self._verifier.seen.note_written(each.path, each.version + 1)
            self._verifier.news += isinstance(each, SetData) or (isinstance(each, Create) and not each.ephemeral)

    async def sync(self, path: str) -> None:
        self._verifier.check(path)
        await self._inner.sync(path)

    def watch(self, path: str, changed: Callable[[], None]) -> Watch:
        watch = _VerifiedWatch(self, self._verifier, changed)
        watch.inner = self._inner.watch(path, watch.hint)
        self._watches.append(watch)
        return watch

    def on_state(self, listener: Callable[[SessionState], None]) -> None:
        self._listeners.append((listener, contextvars.copy_context()))

    async def close(self) -> None:
        await self._inner.close()

    def forget(self, watch: _VerifiedWatch) -> None:
        """Remove a watch that was closed."""
        if watch in self._watches:
            self._watches.remove(watch)

    def _changed(self) -> None:
        """Notify all listeners and watches whether the store can be used."""
        state = self.state
        if state is self._reported:
            return
        self._reported = state
        for listener, context in self._listeners:
            asyncio.get_running_loop().call_soon(listener, state, context=context)
        for watch in list(self._watches):
            watch.report(state)


class _VerifiedWatch:
    """A watch that delays calls until the connection is verified. The driver calls it after each reconnect, before
    the verification."""

    def __init__(self, store: VerifiedStore, verifier: Verifier, changed: Callable[[], None]) -> None:
        self.inner: Watch
        self._store, self._verifier, self._changed = store, verifier, changed
        self._has_missed = self._is_closed = False
        self._call = WatchCall(changed, lambda: not self._is_closed)

    def close(self) -> None:
        self._is_closed = True
        self.inner.close()
        self._store.forget(self)

    def hint(self) -> None:
        """Handle the driver's report that something may have changed."""
        if self._verifier.is_open:
            self._changed()
        else:
            self._has_missed = True

    def report(self, state: SessionState) -> None:
        """Deliver a call that was delayed. Also deliver a call if an older copy was found, so that the caller
        notices it."""
        if state is SessionState.OLDER or (state is SessionState.CONNECTED and self._has_missed):
            self._has_missed = False
            self._call.call_soon()
