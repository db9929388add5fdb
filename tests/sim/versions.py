"""Checker A: is a history linearizable, given the versions in the answers? Exact, in O(n log n).

Versions put all writes of a key in one order, so no search is necessary. Each write has a rank, and each read has the
rank of the write that it found. A history is linearizable if and only if ranks respect real time. If one operation
ended before another began, the later operation has no lower rank, and a higher rank if it is a write.

A read of an absent key has no version. It takes the lowest fitting rank at which the key was absent. The lowest rank of
a later read is no lower, so that these reads need no comparison. A write of unknown outcome has the version under which
a read or the log shows it. If neither shows it, it did nothing, except that an unseen DEL excuses every read of an
absent key after its start. With a log, no such excuse is needed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import NamedTuple

from tests.sim.judges.history import History, Kind, Operation, Result, Value

Log = Mapping[int, tuple[bytes, Value]]
"""The effect of each version: (key, the value of the key from then on)."""


class Violation(AssertionError):
    """The history is not linearizable. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class _Write:
    """The known facts about a version. `ended` is infinite for a write of unknown outcome."""

    began: float
    ended: float
    value: Value
    operation: Operation | None


class _Placed(NamedTuple):
    """An operation in the order of versions."""

    began: float
    ended: float
    rank: int
    is_write: bool
    operation: Operation | None


def check_versions(history: History, log: Log | None = None) -> None:
    """Raise Violation unless the operations of every key are linearizable and, if `log` is given, are in the log."""
    for key, operations in sorted(history.by_key().items()):
        own = None if log is None else {version: value for version, (name, value) in log.items() if name == key}
        _Key(operations, own).check()


class _Key:
    """The operations of one key."""

    def __init__(self, operations: list[Operation], log: Mapping[int, Value] | None) -> None:
        self._operations = [o for o in operations if o.result is Result.OK]
        self._refused = [o for o in operations if o.condition_failed and o.version]
        self._unknown = [o for o in operations if o.result is Result.INFO and o.is_write]
        self._log = log
        self._reads: list[Operation] = []
        self._writes: dict[int, _Write] = {}

    def check(self) -> None:
        self._collect_writes()
        self._reads += [o for o in self._operations if o.kind is Kind.GET and o.version is not None]
        for read in sorted(self._reads, key=lambda o: o.version or 0):
            self._explain_read(read)
        for refused in self._refused:
            self._explain_refusal(refused)
        self._check_log()
        self._check_ranks()
        if not self._unknown:
            self._check_effects()

    # The effect of each version

    def _collect_writes(self) -> None:
        for operation in self._operations:
            if operation.result is not Result.OK or not operation.is_write:
                continue
            if operation.version is None:
                if operation.kind is not Kind.DEL:
                    raise ValueError(f"a write that took effect has a version: {operation}")
                continue
            other = self._writes.get(operation.version)
            if other is not None:
                raise Violation(f"two writes have one version: {operation} and {other.operation}")
            value = None if operation.kind is Kind.DEL else operation.value
            self._writes[operation.version] = _Write(operation.began, operation.ended, value, operation)
        if self._log is not None:
            for version in sorted(self._log.keys() - self._writes.keys()):
                self._find_unknown(version, self._log[version], f"the log's version {version}")
            self._unknown.clear()

    def _find_unknown(self, version: int, value: Value, seen_by: object) -> None:
        """Attribute `version`, which a read saw, to one of the writes of unknown outcome."""
        fitting = [o for o in self._unknown if _may_leave(o, value)]
        if not fitting:
            raise Violation(f"no write of {value!r} explains version {version}: {seen_by}")
        writer = min(fitting, key=lambda o: o.began)
        self._unknown.remove(writer)
        self._writes[version] = _Write(writer.began, inf, value, writer)

    def _explain_read(self, read: Operation) -> None:
        assert read.version is not None
        if read.version not in self._writes:
            self._find_unknown(read.version, read.value, read)
        write = self._writes[read.version]
        if write.value != read.value:
            raise Violation(f"version {read.version} is {write.value!r} by {write.operation}, but was read as: {read}")

    def _explain_refusal(self, refused: Operation) -> None:
        """Treat a refusal that names the version it found as a read of that version. The value that it found is
        unknown."""
        assert refused.version is not None
        write = self._writes.get(refused.version)
        if write is None and self._unknown:
            return  # by one of them, which no operation has read
        if write is None:
            raise Violation(f"no write explains version {refused.version}: {refused}")
        if write.value == refused.expected:
            raise Violation(f"refused although version {refused.version} has the expected value: {refused}")
        self._reads.append(refused)

    def _check_log(self) -> None:
        if self._log is None:
            return
        for version, write in sorted(self._writes.items()):
            if version not in self._log:
                raise Violation(f"lost: the log has no version {version} of {write.operation}")
            if self._log[version] != write.value:
                raise Violation(f"the log has {self._log[version]!r} as version {version}: {write.operation}")

    # Real time

    def _check_ranks(self) -> None:
        ranks = {version: rank for rank, version in enumerate(sorted(self._writes), start=1)}
        placed = [_Placed(w.began, w.ended, ranks[v], True, w.operation) for v, w in self._writes.items()]
        placed += [_Placed(o.began, o.ended, ranks[o.version or 0], False, o) for o in self._reads]
        placed.sort(key=lambda each: each.began)
        by_end = sorted(placed, key=lambda each: each.ended)
        ends = [each.ended for each in by_end]
        highest = list(accumulate(by_end, _higher))
        for each in placed:
            count = bisect_left(ends, each.began)
            if count and highest[count - 1].rank > each.rank - each.is_write:
                raise Violation(f"time goes back: first {highest[count - 1].operation}, then {each.operation}")
        floor = ends, [each.rank for each in highest]
        limits = accumulate((each.rank - each.is_write for each in reversed(placed)), min)
        self._place_reads_of_nothing(ranks, floor, ([each.began for each in placed], list(limits)[::-1]))

    def _place_reads_of_nothing(
        self, ranks: dict[int, int], floor: tuple[list[float], list[int]], ceiling: tuple[list[float], list[int]]
    ) -> None:
        """`floor`: the highest rank reached by each end time. `ceiling`: the highest rank possible from each start
        time on."""
        empty = [0, *sorted(ranks[version] for version, write in self._writes.items() if write.value is None)]
        for read in filter(_found_nothing, self._operations):
            count = bisect_left(floor[0], read.began)
            least = floor[1][count - 1] if count else 0
            index = bisect_left(empty, least)
            later = bisect_right(ceiling[0], read.ended)
            most = ceiling[1][later] if later < len(ceiling[1]) else inf
            fits = index < len(empty) and empty[index] <= most
            if not fits and not any(_may_leave(o, None) and o.began <= read.ended for o in self._unknown):
                raise Violation(f"the key held something all the time: {read}")

    # The effects of conditions and counters

    def _check_effects(self) -> None:
        """Check conditions and counters. Every write is known, so the predecessor of each write is known, too."""
        before: Value = None
        for _, write in sorted(self._writes.items()):
            operation = write.operation
            if operation is not None and operation.kind is Kind.CAS and operation.expected != before:
                raise Violation(f"the key held {before!r}: {operation}")
            if operation is not None and operation.kind is Kind.INCR:
                was = before if isinstance(before, int) else 0
                if write.value != was + operation.delta:
                    raise Violation(f"the counter stood at {was}: {operation}")
            before = write.value


def _higher(one: _Placed, other: _Placed) -> _Placed:
    return other if other.rank > one.rank else one


def _found_nothing(operation: Operation) -> bool:
    """Return True if the operation shows that the key was absent, but not since which version."""
    if operation.result is not Result.OK or operation.version is not None:
        return False
    return operation.kind is Kind.DEL or (operation.kind is Kind.GET and operation.value is None)


def _may_leave(operation: Operation, value: Value) -> bool:
    """Return True if this write of unknown outcome could have left `value`."""
    match operation.kind:
        case Kind.PUT | Kind.CAS:
            return operation.value == value
        case Kind.DEL:
            return value is None
        case Kind.INCR:
            return isinstance(value, int)
        case _:
            return False
