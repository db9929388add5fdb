"""Builds and parses every path in the metadata store, with pure functions. Paths are relative to the chroot of the
connection string.

Paths below LEDGERS have Apache BookKeeper's names, so that its tools work on our clusters. The other paths are our own
(docs/reference/formats.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvstore.types import BookieId, LedgerId, PartitionId, ServerId

LEDGERS = "/ledgers"
LAYOUT = f"{LEDGERS}/LAYOUT"
INSTANCE_ID = f"{LEDGERS}/INSTANCEID"
AVAILABLE = f"{LEDGERS}/available"
READONLY = f"{AVAILABLE}/readonly"
COOKIES = f"{LEDGERS}/cookies"
IDGEN = f"{LEDGERS}/idgen"
IDGEN_LONG = f"{LEDGERS}/idgen-long"

UNDERREPLICATION = f"{LEDGERS}/underreplication"
MARKS_LAYOUT = f"{UNDERREPLICATION}/LAYOUT"
MARKS = f"{UNDERREPLICATION}/ledgers"
MARK_LOCKS = f"{UNDERREPLICATION}/locks"
RECOVERY_DISABLED = f"{UNDERREPLICATION}/disable"
LOST_BOOKIE_DELAY = f"{UNDERREPLICATION}/lostBookieRecoveryDelay"
AUDITOR_VOTES = f"{UNDERREPLICATION}/auditorelection"

SERVERS = "/servers"
PARTITIONS = "/partitions"
KEPT = "/kept"
SNAPSHOTS = "/snapshots"
RING = "/ring"
CONFIG = "/config"
ACCESS = "/access"
NAMESPACES = "/namespaces"
BALANCE = "/balance"
"""Steps that the balancer has made."""
AGES = "/ages"
"""Ages of each bookie's directories."""
HIGH_WATER = "/high-water"
"""Each node's high-water mark."""
VERSION = "/version"
"""The cluster version: features that all of its servers support."""
PIN_NUMBER = "/pin-number"
"""The number of the last pin that was taken."""
OLDER_COPY = "/older-copy"
"""Exists if a node has found that this store is an older copy of itself. The data give the reason."""

COUNTED = "/counted"
"""Counters of ledger ids in metadata that were moved here by a file."""

SHORT_LEDGER_MAX = 2**31 - 2
"""Largest ledger id whose path has ten digits. Paths of larger ids have nineteen digits."""
LEDGER_MAX = 2**63 - 1

_NO_PARTS = frozenset(("", ".", ".."))
_SHORT = re.compile(r"(\d{2})/(\d{4})/L(\d{4})")
_LONG = re.compile(r"(\d{3})/(\d{4})/(\d{4})/(\d{4})/L(\d{4})")
_MARK = re.compile(r"urL(\d{10,19})")
_GROUP = re.compile(r"[0-9a-f]{4}")
_MARKS_PAGE = re.compile(rf"{MARKS}/([0-9a-f]{{4}})/([0-9a-f]{{4}})/([0-9a-f]{{4}})")


def _digits(number: int, *, groups: tuple[int, ...]) -> list[str]:
    text = f"{number:0{sum(groups)}d}"
    ends = [sum(groups[: i + 1]) for i in range(len(groups))]
    return [text[end - size : end] for size, end in zip(groups, ends, strict=True)]


def ledger(ledger_id: LedgerId) -> str:
    """Return the path of a ledger's metadata. The id is split into groups of two, four and four digits, or for
    larger ids into three and four times four digits."""
    if not 0 <= ledger_id <= LEDGER_MAX:
        raise ValueError(f"expected a ledger id from 0 to {LEDGER_MAX}, got {ledger_id}")
    groups = (2, 4, 4) if ledger_id <= SHORT_LEDGER_MAX else (3, 4, 4, 4, 4)
    *parents, last = _digits(ledger_id, groups=groups)
    return "/".join((LEDGERS, *parents, f"L{last}"))


def ledger_of(path: str) -> LedgerId | None:
    """Return the id of the ledger whose metadata are at `path`, or None for any other path."""
    below = path.removeprefix(f"{LEDGERS}/")
    match = _SHORT.fullmatch(below) or _LONG.fullmatch(below)
    if match is None:
        return None
    found = LedgerId(int("".join(match.groups())))
    return found if found <= LEDGER_MAX and ledger(found) == path else None


def is_ledger_tree(name: str) -> bool:
    """Return True if a child of LEDGERS with this name contains ledgers. Such names have two digits for short ids
    and three for long ids."""
    return re.fullmatch(r"\d{2,3}", name) is not None


def mark(ledger_id: LedgerId) -> str:
    """Return the path of the mark of an under-replicated ledger. It contains the id as four groups of four
    hexadecimal digits, then in decimal."""
    if not 0 <= ledger_id <= LEDGER_MAX:
        raise ValueError(f"expected a ledger id from 0 to {LEDGER_MAX}, got {ledger_id}")
    digits = f"{ledger_id:016x}"
    return "/".join((MARKS, *(digits[at : at + 4] for at in range(0, 16, 4)), f"urL{ledger_id:010d}"))


def marked_of(path: str) -> LedgerId | None:
    """Return the id of the ledger that the node at `path` marks, or None for any other path."""
    match = _MARK.fullmatch(path.rpartition("/")[2])
    found = LedgerId(int(match.group(1))) if match else None
    return found if found is not None and found <= LEDGER_MAX and mark(found) == path else None


def is_marks_page(path: str) -> bool:
    """Return True if each child of `path` stands for one mark, which means that `path` ends with the third of the
    four groups of digits."""
    return _MARKS_PAGE.fullmatch(path) is not None


def marks_of_page(path: str, names: Iterable[str]) -> list[LedgerId]:
    """Return the ids of the ledgers whose marks are below the children `names` of `path`, without reading the
    children. The four groups of digits form the ledger id. Returns an empty list if `path` does not end with the
    third group."""
    page = _MARKS_PAGE.fullmatch(path)
    if page is None:
        return []
    found = [int("".join((*page.groups(), name)), 16) for name in names if _GROUP.fullmatch(name)]
    return [LedgerId(each) for each in sorted(found) if each <= LEDGER_MAX]


def mark_lock(ledger_id: LedgerId) -> str:
    """Return the path of the lock that a worker holds while it repairs a marked ledger."""
    return f"{MARK_LOCKS}/urL{ledger_id:010d}"


def available(bookie: BookieId) -> str:
    return f"{AVAILABLE}/{bookie}"


def readonly(bookie: BookieId) -> str:
    return f"{READONLY}/{bookie}"


def cookie(bookie: BookieId) -> str:
    return f"{COOKIES}/{bookie}"


def age(bookie: BookieId) -> str:
    """Return the path of the bookie's age, a count that rises while the bookie stores entries. Directories with a
    lower count are a copy."""
    return f"{AGES}/{bookie}"


def high_water(node: str) -> str:
    """Return the path of a node's high-water mark, a count that only this node raises. Metadata with a lower count
    than a confirmed one are an older copy."""
    return f"{HIGH_WATER}/{node}"


def server(server_id: ServerId) -> str:
    return f"{SERVERS}/{server_id}"


def partition(partition_id: PartitionId) -> str:
    return f"{PARTITIONS}/{partition_id}"


def kept_log(partition_id: PartitionId) -> str:
    """Return the path of the ledger list of a partition that has left the ring. Readers of its feed use the list."""
    return f"{KEPT}/{partition_id}"


def partition_log(partition_id: PartitionId) -> str:
    """Return the path of the partition's list of ledgers."""
    return f"{PARTITIONS}/{partition_id}/log"


def partition_away(partition_id: PartitionId) -> str:
    """Return the path of the record of how long the partition's replicas have been away."""
    return f"{PARTITIONS}/{partition_id}/away"


def partition_term(partition_id: PartitionId) -> str:
    """Return the path of the partition's term, a node whose version rises with every new leader."""
    return f"{PARTITIONS}/{partition_id}/term"


def partition_leader(partition_id: PartitionId) -> str:
    return f"{PARTITIONS}/{partition_id}/leader"


def partition_trusted(partition_id: PartitionId) -> str:
    """Return the path of the node in which an operator declares which state is right if the partition's replicas
    differ."""
    return f"{PARTITIONS}/{partition_id}/trusted"


def partition_pins(partition_id: PartitionId) -> str:
    return f"{PARTITIONS}/{partition_id}/pins"


def partition_pin(partition_id: PartitionId, pin: str) -> str:
    return f"{PARTITIONS}/{partition_id}/pins/{pin}"


def partition_replicas(partition_id: PartitionId) -> str:
    return f"{PARTITIONS}/{partition_id}/replicas"


def partition_replica(partition_id: PartitionId, server_id: ServerId) -> str:
    return f"{PARTITIONS}/{partition_id}/replicas/{server_id}"


def snapshot(snapshot_id: str) -> str:
    return f"{SNAPSHOTS}/{snapshot_id}"


def parent(path: str) -> str:
    """Return the path one level up; the parent of `/a` is `/`."""
    return path.rpartition("/")[0] or "/"


def join(directory: str, name: str) -> str:
    """Return the path of a child."""
    return f"{directory.rstrip('/')}/{name}"


def check(path: str) -> None:
    """Raise ValueError unless `path` is absolute and has no empty parts, no dots as parts and no slash at its end."""
    first, *parts = path.split("/")
    if path != "/" and (first or not parts or "\0" in path or not _NO_PARTS.isdisjoint(parts)):
        raise ValueError(f"expected an absolute path like /a/b, got {path!r}")
