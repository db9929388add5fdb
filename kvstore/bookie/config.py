"""The settings of a bookie. All other numbers are constants beside their use."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Annotated

from kvstore.errors import ConfigError
from kvstore.ranges import BYTES_MAX, SECONDS_MAX, Range, above, between, range_faults, zero_or

MIB = 1 << 20
JOURNAL_DIR = "bookie/journal"
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9.-]{0,62}")
_HOST = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9.-]{0,252}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig:
    """The settings for one bookie's disks: `[storage]` of a node's file. Raises ConfigError."""

    journal_dir: str = JOURNAL_DIR
    """Directory of the journal segments, which contain every byte of every entry once. Relative to the data directory,
    or absolute."""
    index_dir: str = "bookie/index"
    """Directory of the checkpoints of full segments; they can be recreated from the journal."""
    journal_dirs: tuple[str, ...] = ()
    """Several journal directories instead of `journal_dir`, each on its own disk. Ledgers are spread over them,
    and the bookie survives the loss of any (docs/protocol.md, B23 and B24). The first must be the one that the bookie
    had while it had only one. Each of the others has its index in `index` below it."""
    lost_dirs: tuple[str, ...] = ()
    """Journal directories whose disks are lost. The bookie starts without them, permanently."""
    segment_bytes: Annotated[int, between(1 << 10, 2 << 30)] = 64 * MIB
    """Size of a segment of the journal, which is allocated at once; one segment is created ahead. A node requires at
    least 1 MiB."""
    reserve_bytes: Annotated[int, between(0, BYTES_MAX)] = 256 * MIB
    """Free space that is reserved for fences, recovery and restarts. The bookie becomes read-only if less than half of
    it is free, or if it needs a new segment and the segment would not leave all of it free."""
    reclaim_interval_s: Annotated[float, between(0.1, 86_400)] = 60.0
    """Seconds between two checks for deleted ledgers."""
    sparse_share: Annotated[float, Range(0, 1, is_below=True)] = 0.5
    """A full segment with a smaller share of live bytes is rewritten."""
    rewrite_bytes_per_s: Annotated[int, between(1_000, BYTES_MAX)] = 16 * MIB
    """Maximum rate at which the live bytes of sparse segments are rewritten."""
    scrub_bytes_per_s: Annotated[int, zero_or(1_000, BYTES_MAX)] = 4 * MIB
    """Maximum rate at which stored bytes are read again to find damage; 0 disables the scrub."""
    scrub_first_s: Annotated[float, between(1, SECONDS_MAX)] = 600.0
    """Seconds from the start of the bookie to the first scrub. Later scrubs follow after `scrub_rest_s`."""
    scrub_rest_s: Annotated[float, between(1, SECONDS_MAX)] = 3_600.0
    """Seconds from the end of one scrub to the next."""
    admit_raw_adds: bool = False
    """Store adds of clients to ledgers that are closed without entries, with any key and digest. Only for Apache's
    bookie benchmark, never in production (docs/protocol.md, B28)."""

    def __post_init__(self) -> None:
        if faults := [*self._wrong_directories(), *range_faults(self)]:
            raise ConfigError(*faults)

    def _wrong_directories(self) -> list[str]:
        return [
            *self._wrong("journal_dir", _is_directory(self.journal_dir), "a path without . and .."),
            *self._wrong("index_dir", _is_directory(self.index_dir), "a path without . and .."),
            *self._wrong("index_dir", self.index_dir not in self.directories, "another directory than journal_dir"),
            *self._wrong("journal_dirs", not self.journal_dirs or self._are_apart(), "distinct paths without . and .."),
            *self._wrong("journal_dir", self._is_only_way(), "journal_dirs alone, where there are several"),
            *self._wrong("lost_dirs", all(_is_directory(each) for each in self.lost_dirs), "paths without . and .."),
        ]

    @property
    def directories(self) -> tuple[str, ...]:
        """The journal directories."""
        return self.journal_dirs or (self.journal_dir,)

    def _are_apart(self) -> bool:
        """Return True if no directory equals or contains another one, or the index directory."""
        paths = [*self.journal_dirs, self.index_dir]
        return all(_is_directory(each) and each.isprintable() for each in self.journal_dirs) and not any(
            f"{one}/".startswith(f"{other}/")
            for at, one in enumerate(paths)
            for number, other in enumerate(paths)
            if at != number
        )

    def _is_only_way(self) -> bool:
        return not self.journal_dirs or self.journal_dir in (JOURNAL_DIR, self.journal_dirs[0])

    def _wrong(self, field: str, is_right: bool, want: str) -> list[str]:
        return [] if is_right else [f"{field}: expected {want}, got {getattr(self, field)!r}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieConfig(StorageConfig):
    """The settings of one bookie. Raises a ConfigError that names everything that is wrong."""

    name: str
    """The part of the bookie id that stays the same across incarnations, for example the node's id."""
    id: str = ""
    """A fixed bookie id `host:port` instead of `<name>-<incarnation>`, for Apache clients and tools that need it. It
    stays the same when the address changes (docs/protocol.md, B27)."""
    listen: str = "127.0.0.1:3181"
    """Listening address `host:port`; port 0 takes a free port."""
    advertise: str = ""
    """The address `host:port` that is announced to others; empty: the listening address."""
    zone: str = ""
    """Zone of the machine. Copies of one entry go to distinct zones. Empty: unknown."""
    pending_bytes_max: Annotated[int, above(0)] = 64 * MIB
    """Maximum number of bytes that wait for a sync, over all connections; further ordinary adds are refused."""
    connections_max: Annotated[int, above(0)] = 1024
    connection_pending_max: Annotated[int, above(0)] = 10_000
    """Maximum number of unanswered requests of one connection."""
    connection_bytes_max: Annotated[int, above(0)] = 32 * MIB
    """Maximum number of bytes of one connection's unanswered requests, and of answers that its client has not read."""
    poll_ms_max: Annotated[int, above(0)] = 60_000
    """Longest wait of a long poll, whatever it asks for."""

    def alone(self, journal_dir: str, index_dir: str) -> BookieConfig:
        """Return the same settings with one directory."""
        return replace(self, journal_dir=journal_dir, index_dir=index_dir, journal_dirs=(), lost_dirs=())

    def __post_init__(self) -> None:
        faults = [
            *self._wrong("name", _NAME.fullmatch(self.name) is not None, "letters, digits, dots and dashes"),
            *self._wrong("id", not self.id or is_address_id(self.id), "host:port or nothing"),
            *self._wrong("listen", _is_address(self.listen), "host:port"),
            *self._wrong("advertise", not self.advertise or _is_address(self.advertise), "host:port or nothing"),
            *self._wrong_directories(),
            *range_faults(self),
        ]
        if faults:
            raise ConfigError(*faults)


def is_address_id(text: str) -> bool:
    """Return True if a bookie id is one that Apache's older clients can use as the bookie's address."""
    host, _, port = text.partition(":")
    return _HOST.fullmatch(host) is not None and port.isdecimal() and port.isascii() and 0 < int(port) < 1 << 16


def _is_directory(path: str) -> bool:
    """Return True if `path` is a plain path, absolute or below the data directory."""
    return "\0" not in path and not any(part in ("", ".", "..") for part in path.removeprefix("/").split("/"))


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdigit() and int(port) < 1 << 16
