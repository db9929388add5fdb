"""Holds answers that cause no entry of their own: failed conditions, deletes of absent keys, recognised retries. Such
answers depend on entries in flight and wait for them (docs/protocol.md, P8, P10). Bounded in number and in bytes of
values. Decides only."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from kvstore.errors import OutcomeUnknown, StoreError, Unavailable
from kvstore.partition.config import PartitionConfig
from kvstore.partition.leading.evaluate import REAP, Item
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


class Observed:
    """The answers that wait at one leader for the entries that they depend on."""

    def __init__(self, config: PartitionConfig) -> None:
        self.count = self.bytes = 0
        self.is_full = False
        """True if a bound is reached; the leader evaluates nothing more then. A plain attribute, because it is checked
        in every turn."""
        self._config = config
        self._groups: deque[_Group] = deque()

    def add(self, entry: int, taken: QueuedBatch, replies: list[Reply]) -> None:
        """Hold answers to operations of `taken` until entry number `entry`, the newest, is acknowledged."""
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
        """Take out the answers that depend on this entry or on an earlier one."""
        taken: list[Reply] = []
        while self._groups and self._groups[0].entry <= entry:
            taken += self._groups[0].replies
            self._drop(self._groups.popleft())
        return taken

    def take_all(self) -> list[Reply]:
        """Take out all answers."""
        return self.take(self._groups[-1].entry) if self._groups else []

    def take_older(self, before: float, error: Unavailable) -> list[Reply]:
        """Take out answers to operations that arrived before `before`, to be refused with `error`. That nothing was
        done is certain, except for retries."""
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
        self._look()

    def _drop(self, group: _Group) -> None:
        self.count -= len(group.replies)
        self.bytes -= group.bytes
        self._look()

    def _look(self) -> None:
        config = self._config
        self.is_full = self.count >= config.queue_items_max or self.bytes >= config.queue_bytes_max


def _is_retry(item: Item) -> bool:
    """Return True if an earlier attempt may have done this operation, which logged nothing and was not refused. A new
    request id would have left a note in the log, so this one is known already."""
    op = item[0]
    return op[0] != REAP and op[-1] is not None


def _bytes_of(result: Any) -> int:
    """Return the bytes of the values in a result, or in replies."""
    if isinstance(result, bytes):
        return len(result)
    return sum(map(_bytes_of, result)) if isinstance(result, (tuple, list)) else 0
