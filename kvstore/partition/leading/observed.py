"""Answers that no entry of their own brings: refused conditions, deletes of nothing, retries that were recognised. They
rest on entries under way, and wait for these (docs/protocol.md P8, P10). Bounded in number and in bytes of values.
Decides only."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from kvstore.errors import OutcomeUnknown, StoreError, Unavailable
from kvstore.partition.config import PartitionConfig
from kvstore.partition.leading.evaluate import REAP, Item
from kvstore.partition.leading.queue import Taken
from kvstore.partition.state.commands import Reply


class _Group(msgspec.Struct, frozen=True):
    """Answers to operations that came together."""

    entry: int
    """The number of the newest entry that they rest on."""
    since: float
    replies: list[Reply]
    are_retries: list[bool]
    """Which of them may have been done by a former attempt."""
    bytes: int


class Observed:
    """The answers that wait at one leader for the entries that they rest on."""

    def __init__(self, config: PartitionConfig) -> None:
        self.count = self.bytes = 0
        self.is_full = False
        """Whether a bound is reached: nothing more is decided then. A plain attribute: it is looked at in each turn."""
        self._config = config
        self._groups: deque[_Group] = deque()

    def add(self, entry: int, taken: Taken, replies: list[Reply]) -> None:
        """Keep answers to operations of `taken` until the entry of this number, which is the newest, is
        acknowledged."""
        if len(replies) == len(taken.items):
            are_retries = [_is_retry(item) for item in taken.items]
            at = 0
            for since, together in taken.arrivals:
                end = at + together
                self._add(_Group(entry, since, replies[at:end], are_retries[at:end], _bytes_of(replies[at:end])))
                at = end
        elif replies:  # some operations wait on, and it is not told which
            since = min(since for since, _ in taken.arrivals)
            self._add(_Group(entry, since, replies, [True] * len(replies), _bytes_of(replies)))

    def take(self, entry: int) -> list[Reply]:
        """Take out what rests on the entry of this number, or on an earlier one."""
        taken: list[Reply] = []
        while self._groups and self._groups[0].entry <= entry:
            taken += self._groups[0].replies
            self._drop(self._groups.popleft())
        return taken

    def take_all(self) -> list[Reply]:
        """Everything."""
        return self.take(self._groups[-1].entry) if self._groups else []

    def take_older(self, before: float, error: Unavailable) -> list[Reply]:
        """Take out what came before `before`, to be answered with `error`: that nothing was done is certain, but of
        retries."""
        late = [group for group in self._groups if group.since < before]
        if not late:
            return []
        self._groups = deque(group for group in self._groups if group.since >= before)
        unknown = OutcomeUnknown(f"of a former attempt: {error}")
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
        self._look()

    def _drop(self, group: _Group) -> None:
        self.count -= len(group.replies)
        self.bytes -= group.bytes
        self._look()

    def _look(self) -> None:
        config = self._config
        self.is_full = self.count >= config.queue_items_max or self.bytes >= config.queue_bytes_max


def _is_retry(item: Item) -> bool:
    """Whether the operation, which has logged nothing and was not refused, may have been done before: with a request id
    it would have left a note in the log, unless it is known already."""
    op = item[0]
    return op[0] != REAP and op[-1] is not None


def _bytes_of(result: Any) -> int:
    """The bytes of the values in a result, or in replies."""
    if isinstance(result, bytes):
        return len(result)
    return sum(map(_bytes_of, result)) if isinstance(result, (tuple, list)) else 0
