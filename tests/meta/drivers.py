"""The drivers of the metadata store as the conformance suite sees them: connect, and cause trouble on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from random import Random
from typing import Any, Protocol, TypeVar

from kvstore.errors import MetadataDenied, MetadataError, MetadataUnknown, NoSuchNode
from kvstore.meta import paths
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.meta.store import Change, MetadataStore, SessionState, Stat
from tests.sim.world.metadata import MetadataConfig, SimMetadata
from tests.sim.world.metadata_client import SimStore
from tests.waiting import PATIENCE_S, wait_until

T = TypeVar("T")
SESSION_S = 40
"""Timeout of sessions with real servers that must not expire although the test may pause for some seconds."""


class Driver(Protocol):
    """One metadata store, empty at first, to which sessions are opened."""

    async def connect(self) -> MetadataStore: ...

    async def blink(self, store: MetadataStore) -> None:
        """Break the session's connection, and return when it is connected again, in the same session."""
        ...

    async def expire(self, store: MetadataStore) -> None:
        """End the session at the server, and return when a new one is connected."""
        ...

    async def close(self) -> None: ...


class MemoryDriver:
    def __init__(self) -> None:
        self._tree = MemoryTree()

    async def connect(self) -> MetadataStore:
        return MemoryStore(self._tree)

    async def blink(self, store: MetadataStore) -> None:
        assert isinstance(store, MemoryStore)
        store.suspend()
        store.resume()

    async def expire(self, store: MetadataStore) -> None:
        assert isinstance(store, MemoryStore)
        store.suspend()
        store.expire()
        store.resume()

    async def close(self) -> None: ...


class SimDriver:
    """The simulation's store, in real time, so that it is held to the same promises."""

    def __init__(self) -> None:
        config = MetadataConfig(latency_s=(0.0001, 0.001), slow_p=0.0, lag_s=(0.0, 0.01), retry_s=(0.001, 0.01))
        self._server = SimMetadata(asyncio.get_running_loop(), Random(1), config)
        self._stores: list[SimStore] = []

    async def connect(self) -> MetadataStore:
        self._stores.append(await self._server.connect())
        return self._stores[-1]

    async def blink(self, store: MetadataStore) -> None:
        assert isinstance(store, SimStore)
        states = States(store)
        assert store.connection is not None
        store.connection.lose(silently=False)
        await states.wait_for(SessionState.CONNECTED)

    async def expire(self, store: MetadataStore) -> None:
        assert isinstance(store, SimStore)
        states = States(store)
        self._server.close_session(store.session)
        await states.wait_for(SessionState.CONNECTED)

    async def close(self) -> None:
        for store in self._stores:
            await store.close()


class Hint:
    """Counts a watch's calls and lets a test wait for the next one."""

    def __init__(self) -> None:
        self.calls = 0
        self._event = asyncio.Event()

    def __call__(self) -> None:
        self.calls += 1
        self._event.set()

    async def wait(self) -> None:
        """Wait until the next call after the last `wait`."""
        async with asyncio.timeout(PATIENCE_S):
            await self._event.wait()
        self._event.clear()


async def wait_until_gone(store: MetadataStore, path: str) -> None:
    """Wait until a read returns the expected value: a hint may be about the node's own creation, and come late."""

    async def is_gone() -> bool:
        try:
            await store.get(path)
        except NoSuchNode:
            return True
        return False

    await wait_until(is_gone)


class States:
    """Records a session's states and lets a test wait for one."""

    def __init__(self, store: MetadataStore) -> None:
        self.seen: list[SessionState] = []
        self._event = asyncio.Event()
        store.on_state(self._record)

    def _record(self, state: SessionState) -> None:
        self.seen.append(state)
        self._event.set()

    async def wait_for(self, state: SessionState, *, timeout_s: float = PATIENCE_S) -> None:
        """Wait until `state` has been seen since this object was made."""
        async with asyncio.timeout(timeout_s):
            while state not in self.seen:
                self._event.clear()
                await self._event.wait()


async def let_run() -> None:
    """Let everything run that is ready, and what it makes ready."""
    for _ in range(20):
        await asyncio.sleep(0)


class TestNursery:
    """Spawns tasks as the real nursery does, and keeps their errors for the test to see."""

    __test__ = False

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[Any]] = []

    def spawn(self, work: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        self._tasks.append(asyncio.get_running_loop().create_task(work, name=name))
        return self._tasks[-1]

    def child(self, name: str) -> TestNursery:
        return self

    async def close(self) -> None:
        """Cancel what runs; raise the first error that a task ended with."""
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result


class FaultyStore(MemoryStore):
    """Breaks the connection at chosen calls, before or after the call has taken effect."""

    def __init__(self, tree: MemoryTree | None = None) -> None:
        super().__init__(tree)
        self.faults: list[tuple[str, str]] = []
        """(method, "lost" | "done"), in order; each hits the next call of that method. Both raise MetadataUnknown."""
        self.calls: list[str] = []

    async def get(self, path: str) -> tuple[bytes, Stat]:
        return await self._with_fault("get", super().get(path))

    async def children(self, path: str) -> list[str]:
        return await self._with_fault("children", super().children(path))

    async def create(self, path: str, data: bytes = b"", *, ephemeral: bool = False, sequential: bool = False) -> str:
        call = super().create(path, data, ephemeral=ephemeral, sequential=sequential)
        return await self._with_fault("create", call)

    async def set(self, path: str, data: bytes, version: int) -> int:
        return await self._with_fault("set", super().set(path, data, version))

    async def delete(self, path: str, version: int) -> None:
        await self._with_fault("delete", super().delete(path, version))

    async def multi(self, changes: Sequence[Change]) -> None:
        await self._with_fault("multi", super().multi(changes))

    async def _with_fault(self, method: str, call: Coroutine[Any, Any, T]) -> T:
        self.calls.append(method)
        if not self.faults or self.faults[0][0] != method:
            return await call
        _, kind = self.faults.pop(0)
        if kind == "done":
            with suppress(MetadataError):
                await call
        call.close()
        raise MetadataUnknown(method)


class ClosedStore(MemoryStore):
    """The session of a user to whom another user has closed some nodes."""

    closed = frozenset[str]()
    """Nodes that only another user may read or create nodes below."""

    async def get(self, path: str) -> tuple[bytes, Stat]:
        self._check(path)
        return await super().get(path)

    async def children(self, path: str) -> list[str]:
        self._check(path)
        return await super().children(path)

    async def create(self, path: str, data: bytes = b"", *, ephemeral: bool = False, sequential: bool = False) -> str:
        self._check(paths.parent(path))
        return await super().create(path, data, ephemeral=ephemeral, sequential=sequential)

    def _check(self, path: str) -> None:
        if path in self.closed:
            raise MetadataDenied(f"{path}: not authenticated")


class LaggingStore(MemoryStore):
    """A session with a metadata server that lags: after `lag` it shows the tree as it was then, until it is synced."""

    def __init__(self, tree: MemoryTree | None = None) -> None:
        super().__init__(tree)
        self._old: dict[str, tuple[bytes, Stat]] | None = None

    def lag(self) -> None:
        self._old = {path: self.tree.get(path) for path in self.tree.paths()}

    async def get(self, path: str) -> tuple[bytes, Stat]:
        if self._old is None:
            return await super().get(path)
        if path not in self._old:
            raise NoSuchNode(path)
        return self._old[path]

    async def children(self, path: str) -> list[str]:
        if self._old is None:
            return await super().children(path)
        return sorted(each.rpartition("/")[2] for each in self._old if each != "/" and paths.parent(each) == path)

    async def sync(self, path: str) -> None:
        self._old = None
        await super().sync(path)
