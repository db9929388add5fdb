"""Reads of all partitions: a scan, a page, a count, and the keys that a deletion finds. What was asked by a ring that
has changed meanwhile is asked again, so that a key that moves is neither missed nor found twice (docs/protocol.md M14).
Decides only.

    scan = RangeScan(...)                              count = RangeCount(...)
    while not scan.is_done:                       while count.total is None:
        scan.take(answers to scan.wanted())           count.take(answers to count.wanted())

What `take` gets are the answers in the order of `wanted`, or the Moved that one of them was.
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
"""Keys of a page that a caller may ask for."""
PAGE_BYTES = 1 << 20
"""A page ends with the key that reaches it: keys and values."""
DELETE_KEYS = 1_000
"""Keys that a deletion has under way at a time, before it says how far it has come."""
EVERYTHING = Bounds(b"", b"")


class RangeScan:
    """Keys of all partitions in some bounds, in order, page by page; with BARE among the flags keys alone."""

    def __init__(self, routing: Routing, bounds: Bounds, *, limit: int, level: Level, flags: int = 0) -> None:
        backwards = bool(flags & kv_pb2.REVERSE)
        self._routing, self._flags, self._level = routing, flags, level
        self._tagged = tagged_key_or_none(*bounds)
        self._asked_by = routing.ring_version
        self._merge: Merge[Item] = Merge(self._owners(), *bounds, limit=limit, backwards=backwards)
        self._pages: list[ScanPage] = []

    @property
    def is_done(self) -> bool:
        return self._merge.is_done

    @property
    def rest(self) -> tuple[bytes, bytes] | None:
        """The part of the bounds behind what `take` has given; None if that is known to be empty."""
        return self._merge.rest

    def behind(self, key: bytes) -> tuple[bytes, bytes]:
        """Return the part of the bounds behind a key that `take` has given."""
        return self._merge.behind(key)

    def wanted(self) -> list[ClientOperation]:
        """The pages without which nothing more can go out."""
        if self._asked_by != self._routing.ring_version:
            self._asked_by = self._routing.ring_version
            self._merge = self._merge.restarted(self._owners())
        self._pages = self._merge.wanted()
        return [
            operations.scan(page.partition, page.start, page.end, page.limit, self._level, flags=self._flags)
            for page in self._pages
        ]

    def take(self, answers: Answers) -> list[tuple[bytes, Item]]:
        """Take the items that may go out. Raises Moved if no newer ring is known by which to ask again."""
        if not _holds(answers, self._asked_by, self._routing):
            return []
        for page, (items, next_start, *_) in zip(self._pages, answers, strict=True):
            self._merge.feed(page.partition, items, next_start)
        return self._merge.take()

    def _owners(self) -> list[str]:
        """The partitions that may have such keys: the keys of one tag are in one."""
        return self._routing.owners if self._tagged is None else [self._routing.partition_of(self._tagged)]


class RangePage:
    """One page of a range, from its beginning or where a token says."""

    def __init__(
        self, routing: Routing, bounds: Bounds, token: str | None, *, limit: int, level: Level, flags: int = 0
    ) -> None:
        """Raises InvalidRequest."""
        if not 0 < limit <= PAGE_LIMIT_MAX:
            raise InvalidRequest(f"want a limit of 1 to {PAGE_LIMIT_MAX} keys a page, got {limit}")
        if token is not None:
            *rest, is_reverse = bounds.rest(token)
            bounds = Bounds(*rest)
            flags = flags & ~kv_pb2.REVERSE | kv_pb2.REVERSE * is_reverse
        self._is_reverse = bool(flags & kv_pb2.REVERSE)
        self._scan = RangeScan(routing, bounds, limit=limit, level=level, flags=flags)
        self._items: list[tuple[bytes, Item]] = []
        self._bytes = 0
        self._is_cut = False
        """More was taken than the page has room for."""

    @property
    def is_done(self) -> bool:
        return self._scan.is_done or self._bytes >= PAGE_BYTES

    def wanted(self) -> list[ClientOperation]:
        return self._scan.wanted()

    def take(self, answers: Answers) -> None:
        """Raises Moved if no newer ring is known by which to ask again."""
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
    """How many keys all partitions have within some bounds. The count of everything is kept by partitions, and so at
    hand; others go on, each where it has stopped."""

    def __init__(self, routing: Routing, level: Level, bounds: Bounds = EVERYTHING) -> None:
        self.total: int | None = None
        self._routing, self._level, self._bounds = routing, level, bounds
        self._asked_by = -1
        self._counted = 0
        self._left: dict[str, bytes] = {}
        """Where to go on, by partition."""

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
        """Raises Moved if no newer ring is known by which to ask again."""
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
    """The keys of a prefix, found batch by batch, each deleted by itself: so what is counted is exact, and a key that
    moves meanwhile is deleted where it is.

        while not deletion.is_done:
            deletion.take(answers to deletion.wanted())
            deletion.deleted(answers to deletion.deletes())
    """

    def __init__(self, routing: Routing, prefix: bytes, token: str | None) -> None:
        """Raises InvalidRequest, also for an empty prefix."""
        if not prefix:
            raise InvalidRequest("want a prefix of at least one byte to delete: an empty one is every key")
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
        """List the reads that find the next batch."""
        return self._page.wanted()

    def take(self, answers: Answers) -> None:
        """Raises Moved if no newer ring is known by which to ask again."""
        self._page.take(answers)

    def deletes(self) -> list[ClientOperation]:
        """The deletes of the next batch; empty until it is known."""
        return [operations.delete(key) for key, _ in self._page.page.items] if self._page.is_done else []

    def deleted(self, sequences: Sequence[int]) -> Deleted | None:
        """Take in what the deletes gave. Returns how far it has come, if a batch has ended."""
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
    """Whether these are answers by one ring, the present one."""
    if asked_by != routing.ring_version:
        return False
    if isinstance(answers, Moved):
        raise answers
    return True
