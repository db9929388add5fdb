"""Which conditions on columns the store can answer by itself. Decides only.

Spark does not check again what is taken over here, so only what is exact is taken: `key` against constants, and
`partition` against one. Everything else is left to Spark.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from kvstore.spark.options import KeyRange

KEYS_MAX = 1_000
"""A longer list of keys is looked for by Spark, in the range from its first to its last."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Rows that are asked for."""

    keys: KeyRange
    exactly: frozenset[bytes] | None = None
    """None: all keys of the range."""
    partition: str | None = None
    """None: all."""
    is_nothing: bool = False

    def point_keys(self) -> list[bytes] | None:
        """The keys to look for, sorted; None: a range of them."""
        if self.exactly is None:
            return None
        return sorted(key for key in self.exactly if contains(self.keys, key))


def contains(keys: KeyRange, key: bytes) -> bool:
    return keys.start <= key and (not keys.end or key < keys.end)


def after(key: bytes) -> bytes:
    """The next possible key."""
    return key + b"\0"


def push(wanted: Wanted, filters: Iterable[Filter]) -> tuple[Wanted, list[Filter]]:
    """What is wanted under all the filters, and those that Spark must still check."""
    left = []
    for each in filters:
        narrowed, is_exact = _narrow(wanted, each)
        wanted = narrowed
        if not is_exact:
            left.append(each)
    return wanted, left


def _narrow(wanted: Wanted, condition: Filter) -> tuple[Wanted, bool]:
    match condition:
        case IsNotNull(("key",) | ("partition",)):
            return wanted, True
        case EqualTo(("key",), bytes() as key) | EqualNullSafe(("key",), bytes() as key):
            return _among(wanted, frozenset([key])), True
        case In(("key",), keys) if all(isinstance(key, bytes) for key in keys):
            found = frozenset(keys)
            if not found or len(found) <= KEYS_MAX:
                return _among(wanted, found), True
            return replace(wanted, keys=wanted.keys & KeyRange(min(found), after(max(found)))), False
        case GreaterThanOrEqual(("key",), bytes() as key):
            return _within(wanted, KeyRange(key)), True
        case GreaterThan(("key",), bytes() as key):
            return _within(wanted, KeyRange(after(key))), True
        case LessThan(("key",), bytes() as key):
            return _below(wanted, key), True
        case LessThanOrEqual(("key",), bytes() as key):
            return _below(wanted, after(key)), True
        case EqualTo(("partition",), str() as partition) | EqualNullSafe(("partition",), str() as partition):
            if wanted.partition not in (None, partition):
                return replace(wanted, is_nothing=True), True
            return replace(wanted, partition=partition), True
    return wanted, False


def _among(wanted: Wanted, keys: frozenset[bytes]) -> Wanted:
    return replace(wanted, exactly=keys if wanted.exactly is None else wanted.exactly & keys)


def _within(wanted: Wanted, keys: KeyRange) -> Wanted:
    both = wanted.keys & keys
    return replace(wanted, keys=both, is_nothing=wanted.is_nothing or both.is_empty)


def _below(wanted: Wanted, end: bytes) -> Wanted:
    if not end:  # an empty end would be none
        return replace(wanted, is_nothing=True)
    return _within(wanted, KeyRange(b"", end))
