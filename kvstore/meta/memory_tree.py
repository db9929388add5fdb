"""The metadata store's tree in memory: nodes, versions, owners, sequence numbers and transactions as in a ZooKeeper
server. Decides only: it has no clock and no randomness, and a session ends only by a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.errors import MetadataError, MetadataUnavailable, NodeExists, NoSuchNode, NotEmpty, VersionConflict
from kvstore.meta import paths
from kvstore.meta.store import Change, Check, Create, Delete, SetData, Stat, check_change_sizes

Observer = Callable[[str, bytes | None, bytes | None], None]
"""Called with path, old data and new data for each node that a transaction changed. None means that the node is
absent."""


@dataclass(slots=True)
class TreeNode:
    data: bytes
    created: int
    owner: int
    modified_ms: int
    version: int = 0
    births: int = 0
    """Number of children ever created; it numbers sequential children."""
    children: set[str] = field(default_factory=set)

    def copy(self) -> TreeNode:
        return TreeNode(
            self.data, self.created, self.owner, self.modified_ms, self.version, self.births, set(self.children)
        )

    def stat(self) -> Stat:
        return Stat(self.version, self.created, self.owner, self.modified_ms)


ROOT = TreeNode(b"", created=0, owner=0, modified_ms=0)


def find(nodes: dict[str, TreeNode], path: str) -> TreeNode:
    """Return a node. Raises NoSuchNode, and ValueError for a malformed path."""
    paths.check(path)
    node = nodes.get(path)
    if node is None:
        raise NoSuchNode(path)
    return node


class MemoryTree:
    """The state of the server: nodes, sessions and one-shot watches."""

    def __init__(self, wall_ms: Callable[[], int] = lambda: 0) -> None:
        self.observers: list[Observer] = []
        self.on_commit: Callable[[dict[str, TreeNode | None]], None] = lambda touched: None
        """Called with the nodes of each transaction as they are from then on; their contents never change again."""
        self._wall_ms = wall_ms
        self._nodes = {"/": ROOT}
        self._watches: dict[str, list[Callable[[], None]]] = {}
        self._sessions: set[int] = set()
        self._last_session = 0
        self._last_transaction = 0

    def open_session(self) -> int:
        """Open a session and return its id."""
        self._last_session += 1
        self._sessions.add(self._last_session)
        return self._last_session

    def end_session(self, session: int) -> None:
        """Expire or close a session, which deletes its ephemerals. Idempotent."""
        if session not in self._sessions:
            return
        self._sessions.remove(session)
        transaction = Transaction(self._nodes, self._next_transaction(), session=session, now_ms=self._wall_ms())
        for path in sorted(path for path, node in self._nodes.items() if node.owner == session):
            transaction.apply(Delete(path, -1))
        self._commit(transaction)

    def is_open(self, session: int) -> bool:
        return session in self._sessions

    def get(self, path: str) -> tuple[bytes, Stat]:
        node = find(self._nodes, path)
        return node.data, node.stat()

    def children(self, path: str) -> list[str]:
        return sorted(find(self._nodes, path).children)

    def apply(self, session: int, changes: Sequence[Change]) -> None:
        """Make all changes atomically, or none. Raises the error of the first change that failed, or
        MetadataUnavailable if the session has ended."""
        if session not in self._sessions:
            raise MetadataUnavailable(f"session {session} has ended")
        check_change_sizes(changes)
        transaction = Transaction(self._nodes, self._next_transaction(), session=session, now_ms=self._wall_ms())
        for change in changes:
            transaction.apply(change)
        self._commit(transaction)

    def create(self, session: int, path: str, data: bytes, *, ephemeral: bool, sequential: bool) -> str:
        """Create one node and return its path."""
        if sequential:
            path = f"{path}{find(self._nodes, paths.parent(path)).births:010d}"
        self.apply(session, [Create(path, data, ephemeral)])
        return path

    def arm(self, path: str, fire: Callable[[], None]) -> None:
        """Call `fire` once, at the next change of the node, of its existence, or of the set of its children."""
        paths.check(path)
        self._watches.setdefault(path, []).append(fire)

    def disarm(self, path: str, fire: Callable[[], None]) -> None:
        """Undo `arm` if `fire` has not been called yet."""
        armed = self._watches.get(path, [])
        if fire in armed:
            armed.remove(fire)

    def paths(self) -> list[str]:
        """Return the paths of all nodes, sorted, for checks of invariants."""
        return sorted(self._nodes)

    def _next_transaction(self) -> int:
        self._last_transaction += 1
        return self._last_transaction

    def _commit(self, transaction: Transaction) -> None:
        changed = [(path, self._nodes.get(path), node) for path, node in transaction.touched.items()]
        for path, _, node in changed:
            if node is None:
                self._nodes.pop(path, None)
            else:
                self._nodes[path] = node
        self.on_commit(transaction.touched)
        for path, old, new in changed:
            if not _same_value(old, new):
                for observer in self.observers:
                    observer(path, old.data if old else None, new.data if new else None)
        for path, _, _ in changed:
            for fire in self._watches.pop(path, []):
                fire()


def _same_value(old: TreeNode | None, new: TreeNode | None) -> bool:
    if old is None or new is None:
        return old is new
    return (old.created, old.version) == (new.created, new.version)


class Transaction:
    """A transaction, which changes copies of the nodes that it touches. The tree takes over the copies once all
    changes have succeeded. `nodes` must contain the nodes that the changes name, their parents, and the names of
    their children; kvstore/meta/etcd reads exactly these."""

    def __init__(self, nodes: dict[str, TreeNode], number: int, *, session: int, now_ms: int) -> None:
        self.touched: dict[str, TreeNode | None] = {}
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
        if self._node_or_none(change.path) is not None:
            raise NodeExists(change.path)
        above = paths.parent(change.path)
        if self._present(above, -1).owner:
            raise MetadataError(f"{above} is ephemeral and has no children")
        parent = self._writable(above, -1)
        parent.births += 1
        parent.children.add(change.path.rpartition("/")[2])
        owner = self._session if change.ephemeral else 0
        self.touched[change.path] = TreeNode(change.data, self._number, owner, self._now_ms)

    def _delete(self, change: Delete) -> None:
        if self._present(change.path, change.version).children:
            raise NotEmpty(change.path)
        self._writable(paths.parent(change.path), -1).children.remove(change.path.rpartition("/")[2])
        self.touched[change.path] = None

    def _node_or_none(self, path: str) -> TreeNode | None:
        return self.touched[path] if path in self.touched else self._nodes.get(path)

    def _present(self, path: str, version: int) -> TreeNode:
        node = self._node_or_none(path)
        if node is None:
            raise NoSuchNode(path)
        if version not in (-1, node.version):
            raise VersionConflict(path)
        return node

    def _writable(self, path: str, version: int) -> TreeNode:
        node = self._present(path, version)
        if path not in self.touched:
            node = node.copy()
            self.touched[path] = node
        return node
