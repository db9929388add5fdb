"""A metadata store that misbehaves as ZooKeeper does: one seed, one course of events.

    metadata = SimMetadata(world.loop, world.fork("metadata"))
    metadata.tree.observers.append(check)            # (path, old, new) of every change, when it is committed
    store = await metadata.connect()                 # in a node's process: a MetadataStore of that node's own

The server is a MemoryTree. Each connection reads from a follower that lags, except after a sync or a write of its own.
Requests and answers of a connection keep their order; both take time. When a connection breaks, what was under way is
unknown to the client, and a coin decides whether it takes effect: at once, a little later, or never; but never after
the client has connected again (a server refuses what comes late by the old connection).

A session lives on the server while its client is heard; a crashed, paused or cut client is not. Its ephemerals vanish
when the session's time is over, and it learns so when it connects again.
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
    """Of a request, an answer or a watch's call, each way."""
    slow_p: float = 0.01
    slow_s: float = 0.4
    """Now and then one of them takes up to this long."""
    lag_s: tuple[float, float] = (0.0, 0.15)
    """How far a follower is behind."""
    break_p: float = 0.0
    """Chance that a request finds its connection breaking. `trouble` sets it for a while."""
    notice_s: tuple[float, float] = (2.0, 4.0)
    """How long it takes a client to notice a silent server."""
    late_s: float = 0.3
    """What a broken connection still delivers takes up to this long."""
    retry_s: tuple[float, float] = (0.05, 1.0)
    """Between two attempts to connect."""


QUIET = MetadataConfig(slow_p=0.0, lag_s=(0.0, 0.0), followers=1)
"""Nothing is slow, stale or lost unless a test says so."""


@dataclass(frozen=True, slots=True)
class Copy:
    """All that the ensemble keeps, as of one moment."""

    nodes: dict[str, TreeNode]
    sessions: frozenset[int]


class SimMetadata:
    """The ensemble, and the faults it can be made to have."""

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
        """How wrong its date is."""
        self.tree = MemoryTree(wall_ms=lambda: EPOCH_MS + self.wrong_ms + int(loop.time() * 1000))
        self.tree.on_commit = self._committed
        self.followers = [Follower(self, {"/": ROOT}) for _ in range(self.config.followers)]
        self.clients: list[SimStore] = []
        self.restore_observers: list[Observer] = []
        self._cut: set[str] = set()
        self._last_heard: dict[int, float] = {}
        self._is_ticking = False

    async def connect(self) -> SimStore:
        """A session for the calling process. Waits until the server can be reached, however long."""
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
        """The whole ensemble crashes. Sessions do not age meanwhile."""
        self._note("stop")
        for client in self.clients:
            if client.connection is not None:
                client.connection.lose(silently=self.random.random() < 0.3)
        self.is_up = False

    def start(self) -> None:
        """It is back, with all that was committed, and every session has its whole time again."""
        self._note("start")
        self.is_up = True
        for follower in self.followers:
            follower.catch_up()
        for session in self._last_heard:
            self._last_heard[session] = self.loop.time()

    def copy(self) -> Copy:
        """What its disks have now, whether it is up or not."""
        return Copy(dict(self.tree._nodes), frozenset(self.tree._sessions))

    def restore(self, copy: Copy) -> None:
        """Give all members the copy while they are down. Transactions and sessions are numbered on, as by a ZooKeeper
        that begins a new epoch; sessions made since the copy are unknown. The tree's observers are not called, because
        nobody has written; those in `restore_observers` are."""
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
                connection.is_replaced = True  # what was on its way to the former servers never arrives

    def freeze(self) -> None:
        """The ensemble stops as by SIGSTOP: connections stand and are silent."""
        self._note("freeze")
        self.is_frozen = True
        for client in self.clients:
            client.pinged_in_vain(self.loop.time() + self.random.uniform(*self.config.notice_s))

    def thaw(self) -> None:
        """It goes on, serves what had arrived, and expires sessions that were silent for too long by its own clock."""
        self._note("thaw")
        self.is_frozen = False
        for client in self.clients:
            for connection in client.connections:
                connection.thaw()
        for session in self._last_heard:
            if self.random.random() < 0.5:
                self._last_heard[session] = self.loop.time()

    def cut(self, name: str, *, silently: bool = True) -> None:
        """The node `name` does not reach the ensemble until `mend`."""
        self._note("cut", name)
        self._cut.add(name)
        self._lose(name, silently=silently)

    def mend(self, name: str) -> None:
        self._note("mend", name)
        self._cut.discard(name)

    def break_connection(self, name: str) -> None:
        """The node's connection breaks; it may connect again at once."""
        self._note("break", name)
        self._lose(name, silently=False)

    def expire(self, name: str) -> None:
        """The server ends the sessions of `name` now, whatever it hears. The node learns it when it connects again."""
        for client in self._of(name):
            self._end_session(client.server_session)
            if client.connection is not None:
                client.connection.lose(silently=False)

    def trouble(self, break_p: float) -> None:
        """From now on each request finds its connection breaking with this chance. 0 ends it."""
        self.break_p = break_p

    # What clients use

    def reaches(self, client: SimStore) -> bool:
        return self.is_up and client.name not in self._cut

    def accept(self, client: SimStore, session: int) -> Connection | None:
        """A new connection, in `session` or (0) a new one; None if that session has ended."""
        if session and not self.tree.is_open(session):
            return None
        if not session:
            session = self.tree.open_session()
            self._note("session", client.name, session)
        self._last_heard[session] = self.loop.time()
        follower = self.random.choice(self.followers)
        follower.apply_up_to(client.seen)  # a follower behind what the client has seen is none for it
        return Connection(self, client, follower, session)

    def close_session(self, session: int) -> None:
        self._end_session(session)

    def latency(self) -> float:
        if self.random.random() < self.config.slow_p:
            return self.random.uniform(0, self.config.slow_s)
        return self.random.uniform(*self.config.latency_s)

    def at(self, when: float, callback: Callable[[], None]) -> None:
        """Do something on the server or the network, outside of all nodes."""
        self.loop.call_at(when, callback, context=Context())

    # Inside

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
