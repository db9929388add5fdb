"""The interfaces (ports) to the outside world. All other code uses these ports instead of the libraries behind them.

There are two sets of adapters: the production adapters beside this file, and the simulator's in tests/sim. The same
code runs on both. Futures, `asyncio.sleep`, `asyncio.timeout` and `loop.call_later` are used directly, because the
simulator has its own event loop with virtual time. Only a Nursery starts tasks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from kvstore.env.beat import Beat
from kvstore.env.death.port import UNPROVEN, DeathWatch
from kvstore.env.liveness.port import UNWATCHED, Liveness
from kvstore.env.logs.audit_lines import AuditLines
from kvstore.env.networks import KnownNetworks
from kvstore.env.slow_log import SlowLog
from kvstore.env.traces import Traces


class Clock(Protocol):
    """The monotonic clock and the wall clock, which must never be mixed, and the server's conclusions from them
    (docs/protocol.md, P28)."""

    boot_id: str
    """Id of the machine's boot, from which `now` counts; empty if the id is not known."""

    def now(self) -> float:
        """Return the seconds since boot, including suspend (CLOCK_BOOTTIME). Use it for durations, timeouts and
        leases."""
        ...

    def wall_ms(self) -> int:
        """Return the time of this machine's wall clock in milliseconds since 1970. It is only shown to people; no
        decision depends on it."""
        ...

    def date_ms(self) -> int:
        """Return the time that this server uses, in milliseconds since 1970. The monotonic clock and other servers
        confirm it. Use it for record times, expiry and deadlines."""
        ...

    def shown_ms(self) -> int:
        """Return the time of `date_ms` for clients, which send it back (docs/protocol.md, P15). It may be early but
        is never in the future. Returns 0 if the time is not known."""
        ...

    def passed_ms(self) -> int:
        """Return the time of `date_ms` for deletions. Returns 0 while other servers do not confirm it, so that
        nothing counts as expired."""
        ...

    def may_lead(self) -> bool:
        """Return True if the time is reliable enough to lead, by the current state of the clocks."""
        ...

    def has_date(self) -> bool:
        """Return True if the server has any time. Such a time is sufficient if no server that can lead has a better
        one."""
        ...

    def on_date_judged(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed` whenever the result of `may_lead` or `has_date` may have changed. Returns a function that
        ends the calls."""
        ...


class Stream(Protocol):
    """The sending half of a byte stream: the part of `asyncio.Transport` that this project uses. After the handler's
    `connection_lost`, the methods that send or set limits raise RuntimeError, as those of uvloop do."""

    def write(self, data: bytes) -> None: ...
    def writelines(self, data: Iterable[bytes]) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def get_write_buffer_size(self) -> int: ...
    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
    def is_closing(self) -> bool: ...
    def set_protocol(self, protocol: Any) -> None:
        """Pass the stream to another StreamHandler, which receives everything from now on. Its `connection_made` is
        not called."""
        ...

    def close(self) -> None:
        """Send the buffered data, then close the stream. The handler's `connection_lost` is called afterwards."""
        ...

    def abort(self) -> None:
        """Close the stream at once and discard the buffered data. The handler's `connection_lost` is called
        afterwards."""
        ...

    def get_extra_info(self, name: str, default: Any = None) -> Any: ...


class StreamHandler(Protocol):
    """The receiving half of a byte stream: the methods of `asyncio.Protocol`. The event loop or the simulator calls
    them."""

    def connection_made(self, transport: Any) -> None: ...
    def data_received(self, data: bytes) -> None: ...
    def eof_received(self) -> bool | None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class Listener(Protocol):
    """A bound address that accepts connections until it is closed."""

    @property
    def address(self) -> str:
        """The bound `host:port`."""
        ...

    def close(self) -> None:
        """Stop accepting connections. Accepted ones continue."""
        ...


class Prelude(Protocol):
    """A plain-text conversation on one connection before its TLS handshake. A frame is a length of four bytes, then
    the payload. Decides only."""

    @property
    def greeting(self) -> bytes:
        """Bytes that the caller sends first."""
        ...

    @property
    def is_over(self) -> bool:
        """True if the conversation is over and the handshake comes next."""
        ...

    def receive(self, payload: bytes) -> bytes:
        """Process the payload of one frame and return the bytes to send. Raises OSError if the connection must be
        closed."""
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
        """Accept connections at `address`. Each connection gets its own handler from `factory`.

        Args:
            is_vital: accept connections even if descriptors are so short that other listeners refuse theirs.
            is_lenient: on a listener that verifies clients, also accept clients that show no certificate.
            prelude: on TLS listeners, makes the conversation that a client may have before the handshake.

        Raises OSError if the address is taken.
        """
        ...

    async def connect(
        self, address: str, handler: StreamHandler, *, prelude: Callable[[], Prelude] | None = None
    ) -> Stream:
        """Open a connection. `handler.connection_made` is called before this method returns.

        `prelude` makes the conversation before a TLS handshake. If the peer does not understand it, the transport
        connects again without it. Raises OSError.
        """
        ...

    def statistics(self) -> Mapping[str, int]:
        """Return counts of accepted connections that have no handler yet, or never had one."""
        ...


class File(Protocol):
    """An open file. A write survives a crash for certain only after a sync that began after the write has completed."""

    def pwrite(self, offset: int, data: bytes) -> None:
        """Write all of `data` at `offset`. Raises OSError, which kvstore/os_errors.py classifies. A failed write may
        be repeated, because no write counts before a sync."""
        ...

    def read(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes from `offset`, and fewer only at the end of the file. Raises OSError."""
        ...

    def size(self) -> int: ...
    def allocate(self, size: int) -> None:
        """Extend the file to `size` bytes with zeroes, and reserve its blocks. Raises OSError."""
        ...

    def truncate(self, size: int) -> None: ...
    def submit_sync(self, done: Callable[[OSError | None], None]) -> None:
        """Sync everything that was written before this call, off the event loop. `done` is called on the event loop,
        with the error or None, in the order of submission."""
        ...

    def submit_write(
        self, offset: int, data: bytes, done: Callable[[OSError | None], None], *, is_synced: bool = True
    ) -> None:
        """Write all of `data` at `offset` and sync the file, in one step off the event loop. Without `is_synced`, do
        not sync.

        `done` is called on the event loop, in the order of submission of writes and syncs. Its argument is NotWritten
        if the write failed and no sync followed.
        """
        ...

    def sync(self) -> None:
        """Sync the file and block until it is done. Only for start-up and rare metadata, because it blocks the event
        loop. Raises SyncFailed."""
        ...

    def close(self) -> None: ...


FILES_UNLIMITED = 1 << 40
"""Result of `Disk.free_files` for a file system without a fixed number of inodes."""


class Disk(Protocol):
    """A directory tree. Paths are relative to its root, with `/` between parts. A created, renamed or removed name
    survives a crash for certain only after `sync_dir` of its directory."""

    def open(self, path: str, *, create: bool = False) -> File:
        """Open a file for reading and writing. Raises FileNotFoundError if the file does not exist, unless `create`
        is True."""
        ...

    def exists(self, path: str) -> bool:
        """Return True if the disk returns a file of this name. Returns False for a file whose inode cannot be read,
        although `list` names that file."""
        ...

    def list(self, path: str) -> list[str]:
        """Return the names in a directory, sorted. An absent directory counts as empty."""
        ...

    def mkdir(self, path: str) -> None:
        """Create a directory and its missing parents. Idempotent."""
        ...

    def remove(self, path: str) -> None: ...
    def rename(self, old: str, new: str) -> None:
        """Rename a file atomically, replacing an existing one."""
        ...

    def sync_dir(self, path: str) -> None:
        """Sync a directory, so that the names in it survive a crash. Raises SyncFailed."""
        ...

    def free_bytes(self, path: str = "") -> int:
        """Return the number of bytes that are free for files in the existing directory `path`. The result ignores
        quotas; only a write shows that a quota is used up."""
        ...

    def free_files(self, path: str = "") -> int:
        """Return the number of files that can still be created in the directory `path`, or FILES_UNLIMITED if the
        file system has no fixed number of inodes."""
        ...

    def submit_probe(self, path: str, done: Callable[[OSError | None], None]) -> None:
        """Test a directory: create, write, sync and remove a small file in it, off the event loop.

        `done` is called on the event loop with None, or with an error in words for an operator. It is never called if
        the disk does not respond.
        """
        ...

    def real_path(self, path: str) -> str:
        """Return the path in the machine's file system, for libraries that open files themselves."""
        ...


class Task(Protocol):
    """A handle on a running task."""

    def cancel(self) -> bool: ...
    def done(self) -> bool: ...
    def __await__(self) -> Any: ...


class Nursery(Protocol):
    """Starts tasks and owns them. No task outlives its nursery, and the nursery cancels tasks in the order in which
    they were started."""

    def spawn(self, work: Coroutine[Any, Any, Any], *, name: str) -> Task:
        """Start a task that runs `work`. An error that leaves the task is logged with `name` and passed to the
        nursery's `on_error`."""
        ...

    def child(self, name: str) -> Nursery:
        """Return a new nursery that ends with this one or earlier."""
        ...

    async def close(self) -> None:
        """Cancel the running tasks and wait until they have ended."""
        ...


async def always_writable() -> str:
    return ""


def never_starved() -> float:
    return 0.0


def nothing_has_ended() -> None:
    """Do nothing: syncs are reported only in turns of the event loop."""


@dataclass(frozen=True, slots=True)
class Env:
    """All ports of one process. The composition root creates them and passes them down."""

    clock: Clock
    random: Random
    transport: Transport
    disk: Disk
    nursery: Nursery
    fatal: Callable[[str], None]
    """Ends the process at once, for example after a failed sync or a broken invariant. Does not return in
    production."""
    starved: Callable[[], float] = never_starved
    """Share of the recent time, from 0 to 1, in which the event loop was ready to run but had no processor."""
    writable: Callable[[], Awaitable[str]] = always_writable
    """Tests by writing if this node can write to its disks. Returns the reason if it cannot, or an empty string.
    Takes up to three seconds."""
    report_syncs: Callable[[], None] = nothing_has_ended
    """Reports the syncs that have ended, as the event loop would. A callback calls it at its end if more callbacks
    of its kind follow in the same turn of the event loop, so that they do not delay the reports."""
    beat: Beat = Beat()  # noqa: RUF009 - it holds nothing
    liveness: Liveness = UNWATCHED
    """Evidence that the process works, on which its metadata session depends."""
    death: DeathWatch = UNPROVEN
    """Proves the end of this process to other processes."""
    slow: SlowLog = SlowLog()  # noqa: RUF009 - it takes nothing in
    traces: Traces = Traces()  # noqa: RUF009 - it takes none
    audit: AuditLines = AuditLines()  # noqa: RUF009 - it holds nothing
    """Destination of the audit log's lines."""
    known: KnownNetworks = field(default_factory=KnownNetworks)
    """Networks whose connections unauthenticated peers from elsewhere cannot displace. Listeners add the networks of
    clients that authenticate."""
