"""Pages of several partitions → one stream of keys in order, up or down. Decides only.

A page of a partition holds all its keys from where it began up to `next`, or backwards down to it. What lies before
the nearest `next` is complete and may go out. Only the partitions at that mark are asked for more, so at most a page of
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
    """The range to scan. Raises InvalidRequest for a prefix together with bounds, and for what is no bytes."""
    start, end, prefix = as_bytes(start), as_bytes(end), as_bytes(prefix)
    if not prefix:
        return start, end
    if start or end:
        raise InvalidRequest("want a prefix or bounds, not both")
    trimmed = prefix.rstrip(b"\xff")
    return prefix, trimmed[:-1] + bytes([trimmed[-1] + 1]) if trimmed else b""


class Bounds(NamedTuple):
    """The range [start, end); empty end: no end."""

    start: bytes
    end: bytes

    @staticmethod
    def of(start: bytes, end: bytes, prefix: bytes) -> Bounds:
        """Raises InvalidRequest for a prefix together with bounds."""
        return Bounds(*scan_bounds(start, end, prefix))

    def rest(self, token: str) -> PageToken:
        """Return the part of these bounds that a page token leaves; of bounds that say nothing, what the token says.
        Raises InvalidRequest if it is no token, or one of others: the end that a walk does not move is the same in all
        of its tokens. One of a part would end there, as if there were no more."""
        rest = page_token.decode(token)
        if self == (b"", b""):
            return rest
        is_of_these = rest.start == self.start if rest.reverse else rest.end == self.end
        if not is_of_these or rest.start < self.start or (self.end and not (rest.end and rest.end <= self.end)):
            raise InvalidRequest(
                f"want a page token of keys from {self.start[:40]!r} to {self.end[:40]!r}, "
                f"got one of those from {rest.start[:40]!r} to {rest.end[:40]!r}"
            )
        return rest


def tagged_key_or_none(start: bytes, end: bytes) -> bytes | None:
    """A key with the hash tag that all keys in [start, end) have; None if they need not have the same."""
    tag = hash_tag(start)
    opens = start.find(b"{")
    if opens < 0 or tag is start or not end:
        return None
    prefix = start[: opens + 1 + len(tag) + 1]
    return start if end <= scan_bounds(b"", b"", prefix)[1] else None


class ScanPage(NamedTuple):
    """A page to ask for: keys of `partition` in [start, end), at most `limit`."""

    partition: str
    start: bytes
    limit: int
    end: bytes = b""


class Merge(Generic[T]):
    """One scan. Ask for every page of `wanted`, `feed` it, then `take`; until `is_done`."""

    def __init__(
        self, partitions: Sequence[str], start: bytes, end: bytes = b"", *, limit: int = 0, backwards: bool = False
    ) -> None:
        self._start, self._end, self._backwards = start, end, backwards
        self._next: dict[str, bytes | None] = dict.fromkeys(sorted(partitions), end if backwards else start)
        self._held: list[tuple[bytes, T]] = []
        self._left = limit or None
        """How many may still go out; None: all."""
        self._last: bytes | None = None
        """The last key that went out."""
        self._is_cut = False
        """The limit kept something back."""

    def restarted(self, partitions: Sequence[str]) -> Merge[T]:
        """The same scan over the partitions of another ring, from behind the last key that went out."""
        again: Merge[T] = Merge(partitions, *self._rest, backwards=self._backwards)
        again._left, again._last = self._left, self._last
        return again

    @property
    def is_done(self) -> bool:
        return self._left == 0 or (not self._held and not self._unread())

    @property
    def rest(self) -> tuple[bytes, bytes] | None:
        """The range behind the last key that went out; None if it is known to be empty."""
        return self._rest if self._held or self._is_cut or self._unread() else None

    def wanted(self) -> list[ScanPage]:
        """The pages without which nothing more can go out."""
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
        """Take in a page. `next` None: the partition has no more."""
        self._held.extend(items)
        self._next[partition] = next

    def take(self) -> list[tuple[bytes, T]]:
        """Take the records that may go out, in order. A key that two partitions gave, because it moved meanwhile, goes
        out once."""
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
        """How many of those held no partition can have something before."""
        if not unread:
            return len(self._held)
        mark = self._mark(unread)
        if self._backwards:
            later = (i for i, (key, _) in enumerate(self._held) if not mark or key < mark)
        else:
            later = (i for i, (key, _) in enumerate(self._held) if key >= mark)
        return next(later, len(self._held))

    def behind(self, key: bytes) -> tuple[bytes, bytes]:
        """The range behind a key that went out."""
        return (self._start, key) if self._backwards else (key + b"\0", self._end)

    @property
    def _rest(self) -> tuple[bytes, bytes]:
        return (self._start, self._end) if self._last is None else self.behind(self._last)

    def _mark(self, unread: dict[str, bytes]) -> bytes:
        """Where the partition stands that is the least far. Backwards no end is the furthest of all."""
        return max(unread.values(), key=lambda end: (not end, end)) if self._backwards else min(unread.values())

    def _unread(self) -> dict[str, bytes]:
        return {partition: bound for partition, bound in self._next.items() if bound is not None}


def _key(item: tuple[bytes, T]) -> bytes:
    return item[0]
