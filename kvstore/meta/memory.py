"""The in-memory driver of the metadata store: one session on a MemoryTree. For tests, and for clusters in one
process."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Sequence

from kvstore.errors import MetadataUnavailable
from kvstore.meta import paths
from kvstore.meta.memory_tree import MemoryTree
from kvstore.meta.store import Change, Delete, MetadataHistory, SessionState, SetData, Stat, Watch
from kvstore.meta.watch_call import WatchCall

__all__ = ["MemoryStore", "MemoryTree"]


class MemoryStore:
    """A MetadataStore on a MemoryTree. It is connected until a test calls `suspend` or `expire`; `resume` reconnects
    it."""

    def __init__(self, tree: MemoryTree | None = None) -> None:
        self.tree = tree or MemoryTree()
        self._session = self.tree.open_session()
        self._state = SessionState.CONNECTED
        self.history: MetadataHistory = Generations(1)
        self._watches: list[_MemoryWatch] = []
        self._listeners: list[tuple[Callable[[SessionState], None], contextvars.Context]] = []

    @property
    def state(self) -> SessionState:
        return self._state

    @property
    def session(self) -> int:
        return self._session if self._state is not SessionState.LOST else 0

    async def get(self, path: str) -> tuple[bytes, Stat]:
        await self._turn()
        return self.tree.get(path)

    async def children(self, path: str) -> list[str]:
        await self._turn()
        return self.tree.children(path)

    async def create(self, path: str, data: bytes = b"", *, ephemeral: bool = False, sequential: bool = False) -> str:
        await self._turn()
        return self.tree.create(self._session, path, data, ephemeral=ephemeral, sequential=sequential)

    async def set(self, path: str, data: bytes, version: int) -> int:
        await self._turn()
        self.tree.apply(self._session, [SetData(path, data, version)])
        return self.tree.get(path)[1].version

    async def delete(self, path: str, version: int) -> None:
        await self._turn()
        self.tree.apply(self._session, [Delete(path, version)])

    async def multi(self, changes: Sequence[Change]) -> None:
        await self._turn()
        self.tree.apply(self._session, changes)

    async def sync(self, path: str) -> None:
        await self._turn()

    def watch(self, path: str, changed: Callable[[], None]) -> Watch:
        paths.check(path)
        watch = _MemoryWatch(self, path, changed)
        self._watches.append(watch)
        if self._state is SessionState.CONNECTED:
            watch.arm()
        return watch

    def on_state(self, listener: Callable[[SessionState], None]) -> None:
        self._listeners.append((listener, contextvars.copy_context()))

    async def close(self) -> None:
        self.expire()

    def suspend(self) -> None:
        """Cut the connection. Calls are refused and watches report nothing, but ephemeral nodes stay."""
        self._change(SessionState.SUSPENDED)

    def expire(self) -> None:
        """End the session at the server. `resume` creates a new one."""
        self.tree.end_session(self._session)
        self._change(SessionState.LOST)

    def resume(self) -> None:
        """Reconnect, in a new session if the old one has ended. Calls every watch."""
        if not self.tree.is_open(self._session):
            self._change(SessionState.LOST)
            self._session = self.tree.open_session()
        self.history.generation += 1
        self._change(SessionState.CONNECTED)
        for watch in list(self._watches):
            watch.arm()
            watch.call_soon()

    def forget(self, watch: _MemoryWatch) -> None:
        if watch in self._watches:
            self._watches.remove(watch)

    async def _turn(self) -> None:
        """Let other tasks run, as a network call would. Then raise MetadataUnavailable unless the session is
        connected."""
        await asyncio.sleep(0)
        if self._state is not SessionState.CONNECTED:
            raise MetadataUnavailable(f"the metadata session is {self._state.name}")

    def _change(self, state: SessionState) -> None:
        if state is self._state:
            return
        self._state = state
        for listener, context in self._listeners:
            asyncio.get_running_loop().call_soon(listener, state, context=context)


class Generations:
    """The history of a store whose servers never lose anything that they have acknowledged."""

    def __init__(self, generation: int) -> None:
        self.generation = generation

    def trust(self, is_trusted: bool) -> None:
        """Do nothing, because no connection can make this store distrust a server."""


class _MemoryWatch:
    """A standing watch, made of the tree's one-shot watches. It rearms at each event."""

    def __init__(self, store: MemoryStore, path: str, changed: Callable[[], None]) -> None:
        self._store, self._path = store, path
        self._is_closed = False
        self.call_soon = WatchCall(changed, lambda: not self._is_closed).call_soon

    def close(self) -> None:
        self._is_closed = True
        self._store.tree.disarm(self._path, self._fire)
        self._store.forget(self)

    def arm(self) -> None:
        self._store.tree.disarm(self._path, self._fire)
        self._store.tree.arm(self._path, self._fire)

    def _fire(self) -> None:
        if self._is_closed or self._store.state is not SessionState.CONNECTED:
            return  # `resume` arms again and calls
        self.arm()
        self.call_soon()
