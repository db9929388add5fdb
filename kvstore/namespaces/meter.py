"""Measures how much the writes in one log entry add to their namespaces, and refuses writes that exceed a quota.
Decides only.

The meter counts records as clients wrote them: a key counts with its own length plus the length of its value, from the
entry that creates the key to the entry that deletes it. A write that adds nothing, such as a delete or a value that is
no larger than the old one, is never refused, even if a quota is already exceeded.
"""

from __future__ import annotations

from typing import NamedTuple

from kvstore.errors import QuotaExceeded
from kvstore.namespaces.book import Amount, Book
from kvstore.namespaces.table import Namespace


class UsageStep(NamedTuple):
    """How much one mutation changes the usage of its namespace."""

    key: bytes
    namespace: Namespace
    keys: int
    bytes: int


class Meter:
    """Measures one log entry while it is built."""

    __slots__ = ("_book", "_is_atomic", "_used", "steps")

    def __init__(self, book: Book) -> None:
        self._book = book
        self._used: dict[str, Amount] = {}
        """Usage of the touched namespaces, including what this entry adds."""
        self._is_atomic = False
        self.steps: list[UsageStep] = []

    # docs/protocol.md N1
    def put(self, key: bytes, value_bytes: int, old_bytes: int | None) -> None:
        """Record a put of a value of `value_bytes`. `old_bytes` is the size of the value that it replaces, or None if
        the key was absent. Raises QuotaExceeded, and records nothing, if the put exceeds a quota."""
        namespace = self._book.find(key)
        if namespace is None:
            return
        keys, more = (1, len(key) + value_bytes) if old_bytes is None else (0, value_bytes - old_bytes)
        if not self._is_atomic:
            self._check(namespace, keys, more)
        if keys or more:
            self._add(UsageStep(key, namespace, keys, more))

    def delete(self, key: bytes, old_bytes: int) -> None:
        """Record a delete of a key whose value has `old_bytes` bytes. Never refused."""
        namespace = self._book.find(key)
        if namespace is not None:
            self._add(UsageStep(key, namespace, -1, -len(key) - old_bytes))

    def give_back(self, key: bytes, value_bytes: int | None, old_bytes: int | None) -> None:
        """Record that a write that was recorded will not take place: of a value of `value_bytes`, or of a delete if it
        is None. `old_bytes` is the size of the value that stays, or None if the key stays absent. Never refused."""
        namespace = self._book.find(key)
        if namespace is not None:
            had = 0 if old_bytes is None else len(key) + old_bytes
            has = 0 if value_bytes is None else len(key) + value_bytes
            self._add(UsageStep(key, namespace, (old_bytes is not None) - (value_bytes is not None), had - has))

    # docs/protocol.md N4
    def expiry_ms(self, key: bytes, now_ms: int) -> int:
        """Return the time in ms at which a record expires if its write sets no expiry of its own; 0 if it never
        expires."""
        namespace = self._book.find(key)
        return 0 if namespace is None or not namespace.ttl_ms else now_ms + namespace.ttl_ms

    def begin(self, *, is_atomic: bool) -> int:
        """Begin a unit of mutations that can be undone as a whole, and return its mark for `end` and `undo`. With
        `is_atomic`, quotas are checked once for the whole unit, in `end`, rather than for each mutation."""
        self._is_atomic = is_atomic
        return len(self.steps)

    def end(self, mark: int) -> None:
        """Finish the unit that began at `mark`. Raises QuotaExceeded if the unit as a whole exceeds a quota."""
        if self._is_atomic:
            added: dict[str, Amount] = {}
            for _, namespace, keys, more in self.steps[mark:]:
                amount = added.setdefault(namespace.name, Amount())
                amount.keys += keys
                amount.bytes += more
            for namespace in self._book.table.namespaces:
                if (amount_or_none := added.get(namespace.name)) is not None:
                    self._check(namespace, amount_or_none.keys, amount_or_none.bytes, is_added=True)
            self._is_atomic = False

    def undo(self, mark: int) -> None:
        """Undo all mutations recorded since `mark`."""
        for _, namespace, keys, more in self.steps[mark:]:
            used = self._used[namespace.name]
            used.keys -= keys
            used.bytes -= more
        del self.steps[mark:]
        self._is_atomic = False

    def _add(self, step: UsageStep) -> None:
        used = self._used_by(step.namespace.name)
        used.keys += step.keys
        used.bytes += step.bytes
        self.steps.append(step)

    def _used_by(self, name: str) -> Amount:
        found = self._used.get(name)
        if found is None:
            found = self._used[name] = self._book.used(name)
        return found

    def _check(self, namespace: Namespace, keys: int, more: int, *, is_added: bool = False) -> None:
        used = self._used_by(namespace.name)
        for quota, limit, has, adds in (
            ("keys", namespace.keys_max, used.keys, keys),
            ("bytes", namespace.bytes_max, used.bytes, more),
        ):
            before = has - adds if is_added else has
            if limit and adds > 0 and before + adds > limit:
                self._book.refused[namespace.name, quota] += 1
                raise QuotaExceeded(namespace.name, quota, before, limit, adds)
