"""Merges pages of several partitions into one stream of keys in order, ascending or descending. Decides only.

A page of a partition holds all its keys from its start up to `next`, or descending down to it. Keys before the nearest
`next` are complete and may be returned. Only the partitions at that mark are asked for more, so at most one page of
each is held (docs/protocol.md P37).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from kvstore.client.core.operations import as_bytes
from kvstore.errors import InvalidRequest
from kvstore.proto import page_token
from kvstore.proto.page_token import PageToken
from kvstore.ring.hashing import hash_tag

T = TypeVar("T")
PAGE_KEYS = 1_000


def scan_bounds(start: bytes, end: bytes, prefix: bytes) -> tuple[bytes, bytes]:
    """Return the range to scan. Raises InvalidRequest for a prefix together with bounds, and for values that are not
    bytes."""
    start, end, prefix = as_bytes(start), as_bytes(end), as_bytes(prefix)
    if not prefix:
        return start, end
    if start or end:
        raise InvalidRequest("expected either a prefix or bounds, got both")
    trimmed = prefix.rstrip(b"\xff")
    return prefix, trimmed[:-1] + bytes([trimmed[-1] + 1]) if trimmed else b""


class Bounds(NamedTuple):
    """The range [start, end); an empty end means no end."""

    start: bytes
    end: bytes

    @staticmethod
    def of(start: bytes, end: bytes, prefix: bytes) -> Bounds:
        """Return the bounds. Raises InvalidRequest for a prefix together with bounds."""
        return Bounds(*scan_bounds(start, end, prefix))

    def rest(self, token: str) -> PageToken:
        """Return the part of these bounds that a page token leaves, or for empty bounds the token's own range. Raises
        InvalidRequest if the token is malformed or belongs to another range. The bound that a scan does not move is
        equal in all of its tokens; a token of a smaller range would end the scan too early."""
        rest = page_token.decode(token)
        if self == (b"", b""):
            return rest
        is_of_these = rest.start == self.start if rest.reverse else rest.end == self.end
        if not is_of_these or rest.start < self.start or (self.end and not (rest.end and rest.end <= self.end)):
            raise InvalidRequest(
                f"expected a page token of keys from {self.start[:40]!r} to {self.end[:40]!r}, got one of "
                f"keys from {rest.start[:40]!r} to {rest.end[:40]!r}"
            )
        return rest


def tagged_key_or_none(start: bytes, end: bytes) -> bytes | None:
    """Return a key with the hash tag that all keys in [start, end) share; None if they need not share one."""
    tag = hash_tag(start)
    opens = start.find(b"{")
    if opens < 0 or tag is start or not end:
        return None
    prefix = start[: opens + 1 + len(tag) + 1]
    return start if end <= scan_bounds(b"", b"", prefix)[1] else None


class ScanPage(NamedTuple):
    """A page to read: at most `limit` keys of `partition` in [start, end)."""

    partition: str
    start: bytes
    limit: int
    end: bytes = b""


class Merge(Generic[T]):
    """The merge of one scan. Read every page of `wanted`, `feed` it, then `take`; until `is_done`."""

    def __init__(
        self, partitions: Sequence[str], start: bytes, end: bytes = b"", *, limit: int = 0, backwards: bool = False
    ) -> None:
        self._start, self._end, self._backwards = start, end, backwards
        self._next: dict[str, bytes | None] = dict.fromkeys(sorted(partitions), end if backwards else start)
        self._held: list[tuple[bytes, T]] = []
        self._left = limit or None
        """Number of keys that may still be returned; None: no limit."""
        self._last: bytes | None = None
        """Last key that was returned."""
        self._is_cut = False
        """True if the limit has held back keys."""

    def restarted(self, partitions: Sequence[str]) -> Merge[T]:
        """Return the same scan over the partitions of another ring, from behind the last key that was returned."""
        again: Merge[T] = Merge(partitions, *self._rest, backwards=self._backwards)
        again._left, again._last = self._left, self._last
        return again

    @property
    def is_done(self) -> bool:
        return self._left == 0 or (not self._held and not self._unread())

    @property
    def rest(self) -> tuple[bytes, bytes] | None:
        """Range behind the last key that was returned; None if it is known to be empty."""
        return self._rest if self._held or self._is_cut or self._unread() else None

    def wanted(self) -> list[ScanPage]:
        """Return the pages without which no more keys can be returned."""
        unread = self._unread()
        if self._left == 0 or not unread:
            return []
        mark = self._mark(unread)
        limit = PAGE_KEYS if self._left is None else min(self._left, PAGE_KEYS)
        return [
            ScanPage(partition, self._start, limit, mark)
            if self._backwards
            else ScanPage(partition, mark, limit, self._end)
            for partition, bound in unread.items()
            if bound == mark
        ]

    def feed(self, partition: str, items: Sequence[tuple[bytes, T]], next: bytes | None) -> None:
        """Add a page. `next` is None if the partition has no more keys."""
        self._held.extend(items)
        self._next[partition] = next

    def take(self) -> list[tuple[bytes, T]]:
        """Return the records that are complete, in order. A key that two partitions returned, because it moved, comes
        once."""
        self._held.sort(key=_key, reverse=self._backwards)
        count = self._complete(self._unread())
        ready = list(dict(self._held[:count]).items())
        del self._held[:count]
        if self._left is not None:
            self._is_cut = self._is_cut or len(ready) > self._left
            ready = ready[: self._left]
            self._left -= len(ready)
        if ready:
            self._last = ready[-1][0]
        return ready

    def _complete(self, unread: dict[str, bytes]) -> int:
        """Return how many of the held records no partition can precede."""
        if not unread:
            return len(self._held)
        mark = self._mark(unread)
        if self._backwards:
            later = (i for i, (key, _) in enumerate(self._held) if not mark or key < mark)
        else:
            later = (i for i, (key, _) in enumerate(self._held) if key >= mark)
        return next(later, len(self._held))

    def behind(self, key: bytes) -> tuple[bytes, bytes]:
        """Return the range behind a key."""
        return (self._start, key) if self._backwards else (key + b"\0", self._end)

    @property
    def _rest(self) -> tuple[bytes, bytes]:
        return (self._start, self._end) if self._last is None else self.behind(self._last)

    def _mark(self, unread: dict[str, bytes]) -> bytes:
        """Return the bound of the partition that is least far. Descending, an empty end is the highest bound."""
        return max(unread.values(), key=lambda end: (not end, end)) if self._backwards else min(unread.values())

    def _unread(self) -> dict[str, bytes]:
        return {partition: bound for partition, bound in self._next.items() if bound is not None}


def _key(item: tuple[bytes, T]) -> bytes:
    return item[0]
