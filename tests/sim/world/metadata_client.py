"""A node's session with the simulated metadata store: the counterpart of kvstore/meta/zookeeper/store.py."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstore.env.liveness.port import UNWATCHED, Liveness
from kvstore.errors import MetadataUnavailable, MetadataUnknown
from kvstore.meta import paths
from kvstore.meta.memory import Generations
from kvstore.meta.store import Change, Delete, MetadataHistory, SessionState, SetData, Stat, Watch
from tests.sim.world.loop import current_node
from tests.sim.world.metadata import SimMetadata
from tests.sim.world.metadata_link import Call, Connection

T = TypeVar("T")


class SimStore:
    """A MetadataStore of the process that opened it. It dies with that process."""

    def __init__(self, server: SimMetadata) -> None:
        self._server = server
        self._process = current_node.get()
        self._context = contextvars.copy_context()
        self._state = SessionState.LOST
        self._session = 0
        self.history: MetadataHistory = Generations(0)
        self._is_closed = False
        self._listeners: list[tuple[Callable[[SessionState], None], contextvars.Context]] = []
        self._watches: list[_SimWatch] = []
        self._is_trying = False
        self.connection: Connection | None = None
        self.connections: list[Connection] = []
        """All connections from which the server may still receive messages."""
        self.liveness: Liveness = UNWATCHED
        """The liveness that the session depends on, once the process has set it."""
        self.seen = 0
        """The last transaction whose effects this client knows."""
        if self._process is not None:
            self._process.on_death.append(self._died)
        self._try_soon(0.0)

    @property
    def name(self) -> str:
        return self._process.name if self._process is not None else "test"

    @property
    def is_alive(self) -> bool:
        return not self._is_closed and (self._process is None or self._process.alive)

    @property
    def is_silent(self) -> bool:
        """Return True while no pings are sent: the whole process is stopped, or its watchdog has ended the session."""
        if self._process is not None and self._process.paused and not self._process.blocked:
            return True
        return bool(self.liveness.failure)

    # docs/protocol.md P45
    def give_up(self) -> bool:
        """End the session on behalf of the watchdog, whatever the event loop does."""
        session = self.server_session
        if session and self._server.reaches(self) and not self._server.is_frozen:
            self._server.close_session(session)
        return True

    @property
    def server_session(self) -> int:
        """Return the session as the server has it, whatever this client knows."""
        return self.connection.session if self.connection is not None else self._session

    @property
    def state(self) -> SessionState:
        return self._state

    @property
    def session(self) -> int:
        return self._session

    async def get(self, path: str) -> tuple[bytes, Stat]:
        return await self._call(path, lambda connection: connection.follower.get(path))

    async def children(self, path: str) -> list[str]:
        return await self._call(path, lambda connection: connection.follower.children(path))

    async def create(self, path: str, data: bytes = b"", *, ephemeral: bool = False, sequential: bool = False) -> str:
        def create(session: int) -> str:
            return self._server.tree.create(session, path, data, ephemeral=ephemeral, sequential=sequential)

        return await self._call(path, lambda connection: connection.write(create))

    async def set(self, path: str, data: bytes, version: int) -> int:
        def change(session: int) -> int:
            self._server.tree.apply(session, [SetData(path, data, version)])
            return self._server.tree.get(path)[1].version

        return await self._call(path, lambda connection: connection.write(change))

    async def delete(self, path: str, version: int) -> None:
        await self.multi([Delete(path, version)])

    async def multi(self, changes: Sequence[Change]) -> None:
        if changes:
            wanted = list(changes)
            await self._call(
                wanted[0].path, lambda it: it.write(lambda session: self._server.tree.apply(session, wanted))
            )

    async def sync(self, path: str) -> None:
        await self._call(path, lambda connection: connection.follower.catch_up())

    def watch(self, path: str, changed: Callable[[], None]) -> Watch:
        paths.check(path)
        watch = _SimWatch(self, path, changed)
        self._watches.append(watch)
        watch.arm()
        return watch

    def on_state(self, listener: Callable[[SessionState], None]) -> None:
        self._listeners.append((listener, contextvars.copy_context()))

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        session, connection = self._session, self.connection
        self.connection = None
        if connection is not None:
            self._fail(connection)
        self._become(SessionState.LOST, 0)
        if connection is not None and session and self._server.is_up and not self._server.is_frozen:
            self._server.close_session(session)

    async def wait_connected(self) -> None:
        if self._state is SessionState.CONNECTED:
            return
        connected = asyncio.get_running_loop().create_future()

        def heard(state: SessionState) -> None:
            if state is SessionState.CONNECTED and not connected.done():
                connected.set_result(None)

        self.on_state(heard)
        await connected

    # Called by the server and the network

    def at(self, when: float, callback: Callable[[], None]) -> None:
        """Run a callback in this client's process if the process lives, as soon as it is not paused."""
        if self._process is None or self._process.alive:
            self._server.loop.call_at(when, callback, context=self._context)

    def lost(self, connection: Connection) -> None:
        """Notice that a connection is broken. First the outcome of requests in flight becomes unknown, then the
        state changes."""
        if connection is not self.connection:
            return
        self.connection = None
        self._fail(connection)
        if self._state is SessionState.CONNECTED:
            self._become(SessionState.SUSPENDED, self._session)
        self._try_soon(self._server.random.uniform(*self._server.config.retry_s))

    def pinged_in_vain(self, when: float) -> None:
        """Handle a frozen server: unless it resumes before `when`, the client abandons the connection then."""
        connection = self.connection
        if connection is not None:
            self.at(when, lambda: self.lost(connection) if self._server.is_frozen else None)

    def forget(self, watch: _SimWatch) -> None:
        if watch in self._watches:
            self._watches.remove(watch)

    # Internal

    async def _call(self, path: str, operation: Callable[[Connection], T]) -> T:
        paths.check(path)
        connection = self.connection
        if self._state is not SessionState.CONNECTED or connection is None:
            raise MetadataUnavailable(f"{path}: the metadata session is {self._state.name}")
        loop = self._server.loop
        call = Call(operation, loop.create_future())
        connection.send(call)
        if self._server.random.random() < self._server.break_p:
            when = loop.time() + self._server.random.uniform(0, 2 * self._server.config.latency_s[1])
            self._server.at(when, lambda: connection.lose(silently=False))
        # Without an answer in time, the connection counts as broken. asyncio.timeout costs several times as much.
        patience = loop.call_later(self._server.config.call_timeout_s, self.lost, connection)
        try:
            answer: T = await call.answer
            return answer
        finally:
            patience.cancel()

    def _fail(self, connection: Connection) -> None:
        for call in connection.give_up():
            call.answer.set_exception(MetadataUnknown("the connection broke"))

    def _try_soon(self, delay: float) -> None:
        if not self._is_trying and not self._is_closed:
            self._is_trying = True
            self.at(self._server.loop.time() + delay, self._try)

    def _try(self) -> None:
        self._is_trying = False
        if self._is_closed or self.connection is not None:
            return
        if self.liveness.failure:
            self._become(SessionState.LOST, 0)
        if self.liveness.failure or not self._server.reaches(self) or self._server.is_frozen:
            self._try_soon(self._server.random.uniform(*self._server.config.retry_s))
            return
        self._is_trying = True
        self.at(self._server.loop.time() + self._server.latency(), self._enter)

    def _enter(self) -> None:
        self._is_trying = False
        if self._is_closed or self.liveness.failure or not self._server.reaches(self) or self._server.is_frozen:
            self._try_soon(self._server.random.uniform(*self._server.config.retry_s))
            return
        connection = self._server.accept(self, self._session)
        if connection is None:
            self._become(SessionState.LOST, 0)
            self._try_soon(self._server.latency())
            return
        for old in self.connections:
            old.is_replaced = True
        self.connections = [connection]
        self.connection = connection
        self.history.generation += 1
        self._become(SessionState.CONNECTED, connection.session)
        for watch in list(self._watches):
            watch.arm()
            watch.call_soon()

    def _become(self, state: SessionState, session: int) -> None:
        if (state, session) == (self._state, self._session):
            return
        self._state, self._session = state, session
        for listener, context in self._listeners:
            self._server.loop.call_soon(listener, state, context=context)

    def _died(self) -> None:
        if self.connection is not None:
            self.connection.lose(silently=False)


class _SimWatch:
    """A persistent watch on top of the server's one-shot watches. It is armed again before each call, and calls
    coalesce."""

    def __init__(self, store: SimStore, path: str, changed: Callable[[], None]) -> None:
        self._store, self._path, self._changed = store, path, changed
        self._context = contextvars.copy_context()
        self._is_closed = self._is_scheduled = False

    def close(self) -> None:
        self._is_closed = True
        self._store.forget(self)

    def arm(self) -> None:
        connection = self._store.connection
        if connection is None:
            return

        def arm(_: Connection) -> None:
            connection.follower.arm(self._path, lambda: connection.hint(lambda: self._fired(connection)))

        call = Call(arm, self._store._server.loop.create_future())
        call.answer.add_done_callback(lambda answer: answer.exception())
        connection.send(call)

    def call_soon(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._store._server.loop.call_soon(self._deliver, context=self._context)

    def _fired(self, connection: Connection) -> None:
        if connection is self._store.connection and not self._is_closed:
            self.arm()
            self.call_soon()

    def _deliver(self) -> None:
        self._is_scheduled = False
        if not self._is_closed:
            self._changed()
