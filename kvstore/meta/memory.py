"""The metadata store in memory: a tree that many sessions share, and one session on it. For tests and simulation.

The tree is the server. It has no clock and no luck of its own: a session ends when somebody says so. What it does with
versions, owners, sequence numbers and transactions is what ZooKeeper does; tests/meta/test_conformance.py holds both to
it.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.errors import MetadataError, MetadataUnavailable, NodeExists, NoSuchNode, NotEmpty, VersionConflict
from kvstore.meta import paths
from kvstore.meta.store import Change, Check, Create, Delete, SessionState, SetData, Stat, Watch, check_sizes

Observer = Callable[[str, bytes | None, bytes | None], None]
"""Told of each node that a transaction changed: path, old data, new data; None is an absent node."""


@dataclass(slots=True)
class _Node:
    data: bytes
    created: int
    owner: int
    modified_ms: int
    version: int = 0
    births: int = 0
    """Children ever created; numbers the sequential ones."""
    children: set[str] = field(default_factory=set)

    def copy(self) -> _Node:
        return _Node(
            self.data, self.created, self.owner, self.modified_ms, self.version, self.births, set(self.children)
        )

    def stat(self) -> Stat:
        changes = 2 * self.births - len(self.children)
        return Stat(self.version, self.created, self.owner, self.modified_ms, changes)


class MemoryTree:
    """The server's state: nodes, sessions, one-shot watches."""

    def __init__(self, wall_ms: Callable[[], int] = lambda: 0) -> None:
        self.observers: list[Observer] = []
        self._wall_ms = wall_ms
        self._nodes = {"/": _Node(b"", created=0, owner=0, modified_ms=0)}
        self._watches: dict[str, list[Callable[[], None]]] = {}
        self._sessions: set[int] = set()
        self._last_session = 0
        self._last_transaction = 0

    def open_session(self) -> int:
        """A new session's id."""
        self._last_session += 1
        self._sessions.add(self._last_session)
        return self._last_session

    def end_session(self, session: int) -> None:
        """Expire or close a session: its ephemerals vanish. Ending it again changes nothing."""
        if session not in self._sessions:
            return
        self._sessions.remove(session)
        transaction = _Transaction(self._nodes, self._next_transaction(), session=session, now_ms=self._wall_ms())
        for path in sorted(path for path, node in self._nodes.items() if node.owner == session):
            transaction.apply(Delete(path, -1))
        self._commit(transaction)

    def is_open(self, session: int) -> bool:
        return session in self._sessions

    def get(self, path: str) -> tuple[bytes, Stat]:
        node = self._find(path)
        return node.data, node.stat()

    def children(self, path: str) -> list[str]:
        return sorted(self._find(path).children)

    def apply(self, session: int, changes: Sequence[Change]) -> None:
        """All or nothing. Raises the first change's error, or MetadataUnavailable if the session has ended."""
        if session not in self._sessions:
            raise MetadataUnavailable(f"session {session} has ended")
        check_sizes(changes)
        transaction = _Transaction(self._nodes, self._next_transaction(), session=session, now_ms=self._wall_ms())
        for change in changes:
            transaction.apply(change)
        self._commit(transaction)

    def create(self, session: int, path: str, data: bytes, *, ephemeral: bool, sequential: bool) -> str:
        """Create one node; returns its path."""
        if sequential:
            path = f"{path}{self._find(paths.parent(path)).births:010d}"
        self.apply(session, [Create(path, data, ephemeral)])
        return path

    def arm(self, path: str, fire: Callable[[], None]) -> None:
        """Call `fire` once, at the next change of the node, of its existence, or of the set of its children."""
        paths.check(path)
        self._watches.setdefault(path, []).append(fire)

    def disarm(self, path: str, fire: Callable[[], None]) -> None:
        """Forget what `arm` asked for, if it has not been called yet."""
        armed = self._watches.get(path, [])
        if fire in armed:
            armed.remove(fire)

    def paths(self) -> list[str]:
        """Every node's path, sorted; for invariants."""
        return sorted(self._nodes)

    def _find(self, path: str) -> _Node:
        paths.check(path)
        node = self._nodes.get(path)
        if node is None:
            raise NoSuchNode(path)
        return node

    def _next_transaction(self) -> int:
        self._last_transaction += 1
        return self._last_transaction

    def _commit(self, transaction: _Transaction) -> None:
        changed = [(path, self._nodes.get(path), node) for path, node in transaction.touched.items()]
        for path, _, node in changed:
            if node is None:
                self._nodes.pop(path, None)
            else:
                self._nodes[path] = node
        for path, old, new in changed:
            if not _same_value(old, new):
                for observer in self.observers:
                    observer(path, old.data if old else None, new.data if new else None)
        for path, _, _ in changed:
            for fire in self._watches.pop(path, []):
                fire()


def _same_value(old: _Node | None, new: _Node | None) -> bool:
    if old is None or new is None:
        return old is new
    return (old.created, old.version) == (new.created, new.version)


class _Transaction:
    """Changes on copies of the nodes they touch; the tree takes the copies when all have succeeded."""

    def __init__(self, nodes: dict[str, _Node], number: int, *, session: int, now_ms: int) -> None:
        self.touched: dict[str, _Node | None] = {}
        self._nodes, self._number, self._session, self._now_ms = nodes, number, session, now_ms

    def apply(self, change: Change) -> None:
        paths.check(change.path)
        match change:
            case Create():
                self._create(change)
            case SetData():
                node = self._writable(change.path, change.version)
                node.data, node.version, node.modified_ms = change.data, node.version + 1, self._now_ms
            case Delete():
                self._delete(change)
            case Check():
                self._present(change.path, change.version)

    def _create(self, change: Create) -> None:
        if self._look(change.path) is not None:
            raise NodeExists(change.path)
        above = paths.parent(change.path)
        if self._present(above, -1).owner:
            raise MetadataError(f"{above} is ephemeral and has no children")
        parent = self._writable(above, -1)
        parent.births += 1
        parent.children.add(change.path.rpartition("/")[2])
        owner = self._session if change.ephemeral else 0
        self.touched[change.path] = _Node(change.data, self._number, owner, self._now_ms)

    def _delete(self, change: Delete) -> None:
        if self._present(change.path, change.version).children:
            raise NotEmpty(change.path)
        self._writable(paths.parent(change.path), -1).children.remove(change.path.rpartition("/")[2])
        self.touched[change.path] = None

    def _look(self, path: str) -> _Node | None:
        return self.touched[path] if path in self.touched else self._nodes.get(path)

    def _present(self, path: str, version: int) -> _Node:
        node = self._look(path)
        if node is None:
            raise NoSuchNode(path)
        if version not in (-1, node.version):
            raise VersionConflict(path)
        return node

    def _writable(self, path: str, version: int) -> _Node:
        node = self._present(path, version)
        if path not in self.touched:
            node = node.copy()
            self.touched[path] = node
        return node


class MemoryStore:
    """A MetadataStore on a MemoryTree, always connected until a test says otherwise (`suspend`, `resume`, `expire`)."""

    def __init__(self, tree: MemoryTree | None = None) -> None:
        self.tree = tree or MemoryTree()
        self._session = self.tree.open_session()
        self._state = SessionState.CONNECTED
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
        """Cut the connection: calls are refused and watches silent; ephemerals live on."""
        self._change(SessionState.SUSPENDED)

    def expire(self) -> None:
        """End the session at the server; `resume` makes a new one."""
        self.tree.end_session(self._session)
        self._change(SessionState.LOST)

    def resume(self) -> None:
        """Connect again, in a new session if the old one has ended. Every standing watch is called."""
        if not self.tree.is_open(self._session):
            self._change(SessionState.LOST)
            self._session = self.tree.open_session()
        self._change(SessionState.CONNECTED)
        for watch in list(self._watches):
            watch.arm()
            watch.deliver_soon()

    def forget(self, watch: _MemoryWatch) -> None:
        if watch in self._watches:
            self._watches.remove(watch)

    async def _turn(self) -> None:
        """Let others run, as a call over a network would; then refuse unless connected."""
        await asyncio.sleep(0)
        if self._state is not SessionState.CONNECTED:
            raise MetadataUnavailable(f"the metadata session is {self._state.name}")

    def _change(self, state: SessionState) -> None:
        if state is self._state:
            return
        self._state = state
        for listener, context in self._listeners:
            asyncio.get_running_loop().call_soon(listener, state, context=context)


class _MemoryWatch:
    """Hides the tree's one-shot watches: arms again at each call, and coalesces calls that are not yet delivered."""

    def __init__(self, store: MemoryStore, path: str, changed: Callable[[], None]) -> None:
        self._store, self._path, self._changed = store, path, changed
        self._context = contextvars.copy_context()
        self._is_closed = self._is_scheduled = False

    def close(self) -> None:
        self._is_closed = True
        self._store.tree.disarm(self._path, self._fire)
        self._store.forget(self)

    def arm(self) -> None:
        self._store.tree.disarm(self._path, self._fire)
        self._store.tree.arm(self._path, self._fire)

    def deliver_soon(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._deliver, context=self._context)

    def _fire(self) -> None:
        if self._is_closed or self._store.state is not SessionState.CONNECTED:
            return  # `resume` arms again and calls
        self.arm()
        self.deliver_soon()

    def _deliver(self) -> None:
        self._is_scheduled = False
        if not self._is_closed:
            self._changed()
