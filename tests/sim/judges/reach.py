"""The client operations and the fast paths that runs have covered: a run that never takes a path has not tested it.

`OPERATIONS` are the operations with their options and outcomes, taken from the recorded history. `PATHS` are methods
and functions of the code under test, which are wrapped and counted for the duration of a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from kvstore.errors import ConditionFailed, StoreError
from kvstore.partition.leading import evaluate, plain_puts
from kvstore.partition.leading.evaluate import Evaluator
from kvstore.partition.leading.leader_reads import LeaderReads
from kvstore.partition.leading.observed import Observed
from kvstore.partition.leading.queue import WriteQueue
from kvstore.partition.partition import Partition
from kvstore.partition.state.commands import NOT_NOW, Code, Flag, Level, Op
from kvstore.partition.state.retry_table import RetryTable
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.traits import IN_BATCH, LEVEL_AT
from kvstore.server.peer.link import PeerLink
from kvstore.server.routing.router import Router
from tests.sim.judges.operations import Operation, Status
from tests.sim.judges.probes import declare, hits
from tests.sim.judges.roads import Road
from tests.sim.world.env import EPOCH_MS

FLAGS_AT = {
    Code.PUT: 4,
    Code.DELETE: 2,
    Code.EXPIRE: 3,
    Code.BATCH: 3,
    Code.SCAN: 4,
    Code.RANGE: 4,
    Code.SCAN_TOKENS: 4,
}
FLAGS_AT[Code.CHECK] = 2
_CONDITIONS = (Flag.IF_ABSENT, Flag.IF_PRESENT, Flag.IF_VERSION)
FLAGS: dict[Code, tuple[Flag, ...]] = {
    Code.PUT: (*_CONDITIONS, Flag.KEEP_TTL, Flag.RETURN_OLD, Flag.RELATIVE_TTL),
    Code.DELETE: (Flag.IF_PRESENT, Flag.IF_VERSION, Flag.RETURN_OLD),
    Code.EXPIRE: (Flag.RELATIVE_TTL, Flag.IF_NO_TTL, Flag.IF_TTL, Flag.IF_LONGER, Flag.IF_SHORTER),
    Code.BATCH: (Flag.INDEPENDENT,),
    Code.CHECK: _CONDITIONS[1:],
    Code.SCAN: (Flag.KEYS_ONLY,),
    Code.RANGE: (Flag.KEYS_ONLY, Flag.REVERSE, Flag.BARE, Flag.COUNT_ONLY),
    Code.SCAN_TOKENS: (Flag.KEYS_ONLY,),
}
"""The flags that clients set, by operation."""
PAST_MS = 5_000
"""A time in milliseconds that exceeds the difference between dates."""
_PAGED = (Code.SCAN, Code.RANGE, Code.SCAN_TOKENS)


def _expected() -> Iterator[str]:
    for code in Code:
        yield code.name
        for flag in FLAGS.get(code, ()):
            yield f"{code.name} {flag.name}"
        if code in LEVEL_AT:
            yield from (f"{code.name} {level.name}" for level in Level)
    for part in sorted(IN_BATCH):
        yield f"BATCH of {Code(part).name}"
    for code in (Code.PUT, Code.DELETE, Code.CHECK, Code.BATCH):
        yield f"{code.name}, condition failed"
    yield from (f"{code.name}, next page" for code in _PAGED)
    yield from ("RANGE REVERSE, next page", "EXPIRE never", "EXPIRE in the past", "PUT in the past", "PUT at a date")
    yield from ("BATCH of plain puts", "BATCH INDEPENDENT, a part refused", "INCREMENT refused", "DELETE_RANGE of some")
    yield from ("PUT RETURN_OLD, not applied", "PUT without a request id", "PUT again after an unknown outcome")


OPERATIONS = tuple(_expected())
"""Each must be answered in some run."""


def asked(operations: Iterable[Operation]) -> Counter[str]:
    """Return how often each of OPERATIONS was answered."""
    found: Counter[str] = Counter()
    for operation in operations:
        if operation.status is Status.OK:
            found.update(_of_answered(operation))
        elif operation.code is Code.INCREMENT and operation.status is Status.FAIL and len(operation.errors) == 1:
            found["INCREMENT refused"] += 1
    return found


def _of_answered(operation: Operation) -> Iterator[str]:
    op, result, name = operation.op, operation.result, operation.code.name
    if isinstance(result, ConditionFailed):
        yield f"{name}, condition failed"
        return
    yield from _of_op(op)
    if operation.code in (Code.PUT, Code.EXPIRE) and _is_past(operation):
        yield f"{name} in the past"
    if operation.level is not None:
        yield f"{name} {operation.level.name}"
    if operation.code in _PAGED and result[1] is not None:
        yield f"{name}, next page"
        if operation.code is Code.RANGE and op[4] & Flag.REVERSE:
            yield "RANGE REVERSE, next page"
    if operation.code is Code.DELETE_RANGE and result:
        yield "DELETE_RANGE of some"
    if operation.code is Code.PUT:
        yield from _of_put(operation)
    if operation.code is Code.BATCH:
        yield from _of_batch(op, result)


def _is_past(operation: Operation) -> bool:
    """Return True if the requested expiry had passed before the operation began."""
    op, flags = operation.op, operation.op[FLAGS_AT[operation.code]]
    expires_ms = op[3] if operation.code is Code.PUT else op[2]
    return bool(0 < expires_ms < EPOCH_MS + operation.began * 1000 - PAST_MS and not flags & Flag.RELATIVE_TTL)


def _of_op(op: Op) -> Iterator[str]:
    code = Code(op[0])
    yield code.name
    flags = op[FLAGS_AT[code]] if code in FLAGS_AT else 0
    yield from (f"{code.name} {flag.name}" for flag in FLAGS.get(code, ()) if flags & flag)
    if code is Code.EXPIRE and not flags & Flag.RELATIVE_TTL and not op[2]:
        yield "EXPIRE never"


def _of_put(operation: Operation) -> Iterator[str]:
    op, result = operation.op, operation.result
    if op[3] and not op[4] & Flag.RELATIVE_TTL:
        yield "PUT at a date"
    if isinstance(result, tuple) and not result[0]:
        yield "PUT RETURN_OLD, not applied"
    if operation.request is None:
        yield "PUT without a request id"
    elif any(not isinstance(error, ConditionFailed) for error, _ in operation.errors):
        yield "PUT again after an unknown outcome"


def _of_batch(op: Op, result: list[Any]) -> Iterator[str]:
    for part in op[2]:
        yield from _of_op(part)
        yield f"BATCH of {Code(part[0]).name}"
    if all(part[0] == Code.PUT and not (part[3] or part[4]) for part in op[2]):
        yield "BATCH of plain puts"
    if op[3] & Flag.INDEPENDENT and any(isinstance(each, StoreError) for each in result):
        yield "BATCH INDEPENDENT, a part refused"


# ── fast paths ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _is_taken(result: Any) -> bool:
    return result is not None and result is not NOT_NOW and not isinstance(result, BaseException)


def _is_one(result: Any) -> bool:
    return isinstance(result, list) and len(result) == 1


def _are_many(result: Any) -> bool:
    return isinstance(result, list) and len(result) > 1


def _is_true(result: Any) -> bool:
    return result is True


PATHS: dict[str, Road] = {
    "plain puts are decided on in columns": Road(evaluate, "put_together", _is_taken),
    "a batch of plain puts is decided on in columns": Road(evaluate, "put_all", _is_taken),
    "request ids are found to be new in columns": Road(plain_puts, "new_or_none", _is_taken),
    "columns follow what is in flight": Road(plain_puts, "_follow", _is_true),
    "results are remembered in columns": Road(RetryTable, "_remember_batched"),
    "a lone put needs no draft": Road(Evaluator, "_evaluate_lone", _is_taken),
    "a plain put is decided on among others": Road(Evaluator, "_put"),
    "a plain put with a request id is decided on among others": Road(Evaluator, "_put_once"),
    "a range is deleted": Road(Evaluator, "_delete_range"),
    "a delete of a range goes on in the next entry": Road(evaluate, "RangeSink"),
    "an expired key is deleted for a reader": Road(Evaluator, "_reap"),
    "puts reach the leader together": Road(WriteQueue, "offer_puts", _is_true),
    "puts are forwarded together": Road(PeerLink, "add_puts"),
    "operations follow others to another server": Road(Router, "follow"),
    "a read is answered at once": Road(LeaderReads, "now", _is_one),
    "many reads are answered at once": Road(LeaderReads, "now", _are_many),
    "an answer waits for entries in flight": Road(Observed, "add"),
    "several entries are applied together": Road(ReplicaState, "apply_run"),
    "a replica answers a stale or session read": Road(Partition, "_answer_here", _is_taken),
}
declare(*(f"road: {name}" for name in PATHS))


def taken() -> Counter[str]:
    """Return how often each of PATHS was taken since the process began."""
    return Counter({name: hits[f"road: {name}"] for name in PATHS})


def missed(operations: Counter[str], paths: Counter[str]) -> list[str]:
    """Return the OPERATIONS and PATHS that were never taken."""
    lacking = [f"operation: {name}" for name in OPERATIONS if not operations[name]]
    return lacking + [f"fast path: {name}" for name in PATHS if not paths[name]]
