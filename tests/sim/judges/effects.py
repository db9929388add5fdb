"""Check the effect and the answer of each write: a model (tests/partition/model.py) repeats the write on the former
values of its keys, and the log must show the same effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from kvstore.errors import ConditionFailed, InvalidRequest, StoreError
from kvstore.partition.state.commands import Check, Delete, DeleteRange, Flag, Op, Put, Record
from kvstore.partition.state.entry import DELETE
from tests.partition.model import Model
from tests.sim.judges.log_states import LogStates
from tests.sim.judges.operations import Operation, Status

_RECORD = len(Record._fields)
ANY = object()
"""Stands for an unknown result."""


def keys_of(op: Op) -> list[bytes]:
    """Return the keys that an operation reads or writes; none for a range."""
    if op.ops:
        return sorted({part.key for part in op.ops})
    return [] if isinstance(op, DeleteRange) else [op.key]


def plain(result: Any) -> Any:
    """Return a result with records as tuples and errors as their names."""
    if isinstance(result, InvalidRequest):
        return InvalidRequest.__name__
    if isinstance(result, StoreError):
        return type(result).__name__, *result.args
    if isinstance(result, (tuple, list)):
        return tuple(map(plain, result))
    return result


class Effects:
    """Compares writes with the log of a partition. Expiry times are not compared where a namespace gives keys a time
    to live (`prefixes`), because it is not known when the leader learned of the namespace."""

    def __init__(self, states: LogStates, prefixes: tuple[bytes, ...] = ()) -> None:
        self._states, self._prefixes = states, prefixes

    def begin_or_none(self, operation: Operation, seq: int) -> int | None:
        """Return the sequence before the write if its mutations end at `seq` and produce its result; None if the log
        differs there."""
        op, states = operation.op, self._states
        keys = keys_of(op)
        result = operation.result if operation.status is Status.OK else ANY
        last = self._last_of(op) + (operation.request is not None)
        found = None
        for begin in range(seq - 1, max(0, seq - last) - 1, -1):
            if states.mutations[begin].key not in {*keys, op.key} or not states.are_together(begin + 1, seq):
                break
            if self._fits(operation, keys, begin, seq, result):
                found = begin  # if the result is unknown, a delete before it may belong to the write, too
        return found

    def _last_of(self, op: Op) -> int:
        """Return the maximum number of mutations: each operation may find its key expired."""
        return 2 * max(1, len(op.ops))

    def _fits(self, operation: Operation, keys: list[bytes], begin: int, seq: int, result: Any) -> bool:
        states = self._states
        model = self._model(keys, begin, states.time_ms(seq))
        found = model.apply(operation.op)
        known = self._known_of(keys)
        if model.seq != seq or (result is not ANY and known(found) != known(result)):
            return False
        return all(known(model.records.get(key)) == known(_or_none(states.record(key, seq))) for key in keys)

    def is_answer_at(self, operation: Operation, seq: int) -> bool:
        """Return True if an operation that changed nothing could have this result at this sequence."""
        keys = keys_of(operation.op)
        op, known = replace(operation.op, request=None), self._known_of(keys)
        for time_ms in set(self._states.times_ms(seq)):
            model = self._model(keys, seq, time_ms)
            found = model.apply(op)
            is_refused = isinstance(found, (ConditionFailed, InvalidRequest))
            is_same = is_refused or not _changes(self._states, model, keys, seq)
            if is_same and known(found) == known(operation.result):
                return True
        return False

    def _model(self, keys: list[bytes], seq: int, time_ms: int) -> Model:
        records = {key: record for key in keys if (record := self._states.record(key, seq)).version}
        return Model(records, seq, time_ms)

    def _known_of(self, keys: list[bytes]) -> Callable[[Any], Any]:
        """Return a function that reduces results and records of these keys to their known parts. The expiry is
        unknown if a namespace may have set it."""
        return _without_expiry if any(key.startswith(self._prefixes) for key in keys) else plain


def _without_expiry(result: Any) -> Any:
    found = plain(result)
    if not isinstance(found, tuple):
        return found
    is_record = len(found) == _RECORD and isinstance(found[0], bytes)
    return found[:-1] if is_record else tuple(map(_without_expiry, found))


def _or_none(record: Record) -> Record | None:
    return record if record.version else None


def _changes(states: LogStates, model: Model, keys: list[bytes], seq: int) -> bool:
    """Return True if the model changed more than removing expired keys."""
    for key in keys:
        before, after = _or_none(states.record(key, seq)), model.records.get(key)
        is_gone = before is not None and 0 < before.expires_ms <= model.time_ms
        if after != before and not (after is None and is_gone):
            return True
    return False


def deletes_between(states: LogStates, start: bytes, end: bytes, first: int, last: int) -> int:
    """Return the number of keys of a range that the mutations `first` to `last` deleted."""
    some = states.mutations[first - 1 : last]
    return sum(each.kind == DELETE and start <= each.key and (not end or each.key < end) for each in some)


def is_deleted(states: LogStates, start: bytes, end: bytes, since: int, seq: int) -> bool:
    """Return True if at `seq` the range holds no key whose last write is at `since` or earlier."""
    for key in states.keys_between(start, end):
        record = states.record(key, seq)
        if 0 < record.version <= since and not 0 < record.expires_ms <= states.time_ms(seq):
            return False
    return True


def is_conditional(op: Op) -> bool:
    """Return True if an operation can fail because of a condition."""
    conditions = Flag.IF_ABSENT | Flag.IF_PRESENT | Flag.IF_VERSION
    match op:
        case Put() | Delete():
            return bool(op.flags & conditions)
        case Check():
            return True
    return any(map(is_conditional, op.ops))
