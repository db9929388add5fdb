"""The metadata store: a small tree of versioned values with ephemerals, transactions and watches. One interface,
several drivers.

Semantics are ZooKeeper's. Every write names a version. A watch is only a hint: its caller reads again, and also every
10 s if correctness depends on it. Calls raise MetadataUnavailable unless the session is CONNECTED. A call whose
connection broke while it was in flight raises MetadataUnknown, and its caller reads again to learn the outcome. A call
whose caller was cancelled is carried out before later calls of the session, or never.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, Protocol

from kvstore.errors import MetadataError, NodeExists

DATA_BYTES_MAX = 1_000_000
"""Maximum bytes of paths and data in one call. ZooKeeper breaks the connection at 2^20 bytes; drivers refuse before
that with MetadataError."""


class Stat(NamedTuple):
    """A node's version and times."""

    version: int
    """Rises by one with each set; starts at 0."""
    created: int
    """Transaction that created the node (czxid). Distinguishes it from a later node with the same path."""
    owner: int
    """Session id of an ephemeral's owner; 0 if persistent."""
    modified_ms: int
    """Wall clock of the last change, in milliseconds."""


class SessionState(Enum):
    CONNECTED = auto()
    SUSPENDED = auto()
    """The connection is lost; ephemerals exist until the session expires."""
    LOST = auto()
    """The session has expired: its ephemerals are gone, or will be. A new session is being made."""
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
    """-1: any version. Only where nothing that another process writes can be lost."""


@dataclass(frozen=True, slots=True)
class Delete:
    path: str
    version: int
    """-1: any version. Only for nodes that no other process changes."""


@dataclass(frozen=True, slots=True)
class Check:
    path: str
    version: int
    """-1: the node must only exist."""


Change = Create | SetData | Delete | Check


class Watch(Protocol):
    """A standing watch of a path. The driver rearms it over reconnects and new sessions."""

    def close(self) -> None: ...


class MetadataHistory(Protocol):
    """The store's history, as far as a driver knows it from all of its connections."""

    generation: int
    """Number of connections so far, including the current one. A call is sent on the connection that was present when
    the call was made, or refused with MetadataUnavailable."""

    def trust(self, is_trusted: bool) -> None:
        """Record whether the present connection leads to the store's history, as it does by default. A driver refuses
        servers that know less of the history than trusted connections have reported."""
        ...


class MetadataStore(Protocol):
    """One session with the store. All coroutine methods raise MetadataUnavailable or MetadataUnknown besides what they
    name."""

    history: MetadataHistory

    @property
    def state(self) -> SessionState: ...

    @property
    def session(self) -> int:
        """Id of the current session, equal to `Stat.owner` of this process's ephemerals; 0 while there is none."""
        ...

    async def get(self, path: str) -> tuple[bytes, Stat]:
        """Return data and stat of a node. Raises NoSuchNode."""
        ...

    async def children(self, path: str) -> list[str]:
        """Return the names of the children, sorted. Raises NoSuchNode."""
        ...

    async def create(self, path: str, data: bytes = b"", *, ephemeral: bool = False, sequential: bool = False) -> str:
        """Create a node and return its path (with ten digits appended if `sequential`). Raises NodeExists, NoSuchNode
        (parent)."""
        ...

    async def set(self, path: str, data: bytes, version: int) -> int:
        """Compare-and-set, and return the new version. Raises VersionConflict, NoSuchNode."""
        ...

    async def delete(self, path: str, version: int) -> None:
        """Delete a node. Raises VersionConflict, NoSuchNode, NotEmpty."""
        ...

    async def multi(self, changes: Sequence[Change]) -> None:
        """Make all changes or none. Raises the error of the first change that failed."""
        ...

    async def sync(self, path: str) -> None:
        """Make later reads of this session see at least what was committed before this call."""
        ...

    def watch(self, path: str, changed: Callable[[], None]) -> Watch:
        """Call `changed` on the event loop soon after `path` or the set of its children may have changed, and after
        each reconnect. The path need not exist. Watch first, then read: only changes after that read are certain to be
        reported."""
        ...

    def on_state(self, listener: Callable[[SessionState], None]) -> None:
        """Call `listener` on the event loop at each change of the session's state."""
        ...

    async def close(self) -> None:
        """End the session, which deletes its ephemerals."""
        ...


async def ensure_path(store: MetadataStore, path: str) -> None:
    """Create `path` and its parents as empty persistent nodes where they are absent."""
    parts = path.strip("/").split("/")
    for count in range(1, len(parts) + 1):
        try:
            await store.create("/" + "/".join(parts[:count]))
        except NodeExists:
            continue


def check_change_sizes(changes: Sequence[Change]) -> None:
    """Raise MetadataError if one call carries more than a ZooKeeper server accepts, which would break the
    connection."""
    total = sum(len(change.path) + len(change.data) for change in changes if isinstance(change, Create | SetData))
    if total > DATA_BYTES_MAX:
        raise MetadataError(f"{changes[0].path}: {total} bytes in one call, at most {DATA_BYTES_MAX}")
