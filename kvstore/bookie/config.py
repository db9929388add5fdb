"""The settings of a bookie. Every other number is a constant beside its use."""

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
    """The operator's settings for one bookie's disks: `[storage]` of a node's file. Raises ConfigError."""

    journal_dir: str = JOURNAL_DIR
    """Segments: every byte of every entry, once. Relative to the data directory, or a path of its own."""
    index_dir: str = "bookie/index"
    """Checkpoints of full segments; they can be made again from the journal."""
    journal_dirs: tuple[str, ...] = ()
    """Several directories in place of `journal_dir`, each on a disk of its own: ledgers are spread over them, and the
    bookie outlives the loss of any (docs/protocol.md, B23 and B24). The first is the one that the bookie had while it
    had only one. What is found in full segments of the others is kept in `index` below each."""
    lost_dirs: tuple[str, ...] = ()
    """Those of them whose disks are lost: the bookie starts without them, for good."""
    segment_bytes: Annotated[int, between(1 << 10, 2 << 30)] = 64 * MIB
    """Size of a file of the journal, allocated at once; one is made ahead. A node wants at least 1 MiB."""
    reserve_bytes: Annotated[int, between(0, BYTES_MAX)] = 256 * MIB
    """Free space below which the bookie becomes read-only. What is left serves fences, recovery and restarts."""
    reclaim_interval_s: Annotated[float, between(0.1, 86_400)] = 60.0
    """Between two looks for ledgers that were deleted."""
    sparse_share: Annotated[float, Range(0, 1, is_below=True)] = 0.5
    """A full segment with a smaller share of live bytes is rewritten."""
    rewrite_bytes_per_s: Annotated[int, between(1_000, BYTES_MAX)] = 16 * MIB
    """How fast the live bytes of sparse segments are written again."""
    scrub_bytes_per_s: Annotated[int, zero_or(1_000, BYTES_MAX)] = 4 * MIB
    """How fast stored bytes are read again to find damage; 0: never."""
    scrub_first_s: Annotated[float, between(1, SECONDS_MAX)] = 600.0
    """From the start of the bookie to the first round; between two rounds it is `scrub_rest_s`."""
    scrub_rest_s: Annotated[float, between(1, SECONDS_MAX)] = 3_600.0
    """From the end of one round of that to the next."""
    admit_raw_adds: bool = False
    """Store what clients add, whatever key and digest it has, to ledgers that are closed without entries: for Apache's
    own benchmark of a bookie, never in production (docs/protocol.md, B28)."""

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
        """Where segments are."""
        return self.journal_dirs or (self.journal_dir,)

    def _are_apart(self) -> bool:
        """Whether none of the directories is another one, or in it, or takes its index."""
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
        return [] if is_right else [f"{field}: want {want}, got {getattr(self, field)!r}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieConfig(StorageConfig):
    """One bookie. Raises ConfigError that names everything that is wrong."""

    name: str
    """The part of the bookie id that stays over incarnations; for example the node's id."""
    id: str = ""
    """The bookie id as `host:port`, in place of `<name>-<incarnation>`, for clients and tools of Apache's that want
    it so. It stays when the address changes (docs/protocol.md, B27)."""
    listen: str = "127.0.0.1:3181"
    """`host:port`; port 0 takes a free one."""
    advertise: str = ""
    """The `host:port` that others are told; empty: where it listens."""
    zone: str = ""
    """Where the machine stands; copies of one entry go to distinct zones. Empty: nowhere in particular."""
    pending_bytes_max: Annotated[int, above(0)] = 64 * MIB
    """Packets that wait for a sync, over all connections; ordinary adds beyond are refused."""
    connections_max: Annotated[int, above(0)] = 1024
    connection_pending_max: Annotated[int, above(0)] = 10_000
    """Requests of one connection that are not answered yet."""
    connection_bytes_max: Annotated[int, above(0)] = 32 * MIB
    """Bytes of one connection's requests not answered, and of answers that it has not read."""
    poll_ms_max: Annotated[int, above(0)] = 60_000
    """Longest a long poll waits, whatever it asks for."""

    def alone(self, journal_dir: str, index_dir: str) -> BookieConfig:
        """The same with one directory."""
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
    """Whether a bookie id is one that Apache's older clients can take for the bookie's address."""
    host, _, port = text.partition(":")
    return _HOST.fullmatch(host) is not None and port.isdecimal() and port.isascii() and 0 < int(port) < 1 << 16


def _is_directory(path: str) -> bool:
    """Whether it is plainly a path, by itself or below the data directory."""
    return "\0" not in path and not any(part in ("", ".", "..") for part in path.removeprefix("/").split("/"))


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdigit() and int(port) < 1 << 16
