"""The ports to the outside world, against which every part is written, instead of the libraries behind them.

There are two sets of adapters: the production ones beside this file, and the simulator's in tests/sim. The same code
runs on both. Futures, `asyncio.sleep`, `asyncio.timeout` and `loop.call_later` are used directly: the simulator has its
own event loop with virtual time. Tasks are started only by a Nursery.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from kvstore.env.beat import Beat
from kvstore.env.liveness.port import UNWATCHED, Liveness
from kvstore.env.logs.audit_lines import AuditLines
from kvstore.env.networks import KnownNetworks
from kvstore.env.slow_log import SlowLog
from kvstore.env.traces import Traces


class Clock(Protocol):
    """Two clocks that must never be mixed, and what a server concludes from them (docs/protocol.md, P28)."""

    boot_id: str
    """Id of the machine's boot, from which `now` counts; empty if it is not known."""

    def now(self) -> float:
        """Return the seconds since boot, including suspend (CLOCK_BOOTTIME). For durations, timeouts and leases."""
        ...

    def wall_ms(self) -> int:
        """Return milliseconds since 1970 by this machine's wall clock. Only shown to people; nothing is
        decided by it."""
        ...

    def date_ms(self) -> int:
        """Return the time that this server uses, confirmed by its monotonic clock and by other servers, in milliseconds
        since 1970. For record times, expiry and deadlines."""
        ...

    def shown_ms(self) -> int:
        """Return that time for clients, which send it back (docs/protocol.md, P15): too early rather than in the
        future; 0 if it is not known."""
        ...

    def passed_ms(self) -> int:
        """Return that time for deletions; 0 while other servers do not confirm it, so that nothing counts as
        expired."""
        ...

    def may_lead(self) -> bool:
        """Return True if the time is good enough to lead, by the clocks as they are now."""
        ...

    def has_date(self) -> bool:
        """Return True if there is a time at all. It is sufficient if no server has a better one and can lead."""
        ...

    def on_date_judged(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed` when the result of `may_lead` or `has_date` may have changed. Returns the function that ends
        this."""
        ...


class Stream(Protocol):
    """The sending half of a byte stream: the part of `asyncio.Transport` that we use."""

    def write(self, data: bytes) -> None: ...
    def writelines(self, data: Iterable[bytes]) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def get_write_buffer_size(self) -> int: ...
    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
    def is_closing(self) -> bool: ...
    def set_protocol(self, protocol: Any) -> None:
        """Pass the stream to another StreamHandler, which receives everything that follows. `connection_made` is not
        called."""
        ...

    def close(self) -> None:
        """Send what is buffered, then close. `connection_lost` follows."""
        ...

    def abort(self) -> None:
        """Close at once and discard what is buffered. `connection_lost` follows."""
        ...

    def get_extra_info(self, name: str, default: Any = None) -> Any: ...


class StreamHandler(Protocol):
    """The receiving half: the methods of `asyncio.Protocol`, fed with bytes by the event loop or by the simulator."""

    def connection_made(self, transport: Any) -> None: ...
    def data_received(self, data: bytes) -> None: ...
    def eof_received(self) -> bool | None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class Listener(Protocol):
    """A bound address that accepts connections until closed."""

    @property
    def address(self) -> str:
        """The bound `host:port`."""
        ...

    def close(self) -> None:
        """Stop accepting connections. Accepted ones continue."""
        ...


class Prelude(Protocol):
    """A conversation in plain text on one connection before its TLS handshake, in frames: four bytes of length, then
    the payload. Decides only."""

    @property
    def greeting(self) -> bytes:
        """Bytes to send first."""
        ...

    @property
    def is_over(self) -> bool:
        """True if the handshake comes next."""
        ...

    def receive(self, payload: bytes) -> bytes:
        """Take one frame's payload and return the bytes to send. Raises OSError if the connection must close."""
        ...

    def asks_for_tls(self, payload: bytes) -> bool:
        """Return True if the client's first frame starts a TLS handshake."""
        ...


class Transport(Protocol):
    """Byte streams between nodes. Addresses are `host:port`."""

    async def listen(
        self,
        address: str,
        factory: Callable[[], StreamHandler],
        *,
        is_vital: bool = False,
        is_lenient: bool = False,
        prelude: Callable[[], Prelude] | None = None,
    ) -> Listener:
        """Accept connections; each gets a handler of its own. `is_vital`: accept also when descriptors are so short
        that others are refused. `is_lenient`: where clients are verified, also accept clients that show no certificate.
        `prelude`: on TLS listeners, the conversation that a client may have before. Raises OSError if the address is
        taken."""
        ...

    async def connect(
        self, address: str, handler: StreamHandler, *, prelude: Callable[[], Prelude] | None = None
    ) -> Stream:
        """Open a connection; `handler.connection_made` is called before this returns. `prelude`: on TLS connections,
        the conversation before; a peer that does not understand it is called again without it. Raises OSError."""
        ...

    def statistics(self) -> Mapping[str, int]:
        """Return counts of accepted connections that no handler has, or ever had."""
        ...


class File(Protocol):
    """An open file. A write is certain to survive a crash only after a sync that began after it has completed."""

    def pwrite(self, offset: int, data: bytes) -> None:
        """Write all of `data` at `offset`. Raises OSError, which kvstore/os_errors.py classifies. A failed write may be
        repeated: it does not count before a sync."""
        ...

    def read(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes from `offset`; fewer only at the end of the file. Raises OSError."""
        ...

    def size(self) -> int: ...
    def allocate(self, size: int) -> None:
        """Extend the file to `size` bytes of zeroes with its blocks reserved. Raises OSError."""
        ...

    def truncate(self, size: int) -> None: ...
    def submit_sync(self, done: Callable[[OSError | None], None]) -> None:
        """Sync what was written up to this call, off the event loop. `done` is called on the loop, in order of
        submission."""
        ...

    def submit_write(
        self, offset: int, data: bytes, done: Callable[[OSError | None], None], *, is_synced: bool = True
    ) -> None:
        """Write all of `data` at `offset` and sync the file, as one step off the event loop. `done` is called on the
        loop, in order of submission with the syncs: with NotWritten if the write failed and no sync followed. Without
        `is_synced` nothing is synced."""
        ...

    def sync(self) -> None:
        """Sync and wait. For start-up and rare metadata, because it blocks the event loop. Raises SyncFailed."""
        ...

    def close(self) -> None: ...


FILES_UNLIMITED = 1 << 40
"""Value of `Disk.free_files` for a file system without a fixed number of inodes."""


class Disk(Protocol):
    """A directory tree. Paths are relative to its root, with `/` between parts. A created, renamed or removed name is
    certain to survive a crash only after `sync_dir` of its directory."""

    def open(self, path: str, *, create: bool = False) -> File:
        """Open a file for reading and writing. Raises FileNotFoundError unless `create`."""
        ...

    def exists(self, path: str) -> bool:
        """Return True if the disk returns a file of this name. A file whose inode cannot be read looks absent here, and
        exists if `list` names it."""
        ...

    def list(self, path: str) -> list[str]:
        """Return the names in a directory, sorted; an absent directory is empty."""
        ...

    def mkdir(self, path: str) -> None:
        """Create a directory and its parents. Idempotent."""
        ...

    def remove(self, path: str) -> None: ...
    def rename(self, old: str, new: str) -> None:
        """Rename a file atomically, replacing an existing one."""
        ...

    def sync_dir(self, path: str) -> None:
        """Make the names in a directory durable. Raises SyncFailed."""
        ...

    def free_bytes(self, path: str = "") -> int:
        """Return the bytes that are free for files in the existing directory `path`. A quota does not show here: only a
        write finds it."""
        ...

    def free_files(self, path: str = "") -> int:
        """Return the number of files that can still be created in the directory `path`; FILES_UNLIMITED if the file
        system has no fixed number of inodes."""
        ...

    def submit_probe(self, path: str, done: Callable[[OSError | None], None]) -> None:
        """Create, write, sync and remove a small file in the directory `path`, off the event loop. `done` is called on
        the loop, with the error in words for an operator; it is never called if the disk does not answer."""
        ...

    def real_path(self, path: str) -> str:
        """Return the path in the machine's file system, for libraries that open files themselves."""
        ...


class Task(Protocol):
    """A handle on spawned work."""

    def cancel(self) -> bool: ...
    def done(self) -> bool: ...
    def __await__(self) -> Any: ...


class Nursery(Protocol):
    """Starts tasks and owns them: no task outlives it, and they are cancelled in the order in which they were
    started."""

    def spawn(self, work: Coroutine[Any, Any, Any], *, name: str) -> Task:
        """Run `work`. An error that leaves it is logged with `name` and passed to the nursery's `on_error`."""
        ...

    def child(self, name: str) -> Nursery:
        """Return a nursery that ends with this one, or earlier."""
        ...

    async def close(self) -> None:
        """Cancel the running tasks and wait for them."""
        ...


async def always_writable() -> str:
    return ""


def never_starved() -> float:
    return 0.0


def nothing_has_ended() -> None:
    """Do nothing: syncs are reported only in turns of the event loop."""


@dataclass(frozen=True, slots=True)
class Env:
    """All ports of one process, passed down from the composition root."""

    clock: Clock
    random: Random
    transport: Transport
    disk: Disk
    nursery: Nursery
    fatal: Callable[[str], None]
    """Ends the process at once (a failed sync, a broken invariant). Does not return in production."""
    starved: Callable[[], float] = never_starved
    """Share of the recent time, from 0 to 1, in which the event loop was ready to run and had no processor."""
    writable: Callable[[], Awaitable[str]] = always_writable
    """Finds out by writing why this node cannot write to its disks; empty if it can. Takes up to three seconds."""
    report_syncs: Callable[[], None] = nothing_has_ended
    """Reports the syncs that have ended, as the event loop would. Called at the end of a callback that is followed by
    more of its kind in the same turn, so that these do not delay the reports."""
    beat: Beat = Beat()  # noqa: RUF009 - it holds nothing
    liveness: Liveness = UNWATCHED
    """Evidence that the process works, on which its metadata session depends."""
    slow: SlowLog = SlowLog()  # noqa: RUF009 - it takes nothing in
    traces: Traces = Traces()  # noqa: RUF009 - it takes none
    audit: AuditLines = AuditLines()  # noqa: RUF009 - it holds nothing
    """Destination of the audit log's lines."""
    known: KnownNetworks = field(default_factory=KnownNetworks)
    """Networks that unauthenticated peers elsewhere do not displace. Listeners add those of clients that
    authenticate."""
