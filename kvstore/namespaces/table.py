"""The table of namespaces: names for prefixes of keys, and what holds for the keys of each. Decides only: values that
cannot be built wrong. kvstore/meta/tables/namespaces.py keeps it in the metadata store.

A key is in one namespace or in none: prefixes of which one begins with another are refused. Were they allowed, a key
would have two quotas and two TTLs, and a write that one of them refuses would be told the other's name.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

NAMESPACES_MAX = 256
"""Each is a label of metrics, and each leader counts each."""
PREFIX_BYTES_MAX = 1_024
LIMIT_MAX = 1 << 53
"""What every client's numbers hold exactly."""
OPS_MAX = 1_000_000_000
TTL_MAX_MS = 100 * 366 * 86_400_000
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,62}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """The keys that begin with a prefix. A limit of 0 is none."""

    name: str
    prefix: bytes
    keys_max: int = 0
    bytes_max: int = 0
    """Of keys and values as clients wrote them, one copy."""
    ops_per_s: int = 0
    """Of the whole cluster."""
    burst: int = 0
    """Operations that may come at once after a rest; 0: those of one second."""
    ttl_ms: int = 0
    """How long a record lives whose write says nothing about it; 0: until it is deleted."""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(
                f"want a namespace of letters, digits and _ . @ - (1 to 63, no sign first), got {self.name[:80]!r}"
            )
        if not 0 < len(self.prefix) <= PREFIX_BYTES_MAX:
            raise ValueError(
                f"namespace {self.name}: want a prefix of 1 to {PREFIX_BYTES_MAX} bytes, got {len(self.prefix)}"
            )
        for what, value, most in (
            ("keys_max", self.keys_max, LIMIT_MAX),
            ("bytes_max", self.bytes_max, LIMIT_MAX),
            ("ops_per_s", self.ops_per_s, OPS_MAX),
            ("burst", self.burst, OPS_MAX),
            ("ttl_ms", self.ttl_ms, TTL_MAX_MS),
        ):
            if not 0 <= value <= most:
                raise ValueError(f"namespace {self.name}: want {what} from 0 to {most}, got {value}")
        if self.burst and not self.ops_per_s:
            raise ValueError(f"namespace {self.name}: want a burst only with ops_per_s, got {self.burst} alone")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceTable:
    """All namespaces of a cluster."""

    namespaces: tuple[Namespace, ...] = ()
    """By name."""

    def __post_init__(self) -> None:
        names = [each.name for each in self.namespaces]
        if len(names) > NAMESPACES_MAX:
            raise ValueError(f"want at most {NAMESPACES_MAX} namespaces, got {len(names)}")
        if sorted(set(names)) != names:
            raise ValueError("want namespaces sorted by name, each once")
        for one, other in pairwise(sorted(self.namespaces, key=lambda each: each.prefix)):
            if other.prefix.startswith(one.prefix):
                raise ValueError(
                    f"want a key in one namespace at most: {other.name} ({other.prefix!r}) and {one.name} "
                    f"({one.prefix!r}) overlap"
                )

    def find_or_none(self, name: str) -> Namespace | None:
        return next((each for each in self.namespaces if each.name == name), None)


class Prefixes:
    """The prefixes of all namespaces, to find whose a key is. Immutable."""

    __slots__ = ("all", "by_prefix", "named")

    def __init__(self, namespaces: tuple[Namespace, ...]) -> None:
        self.by_prefix = tuple(sorted(namespaces, key=lambda each: each.prefix))
        self.named = tuple((each.name, each.prefix) for each in self.by_prefix)
        self.all = tuple(each.prefix for each in self.by_prefix)
        """For `key.startswith(prefixes.all)`, one call in C: empty if there are none, which nothing begins with."""

    def find(self, key: bytes) -> Namespace | None:
        """The namespace of the key; None: it is in none."""
        place = bisect_right(self.all, key)
        return self.by_prefix[place - 1] if place and key.startswith(self.all[place - 1]) else None
