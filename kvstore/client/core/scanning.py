"""Pages of several partitions → one stream of keys in order. Decides only.

A page of a partition holds all its keys from where it began up to `next`. What is below the smallest `next` is
complete and may go out. Only the partitions at that mark are asked for more, so at most a page of each is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from kvstore.errors import InvalidRequest
from kvstore.ring.hashing import hash_tag

T = TypeVar("T")
PAGE_KEYS = 1_000


def scan_bounds(start: bytes, end: bytes, prefix: bytes) -> tuple[bytes, bytes]:
    """The range to scan. Raises InvalidRequest for a prefix together with bounds."""
    if not prefix:
        return start, end
    if start or end:
        raise InvalidRequest("want a prefix or bounds, not both")
    trimmed = prefix.rstrip(b"\xff")
    return prefix, trimmed[:-1] + bytes([trimmed[-1] + 1]) if trimmed else b""


def tagged_key_or_none(start: bytes, end: bytes) -> bytes | None:
    """A key with the hash tag that all keys in [start, end) have; None if they need not have the same."""
    tag = hash_tag(start)
    opens = start.find(b"{")
    if opens < 0 or tag is start or not end:
        return None
    prefix = start[: opens + 1 + len(tag) + 1]
    return start if end <= scan_bounds(b"", b"", prefix)[1] else None


class Page(NamedTuple):
    """A page to ask for: keys of `partition` from `start` on, at most `limit`."""

    partition: str
    start: bytes
    limit: int


class Merge(Generic[T]):
    """One scan. Ask for every page of `wanted`, `feed` it, then `take`; until `is_done`."""

    def __init__(self, partitions: Sequence[str], start: bytes, *, limit: int = 0) -> None:
        self._start = start
        self._next: dict[str, bytes | None] = dict.fromkeys(sorted(partitions), start)
        self._held: list[tuple[bytes, T]] = []
        self._left = limit or None
        """How many may still go out; None: all."""
        self._last: bytes | None = None
        """The last key that went out."""

    def anew(self, partitions: Sequence[str]) -> Merge[T]:
        """The same scan over the partitions of another ring, from behind the last key that went out."""
        again: Merge[T] = Merge(partitions, self._start if self._last is None else self._last + b"\0")
        again._left, again._last = self._left, self._last
        return again

    @property
    def is_done(self) -> bool:
        return self._left == 0 or (not self._held and not self._unread())

    def wanted(self) -> list[Page]:
        """The pages without which nothing more can go out."""
        unread = self._unread()
        if self._left == 0 or not unread:
            return []
        mark = min(unread.values())
        limit = PAGE_KEYS if self._left is None else min(self._left, PAGE_KEYS)
        return [Page(partition, start, limit) for partition, start in unread.items() if start == mark]

    def feed(self, partition: str, items: Sequence[tuple[bytes, T]], next: bytes | None) -> None:
        """Take in a page. `next` None: the partition has no more."""
        self._held.extend(items)
        self._next[partition] = next

    def take(self) -> list[tuple[bytes, T]]:
        """Take the records that may go out, in order. A key that two partitions gave, because it moved meanwhile, goes
        out once."""
        self._held.sort(key=_key)
        unread = self._unread()
        if unread:
            mark = min(unread.values())
            count = next((i for i, (key, _) in enumerate(self._held) if key >= mark), len(self._held))
        else:
            count = len(self._held)
        ready = list(dict(self._held[:count]).items())
        del self._held[:count]
        if self._left is not None:
            ready = ready[: self._left]
            self._left -= len(ready)
        if ready:
            self._last = ready[-1][0]
        return ready

    def _unread(self) -> dict[str, bytes]:
        return {partition: start for partition, start in self._next.items() if start is not None}


def _key(item: tuple[bytes, T]) -> bytes:
    return item[0]
