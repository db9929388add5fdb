"""The traits of operations, by code: one table, and the sets derived from it. Decides only.

Code that needs to know whether an operation has a trait uses one of these sets. A new operation needs only its class in
commands.py and a row in TRAITS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore import versions
from kvstore.access import Right
from kvstore.errors import InvalidRequest
from kvstore.partition.state.commands import TYPES, Code, Flag, Op, ReadOp


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """The traits of all operations with one code."""

    needs: tuple[Right, ...]
    """The rights that a user needs on the operation's keys (docs/design/0014). A batch needs the rights of the
    operations in it."""
    is_keyless: bool = False
    """True if the operation goes to a partition rather than to the owner of a key. Its key may be empty, and the
    partition answers for the tokens that the ring gave it when the operation arrived."""
    is_internal: bool = False
    """True if only leaders send the operation to each other, to carry out a transaction."""
    is_in_batch: bool = False
    """True if the operation may be part of a batch."""
    is_versioned: bool = False
    """True if the result is only a version, unless the caller requests a record."""
    flags: Flag = Flag.NONE
    """The flags that the operation supports. A request with any other flag is refused, because the operation would not
    do what was requested."""
    since: int = versions.FIRST
    """The first cluster version in which every server knows the operation (docs/protocol.md V3)."""


_READ, _WRITE = (Right.READ,), (Right.WRITE,)
_VERSIONS = Flag.IF_ABSENT | Flag.IF_PRESENT | Flag.IF_VERSION
_TIMES = Flag.IF_NO_TTL | Flag.IF_TTL | Flag.IF_LONGER | Flag.IF_SHORTER
_PUTS = _VERSIONS | Flag.KEEP_TTL | Flag.RETURN_OLD | Flag.RELATIVE_TTL
_RANGES = Flag.KEYS_ONLY | Flag.REVERSE | Flag.BARE | Flag.COUNT_ONLY

TRAITS: dict[Code, Traits] = {
    Code.GET: Traits(needs=_READ, is_in_batch=True),
    Code.META: Traits(needs=_READ, is_in_batch=True),
    Code.PUT: Traits(needs=_WRITE, is_in_batch=True, is_versioned=True, flags=_PUTS),
    Code.DELETE: Traits(needs=_WRITE, is_in_batch=True, is_versioned=True, flags=_VERSIONS | Flag.RETURN_OLD),
    Code.INCREMENT: Traits(needs=_READ + _WRITE, is_in_batch=True),
    Code.APPEND: Traits(needs=_WRITE, is_in_batch=True),
    Code.EXPIRE: Traits(needs=_WRITE, is_in_batch=True, flags=_TIMES | Flag.RELATIVE_TTL),
    Code.BATCH: Traits(needs=(), flags=Flag.INDEPENDENT),
    Code.DELETE_RANGE: Traits(needs=_WRITE, is_keyless=True),
    Code.SCAN: Traits(needs=_READ, is_keyless=True, flags=Flag.KEYS_ONLY),
    Code.SCAN_TOKENS: Traits(needs=_READ, is_keyless=True),
    Code.COUNT: Traits(needs=_READ, is_keyless=True),
    Code.CHECK: Traits(needs=_READ, is_in_batch=True, is_versioned=True, flags=_VERSIONS),
    Code.RANGE: Traits(needs=_READ, is_keyless=True, flags=_RANGES, since=2),
    Code.TRANSACT: Traits(needs=(), flags=Flag.INDEPENDENT, since=3),
    Code.PREPARE: Traits(needs=(), is_internal=True, flags=Flag.INDEPENDENT, since=3),
    Code.RESOLVE: Traits(needs=(), is_internal=True, since=3),
    Code.INQUIRE: Traits(needs=(), is_internal=True, since=3),
}

# Plain integers, because a code from a wire is one.
READS = frozenset(code for code, each in TYPES.items() if issubclass(each, ReadOp))
WRITES = frozenset(TYPES) - READS
KEYLESS = frozenset(int(code) for code, each in TRAITS.items() if each.is_keyless)
INTERNAL = frozenset(int(code) for code, each in TRAITS.items() if each.is_internal)
"""Operations that no endpoint accepts from a client."""
POINT_READS = READS - KEYLESS
"""Reads of one key."""
UNORDERED = KEYLESS | POINT_READS
"""Operations that may be carried out in any order (docs/protocol.md M15)."""
IN_BATCH = frozenset(int(code) for code, each in TRAITS.items() if each.is_in_batch)
APPLIES_NOTHING = frozenset(int(code) for code in IN_BATCH if Right.WRITE not in TRAITS[Code(code)].needs)
"""Operations of a batch that apply nothing: reads and CHECK. It does not matter if they were done before."""
VERSIONED = frozenset(int(code) for code, each in TRAITS.items() if each.is_versioned)
SINCE = {int(code): each.since for code, each in TRAITS.items() if each.since > versions.FIRST}
"""Operations that servers of the first release do not know."""
NEEDS = {int(code): each.needs for code, each in TRAITS.items()}
FLAGS = {int(code): int(each.flags) for code, each in TRAITS.items()}
_EXCLUSIVE = (
    _VERSIONS,
    Flag.IF_NO_TTL | Flag.IF_TTL,
    Flag.IF_NO_TTL | Flag.IF_LONGER | Flag.IF_SHORTER,
    Flag.KEEP_TTL | Flag.RELATIVE_TTL,
)
"""A request may have one flag of each of these sets, because two would contradict each other."""


def check_options(code: int, flags: int, expires_ms: int = 0, version: int = 0) -> int:
    """Return `flags` if the operation supports these options. Every endpoint checks its requests here. Raises
    InvalidRequest if the operation does not support a flag, an expiry or a version, or if options contradict each
    other."""
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


def home_key(ops: Sequence[Op]) -> bytes:
    """Return the key whose owner decides a transaction of these operations: the first key that it writes, or the key of
    its first operation if it writes nothing (docs/protocol.md Tx2). `ops` must not be empty."""
    return next((op.key for op in ops if op.code not in APPLIES_NOTHING), ops[0].key)


def _names(flags: int) -> str:
    """Name the flags, unknown ones by their number."""
    known = [each.name for each in Flag if each and flags & each]
    unknown = flags & ~sum(Flag)
    return ", ".join([*map(str, known), *([f"{unknown:#x}"] if unknown else [])]) or "no flags"


def version_of(op: Op) -> int:
    """Return the first cluster version in which every server knows the operation. For a batch or a
    transaction, return the highest such version of the operations in it."""
    return max((SINCE.get(op.code, versions.FIRST), *map(version_of, op.ops)))
