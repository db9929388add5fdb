"""Reads of all partitions: a scan, a count. What was asked by a ring that has changed meanwhile is asked again, so that
a key that moves is neither missed nor found twice (docs/protocol.md M14). Decides only.

    scan = Scan(...)                              count = Count(...)
    while not scan.is_done:                       while count.total is None:
        scan.take(answers to scan.wanted())           count.take(answers to count.wanted())

What `take` gets are the answers in the order of `wanted`, or the Moved that one of them was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from kvstore.client.core import operations
from kvstore.client.core.operation import Operation
from kvstore.client.core.routing import Routing
from kvstore.client.core.scanning import Merge, Page, tagged_key_or_none
from kvstore.client.core.values import Item, Level
from kvstore.errors import Moved

Answers = Sequence[Any] | Moved


class Scan:
    """Keys of all partitions in [start, end), in order, page by page."""

    def __init__(
        self, routing: Routing, start: bytes, end: bytes, *, limit: int, keys_only: bool, level: Level
    ) -> None:
        self._routing, self._end, self._keys_only, self._level = routing, end, keys_only, level
        self._tagged = tagged_key_or_none(start, end)
        self._asked_by = routing.ring_version
        self._merge: Merge[Item] = Merge(self._owners(), start, limit=limit)
        self._pages: list[Page] = []

    @property
    def is_done(self) -> bool:
        return self._merge.is_done

    def wanted(self) -> list[Operation]:
        """The pages without which nothing more can go out."""
        if self._asked_by != self._routing.ring_version:
            self._asked_by = self._routing.ring_version
            self._merge = self._merge.anew(self._owners())
        self._pages = self._merge.wanted()
        return [
            operations.scan(page.partition, page.start, self._end, page.limit, self._level, keys_only=self._keys_only)
            for page in self._pages
        ]

    def take(self, answers: Answers) -> list[tuple[bytes, Item]]:
        """Take the items that may go out. Raises Moved if no newer ring is known by which to ask again."""
        if not _holds(answers, self._asked_by, self._routing):
            return []
        for page, (items, next_start) in zip(self._pages, answers, strict=True):
            self._merge.feed(page.partition, items, next_start)
        return self._merge.take()

    def _owners(self) -> list[str]:
        """The partitions that may have such keys: the keys of one tag are in one."""
        return self._routing.owners if self._tagged is None else [self._routing.partition_of(self._tagged)]


class Count:
    """How many keys all partitions have."""

    def __init__(self, routing: Routing, level: Level) -> None:
        self.total: int | None = None
        self._routing, self._level = routing, level
        self._asked_by = 0

    def wanted(self) -> list[Operation]:
        self._asked_by = self._routing.ring_version
        return [operations.count(partition, self._level) for partition in self._routing.owners]

    def take(self, answers: Answers) -> None:
        """Raises Moved if no newer ring is known by which to ask again."""
        if _holds(answers, self._asked_by, self._routing):
            self.total = sum(answers)


def _holds(answers: Answers, asked_by: int, routing: Routing) -> TypeGuard[Sequence[Any]]:
    """Whether these are answers by one ring, the present one."""
    if asked_by != routing.ring_version:
        return False
    if isinstance(answers, Moved):
        raise answers
    return True
