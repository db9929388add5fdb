"""The client operations and the fast paths that runs have covered: a run that never takes a path has not tested it.

`OPERATIONS` are the operations with their options and outcomes, taken from the recorded history. `PATHS` are methods
and functions of the code under test, which are wrapped and counted for the duration of a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.errors import ConditionFailed, Conflict, StoreError
from kvstore.partition.leading import evaluate, plain_puts
from kvstore.partition.leading.evaluate import Evaluator
from kvstore.partition.leading.leader_reads import LeaderReads
from kvstore.partition.leading.queue import WriteQueue
from kvstore.partition.leading.unlogged_answers import UnloggedAnswers
from kvstore.partition.moves.import_driver import ImportDriver
from kvstore.partition.partition import Partition
from kvstore.partition.pinning import Pinning
from kvstore.partition.state.commands import NOT_NOW, Code, Expire, Flag, Level, Op, Put, Range, Transact
from kvstore.partition.state.retry_table import RetryTable
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.traits import IN_BATCH, INTERNAL, READS
from kvstore.ring.hashing import HASHES, KeyHash
from kvstore.server.balance.balancer import Balancer
from kvstore.server.balance.step import Goal, Step
from kvstore.server.peer.link import PeerLink
from kvstore.server.routing.router import Router
from tests.sim.judges.code_paths import CODE_PATHS, CodePath, Taken
from tests.sim.judges.operations import Operation, Status, changes_nothing
from tests.sim.judges.probes import declare, hits
from tests.sim.strikes.faults import FAULTS
from tests.sim.world.env import EPOCH_MS

_CONDITIONS = (Flag.IF_ABSENT, Flag.IF_PRESENT, Flag.IF_VERSION)
FLAGS: dict[Code, tuple[Flag, ...]] = {
    Code.PUT: (*_CONDITIONS, Flag.KEEP_TTL, Flag.RETURN_OLD, Flag.RELATIVE_TTL),
    Code.DELETE: (Flag.IF_PRESENT, Flag.IF_VERSION, Flag.RETURN_OLD),
    Code.EXPIRE: (Flag.RELATIVE_TTL, Flag.IF_NO_TTL, Flag.IF_TTL, Flag.IF_LONGER, Flag.IF_SHORTER),
    Code.BATCH: (Flag.INDEPENDENT,),
    Code.TRANSACT: (Flag.INDEPENDENT,),
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
    for code in sorted(set(Code) - INTERNAL):
        yield code.name
        for flag in FLAGS.get(code, ()):
            yield f"{code.name} {flag.name}"
        if code in READS:
            yield from (f"{code.name} {level.name}" for level in Level)
    for part in sorted(IN_BATCH):
        yield f"BATCH of {Code(part).name}"
        yield f"TRANSACT of {Code(part).name}"
    yield from (f"SCAN_TOKENS with {name}" for name in HASHES)
    yield from ("TRANSACT in one partition", "TRANSACT in several partitions", "TRANSACT that only reads")
    yield from (
        "TRANSACT refused by a conflict",
        "TRANSACT without a request id",
        "TRANSACT INDEPENDENT, a part refused",
    )
    for code in (Code.PUT, Code.DELETE, Code.CHECK, Code.BATCH, Code.TRANSACT):
        yield f"{code.name}, condition failed"
    yield from (f"{code.name}, next page" for code in _PAGED)
    yield from ("RANGE REVERSE, next page", "EXPIRE never", "EXPIRE in the past", "PUT in the past", "PUT at a date")
    yield from ("BATCH of plain puts", "BATCH INDEPENDENT, a part refused", "INCREMENT refused", "DELETE_RANGE of some")
    yield from ("PUT RETURN_OLD, not applied", "PUT without a request id", "PUT again after an unknown outcome")


OPERATIONS = tuple(dict.fromkeys(_expected()))
"""Each must be answered in some run."""
TRANSACTION_OPERATIONS = tuple(name for name in OPERATIONS if name.startswith("TRANSACT"))
"""Each must be answered in some run of transactions (tests/sim/transacting/swarm.py)."""


def asked(operations: Iterable[Operation], hash: KeyHash) -> Counter[str]:
    """Return how often each of OPERATIONS was answered in a run with this key hash."""
    found: Counter[str] = Counter()
    for operation in operations:
        if operation.status is Status.OK:
            found.update(_of_answered(operation))
        elif operation.code is Code.INCREMENT and operation.status is Status.FAIL and len(operation.errors) == 1:
            found["INCREMENT refused"] += 1
        if any(isinstance(error, Conflict) for error, _ in operation.errors):
            found["TRANSACT refused by a conflict"] += 1
    found[f"SCAN_TOKENS with {hash.name}"] = found["SCAN_TOKENS"]
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
        if isinstance(op, Range) and op.flags & Flag.REVERSE:
            yield "RANGE REVERSE, next page"
    if operation.code is Code.DELETE_RANGE and result:
        yield "DELETE_RANGE of some"
    if operation.code is Code.PUT:
        yield from _of_put(operation)
    if op.ops:
        yield from _of_batch(operation)


def _is_past(operation: Operation) -> bool:
    """Return True if the requested expiry had passed before the operation began."""
    op = operation.op
    assert isinstance(op, (Put, Expire))
    latest_ms = EPOCH_MS + operation.began * 1000 - PAST_MS
    return bool(0 < op.expires_ms < latest_ms and not op.flags & Flag.RELATIVE_TTL)


def _of_op(op: Op) -> Iterator[str]:
    code = Code(op.code)
    yield code.name
    flags = getattr(op, "flags", 0)
    yield from (f"{code.name} {flag.name}" for flag in FLAGS.get(code, ()) if flags & flag)
    if isinstance(op, Expire) and not flags & Flag.RELATIVE_TTL and not op.expires_ms:
        yield "EXPIRE never"


def _of_put(operation: Operation) -> Iterator[str]:
    op, result = operation.op, operation.result
    assert isinstance(op, Put)
    if op.expires_ms and not op.flags & Flag.RELATIVE_TTL:
        yield "PUT at a date"
    if isinstance(result, tuple) and not result[0]:
        yield "PUT RETURN_OLD, not applied"
    if operation.request is None:
        yield "PUT without a request id"
    elif any(not isinstance(error, ConditionFailed) for error, _ in operation.errors):
        yield "PUT again after an unknown outcome"


def _of_batch(operation: Operation) -> Iterator[str]:
    op, result, name = operation.op, operation.result, operation.code.name
    for part in op.ops:
        yield from _of_op(part)
        yield f"{name} of {Code(part.code).name}"
    if isinstance(op, Transact):
        yield f"TRANSACT in {'one partition' if len(operation.positions) == 1 else 'several partitions'}"
        if changes_nothing(op):
            yield "TRANSACT that only reads"
        elif operation.request is None:
            yield "TRANSACT without a request id"
    elif all(isinstance(part, Put) and not (part.expires_ms or part.flags) for part in op.ops):
        yield "BATCH of plain puts"
    if op.flags & Flag.INDEPENDENT and any(isinstance(each, StoreError) for each in result):
        yield f"{name} INDEPENDENT, a part refused"


# ── fast paths ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _is_taken(result: Any) -> bool:
    return result is not None and result is not NOT_NOW and not isinstance(result, BaseException)


def _is_one(result: Any) -> bool:
    return isinstance(result, list) and len(result) == 1


def _are_many(result: Any) -> bool:
    return isinstance(result, list) and len(result) > 1


def _is_true(result: Any) -> bool:
    return result is True


def _has_moved(*goals: Goal) -> Taken:
    return lambda result: isinstance(result, Step) and result.goal in goals


PATHS: dict[str, CodePath] = {
    "plain puts are decided as a batch": CodePath(evaluate, "evaluate_batched", _is_taken),
    "a batch of plain puts is decided columnwise": CodePath(evaluate, "put_all", _is_taken),
    "request ids of a batch are found to be new": CodePath(plain_puts, "new_or_none", _is_taken),
    "a batch of puts follows what is in flight": CodePath(plain_puts, "_follow", _is_true),
    "results of a batch are remembered": CodePath(RetryTable, "_remember_batched"),
    "a single put needs no draft": CodePath(Evaluator, "_evaluate_single", _is_taken),
    "a plain put is decided on among others": CodePath(Evaluator, "_put"),
    "a plain put with a request id is decided on among others": CodePath(Evaluator, "_put_once"),
    "a range is deleted": CodePath(Evaluator, "_delete_range"),
    "a delete of a range continues in the next entry": CodePath(evaluate, "RangeSink"),
    "an expired key is deleted for a reader": CodePath(Evaluator, "_reap"),
    "puts reach the leader together": CodePath(WriteQueue, "offer_puts", _is_true),
    "puts are forwarded together": CodePath(PeerLink, "add_puts"),
    "operations follow others to another server": CodePath(Router, "follow"),
    "a read is answered at once": CodePath(LeaderReads, "now", _is_one),
    "many reads are answered at once": CodePath(LeaderReads, "now", _are_many),
    "an answer waits for entries in flight": CodePath(UnloggedAnswers, "add"),
    "several entries are applied together": CodePath(ReplicaState, "apply_run"),
    "a replica answers a stale or session read": CodePath(Partition, "_answer_here", _is_taken),
    "the balancer moves a lead": CodePath(Balancer, "act", _has_moved(Goal.LEADS)),
    "the balancer moves a replica": CodePath(Balancer, "act", _has_moved(Goal.REPLICAS)),
}


def _has_succeeded(result: Any) -> bool:
    return not isinstance(result, BaseException)


TRANSACTION_PATHS: dict[str, CodePath] = {
    "a takeover begins": CODE_PATHS["a takeover begins"],
    "the log is trimmed": CODE_PATHS["the log is trimmed"],
    "a retry is answered from the table": CODE_PATHS["a retry is answered from the table"],
    "an expired key is deleted": CodePath(Evaluator, "_reap", _has_succeeded),
    "a range has moved": CodePath(ImportDriver, "_flip", _has_succeeded),
    "a partition is pinned": CodePath(Pinning, "_take", _has_succeeded),
    "the balancer moves a range": CodePath(Balancer, "act", _has_moved(Goal.LOAD, Goal.SHARES)),
}
"""Each must be taken in some run of transactions."""


def paths_with(hash: KeyHash) -> dict[str, CodePath]:
    """Return the paths that must be taken in some run of transactions with this key hash."""
    names = ("a range has moved", "a partition is pinned")
    return {f"{name} with {hash.name}": TRANSACTION_PATHS[name] for name in names}


_ALL = PATHS | TRANSACTION_PATHS | {name: path for hash in HASHES.values() for name, path in paths_with(hash).items()}
declare(*(f"path: {name}" for name in _ALL))


def taken() -> Counter[str]:
    """Return how often each path was taken since the process began."""
    return Counter({name: hits[f"path: {name}"] for name in _ALL})


@dataclass(frozen=True, slots=True)
class Expected:
    """The things that runs of one kind must reach, once there are enough of them."""

    seeds: int
    """Number of seeds after which all is expected."""
    operations: Sequence[str]
    paths: Iterable[str]
    faults: Iterable[str] = ()

    def missed(self, operations: Counter[str], paths: Counter[str], struck: Counter[str]) -> list[str]:
        """Return the operations, paths and faults that were never reached."""
        return [
            *(f"operation: {name}" for name in self.operations if not operations[name]),
            *(f"path: {name}" for name in self.paths if not paths[name]),
            *(f"fault: {name}" for name in self.faults if not struck[name]),
        ]


PLAIN = Expected(25, OPERATIONS, PATHS)
TRANSACTING = Expected(500, TRANSACTION_OPERATIONS, [each for each in _ALL if each not in PATHS], tuple(sorted(FAULTS)))
