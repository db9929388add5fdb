"""Holds answers that cause no log entry of their own: failed conditions, deletes of absent keys, and recognized
retries. Such answers depend on entries in flight and wait until these are acknowledged (docs/protocol.md, P8, P10). The
number of answers and the bytes of their values are bounded. Decides only."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from kvstore.errors import OutcomeUnknown, StoreError, Unavailable
from kvstore.partition.config import PartitionConfig
from kvstore.partition.leading.evaluate import Item
from kvstore.partition.leading.queue import QueuedBatch
from kvstore.partition.state.commands import Reply


class _Group(msgspec.Struct, frozen=True):
    """Answers to operations that arrived together."""

    entry: int
    """The number of the newest entry that they depend on."""
    since: float
    replies: list[Reply]
    are_retries: list[bool]
    """True for each operation that an earlier attempt may have done."""
    bytes: int


class UnloggedAnswers:
    """The answers of one leader that wait for the entries on which they depend."""

    def __init__(self, config: PartitionConfig) -> None:
        self.count = self.bytes = 0
        self.is_full = False
        """True if a bound is reached; the leader evaluates nothing more then. A plain attribute, because it is checked
        in every turn."""
        self._config = config
        self._groups: deque[_Group] = deque()

    def add(self, entry: int, taken: QueuedBatch, replies: list[Reply]) -> None:
        """Hold the answers to operations of `taken` until the entry with number `entry`, the newest one, is
        acknowledged."""
        if len(replies) == len(taken.items):
            are_retries = [_is_retry(item) for item in taken.items]
            at = 0
            for since, together in taken.arrivals:
                end = at + together
                self._add(_Group(entry, since, replies[at:end], are_retries[at:end], _bytes_of(replies[at:end])))
                at = end
        elif replies:  # some operations still wait, and it is unknown which
            since = min(since for since, _ in taken.arrivals)
            self._add(_Group(entry, since, replies, [True] * len(replies), _bytes_of(replies)))

    def take(self, entry: int) -> list[Reply]:
        """Remove and return the answers that depend on this entry or on an earlier one."""
        taken: list[Reply] = []
        while self._groups and self._groups[0].entry <= entry:
            taken += self._groups[0].replies
            self._drop(self._groups.popleft())
        return taken

    def take_all(self) -> list[Reply]:
        """Remove and return all answers."""
        return self.take(self._groups[-1].entry) if self._groups else []

    def take_older(self, before: float, error: Unavailable) -> list[Reply]:
        """Remove and return the answers to operations that arrived before `before`, replaced by `error`. These
        operations have definitely not been done, except for retries, whose earlier attempt may have succeeded."""
        late = [group for group in self._groups if group.since < before]
        if not late:
            return []
        self._groups = deque(group for group in self._groups if group.since >= before)
        unknown = OutcomeUnknown(f"an earlier attempt may have been done: {error}")
        refused: list[Reply] = []
        for group in late:
            self._drop(group)
            for (sink, token, result), is_retry in zip(group.replies, group.are_retries, strict=True):
                refused.append((sink, token, unknown if is_retry and not isinstance(result, StoreError) else error))
        return refused

    def _add(self, group: _Group) -> None:
        self._groups.append(group)
        self.count += len(group.replies)
        self.bytes += group.bytes
        self._check_bounds()

    def _drop(self, group: _Group) -> None:
        self.count -= len(group.replies)
        self.bytes -= group.bytes
        self._check_bounds()

    def _check_bounds(self) -> None:
        config = self._config
        self.is_full = self.count >= config.queue_items_max or self.bytes >= config.queue_bytes_max


def _is_retry(item: Item) -> bool:
    """Return True if an earlier attempt may have done this operation, which logged nothing and was not refused. A new
    request id would have left a note in the log, so this one is known already."""
    return item[0].request is not None


def _bytes_of(result: Any) -> int:
    """Return the bytes of the values in a result, or in replies."""
    if isinstance(result, bytes):
        return len(result)
    return sum(map(_bytes_of, result)) if isinstance(result, (tuple, list)) else 0
