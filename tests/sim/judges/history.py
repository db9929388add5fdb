"""A history of operations, their times and their answers: the only evidence that a checker may use.

A process performs one operation at a time. An operation of unknown outcome (INFO) may take effect at any moment after
its start, or never. Its process performs no further operation; a new process replaces it. Written values are unique per
key.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import Any

Value = bytes | int | None
"""The value of a key: bytes, the number of a counter, or None for no value."""


class Kind(StrEnum):
    PUT = "put"
    GET = "get"
    DEL = "del"
    CAS = "cas"
    """Put if the key holds `expected`."""
    INCR = "incr"
    """Add `delta` to a counter, starting from 0 if the key is absent; `value` is the sum."""
    SWAP = "swap"
    """Put, or delete if `value` is None, and return the former value of the key: `expected`."""
    APPEND = "append"
    """Append `value` to the value; `delta` is the resulting length."""


class Result(StrEnum):
    OK = "ok"
    FAIL = "fail"
    """Certainly not done. For CAS with `condition_failed`: the key held another value."""
    INFO = "info"


WRITES = frozenset({Kind.PUT, Kind.DEL, Kind.CAS, Kind.INCR, Kind.SWAP, Kind.APPEND})

_ANSWERED = {Kind.GET: "value", Kind.INCR: "value", Kind.SWAP: "expected", Kind.APPEND: "delta"}
"""The field that holds the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of one process."""

    process: str
    kind: Kind
    key: bytes
    began: float
    """Seconds on one clock that all processes share."""
    ended: float = inf
    result: Result = Result.INFO
    value: Value = None
    """The value written by PUT, CAS, SWAP or APPEND, found by GET, or returned as the sum by INCR."""
    expected: Value = None
    delta: int = 0
    version: int | None = None
    """The version of an effective write, of the value that a GET found, or of the value that failed a condition;
    None if there was no value."""
    condition_failed: bool = False
    node: str = ""

    def __post_init__(self) -> None:
        if self.ended < self.began:
            raise ValueError(f"expected an end after the beginning, got {self}")
        if (self.result is Result.INFO) != (self.ended == inf):
            raise ValueError(f"expected an end exactly if the outcome is known, got {self}")

    @property
    def is_write(self) -> bool:
        return self.kind in WRITES

    def __str__(self) -> str:
        fields = [f"{self.process}: {self.kind} {self.key!r}"]
        fields += [f"expected {self.expected!r}"] if self.kind in (Kind.CAS, Kind.SWAP) else []
        fields += [f"{self.delta:+}"] if self.kind in (Kind.INCR, Kind.APPEND) else []
        fields += [repr(self.value)] if self.kind not in (Kind.INCR, Kind.DEL) else []
        fields += [f"{self.result} version {self.version} in {self.began:.6f}..{self.ended:.6f} {self.node}"]
        return " ".join(fields).rstrip()


class Pending:
    """An operation that has begun. At most one of its methods ends it; without one, its outcome is unknown."""

    def __init__(self, history: History, **fields: Any) -> None:
        self._history = history
        self._fields = fields
        self.is_over = False

    def ok(self, value: Value = None, *, version: int | None = None) -> None:
        """Record success. `value` is the answer for all kinds except PUT, DEL and CAS."""
        field = _ANSWERED.get(self._fields["kind"])
        if field is not None:
            self._fields[field] = value
        self._end(Result.OK, version=version)

    def fail(self, *, condition_failed: bool = False, version: int | None = None) -> None:
        """Record that the operation was certainly not done. If its condition failed, `version` is the version that
        it found."""
        self._end(Result.FAIL, condition_failed=condition_failed, version=version)

    def info(self) -> None:
        """Record that the outcome is unknown."""
        self._end(Result.INFO)

    def _end(self, result: Result, **fields: Any) -> None:
        assert not self.is_over, f"ended twice: {self._fields}"
        self.is_over = True
        ended = inf if result is Result.INFO else self._history.now()
        self._history.add(Operation(**self._fields, **fields, result=result, ended=ended))


class History:
    """Operations in the order in which their outcomes became known."""

    def __init__(self, now: Callable[[], float] = lambda: 0.0) -> None:
        self.now = now
        self.operations: list[Operation] = []
        self._busy: dict[str, Pending] = {}

    def begin(
        self,
        process: str,
        kind: Kind,
        key: bytes,
        value: Value = None,
        *,
        expected: Value = None,
        delta: int = 0,
        node: str = "",
    ) -> Pending:
        """Record that `process` begins an operation. Raises ValueError if the process still waits for an answer or
        had an operation of unknown outcome."""
        if process in self._busy:
            raise ValueError(f"{process} begins {kind} {key!r} before the outcome of its last operation is known")
        fields = {"process": process, "kind": kind, "key": key, "value": value, "expected": expected}
        pending = Pending(self, **fields, delta=delta, node=node, began=self.now())
        self._busy[process] = pending
        return pending

    def add(self, operation: Operation) -> None:
        """Record an operation that has ended or has an unknown outcome."""
        self.operations.append(operation)
        if operation.result is not Result.INFO:
            self._busy.pop(operation.process, None)

    def close(self) -> None:
        """Give all operations that have not ended an unknown outcome."""
        for pending in list(self._busy.values()):
            if not pending.is_over:
                pending.info()

    def by_key(self) -> dict[bytes, list[Operation]]:
        """Return the operations of each key. Keys are independent of each other."""
        keys: dict[bytes, list[Operation]] = {}
        for operation in self.operations:
            keys.setdefault(operation.key, []).append(operation)
        return keys

    def counts(self) -> Counter[Result]:
        return Counter(operation.result for operation in self.operations)

    def require(self, ok_min: int, *, since: float = -inf, until: float = inf) -> None:
        """Raise AssertionError if fewer than `ok_min` operations succeeded between `since` and `until`: an idle run
        proves nothing."""
        done = sum(each.result is Result.OK and since <= each.ended <= until for each in self.operations)
        assert done >= ok_min, f"only {done} operations succeeded between {since} and {until}, expected {ok_min}"

    def dump(self, path: Path) -> None:
        """Write one JSON object per operation."""
        path.write_text("".join(json.dumps(_to_json(each)) + "\n" for each in self.operations))

    @classmethod
    def load(cls, *paths: Path) -> History:
        """Read the files that `dump` wrote, possibly in several processes."""
        history = cls()
        for path in paths:
            for line in path.read_text().splitlines():
                history.add(_from_json(json.loads(line)))
        return history

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.operations)

    def __len__(self) -> int:
        return len(self.operations)


def history_of(operations: Iterable[Operation]) -> History:
    """Return a history of the given operations."""
    history = History()
    for operation in operations:
        history.add(operation)
    return history


# Bytes are written as {"bytes": text with the same code points}, so that all bytes are representable and ASCII stays
# readable.


def _to_json(operation: Operation) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "process": operation.process,
        "kind": operation.kind,
        "key": _text(operation.key),
        "value": _text(operation.value),
        "began": operation.began,
        "ended": None if operation.ended == inf else operation.ended,
        "result": operation.result,
        "version": operation.version,
        "expected": _text(operation.expected),
        "delta": operation.delta,
        "condition_failed": operation.condition_failed,
        "node": operation.node,
    }
    return {name: value for name, value in fields.items() if not (value is None or value is False or value == "")}


def _from_json(fields: dict[str, Any]) -> Operation:
    fields["ended"] = fields.get("ended", inf)
    for name in ("key", "value", "expected"):
        if isinstance(fields.get(name), dict):
            fields[name] = fields[name]["bytes"].encode("latin-1")
    return Operation(**fields | {"kind": Kind(fields["kind"]), "result": Result(fields["result"])})


def _text(value: Value) -> dict[str, str] | int | None:
    return {"bytes": value.decode("latin-1")} if isinstance(value, bytes) else value
