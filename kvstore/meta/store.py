"""The interface of the metadata store: a small tree of versioned nodes with ephemeral nodes, transactions and watches.
Several drivers implement it.

The semantics are ZooKeeper's. Every write names the version that it expects. A watch is only a hint: its caller reads
again, and also reads every 10 s if correctness depends on the value. Calls raise MetadataUnavailable unless the session
is CONNECTED. A call whose connection broke while the call was in flight raises MetadataUnknown; the caller reads again
to learn the outcome. A call whose caller was cancelled is carried out before later calls of the session, or never.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, Protocol

from kvstore.errors import MetadataError, NodeExists

DATA_BYTES_MAX = 1_000_000
"""Maximum bytes of the paths and data in one call. A ZooKeeper server breaks the connection at 2^20 bytes; drivers
refuse such calls earlier, with MetadataError."""


class Stat(NamedTuple):
    """The version, the owner and the times of a node."""

    version: int
    """Number of sets since the node was created; starts at 0."""
    created: int
    """Id of the transaction that created the node (czxid). It distinguishes the node from a later node with the same
    path."""
    owner: int
    """Session id of the owner if the node is ephemeral; 0 if it is persistent."""
    modified_ms: int
    """Wall-clock time of the last change, in milliseconds since 1970."""


class SessionState(Enum):
    CONNECTED = auto()
    SUSPENDED = auto()
    """The connection is lost. Ephemeral nodes exist until the session expires."""
    LOST = auto()
    """The session has expired. Its ephemeral nodes are deleted now or soon. The driver is creating a new session."""
    OLDER = auto()
    """Connected to an older copy of the metadata, which is neither read nor written (docs/protocol.md B29)."""


@dataclass(frozen=True, slots=True)
class Create:
    path: str
    data: bytes = b""
    ephemeral: bool = False


@dataclass(frozen=True, slots=True)
class SetData:
    path: str
    data: bytes
    version: int
    """Expected version; -1 for any. Use -1 only if the write cannot overwrite anything that another process has
    written."""


@dataclass(frozen=True, slots=True)
class Delete:
    path: str
    version: int
    """Expected version; -1 for any. Use -1 only for nodes that no other process changes."""


@dataclass(frozen=True, slots=True)
class Check:
    path: str
    version: int
    """Expected version; -1 if the node only has to exist."""


Change = Create | SetData | Delete | Check


class Watch(Protocol):
    """A standing watch of a path. The driver renews it after reconnects and in new sessions."""

    def close(self) -> None: ...


class MetadataHistory(Protocol):
    """The knowledge of a driver about the store's history, from all of its connections."""

    generation: int
    """Number of connections so far, including the current one. A call is sent on the connection that was current
    when the call was made; otherwise it is refused with MetadataUnavailable."""

    def trust(self, is_trusted: bool) -> None:
        """Record whether the current connection leads to the store's own history, which is the default. A driver
        refuses servers that know less of the history than trusted connections have reported."""
        ...


class MetadataStore(Protocol):
    """One session with the metadata store. All coroutine methods may raise MetadataUnavailable and MetadataUnknown
    in addition to the errors that they name."""

    history: MetadataHistory

    @property
    def state(self) -> SessionState: ...

    @property
    def session(self) -> int:
        """Id of the current session, or 0 if there is none. `Stat.owner` of this process's ephemeral nodes is equal
        to it."""
        ...

    async def get(self, path: str) -> tuple[bytes, Stat]:
        """Return the data and the stat of a node. Raises NoSuchNode."""
        ...

    async def children(self, path: str) -> list[str]:
        """Return the names of the children, sorted. Raises NoSuchNode."""
        ...

    async def create(self, path: str, data: bytes = b"", *, ephemeral: bool = False, sequential: bool = False) -> str:
        """Create a node and return its path. `sequential` appends a counter of ten digits to the path. `ephemeral`
        makes the node exist only as long as this session. Raises NodeExists, or NoSuchNode if the parent does not
        exist."""
        ...

    async def set(self, path: str, data: bytes, version: int) -> int:
        """Replace the data of a node if the node has this version, and return the new version. Raises
        VersionConflict, NoSuchNode."""
        ...

    async def delete(self, path: str, version: int) -> None:
        """Delete a node if it has this version. Raises VersionConflict, NoSuchNode, or NotEmpty if the node has
        children."""
        ...

    async def multi(self, changes: Sequence[Change]) -> None:
        """Make all changes atomically. If one of them fails, make none and raise the error of the first that failed."""
        ...

    async def sync(self, path: str) -> None:
        """Wait until later reads of this session see at least everything that was committed before this call."""
        ...

    def watch(self, path: str, changed: Callable[[], None]) -> Watch:
        """Call `changed` on the event loop soon after the node at `path` or the set of its children may have changed,
        and after each reconnect. The path need not exist.

        Watch first, then read: only changes after that read are certain to be reported.
        """
        ...

    def on_state(self, listener: Callable[[SessionState], None]) -> None:
        """Call `listener` on the event loop whenever the state of the session changes."""
        ...

    async def close(self) -> None:
        """End the session, which deletes its ephemeral nodes."""
        ...


async def ensure_path(store: MetadataStore, path: str) -> None:
    """Create `path` and its missing parents as empty persistent nodes. Idempotent."""
    parts = path.strip("/").split("/")
    for count in range(1, len(parts) + 1):
        try:
            await store.create("/" + "/".join(parts[:count]))
        except NodeExists:
            continue


def check_change_sizes(changes: Sequence[Change]) -> None:
    """Raise MetadataError if the changes of one call together exceed DATA_BYTES_MAX, because a ZooKeeper server
    would break the connection."""
    total = sum(len(change.path) + len(change.data) for change in changes if isinstance(change, Create | SetData))
    if total > DATA_BYTES_MAX:
        raise MetadataError(f"{changes[0].path}: {total} bytes in one call, at most {DATA_BYTES_MAX}")
