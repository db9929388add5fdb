"""The namespace table: named prefixes of keys, and the limits of each. Decides only; its values are valid by
construction. kvstore/meta/tables/namespaces.py stores the table.

A key is in at most one namespace, because overlapping prefixes are refused. If prefixes could overlap, a key would have
two quotas and two TTLs, and the error for a refused write could name the wrong namespace.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

NAMESPACES_MAX = 256
"""Maximum number of namespaces. Limited because each namespace is a metric label, and each leader counts the usage of
each namespace."""
PREFIX_BYTES_MAX = 1_024
LIMIT_MAX = 1 << 53
"""The largest integer that the number types of all clients represent exactly."""
OPS_MAX = 1_000_000_000
TTL_MAX_MS = 100 * 366 * 86_400_000
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,62}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """The keys that begin with a prefix, and the limits on them. A limit of 0 means no limit."""

    name: str
    prefix: bytes
    keys_max: int = 0
    bytes_max: int = 0
    """Maximum total size in bytes of keys and values, as clients wrote them. Each record counts once, regardless of its
    replicas."""
    ops_per_s: int = 0
    """Maximum number of operations per second in the whole cluster."""
    burst: int = 0
    """Number of operations that may come at once after idle time; 0 means as many as in one second."""
    ttl_ms: int = 0
    """Lifetime in ms of a record whose write sets no expiry; 0 means that the record does not expire."""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(
                "expected a namespace of 1 to 63 letters, digits and _ . @ -, beginning with a letter or digit, got "
                f"{self.name[:80]!r}"
            )
        if not 0 < len(self.prefix) <= PREFIX_BYTES_MAX:
            raise ValueError(
                f"namespace {self.name}: expected a prefix of 1 to {PREFIX_BYTES_MAX} bytes, got {len(self.prefix)}"
            )
        for what, value, most in (
            ("keys_max", self.keys_max, LIMIT_MAX),
            ("bytes_max", self.bytes_max, LIMIT_MAX),
            ("ops_per_s", self.ops_per_s, OPS_MAX),
            ("burst", self.burst, OPS_MAX),
            ("ttl_ms", self.ttl_ms, TTL_MAX_MS),
        ):
            if not 0 <= value <= most:
                raise ValueError(f"namespace {self.name}: expected {what} from 0 to {most}, got {value}")
        if self.burst and not self.ops_per_s:
            raise ValueError(
                f"namespace {self.name}: expected a burst only together with ops_per_s, got {self.burst} alone"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceTable:
    """All namespaces of a cluster."""

    namespaces: tuple[Namespace, ...] = ()
    """Sorted by name."""

    def __post_init__(self) -> None:
        names = [each.name for each in self.namespaces]
        if len(names) > NAMESPACES_MAX:
            raise ValueError(f"expected at most {NAMESPACES_MAX} namespaces, got {len(names)}")
        if sorted(set(names)) != names:
            raise ValueError("expected namespaces sorted by name, without duplicates")
        for one, other in pairwise(sorted(self.namespaces, key=lambda each: each.prefix)):
            if other.prefix.startswith(one.prefix):
                raise ValueError(
                    f"expected prefixes that do not overlap; {other.name} ({other.prefix!r}) and {one.name} "
                    f"({one.prefix!r}) overlap"
                )

    def find_or_none(self, name: str) -> Namespace | None:
        """Return the namespace of this name, or None."""
        return next((each for each in self.namespaces if each.name == name), None)


class Prefixes:
    """An immutable index of the prefixes of all namespaces, which finds the namespace of a key."""

    __slots__ = ("all", "by_prefix", "named")

    def __init__(self, namespaces: tuple[Namespace, ...]) -> None:
        self.by_prefix = tuple(sorted(namespaces, key=lambda each: each.prefix))
        self.named = tuple((each.name, each.prefix) for each in self.by_prefix)
        self.all = tuple(each.prefix for each in self.by_prefix)
        """Prefixes for `key.startswith(prefixes.all)`, a single C call. Without prefixes it matches nothing."""

    def find(self, key: bytes) -> Namespace | None:
        """Return the namespace that contains the key, or None. Takes one binary search."""
        place = bisect_right(self.all, key)
        return self.by_prefix[place - 1] if place and key.startswith(self.all[place - 1]) else None
