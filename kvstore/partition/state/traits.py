"""The traits of operations, by their codes: one table, and the sets that are made of it. Decides only.

A file that asks "is it one of those that …" takes a set from here; a new operation says all of it in its row of TRAITS.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore import versions
from kvstore.access import Right
from kvstore.errors import InvalidRequest
from kvstore.partition.state.commands import Code, Flag, Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """The traits of all operations of one code."""

    needs: tuple[Right, ...]
    """The rights that a user needs on its keys (docs/design/0014); that of a batch is what its operations need."""
    level_at: int | None = None
    """Where a read's level stands in its tuple. What has none is a write: done once, in order, by the leader. A read
    may be asked again elsewhere, whatever became of it."""
    seq_at: int | None = None
    """Where the sequence that a read wants applied stands in its tuple, if it may name one."""
    is_keyless: bool = False
    """It goes to a partition, and not to the owner of a key. Its key may be empty, and the partition answers for the
    tokens that the ring gave it when the operation came."""
    is_in_batch: bool = False
    """It may stand in a batch."""
    has_value: bool = False
    """Its third field is a value: its size counts."""
    is_versioned: bool = False
    """Answered with a version, and nothing else if no record is asked for."""
    flags: Flag = Flag.NONE
    """The flags that it honours; a request with any other is refused, because its answer would not be the one that was
    asked for."""
    since: int = versions.FIRST
    """The first cluster version at which every server knows it (docs/protocol.md V3)."""


_READ, _WRITE = (Right.READ,), (Right.WRITE,)
_VERSIONS = Flag.IF_ABSENT | Flag.IF_PRESENT | Flag.IF_VERSION
_TIMES = Flag.IF_NO_TTL | Flag.IF_TTL | Flag.IF_LONGER | Flag.IF_SHORTER
_PUTS = _VERSIONS | Flag.KEEP_TTL | Flag.RETURN_OLD | Flag.RELATIVE_TTL
_RANGES = Flag.KEYS_ONLY | Flag.REVERSE | Flag.BARE | Flag.COUNT_ONLY

TRAITS: dict[Code, Traits] = {
    Code.GET: Traits(needs=_READ, level_at=2, seq_at=3, is_in_batch=True),
    Code.META: Traits(needs=_READ, level_at=2, seq_at=3, is_in_batch=True),
    Code.PUT: Traits(needs=_WRITE, is_in_batch=True, has_value=True, is_versioned=True, flags=_PUTS),
    Code.DELETE: Traits(needs=_WRITE, is_in_batch=True, is_versioned=True, flags=_VERSIONS | Flag.RETURN_OLD),
    Code.INCREMENT: Traits(needs=_READ + _WRITE, is_in_batch=True),
    Code.APPEND: Traits(needs=_WRITE, is_in_batch=True, has_value=True),
    Code.EXPIRE: Traits(needs=_WRITE, is_in_batch=True, flags=_TIMES | Flag.RELATIVE_TTL),
    Code.BATCH: Traits(needs=(), flags=Flag.INDEPENDENT),
    Code.DELETE_RANGE: Traits(needs=_WRITE, is_keyless=True),
    Code.SCAN: Traits(needs=_READ, level_at=5, seq_at=6, is_keyless=True, flags=Flag.KEYS_ONLY),
    Code.SCAN_TOKENS: Traits(needs=_READ, level_at=3, is_keyless=True),
    Code.COUNT: Traits(needs=_READ, level_at=2, is_keyless=True),
    Code.CHECK: Traits(needs=_READ, is_in_batch=True, is_versioned=True, flags=_VERSIONS),
    Code.RANGE: Traits(needs=_READ, level_at=5, seq_at=6, is_keyless=True, flags=_RANGES, since=2),
}

# Plain integers: what comes off a wire is one.
LEVEL_AT = {int(code): each.level_at for code, each in TRAITS.items() if each.level_at is not None}
SEQ_AT = {int(code): each.seq_at for code, each in TRAITS.items() if each.seq_at is not None}
READS = frozenset(LEVEL_AT)
WRITES = frozenset(map(int, TRAITS)) - READS
KEYLESS = frozenset(int(code) for code, each in TRAITS.items() if each.is_keyless)
POINT_READS = READS - KEYLESS
"""Reads of one key."""
UNORDERED = KEYLESS | POINT_READS
"""They need not be done in the order in which they came (docs/protocol.md M15)."""
IN_BATCH = frozenset(int(code) for code, each in TRAITS.items() if each.is_in_batch)
APPLIES_NOTHING = frozenset(int(code) for code in IN_BATCH if Right.WRITE not in TRAITS[Code(code)].needs)
"""Of those, reads and CHECK: nobody needs to know whether they were done before."""
WITH_VALUE = frozenset(int(code) for code, each in TRAITS.items() if each.has_value)
VERSIONED = frozenset(int(code) for code, each in TRAITS.items() if each.is_versioned)
SINCE = {int(code): each.since for code, each in TRAITS.items() if each.since > versions.FIRST}
"""Those that servers of the first release do not know."""
NEEDS = {int(code): each.needs for code, each in TRAITS.items()}
FLAGS = {int(code): int(each.flags) for code, each in TRAITS.items()}
_EXCLUSIVE = (
    _VERSIONS,
    Flag.IF_NO_TTL | Flag.IF_TTL,
    Flag.IF_NO_TTL | Flag.IF_LONGER | Flag.IF_SHORTER,
    Flag.KEEP_TTL | Flag.RELATIVE_TTL,
)
"""Of each of these sets a request may have one flag: two would contradict each other."""


def check_options(code: int, flags: int, expires_ms: int = 0, version: int = 0) -> int:
    """Return the flags of an operation that a client asks for: every endpoint's requests pass here. Raises
    InvalidRequest for a flag, an expiry or a version that the operation would not honour, and for options that
    contradict each other."""
    if not (flags or expires_ms or version):
        return flags
    if unknown := flags & ~FLAGS[code]:
        raise InvalidRequest(f"expected {Code(code).name} with {_names(FLAGS[code])}, got {_names(unknown)} too")
    for each in _EXCLUSIVE:
        if (flags & each).bit_count() > 1:
            raise InvalidRequest(f"expected one of {_names(each)} in {Code(code).name}, got {_names(flags & each)}")
    if flags & Flag.KEEP_TTL and expires_ms:
        raise InvalidRequest(f"expected KEEP_TTL or an expiry in {Code(code).name}, got both")
    if flags & Flag.RELATIVE_TTL and not expires_ms:
        raise InvalidRequest(f"expected a time to live of at least 1 ms in {Code(code).name}, got 0")
    if expires_ms and not FLAGS[code] & Flag.RELATIVE_TTL:
        raise InvalidRequest(f"expected no expiry in {Code(code).name}, got {expires_ms}")
    if version and not flags & Flag.IF_VERSION:
        raise InvalidRequest(f"expected IF_VERSION beside a version in {Code(code).name}, got version {version} alone")
    return flags


def _names(flags: int) -> str:
    """Name the flags; those that nobody knows by their number."""
    known = [each.name for each in Flag if each and flags & each]
    unknown = flags & ~sum(Flag)
    return ", ".join([*map(str, known), *([f"{unknown:#x}"] if unknown else [])]) or "no flags"


def version_of(op: Op) -> int:
    """The first cluster version at which every server knows the operation; of a batch, all that stand in it."""
    if op[0] == Code.BATCH:
        return max((SINCE.get(each[0], versions.FIRST) for each in op[2]), default=versions.FIRST)
    return SINCE.get(op[0], versions.FIRST)
