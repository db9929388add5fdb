"""A metadata store that misbehaves as ZooKeeper does: one seed gives one sequence of events.

    metadata = SimMetadata(world.loop, world.fork("metadata"))
    metadata.tree.observers.append(check)            # (path, old, new) of every committed change
    store = await metadata.connect()                 # in a node's process: that node's MetadataStore

The server is a MemoryTree. Each connection reads from a follower that lags, except after its own syncs and writes.
Requests and answers of a connection keep their order; both take time. When a connection breaks, the outcome of
requests in flight is unknown to the client. They take effect at random: at once, a little later, or never. They never
take effect after the client has connected again, because a server refuses late requests of the old connection.

A session lives on the server while the server receives messages of its client, which a crash, a pause or a cut ends.
The session's ephemerals vanish after its timeout, and the client learns that when it connects again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from kvstore.meta.memory_tree import ROOT, MemoryTree, Observer, TreeNode
from tests.sim.judges.probes import declare, probe
from tests.sim.trace import Trace
from tests.sim.world.metadata_link import Connection, Follower

if TYPE_CHECKING:
    from tests.sim.world.metadata_client import SimStore

EPOCH_MS = 1_790_000_000_000
TICK_S = 0.25

declare("metadata.session_expired")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataConfig:
    session_timeout_s: float = 6.0
    call_timeout_s: float = 5.0
    followers: int = 3
    latency_s: tuple[float, float] = (0.0002, 0.004)
    """Seconds for a request, an answer or a watch's call, each way."""
    slow_p: float = 0.01
    slow_s: float = 0.4
    """Maximum seconds of an occasional slow message."""
    lag_s: tuple[float, float] = (0.0, 0.15)
    """Seconds by which a follower is behind."""
    break_p: float = 0.0
    """Probability that a request meets a breaking connection. `trouble` sets it for a while."""
    notice_s: tuple[float, float] = (2.0, 4.0)
    """Seconds until a client notices a silent server."""
    late_s: float = 0.3
    """Maximum seconds until a broken connection delivers its last messages."""
    retry_s: tuple[float, float] = (0.05, 1.0)
    """Seconds between two attempts to connect."""


QUIET = MetadataConfig(slow_p=0.0, lag_s=(0.0, 0.0), followers=1)
"""Nothing is slow, stale or lost unless a test says so."""


@dataclass(frozen=True, slots=True)
class Copy:
    """All data that the ensemble keeps, at one moment."""

    nodes: dict[str, TreeNode]
    sessions: frozenset[int]


class SimMetadata:
    """The ensemble and the faults that tests can cause in it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        random: Random,
        config: MetadataConfig | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.loop, self.random, self.config, self.trace = loop, random, config or MetadataConfig(), trace
        self.is_up = True
        self.is_frozen = False
        self.break_p = self.config.break_p
        self.wrong_ms = 0
        """Error of its date in milliseconds."""
        self.tree = MemoryTree(wall_ms=lambda: EPOCH_MS + self.wrong_ms + int(loop.time() * 1000))
        self.tree.on_commit = self._committed
        self.followers = [Follower(self, {"/": ROOT}) for _ in range(self.config.followers)]
        self.clients: list[SimStore] = []
        self.restore_observers: list[Observer] = []
        self._cut: set[str] = set()
        self._last_heard: dict[int, float] = {}
        self._is_ticking = False

    async def connect(self) -> SimStore:
        """Open a session for the calling process. Waits until the server can be reached, without a limit."""
        from tests.sim.world.metadata_client import SimStore

        store = SimStore(self)
        self.clients.append(store)
        if not self._is_ticking:
            self._is_ticking = True
            self.at(self.loop.time() + TICK_S, self._tick)
        await store.wait_connected()
        return store

    # Faults

    def stop(self) -> None:
        """Crash the whole ensemble. Sessions do not age while it is down."""
        self._note("stop")
        for client in self.clients:
            if client.connection is not None:
                client.connection.lose(silently=self.random.random() < 0.3)
        self.is_up = False

    def start(self) -> None:
        """Start the ensemble with everything that was committed. Every session has its whole timeout again."""
        self._note("start")
        self.is_up = True
        for follower in self.followers:
            follower.catch_up()
        for session in self._last_heard:
            self._last_heard[session] = self.loop.time()

    def copy(self) -> Copy:
        """Return the content of its disks, whether it is up or not."""
        return Copy(dict(self.tree._nodes), frozenset(self.tree._sessions))

    def restore(self, copy: Copy) -> None:
        """Give all members the copy while they are down. Transaction and session numbers continue, as in a ZooKeeper
        ensemble that begins a new epoch; sessions opened after the copy are unknown. The tree's observers are not
        called, because no process has written; the observers in `restore_observers` are."""
        assert not self.is_up
        self._note("restore")
        before = self.tree._nodes
        changed = [path for path in {**before, **copy.nodes} if before.get(path) is not copy.nodes.get(path)]
        self.tree._nodes, self.tree._sessions = dict(copy.nodes), set(copy.sessions)
        self._last_heard = dict.fromkeys(sorted(copy.sessions), self.loop.time())
        self._committed({path: copy.nodes.get(path) for path in changed})
        for path in changed:
            old, new = before.get(path), copy.nodes.get(path)
            for observer in self.restore_observers:
                observer(path, old.data if old else None, new.data if new else None)
        for follower in self.followers:
            follower.catch_up()
        for client in self.clients:
            for connection in client.connections:
                connection.is_replaced = True  # messages on their way to the former servers never arrive

    def freeze(self) -> None:
        """Stop the ensemble as SIGSTOP does: connections stay open and are silent."""
        self._note("freeze")
        self.is_frozen = True
        for client in self.clients:
            client.pinged_in_vain(self.loop.time() + self.random.uniform(*self.config.notice_s))

    def thaw(self) -> None:
        """Resume the ensemble. It serves the requests that have arrived, and expires sessions that were silent for
        too long by its own clock."""
        self._note("thaw")
        self.is_frozen = False
        for client in self.clients:
            for connection in client.connections:
                connection.thaw()
        for session in self._last_heard:
            if self.random.random() < 0.5:
                self._last_heard[session] = self.loop.time()

    def cut(self, name: str, *, silently: bool = True) -> None:
        """Cut the node `name` from the ensemble until `mend`."""
        self._note("cut", name)
        self._cut.add(name)
        self._lose(name, silently=silently)

    def mend(self, name: str) -> None:
        self._note("mend", name)
        self._cut.discard(name)

    def break_connection(self, name: str) -> None:
        """Break the node's connection. The node may connect again at once."""
        self._note("break", name)
        self._lose(name, silently=False)

    def expire(self, name: str) -> None:
        """End the sessions of `name` on the server now, even if their clients are active. The node learns it when it
        connects again."""
        for client in self._of(name):
            self._end_session(client.server_session)
            if client.connection is not None:
                client.connection.lose(silently=False)

    def trouble(self, break_p: float) -> None:
        """From now on, let the connection of each request break with this probability. 0 ends it."""
        self.break_p = break_p

    # Used by clients

    def reaches(self, client: SimStore) -> bool:
        return self.is_up and client.name not in self._cut

    def accept(self, client: SimStore, session: int) -> Connection | None:
        """Return a new connection, in `session` or, for 0, in a new session. None if the session has ended."""
        if session and not self.tree.is_open(session):
            return None
        if not session:
            session = self.tree.open_session()
            self._note("session", client.name, session)
        self._last_heard[session] = self.loop.time()
        follower = self.random.choice(self.followers)
        follower.apply_up_to(client.seen)  # a client never reads from a follower behind what the client has seen
        return Connection(self, client, follower, session)

    def close_session(self, session: int) -> None:
        self._end_session(session)

    def latency(self) -> float:
        config, draw = self.config, self.random.random
        if draw() < config.slow_p:
            return config.slow_s * draw()
        low, high = config.latency_s
        return low + (high - low) * draw()

    def at(self, when: float, callback: Callable[[], None]) -> None:
        """Run a callback on the server or the network, outside of all nodes."""
        self.loop.call_at(when, callback, context=Context())

    # Internal

    def _committed(self, touched: dict[str, TreeNode | None]) -> None:
        for follower in self.followers:
            follower.commit(touched)

    def _tick(self) -> None:
        self.at(self.loop.time() + TICK_S, self._tick)
        if not self.is_up or self.is_frozen:
            return
        now = self.loop.time()
        for client in self.clients:
            if client.is_alive and not client.is_silent and client.connection is not None and client.connection.is_open:
                self._last_heard[client.connection.session] = now
        for session, heard in list(self._last_heard.items()):
            if now - heard > self.config.session_timeout_s:
                probe("metadata.session_expired")
                self._end_session(session)
        self.clients = [each for each in self.clients if each.is_alive]

    def _end_session(self, session: int) -> None:
        self._last_heard.pop(session, None)
        if not self.tree.is_open(session):
            return
        self._note("expire", session)
        self.tree.end_session(session)
        for client in self.clients:
            if client.connection is not None and client.connection.session == session:
                client.connection.lose(silently=False)

    def _of(self, name: str) -> list[SimStore]:
        return [client for client in self.clients if client.name == name]

    def _lose(self, name: str, *, silently: bool) -> None:
        for client in self._of(name):
            if client.connection is not None:
                client.connection.lose(silently=silently)

    def _note(self, kind: str, *details: str | int) -> None:
        if self.trace is not None:
            self.trace.event("metadata", kind, *details)
