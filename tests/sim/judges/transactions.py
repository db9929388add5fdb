"""Judge transactions by their answers alone: lists for the cycle checker, sums of accounts, and circles.

The keys are named here, so that users and judges agree. transaction_logs.py judges the logs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

from kvstore.errors import OutcomeUnknown, StoreError
from kvstore.partition.state.commands import Append, Check, Flag, Get, Level, Op
from tests.sim.judges.cycles import Items, Step, Transaction
from tests.sim.judges.log_states import Wrong
from tests.sim.judges.operations import Operation, Status

PREFIX, END = b"T/", b"T0"
"""All keys of transactors are between these."""
DEPOSIT = 100
"""The initial balance of each account."""


def numbered(name: bytes, count: int) -> tuple[bytes, ...]:
    """Return the names of keys of one kind."""
    return tuple(PREFIX + name + b"%d" % number for number in range(count))


ACCOUNTS = numbered(b"a", 8)
LISTS = numbered(b"l", 5)
REGISTERS = numbered(b"r", 5)
EXPIRING = numbered(b"e", 3)
CIRCLES = (numbered(b"pair", 2), numbered(b"three", 3), numbered(b"four", 4))
"""Keys of which never all are present: each is written only while the following one is absent."""
KINDS = (ACCOUNTS, LISTS, REGISTERS, EXPIRING, *CIRCLES)


def is_certain(operation: Operation) -> bool:
    """Return True if it is known whether the operation was done. A refusal says nothing about an earlier attempt whose
    answer was lost."""
    if operation.status is Status.INFO:
        return False
    is_refused = operation.status is Status.FAIL or isinstance(operation.result, StoreError)
    return not (is_refused and any(isinstance(error, OutcomeUnknown) for error, _ in operation.errors))


def is_done(operation: Operation) -> bool:
    """Return True if the operation was answered, and not by an error."""
    return operation.status is Status.OK and not isinstance(operation.result, StoreError)


def is_refused(operation: Operation) -> bool:
    """Return True if the operation has certainly done nothing."""
    return is_certain(operation) and not is_done(operation)


def steps_of(operation: Operation) -> Iterator[tuple[Op, Any]]:
    """Yield the operations of which this one consists, each with its result. Without an answer, results are None."""
    if not operation.op.ops:
        yield operation.op, operation.result if is_done(operation) else None
        return
    results = operation.result if is_done(operation) else (None,) * len(operation.op.ops)
    yield from zip(operation.op.ops, results, strict=True)


# ── lists ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def items_of(value: bytes) -> Items:
    return tuple(item + b"," for item in value.split(b",")[:-1])


def list_history(operations: Iterable[Operation]) -> list[Transaction]:
    """Return what transactions and lone operations did to lists. A CHECK of a version is a read of what others found
    at that version."""
    operations = [each for each in operations if any(step.key in LISTS for step, _ in steps_of(each))]
    seen = _seen_at(operations)
    found = []
    for operation in operations:
        steps = list(_list_steps(operation, seen))
        if not steps or (is_refused(operation) and not any(step.item for step in steps)):
            continue
        if operation.level in (Level.SESSION, Level.STALE):
            continue
        ended = operation.ended if is_done(operation) else inf
        found.append(
            Transaction(
                name=f"{operation.number} of {operation.client} via {','.join(operation.attempts)}",
                steps=steps,
                began=operation.began,
                ended=ended,
                is_aborted=is_refused(operation),
            )
        )
    return found


def _seen_at(operations: Iterable[Operation]) -> Mapping[tuple[bytes, int], Items]:
    """Return what reads of lists have found, by key and version."""
    found: dict[tuple[bytes, int], Items] = {}
    for operation in operations:
        written = set()
        for step, result in steps_of(operation):
            if isinstance(step, Get) and result is not None and step.key not in written:
                key, version, items = step.key, result[1], items_of(result[0])
                if found.setdefault((key, version), items) != items:
                    raise Wrong(f"version {version} of {key!r} is {found[key, version]} and {items}: {operation}")
            elif not isinstance(step, Get):
                written.add(step.key)
    return found


def _list_steps(operation: Operation, seen: Mapping[tuple[bytes, int], Items]) -> Iterator[Step]:
    for step, result in steps_of(operation):
        if isinstance(step, Append):
            yield Step(step.key, item=step.value)
        elif isinstance(step, Get) and is_done(operation) and step.key in LISTS:
            yield Step(step.key, items=items_of(result[0]) if result is not None else ())
        elif isinstance(step, Check) and is_done(operation) and (items := seen.get((step.key, step.version))):
            assert step.flags & Flag.IF_VERSION
            yield Step(step.key, items=items)


# ── invariants ────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_values(values: Mapping[bytes, bytes | None], shown_by: object) -> None:
    """Raise Wrong unless these values of all accounts, or of all keys of a circle, can exist at one moment. Keys of
    other kinds, and groups that are not complete, are ignored."""
    if set(ACCOUNTS) <= values.keys():
        balances = [int(value) for key in ACCOUNTS if (value := values[key]) is not None]
        if balances and (len(balances), sum(balances)) != (len(ACCOUNTS), DEPOSIT * len(ACCOUNTS)):
            raise Wrong(f"{len(balances)} accounts have {sum(balances)}: {balances} in {shown_by}")
    for circle in CIRCLES:
        if set(circle) <= values.keys() and all(values[key] is not None for key in circle):
            raise Wrong(f"all of a circle are present: {[values[key] for key in circle]} in {shown_by}")


def check_reads(operations: Iterable[Operation]) -> int:
    """Check what transactions that only read have found. Return how many there were."""
    count = 0
    for operation in operations:
        steps = list(steps_of(operation))
        if len(steps) < 2 or not is_done(operation) or not all(isinstance(step, Get) for step, _ in steps):
            continue
        count += 1
        check_values({step.key: None if result is None else result[0] for step, result in steps}, operation)
    return count


def is_unique(value: bytes) -> bool:
    """Return True if only one operation writes this value."""
    return b"." in value


def is_of_transactors(operation: Operation) -> bool:
    """Return True if the operation is on keys of transactors."""
    keys: Sequence[bytes] = [step.key for step in operation.op.ops] or [operation.key]
    return any(key.startswith(PREFIX) for key in keys)
