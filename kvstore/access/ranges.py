"""Sets of keys defined by prefixes. Decides only."""

from __future__ import annotations

from collections.abc import Iterable


def end_of_prefix(prefix: bytes) -> bytes | None:
    """Return the first key after all keys that begin with `prefix`. Returns None if there is no such key, because the
    prefix is empty or consists of 0xff bytes."""
    head = prefix.rstrip(b"\xff")
    return head[:-1] + bytes([head[-1] + 1]) if head else None


class Ranges:
    """The set of keys that begin with any of several prefixes.

    `prefixes` is the shortest equivalent list of prefixes, sorted. `key.startswith(ranges.prefixes)` checks one key in
    a single C call.
    """

    __slots__ = ("prefixes", "spans")

    def __init__(self, prefixes: Iterable[bytes] = ()) -> None:
        kept: list[bytes] = []
        for each in sorted(set(prefixes)):
            if not kept or not each.startswith(kept[-1]):
                kept.append(each)
        self.prefixes: tuple[bytes, ...] = tuple(kept)
        self.spans = _merged(kept)
        """The same keys as ranges [start, end). An end of None means up to the last key."""

    def __bool__(self) -> bool:
        return bool(self.prefixes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and self.prefixes == other.prefixes

    __hash__ = None  # type: ignore[assignment]

    def has(self, key: bytes) -> bool:
        """Return True if the key is in the set."""
        return key.startswith(self.prefixes)

    def covers(self, start: bytes, end: bytes) -> bool:
        """Return True if the set contains all keys in [start, end). An empty `end` means up to the last key. An empty
        range is covered if its start is in the set: a user who may not read there gets an error instead of an empty
        result."""
        for first, behind in self.spans:
            if first <= start and (behind is None or start < behind):
                return behind is None or (end != b"" and end <= behind)
        return False


def _merged(prefixes: list[bytes]) -> tuple[tuple[bytes, bytes | None], ...]:
    """Return the ranges of sorted, disjoint prefixes, with adjacent ranges merged."""
    spans: list[tuple[bytes, bytes | None]] = []
    for prefix in prefixes:
        if spans and spans[-1][1] == prefix:
            spans[-1] = (spans[-1][0], end_of_prefix(prefix))
        else:
            spans.append((prefix, end_of_prefix(prefix)))
    return tuple(spans)
