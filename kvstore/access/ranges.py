"""Sets of keys that are made of prefixes. Decides only."""

from __future__ import annotations

from collections.abc import Iterable


def end_of_prefix(prefix: bytes) -> bytes | None:
    """The first key behind all those that begin with `prefix`; None if there is none."""
    head = prefix.rstrip(b"\xff")
    return head[:-1] + bytes([head[-1] + 1]) if head else None


class Ranges:
    """The keys that begin with one of some prefixes.

    `prefixes` is the shortest list that says the same, sorted: `key.startswith(ranges.prefixes)` is the whole check of
    one key, in C.
    """

    __slots__ = ("prefixes", "spans")

    def __init__(self, prefixes: Iterable[bytes] = ()) -> None:
        kept: list[bytes] = []
        for each in sorted(set(prefixes)):
            if not kept or not each.startswith(kept[-1]):
                kept.append(each)
        self.prefixes: tuple[bytes, ...] = tuple(kept)
        self.spans = _merged(kept)
        """The same keys as ranges, each from a first key to the first behind it; None: to the last key."""

    def __bool__(self) -> bool:
        return bool(self.prefixes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and self.prefixes == other.prefixes

    __hash__ = None  # type: ignore[assignment]

    def has(self, key: bytes) -> bool:
        """Whether `key` is one of them."""
        return key.startswith(self.prefixes)

    def covers(self, start: bytes, end: bytes) -> bool:
        """Whether all keys in [start, end) are; `end` empty: to the last key. An empty range is covered if its start
        is: it tells nothing, and a caller who may not look there shall hear so."""
        for first, behind in self.spans:
            if first <= start and (behind is None or start < behind):
                return behind is None or (end != b"" and end <= behind)
        return False


def _merged(prefixes: list[bytes]) -> tuple[tuple[bytes, bytes | None], ...]:
    """The ranges of sorted prefixes of which none begins with another, those side by side as one."""
    spans: list[tuple[bytes, bytes | None]] = []
    for prefix in prefixes:
        if spans and spans[-1][1] == prefix:
            spans[-1] = (spans[-1][0], end_of_prefix(prefix))
        else:
            spans.append((prefix, end_of_prefix(prefix)))
    return tuple(spans)
