"""What clients asked and were told, and when: the only evidence that a checker may use.

One process does one operation at a time. An operation whose outcome nobody knows (INFO) may take effect at any moment
after its start, or never; its process asks nothing more, a new one takes its place. Written values are unique per key.
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
"""What a key holds: bytes, the number of a counter, or None for nothing."""


class Kind(StrEnum):
    PUT = "put"
    GET = "get"
    DEL = "del"
    CAS = "cas"
    """Put if the key holds `expected`."""
    INCR = "incr"
    """Add `delta` to a counter, from 0 if there is none; `value` is the sum."""
    SWAP = "swap"
    """Put, or delete if `value` is None, and answer what the key held: `expected`."""
    APPEND = "append"
    """Lengthen the value by `value`; `delta` is the length that was answered."""


class Result(StrEnum):
    OK = "ok"
    FAIL = "fail"
    """Certainly not done. For CAS with `condition_failed`, because the key held something else."""
    INFO = "info"


WRITES = frozenset({Kind.PUT, Kind.DEL, Kind.CAS, Kind.INCR, Kind.SWAP, Kind.APPEND})

_ANSWERED = {Kind.GET: "value", Kind.INCR: "value", Kind.SWAP: "expected", Kind.APPEND: "delta"}
"""Where the answer stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of one process."""

    process: str
    kind: Kind
    key: bytes
    began: float
    """Seconds, on one clock for all processes."""
    ended: float = inf
    result: Result = Result.INFO
    value: Value = None
    """Written by PUT, CAS, SWAP and APPEND; found by GET; the sum that INCR answered."""
    expected: Value = None
    delta: int = 0
    version: int | None = None
    """Of a write that took effect, of what a GET found, or of what a failed condition met; None if that was nothing."""
    condition_failed: bool = False
    node: str = ""

    def __post_init__(self) -> None:
        if self.ended < self.began:
            raise ValueError(f"ends before it begins: {self}")
        if (self.result is Result.INFO) != (self.ended == inf):
            raise ValueError(f"want an end exactly if the outcome is known: {self}")

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
    """An operation that has begun. Ends by exactly one of its methods; if by none, its outcome is unknown."""

    def __init__(self, history: History, **fields: Any) -> None:
        self._history = history
        self._fields = fields
        self.is_over = False

    def ok(self, value: Value = None, *, version: int | None = None) -> None:
        """Done. For all but PUT, DEL and CAS `value` is the answer."""
        field = _ANSWERED.get(self._fields["kind"])
        if field is not None:
            self._fields[field] = value
        self._end(Result.OK, version=version)

    def fail(self, *, condition_failed: bool = False, version: int | None = None) -> None:
        """Certainly not done; because of its condition, `version` is what was met."""
        self._end(Result.FAIL, condition_failed=condition_failed, version=version)

    def info(self) -> None:
        """Nobody knows."""
        self._end(Result.INFO)

    def _end(self, result: Result, **fields: Any) -> None:
        assert not self.is_over, f"ended twice: {self._fields}"
        self.is_over = True
        ended = inf if result is Result.INFO else self._history.now()
        self._history.add(Operation(**self._fields, **fields, result=result, ended=ended))


class History:
    """Operations in the order in which they were told the outcome."""

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
        """Note that `process` asks. Raises ValueError if it still waits for an answer, or has had an unknown one."""
        if process in self._busy:
            raise ValueError(f"{process} asks for {kind} {key!r} before it has a definite answer to its last question")
        fields = {"process": process, "kind": kind, "key": key, "value": value, "expected": expected}
        pending = Pending(self, **fields, delta=delta, node=node, began=self.now())
        self._busy[process] = pending
        return pending

    def add(self, operation: Operation) -> None:
        """Note an operation whose outcome is known, or known to be unknown."""
        self.operations.append(operation)
        if operation.result is not Result.INFO:
            self._busy.pop(operation.process, None)

    def close(self) -> None:
        """What has not ended by now has an unknown outcome."""
        for pending in list(self._busy.values()):
            if not pending.is_over:
                pending.info()

    def by_key(self) -> dict[bytes, list[Operation]]:
        """Operations of each key: keys are independent of each other."""
        keys: dict[bytes, list[Operation]] = {}
        for operation in self.operations:
            keys.setdefault(operation.key, []).append(operation)
        return keys

    def counts(self) -> Counter[Result]:
        return Counter(operation.result for operation in self.operations)

    def require(self, ok_min: int, *, since: float = -inf, until: float = inf) -> None:
        """Raise AssertionError unless so many operations succeeded in that time: an idle run proves nothing."""
        done = sum(each.result is Result.OK and since <= each.ended <= until for each in self.operations)
        assert done >= ok_min, f"only {done} operations succeeded between {since} and {until}, want {ok_min}"

    def dump(self, path: Path) -> None:
        """Write one JSON object per operation."""
        path.write_text("".join(json.dumps(_to_json(each)) + "\n" for each in self.operations))

    @classmethod
    def load(cls, *paths: Path) -> History:
        """Read what `dump` wrote, of several processes if need be."""
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
    """A history of given operations."""
    history = History()
    for operation in operations:
        history.add(operation)
    return history


# Bytes are written as {"bytes": text with the same code points}, so that any bytes pass and ASCII stays readable.


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
