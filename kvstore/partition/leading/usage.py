"""Counts what a partition's keys use of each namespace: once by reading them, then by what its leader decides. Decides
only.

A leader knows each record that it replaces, so it knows what every entry adds before the entry is sent. Its count is
that of the state with all entries in flight. Counting starts with a leadership, with a change of the namespace table,
and with a change of what the partition owns. It goes through the namespaces' keys in order, some at a time: changes to
keys behind the cursor count at once, changes to other keys when the cursor reaches them. Until counting is complete,
the previous count is used. Nothing of it is stored: the records are the truth, and replicas that never lead pay
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.access.ranges import end_of_prefix
from kvstore.limits import KEY_BYTES_MAX
from kvstore.namespaces.book import Amounts, Book, UsageReport, add
from kvstore.namespaces.meter import Meter
from kvstore.partition.leading.lock_table import LockTable
from kvstore.partition.leading.range_reads import keys_in
from kvstore.partition.state.intents import IntentEffect
from kvstore.partition.state.overlay import Overlay
from kvstore.partition.state.rows import data_keys_of, record_of
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.tokens import Tokens

KEYS_PER_STEP, KEYS_PER_READ, BYTES_PER_STEP = 256, 16, 1 << 20
"""Limits of one step, which takes some milliseconds. A record may have a megabyte."""
_BEHIND_ALL = b"\xff" * (KEY_BYTES_MAX + 1)
"""Greater than every key that the store accepts."""


class Usage:
    """The usage of namespaces in one partition, as one leadership counts it."""

    def __init__(self, state: ReplicaState, epoch: int, overlay: Overlay, lock_table: LockTable) -> None:
        self._state, self._epoch, self._overlay, self._lock_table = state, epoch, overlay, lock_table
        self.book = Book()
        """Without namespaces until `join`."""
        self.amounts: Amounts = {}
        """Includes the entries in flight."""
        self._counted_for: tuple[int, Tokens] | None = None
        """The generation of the prefixes and the tokens that were counted, or are being counted."""
        self._counting: _Counting | None = None
        self._is_over = False

    def join(self, book: Book) -> None:
        """Begin to count for this server's book. Call it before anything is evaluated, so that no write is missed."""
        self.book, self.amounts = book, book.lead(self._state.partition, self)

    def leave(self) -> None:
        """Stop counting, because the leadership has ended. Nothing is read after this call, because the engine may be
        closed."""
        self._is_over = True
        self.book.leave(self._state.partition, self)

    def forget(self, names: Iterable[str]) -> None:
        """Drop the counts of these namespaces, because their names now stand for other keys."""
        for name in names:
            self.amounts.pop(name, None)

    @property
    def is_counted(self) -> bool:
        """Return True if the count is exact."""
        return self._counting is None and self._is_of_now()

    def report(self) -> UsageReport:
        """Return the usage report for other servers."""
        return UsageReport(self._state.partition, self._epoch, self.amounts, self.is_counted)

    def meter(self) -> Meter:
        """Return a meter for the next entry."""
        return Meter(self.book)

    def admit(self, meter: Meter) -> None:
        """Add the measured usage to the count, because the entry will be in the log."""
        for step in meter.steps:
            key, namespace, keys, size = step
            add(self.amounts, namespace.name, keys, size)
            if self._counting is not None and key < self._counting.cursor:
                add(self._counting.amounts, namespace.name, keys, size)

    # docs/protocol.md N1
    def count_some(self) -> bool:
        """Count some more keys. Returns True once the count is exact, or if the leadership is over. Raises OSError."""
        if self._is_over:
            return True
        if not self._is_of_now():
            self._counted_for = self.book.generation, self._state.ownership.owned
            self._counting = _Counting()
        counting = self._counting
        if counting is None:
            return True
        bounds = next((each for each in map(_bounds, self.book.prefixes.all) if _is_ahead(each, counting.cursor)), None)
        if bounds is None:
            self.amounts, self._counting = counting.amounts, None
            return True
        first, end = bounds
        self._count(counting, max(first, counting.cursor), end)
        return False

    def _count(self, counting: _Counting, start: bytes, end: bytes) -> None:
        """Count keys of one namespace and move the cursor behind them. An empty `end` means up to the last key."""
        state, size, at = self._state, 0, 0
        keys, following = keys_in(state, start, end, KEYS_PER_STEP, state.ownership.owned)
        found: dict[bytes, int] = {}
        while at < len(keys) and size < BYTES_PER_STEP:
            some = keys[at : at + KEYS_PER_READ]
            for key, row in zip(some, state.engine.multi_get(data_keys_of(state.hash, some)), strict=True):
                if row is not None:
                    found[key] = len(record_of(row).value)
                    size += len(row)
            at += len(some)
        if at < len(keys):
            following = keys[at]
        for key, record in self._overlay.rows_between(start, following or end or None).items():
            if record is None:
                found.pop(key, None)
            else:
                found[key] = len(record[0])
        self._take_intents(found, start, following or end)
        for key, value_bytes in found.items():
            namespace = self.book.find(key)
            assert namespace is not None, "counted beside its namespace"
            add(counting.amounts, namespace.name, 1, len(key) + value_bytes)
        counting.cursor = following or end or _BEHIND_ALL

    def _take_intents(self, found: dict[bytes, int], start: bytes, end: bytes) -> None:
        """Count the effects of intents as if they were committed: they were charged when they were prepared, and are
        given back by an abort."""
        for intent in self._lock_table.intents:
            key, effect = intent.key, intent.record.effect
            if (
                start <= key
                and (not end or key < end)
                and self._state.ownership.owned.holds(self._state.hash.token_of(key))
            ):
                if effect == IntentEffect.DELETE:
                    found.pop(key, None)
                elif effect != IntentEffect.NONE and self.book.find(key) is not None:
                    found[key] = len(intent.record.value)

    def _is_of_now(self) -> bool:
        """Return True if the last count, finished or not, is of the present prefixes and tokens. A range that went away
        and came back makes equal tokens with other records, so the tokens are compared by identity."""
        if self._counted_for is None:
            return False
        generation, owned = self._counted_for
        return generation == self.book.generation and owned is self._state.ownership.owned


class _Counting:
    """A count in progress: keys before `cursor` are in `amounts`."""

    __slots__ = ("amounts", "cursor")

    def __init__(self) -> None:
        self.amounts: Amounts = {}
        self.cursor = b""


def _bounds(prefix: bytes) -> tuple[bytes, bytes]:
    """Return the range [first, second) of the keys that begin with the prefix. The second is empty if no key follows
    them."""
    return prefix, end_of_prefix(prefix) or b""


def _is_ahead(bounds: tuple[bytes, bytes], cursor: bytes) -> bool:
    """Return True if some keys within the bounds are not behind the cursor."""
    return cursor != _BEHIND_ALL and (not bounds[1] or cursor < bounds[1])
