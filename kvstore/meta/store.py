"""The metadata store: a small tree of versioned values with ephemerals, transactions and watches. One interface,
several drivers.

Semantics are ZooKeeper's. Every write names a version. A watch is only a hint: whoever is called re-reads; whoever
depends on it re-reads every 10 s anyway. Calls are refused with MetadataUnavailable unless the session is CONNECTED; a
call whose connection broke while it was under way raises MetadataUnknown, and its caller reads again to learn what
happened. A call whose caller was cancelled is done before later calls of the session, or never.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, Protocol

from kvstore.errors import MetadataError, NodeExists

DATA_BYTES_MAX = 1_000_000
"""Paths and data in one call. ZooKeeper breaks the connection at 2^20 bytes; drivers refuse before, with
MetadataError."""


class Stat(NamedTuple):
    """A node's version and times."""

    version: int
    """Rises by one with each set; starts at 0."""
    created: int
    """Transaction that created the node (czxid): tells a node from one of the same path made later."""
    owner: int
    """Session id of an ephemeral's owner; 0 if persistent."""
    modified_ms: int
    """Wall clock of the last change, in milliseconds."""


class SessionState(Enum):
    CONNECTED = auto()
    SUSPENDED = auto()
    """Connection lost; ephemerals live on until the session expires."""
    LOST = auto()
    """The session has expired: its ephemerals are gone, or will be; a new session is being made."""
    OLDER = auto()
    """Connected to an older copy of the metadata, of which nothing is read or written (docs/protocol.md B29)."""


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
    """-1: whatever version; only where nothing that another process writes can be lost."""


@dataclass(frozen=True, slots=True)
class Delete:
    path: str
    version: int
    """-1: whatever version; only for nodes that no other process ever changes."""


@dataclass(frozen=True, slots=True)
class Check:
    path: str
    version: int
    """-1: only that the node exists."""


Change = Create | SetData | Delete | Check


class Watch(Protocol):
    """A standing interest in a path; the driver re-arms it over reconnects and new sessions."""

    def close(self) -> None: ...


class MetadataHistory(Protocol):
    """The store's history, as far as a driver knows it from all of its connections."""

    generation: int
    """Number of connections so far, the present one included. A call is sent on the connection that was the present one
    when the call was made, or refused with MetadataUnavailable."""

    def trust(self, is_trusted: bool) -> None:
        """Say whether the present connection leads to the store's history, which it does unless this says otherwise. A
        driver refuses servers that know less of the history than trusted connections have told."""
        ...


class MetadataStore(Protocol):
    """One session with the store. All coroutine methods raise MetadataUnavailable or MetadataUnknown besides what they
    name."""

    history: MetadataHistory

    @property
    def state(self) -> SessionState: ...

    @property
    def session(self) -> int:
        """Id of the present session; what `Stat.owner` of this process's ephemerals equals. 0 while there is none."""
        ...

    async def get(self, path: str) -> tuple[bytes, Stat]:
        """Raises NoSuchNode."""
        ...

    async def children(self, path: str) -> list[str]:
        """Names, sorted. Raises NoSuchNode."""
        ...

    async def create(self, path: str, data: bytes = b"", *, ephemeral: bool = False, sequential: bool = False) -> str:
        """Create a node and return its path (with ten digits appended if `sequential`). Raises NodeExists, NoSuchNode
        (parent)."""
        ...

    async def set(self, path: str, data: bytes, version: int) -> int:
        """Compare-and-set; returns the new version. Raises VersionConflict, NoSuchNode."""
        ...

    async def delete(self, path: str, version: int) -> None:
        """Raises VersionConflict, NoSuchNode, NotEmpty."""
        ...

    async def multi(self, changes: Sequence[Change]) -> None:
        """All or nothing. Raises the error of the first change that failed."""
        ...

    async def sync(self, path: str) -> None:
        """Later reads of this session see at least what was committed before this call."""
        ...

    def watch(self, path: str, changed: Callable[[], None]) -> Watch:
        """Call `changed` on the event loop, soon after `path` or the set of its children may have changed, and after
        each reconnect. The path need not exist. Watch first, then read: only what changes after that read is sure to be
        told."""
        ...

    def on_state(self, listener: Callable[[SessionState], None]) -> None:
        """Call `listener` on the event loop at each change of the session's state."""
        ...

    async def close(self) -> None:
        """End the session: its ephemerals vanish."""
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
    """Raise MetadataError if one call carries more than a ZooKeeper server takes: it would break the connection."""
    total = sum(len(change.path) + len(change.data) for change in changes if isinstance(change, Create | SetData))
    if total > DATA_BYTES_MAX:
        raise MetadataError(f"{changes[0].path}: {total} bytes in one call, at most {DATA_BYTES_MAX}")
