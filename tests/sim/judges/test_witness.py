"""The judge of histories accepts what a correct store could have answered, and rejects everything else."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from kvstore.errors import ConditionFailed, NotLeader, OutcomeUnknown
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Flag, Level, Op, Record, RequestId
from kvstore.partition.state.entry import CREATE, DELETE, EXPIRES, OVERWRITE, Entry, Requests
from kvstore.types import EntryId, LedgerId, PartitionId, Position
from tests.sim.judges.checks import as_history
from tests.sim.judges.history import Result
from tests.sim.judges.log_states import LogStates, Wrong
from tests.sim.judges.operations import Operation, Status, transaction
from tests.sim.judges.witness import Witness

P = PartitionId("p1")
K, L = b"k", b"l"
CLIENT = b"c" * 16


class Log:
    """Builds a partition's log."""

    def __init__(self) -> None:
        self.entries: list[tuple[Position, Entry]] = []
        self._keys: dict[bytes, int] = {}
        self._seq = 0

    def add(
        self, *changes: tuple[bytes, bytes | None], time_ms: int = 0, request: int | None = None, expires_ms: int = 0
    ) -> Log:
        """Append one entry; None deletes."""
        entry = Entry(P, 1, self._seq + 1, time_ms or self._seq + 1, b"")
        kinds = bytearray()
        for key, value in changes:
            self._seq += 1
            entry.keys.append(key)
            if value is None:
                kinds.append(DELETE)
                del self._keys[key]
                continue
            kinds.append((OVERWRITE if key in self._keys else CREATE) | (EXPIRES if expires_ms else 0))
            if key in self._keys:
                entry.ages.append(self._seq - self._keys[key])
            self._keys.setdefault(key, self._seq)
            entry.values.append(value)
            if expires_ms:
                entry.expires_ms.append(expires_ms)
        entry.kinds = bytes(kinds)
        if request is not None:
            entry.requests = Requests([CLIENT], [0], [0], [0], [request], [0], [len(changes) - 1], [b""], [b""])
        self.entries.append((Position(LedgerId(1), EntryId(len(self.entries))), entry))
        return self

    def states(self) -> LogStates:
        return LogStates(P, self.entries)


def asked(op: Op, began: float, ended: float, result: Any, status: Status = Status.OK, **more: Any) -> Operation:
    operation = Operation(0, "client", op, P, began, ended, status, result, **more)
    if status is Status.INFO:
        operation.ended = inf
    return operation


def record(value: bytes, version: int, created: int) -> Record:
    return Record(value, version, created, version, 0)


def judge(log: Log, *operations: Operation) -> Witness:
    for number, operation in enumerate(operations):
        operation.number = number
    witness = Witness(log.states())
    witness.check(operations)
    return witness


TWO_PUTS = Log().add((K, b"1")).add((K, b"2"))
PUT_1 = asked(commands.Put(K, b"1"), 0, 1, 1)
PUT_2 = asked(commands.Put(K, b"2"), 2, 3, 2)


def test_reads_of_existing_values_are_right() -> None:
    old, new = record(b"1", 1, 1), record(b"2", 2, 1)
    witness = judge(
        TWO_PUTS,
        PUT_1,
        asked(commands.Get(K), 0, 0.5, None),
        asked(commands.Get(K), 1.1, 1.9, old),
        PUT_2,
        asked(commands.Get(K), 2.1, 5, old),
        asked(commands.Get(K), 2.2, 5, new),
        asked(commands.Get(K), 5.1, 6, new),
    )
    assert witness.placed == 7


def test_read_of_value_replaced_by_acknowledged_write_is_wrong() -> None:
    with pytest.raises(Wrong, match="no state"):
        judge(TWO_PUTS, PUT_1, PUT_2, asked(commands.Get(K), 3.1, 4, record(b"1", 1, 1)))


def test_read_older_than_earlier_read_is_wrong() -> None:
    new, old = (
        asked(commands.Get(K), 2.1, 2.2, record(b"2", 2, 1)),
        asked(commands.Get(K), 2.3, 2.4, record(b"1", 1, 1)),
    )
    with pytest.raises(Wrong, match="no state"):
        judge(TWO_PUTS, PUT_1, asked(commands.Put(K, b"2"), 2, 9, 2), new, old)


def test_read_older_than_read_of_another_key_in_partition_is_wrong() -> None:
    log = Log().add((K, b"1")).add((L, b"2"))
    seen = asked(commands.Get(L), 1, 2, record(b"2", 2, 2))
    with pytest.raises(Wrong, match="no state"):
        judge(log, asked(commands.Put(K, b"1"), 0, 9, 1), seen, asked(commands.Get(K), 3, 4, None))


def test_reading_transaction_may_see_a_state_within_an_entry() -> None:
    def both(*found: Record | None) -> Witness:
        op = transaction((commands.Get(K), commands.Get(L)))
        return judge(Log().add((K, b"1"), (L, b"2")), asked(op, 0, 9, list(found)))

    first, second = Record(b"1", 1, 1, 1, 0), Record(b"2", 2, 2, 1, 0)
    assert both(first, None).placed == both(first, second).placed == both(None, None).placed == 1
    with pytest.raises(Wrong, match="no state"):
        both(None, second)


def test_read_of_value_never_written_is_wrong() -> None:
    with pytest.raises(Wrong, match="no state"):
        judge(TWO_PUTS, asked(commands.Get(K), 0, 9, record(b"3", 2, 1)))


def test_acknowledged_write_missing_from_log_is_wrong() -> None:
    with pytest.raises(Wrong, match="not in the log"):
        judge(TWO_PUTS, asked(commands.Put(K, b"3"), 4, 5, 3))
    with pytest.raises(Wrong, match="the log has"):
        judge(TWO_PUTS, asked(commands.Put(K, b"3"), 4, 5, 2))


def test_refused_write_found_in_log_is_wrong() -> None:
    with pytest.raises(Wrong, match="P7"):
        judge(TWO_PUTS, asked(commands.Put(K, b"2"), 2, 3, NotLeader("p1"), Status.FAIL))


def test_write_of_unknown_outcome_may_be_in_log_or_not() -> None:
    unknown = OutcomeUnknown("timeout")
    there = asked(commands.Put(K, b"2"), 2, inf, unknown, Status.INFO)
    absent = asked(commands.Put(K, b"9"), 2, inf, unknown, Status.INFO)
    assert judge(TWO_PUTS, PUT_1, there, absent).placed == 2


def test_transaction_not_done_may_have_a_value_that_another_one_wrote() -> None:
    op = transaction((commands.Put(K, b"1", version=2, flags=Flag.IF_VERSION),))
    unknown = asked(op, 4, inf, OutcomeUnknown("timeout"), Status.INFO)
    refused = asked(op, 4, 5, NotLeader("p1"), Status.FAIL)
    assert judge(TWO_PUTS, PUT_1, PUT_2, unknown, refused).placed == 2


def test_write_with_effect_before_its_request_is_wrong() -> None:
    late = asked(commands.Put(K, b"1"), 5, inf, OutcomeUnknown("timeout"), Status.INFO)
    with pytest.raises(Wrong, match="took effect at 1"):
        judge(TWO_PUTS, PUT_2, late)


def test_request_in_log_twice_is_wrong() -> None:
    with pytest.raises(Wrong, match="P4"):
        Log().add((K, b"1"), request=7).add((K, b"1"), request=7).states()


def test_increment_is_found_by_request_and_must_add_up() -> None:
    log = Log().add((K, b"3"), request=1).add((K, b"5"), request=2)
    first, second = RequestId(CLIENT, 1, 1, 0), RequestId(CLIENT, 2, 1, 0)
    judge(log, asked(commands.Increment(K, 3), 0, 1, (3, 1), request=first))
    with pytest.raises(Wrong, match="the log has"):
        judge(log, asked(commands.Increment(K, 3), 0, 1, (5, 2), request=second))
    with pytest.raises(Wrong, match="the log has"):
        judge(log, asked(commands.Increment(K, 2), 0, 1, (5, 2), request=first))


def test_failed_condition_is_a_read() -> None:
    op = commands.Put(K, b"9", flags=Flag.IF_VERSION, version=7)
    judge(TWO_PUTS, PUT_1, PUT_2, asked(op, 4, 5, ConditionFailed(2)))
    with pytest.raises(Wrong, match="no state"):
        judge(TWO_PUTS, PUT_1, PUT_2, asked(op, 4, 5, ConditionFailed(1)))


def test_retry_with_failed_condition_may_be_done_by_first_attempt() -> None:
    """The first attempt was still in flight, and the key was absent when the attempt reached the log."""
    log, request = Log().add((b"r1", b"1")).add((b"r1", None)).add((b"r1", b"2"), request=7), RequestId(CLIENT, 7, 1, 0)
    put = commands.Put(b"r1", b"2", flags=Flag.IF_ABSENT)
    found = as_history(log.states(), [asked(put, 0, 1, ConditionFailed(1), Status.INFO, request=request)])
    assert [(each.result, each.ended) for each in found.operations] == [(Result.INFO, inf)]


def test_condition_not_met_when_log_applied_it_is_wrong() -> None:
    swap = asked(commands.Put(K, b"2", flags=Flag.IF_VERSION, version=5), 2, 3, 2)
    with pytest.raises(Wrong, match="the log has"):
        judge(TWO_PUTS, PUT_1, swap)


def test_scan_with_half_of_a_batch_is_wrong() -> None:
    log = Log().add((K, b"1"), (L, b"2"))
    both = [(K, Record(b"1", 1, 1, 1, 0)), (L, Record(b"2", 2, 2, 1, 0))]
    judge(log, asked(commands.Scan(b"", b"", 9), 0, 1, (both, None)))
    judge(log, asked(commands.Scan(b"", b"", 9), 0, 1, ([], None)))
    with pytest.raises(Wrong, match="no state"):
        judge(log, asked(commands.Scan(b"", b"", 9), 0, 1, (both[:1], None)))


def test_session_read_below_token_is_wrong_and_stale_read_may_be_old() -> None:
    old = record(b"1", 1, 1)
    judge(TWO_PUTS, PUT_1, PUT_2, asked(commands.Get(K, Level.STALE), 4, 5, old))
    judge(TWO_PUTS, PUT_1, PUT_2, asked(commands.Get(K, Level.SESSION, 1), 4, 5, old))
    with pytest.raises(Wrong, match="no state"):
        judge(TWO_PUTS, PUT_1, PUT_2, asked(commands.Get(K, Level.SESSION, 2), 4, 5, old))


def test_key_may_be_absent_only_after_its_expiry() -> None:
    log = Log().add((K, b"1"), time_ms=100, expires_ms=150).add((L, b"2"), time_ms=140).add((L, b"3"), time_ms=160)
    gone = asked(commands.Get(K), 8, 9, None)
    judge(log, asked(commands.Put(L, b"3"), 0, 1, 3), gone)
    with pytest.raises(Wrong, match="no state"):
        judge(log, asked(commands.Put(L, b"3"), 0, 1, 3), asked(commands.Get(K), 8, 9, Record(b"1", 1, 1, 100, 150)))


def test_count_is_of_one_state() -> None:
    log = Log().add((K, b"1"), (L, b"2")).add((K, None))
    judge(log, asked(commands.Count(), 0, 1, 0), asked(commands.Count(), 2, 3, 2), asked(commands.Count(), 4, 5, 1))
    with pytest.raises(Wrong, match="no state"):
        judge(log, asked(commands.Count(), 2, 3, 1), asked(commands.Count(), 4, 5, 2))


def test_operations_of_one_moment_have_no_order() -> None:
    reads = [asked(commands.Get(K), 2.5, 9, record(b"%d" % n, n, 1)) for n in (2, 1)]
    assert judge(TWO_PUTS, PUT_1, asked(commands.Put(K, b"2"), 2, 9, 2), *reads).placed == 4


def test_equal_operations_each_have_their_own_mutation() -> None:
    log = Log().add((K, b"1")).add((K, b"1"), expires_ms=1000).add((K, b"1"), expires_ms=1000)
    expire = commands.Expire(K, 1000)
    twice = judge(log, asked(commands.Put(K, b"1"), 0, 1, 1), asked(expire, 2, 3, True), asked(expire, 2, 3, True))
    twice.check_nothing_else()
    once = judge(log, asked(commands.Put(K, b"1"), 0, 1, 1), asked(expire, 2, 3, True))
    with pytest.raises(Wrong, match="no operation explains"):
        once.check_nothing_else()
