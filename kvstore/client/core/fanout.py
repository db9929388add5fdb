"""Reads of all partitions: a scan, a page, a count, and the keys that a deletion finds. Decides only.

Requests that were made with an older ring than the current one are repeated, so that a key that moves is neither missed
nor returned twice (docs/protocol.md M14).

    scan = RangeScan(...)                         count = RangeCount(...)
    while not scan.is_done:                       while count.total is None:
        scan.take(answers to scan.wanted())           count.take(answers to count.wanted())

`take` gets the answers in the order of `wanted`, or the Moved that one of them was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from kvstore.client.core import operations
from kvstore.client.core.operation import ClientOperation
from kvstore.client.core.routing import Routing
from kvstore.client.core.scanning import Bounds, Merge, ScanPage, tagged_key_or_none
from kvstore.client.core.values import Deleted, Item, Level, Page
from kvstore.errors import InvalidRequest, Moved
from kvstore.proto import kv_pb2
from kvstore.proto.page_token import PageToken

Answers = Sequence[Any] | Moved

PAGE_LIMIT_MAX = 10_000
"""Maximum number of keys that a caller may request for a page."""
PAGE_BYTES = 1 << 20
"""A page ends with the key that reaches this many bytes of keys and values."""
DELETE_KEYS = 1_000
"""Number of keys that a deletion deletes before it reports its progress."""
EVERYTHING = Bounds(b"", b"")


class RangeScan:
    """The keys of all partitions within bounds, in order, page by page. With BARE among the flags, keys alone."""

    def __init__(self, routing: Routing, bounds: Bounds, *, limit: int, level: Level, flags: int = 0) -> None:
        backwards = bool(flags & kv_pb2.REVERSE)
        self._routing, self._flags, self._level = routing, flags, level
        self._tagged = tagged_key_or_none(*bounds)
        self._asked_by = routing.ring_version
        self._merge: Merge[Item] = Merge(self._owners(), *bounds, limit=operations.as_limit(limit), backwards=backwards)
        self._pages: list[ScanPage] = []

    @property
    def is_done(self) -> bool:
        return self._merge.is_done

    @property
    def rest(self) -> tuple[bytes, bytes] | None:
        """Bounds behind the items that `take` has returned; None if that range is known to be empty."""
        return self._merge.rest

    def behind(self, key: bytes) -> tuple[bytes, bytes]:
        """Return the bounds behind a key that `take` has returned."""
        return self._merge.behind(key)

    def wanted(self) -> list[ClientOperation]:
        """Return the reads of pages without which no more items can be returned."""
        if self._asked_by != self._routing.ring_version:
            self._asked_by = self._routing.ring_version
            self._merge = self._merge.restarted(self._owners())
        self._pages = self._merge.wanted()
        return [
            operations.scan(page.partition, page.start, page.end, page.limit, self._level, flags=self._flags)
            for page in self._pages
        ]

    def take(self, answers: Answers) -> list[tuple[bytes, Item]]:
        """Return the items that are complete. Raises Moved if no newer ring is known, so that repeating the reads is
        useless."""
        if not _holds(answers, self._asked_by, self._routing):
            return []
        for page, (items, next_start, *_) in zip(self._pages, answers, strict=True):
            self._merge.feed(page.partition, items, next_start)
        return self._merge.take()

    def _owners(self) -> list[str]:
        """Return the partitions that may have such keys: the keys of one tag are in one partition."""
        return self._routing.owners if self._tagged is None else [self._routing.partition_of(self._tagged)]


class RangePage:
    """One page of a range, from its beginning or from a token on."""

    def __init__(
        self, routing: Routing, bounds: Bounds, token: str | None, *, limit: int, level: Level, flags: int = 0
    ) -> None:
        """Raises InvalidRequest for a wrong limit or token."""
        if not isinstance(limit, int) or not 0 < limit <= PAGE_LIMIT_MAX:
            raise InvalidRequest(f"expected a limit of 1 to {PAGE_LIMIT_MAX} keys a page, got {limit!r:.80}")
        if token is not None:
            *rest, is_reverse = bounds.rest(token)
            bounds = Bounds(*rest)
            flags = flags & ~kv_pb2.REVERSE | kv_pb2.REVERSE * is_reverse
        self._is_reverse = bool(flags & kv_pb2.REVERSE)
        self._scan = RangeScan(routing, bounds, limit=limit, level=level, flags=flags)
        self._items: list[tuple[bytes, Item]] = []
        self._bytes = 0
        self._is_cut = False
        """True if more items were read than fit into the page."""

    @property
    def is_done(self) -> bool:
        return self._scan.is_done or self._bytes >= PAGE_BYTES

    def wanted(self) -> list[ClientOperation]:
        return self._scan.wanted()

    def take(self, answers: Answers) -> None:
        """Take answers. Raises Moved if no newer ring is known, so that repeating the reads is useless."""
        for key, item in self._scan.take(answers):
            if self._bytes >= PAGE_BYTES:
                self._is_cut = True
                break
            self._items.append((key, item))
            self._bytes += len(key) + (len(item.value) if item else 0)

    @property
    def page(self) -> Page:
        """The page, once it is done."""
        rest = self._scan.behind(self._items[-1][0]) if self._is_cut else self._scan.rest
        return Page(self._items, None if rest is None else PageToken(*rest, self._is_reverse).encode())


class RangeCount:
    """The number of keys of all partitions within bounds. Partitions keep the count of all their keys; a range is
    counted part by part."""

    def __init__(self, routing: Routing, level: Level, bounds: Bounds = EVERYTHING) -> None:
        self.total: int | None = None
        self._routing, self._level, self._bounds = routing, level, bounds
        self._asked_by = -1
        self._counted = 0
        self._left: dict[str, bytes] = {}
        """Where to continue, by partition."""

    def wanted(self) -> list[ClientOperation]:
        if self._asked_by != self._routing.ring_version:
            self._asked_by, self._counted = self._routing.ring_version, 0
            self._left = dict.fromkeys(self._routing.owners, self._bounds.start)
        if self._bounds == EVERYTHING:
            return [operations.count(partition, self._level) for partition in self._left]
        return [
            operations.scan(partition, start, self._bounds.end, 0, self._level, flags=kv_pb2.COUNT_ONLY)
            for partition, start in self._left.items()
        ]

    def take(self, answers: Answers) -> None:
        """Take answers. Raises Moved if no newer ring is known, so that repeating the reads is useless."""
        if not _holds(answers, self._asked_by, self._routing):
            return
        if self._bounds == EVERYTHING:
            self.total = sum(answers)
            return
        self._counted += sum(part.number for part in answers)
        following = zip(self._left, (part.next for part in answers), strict=True)
        self._left = {partition: start for partition, start in following if start is not None}
        if not self._left:
            self.total = self._counted


class PrefixDeletion:
    """The keys with a prefix, found batch by batch and each deleted by itself. So the count is exact, and a key that
    moves meanwhile is deleted where it is.

        while not deletion.is_done:
            deletion.take(answers to deletion.wanted())
            deletion.deleted(answers to deletion.deletes())
    """

    def __init__(self, routing: Routing, prefix: bytes, token: str | None) -> None:
        """Raises InvalidRequest for an empty prefix or a wrong token."""
        if not prefix:
            raise InvalidRequest(
                "expected a prefix of at least one byte to delete, got an empty one, which matches every key"
            )
        self._routing, self._bounds = routing, Bounds.of(b"", b"", prefix)
        self._count = 0
        self._token = token
        self._found: list[bytes] = []
        self._next()

    def _next(self) -> None:
        self._page = RangePage(
            self._routing, self._bounds, self._token, limit=DELETE_KEYS, level=Level.LINEARIZABLE, flags=kv_pb2.BARE
        )
        self.is_done = False

    def wanted(self) -> list[ClientOperation]:
        """Return the reads that find the next batch."""
        return self._page.wanted()

    def take(self, answers: Answers) -> None:
        """Take answers. Raises Moved if no newer ring is known, so that repeating the reads is useless."""
        self._page.take(answers)

    def deletes(self) -> list[ClientOperation]:
        """Return the deletes of the next batch; empty until the batch is known."""
        return [operations.delete(key) for key, _ in self._page.page.items] if self._page.is_done else []

    def deleted(self, sequences: Sequence[int]) -> Deleted | None:
        """Count the results of deletes. Returns the progress if a batch has ended."""
        if not self._page.is_done:
            return None
        self._count += len(sequences) - sequences.count(0)
        self._token = self._page.page.token
        if self._token is None:
            self.is_done = True
        else:
            self._next()
        return Deleted(self._count, self._token)


def _holds(answers: Answers, asked_by: int, routing: Routing) -> TypeGuard[Sequence[Any]]:
    """Return True if the answers belong to the current ring. Raises the Moved that came instead of them."""
    if asked_by != routing.ring_version:
        return False
    if isinstance(answers, Moved):
        raise answers
    return True
