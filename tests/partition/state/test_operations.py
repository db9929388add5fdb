"""The effects of operations on keys; ranges; scans. Expiry is in test_leader_expiry.py."""

from typing import Any

import pytest

from kvstore.errors import (
    ConditionFailed,
    InvalidRequest,
    NotEnoughBookies,
    NotLeader,
    OutcomeUnknown,
    Overloaded,
    StoreError,
)
from kvstore.partition.config import PartitionConfig
from kvstore.partition.leading import evaluate, queries
from kvstore.partition.state.commands import (
    Append,
    Batch,
    Check,
    Delete,
    DeleteRange,
    Flag,
    Get,
    Increment,
    Level,
    Meta,
    Put,
    Record,
    RequestId,
    Scan,
    ScanTokens,
)
from kvstore.partition.state.entry import EntryKind, decode
from tests.partition.one_partition import TIME_MS, Partition
from tests.ring import rings

RELATIVE = Flag.RELATIVE_TTL


@pytest.fixture
def p() -> Partition:
    return Partition().start()


# ── conditions, counters, appends ─────────────────────────────────────────────────────────────────────────────────────


def test_condition_is_met_or_reports_the_version_found(p: Partition) -> None:
    assert p.do(Put(b"a", b"1", flags=Flag.IF_VERSION, version=0)) == 1
    assert p.do(Put(b"a", b"2", flags=Flag.IF_VERSION, version=1)) == 2
    for op in (
        Put(b"a", b"3", flags=Flag.IF_VERSION, version=1),
        Put(b"a", b"3", flags=Flag.IF_ABSENT),
        Delete(b"a", Flag.IF_VERSION, 1),
    ):
        refused = p.do(op)
        assert isinstance(refused, ConditionFailed)
        assert refused.version == 2
    assert p.do(Put(b"b", b"1", flags=Flag.IF_PRESENT)).version == 0
    assert p.do(Delete(b"a", Flag.IF_VERSION, 2)) == 3


def test_return_old_gives_the_record_even_when_not_applied(p: Partition) -> None:
    assert p.do(Put(b"a", b"1", flags=Flag.RETURN_OLD)) == (True, 1, None)
    old = Record(b"1", 1, 1, TIME_MS, 0)
    assert p.do(Put(b"a", b"2", flags=Flag.RETURN_OLD | Flag.IF_ABSENT)) == (False, 1, old)
    assert p.do(Put(b"a", b"2", flags=Flag.RETURN_OLD)) == (True, 2, old)
    assert p.do(Delete(b"a", Flag.RETURN_OLD)) == (3, Record(b"2", 2, 1, TIME_MS, 0))
    assert p.do(Delete(b"a", Flag.RETURN_OLD)) == (0, None)


@pytest.mark.parametrize(
    "value", [b"", b"a", b"1a", b" 1", b"+1", b"01", b"-0", b"1.0", b"9223372036854775808", b"1" * 30]
)
def test_only_a_64_bit_integer_can_be_incremented(p: Partition, value: bytes) -> None:
    p.do(Put(b"n", value))
    assert isinstance(p.do(Increment(b"n", 1)), InvalidRequest)
    assert p.do(Get(b"n")).value == value


def test_counters_reach_both_ends_of_the_range(p: Partition) -> None:
    p.do(Put(b"n", b"9223372036854775806"), Put(b"m", b"-9223372036854775807"))
    assert p.do(Increment(b"n", 1)) == (2**63 - 1, 3)
    assert p.do(Increment(b"m", -1)) == (-(2**63), 4)
    assert isinstance(p.do(Increment(b"n", 1)), InvalidRequest)
    assert isinstance(p.do(Increment(b"m", -1)), InvalidRequest)


def test_append_keeps_the_expiry_and_the_size_bound(p: Partition) -> None:
    p.do(Put(b"a", b"x" * (1 << 20), 500, RELATIVE))
    assert isinstance(p.do(Append(b"a", b"y")), InvalidRequest)
    p.do(Put(b"a", b"x", 500, RELATIVE))
    assert p.do(Append(b"a", b"yz")) == (3, 3)
    assert p.do(Get(b"a")).expires_ms == TIME_MS + 500


# ── batches ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_batch_is_all_or_nothing(p: Partition) -> None:
    p.do(Put(b"a", b"1"), Put(b"n", b"x"))
    fingerprint = p.state.fingerprint()
    failing = (Put(b"b", b"1"), Delete(b"a"), Put(b"a", b"2"), Increment(b"n", 1))
    assert isinstance(p.do(Batch(b"a", failing)), InvalidRequest)
    assert p.state.fingerprint() == fingerprint
    assert p.do(Batch(b"a", failing[:3]), Put(b"z", b"1")) == [[3, 4, 5], 6]
    assert [p.do(Get(key)).value for key in (b"a", b"b")] == [b"2", b"1"]
    assert p.state.key_count == 4


def test_operations_before_a_failed_batch_in_its_entry_stand(p: Partition) -> None:
    failing = Batch(b"a", (Put(b"a", b"22"), Put(b"a", b"333"), Put(b"b", b"x"), Increment(b"b", 1)))
    results = p.do(Put(b"a", b"1"), failing, Append(b"a", b"x"), Put(b"b", b"1", flags=Flag.IF_ABSENT))
    assert isinstance(results.pop(1), InvalidRequest)
    assert results == [1, (2, 2), 3]


def test_independent_operations_of_a_batch_fail_separately(p: Partition) -> None:
    p.do(Put(b"n", b"x"))
    results = p.do(Batch(b"a", (Put(b"a", b"1"), Increment(b"n", 1), Get(b"a"), Meta(b"a")), Flag.INDEPENDENT))
    assert results[0] == 2
    assert isinstance(results[1], InvalidRequest)
    assert (results[2].value, results[3][0]) == (b"1", 1)


# docs/protocol.md P11
@pytest.mark.parametrize("flags", [0, Flag.INDEPENDENT])
@pytest.mark.parametrize(
    ("condition", "is_met"),
    [
        (Check(b"a", Flag.IF_VERSION, 1), True),
        (Check(b"a", Flag.IF_VERSION, 2), False),
        (Check(b"a", Flag.IF_PRESENT), True),
        (Check(b"a", Flag.IF_ABSENT), False),
        (Check(b"b", Flag.IF_VERSION, 0), True),
        (Check(b"b", Flag.IF_PRESENT), False),
        (Check(b"b", Flag.IF_ABSENT), True),
    ],
)
def test_batch_is_done_only_if_every_check_holds(p: Partition, flags: int, condition: Any, is_met: bool) -> None:
    p.do(Put(b"a", b"1"))
    found = p.do(Batch(b"c", (Put(b"c", b"3"), condition, Put(b"d", b"4")), flags))
    assert found == [2, int(condition.key == b"a"), 3] if is_met else isinstance(found, ConditionFailed)
    assert (p.do(Get(b"c")) is not None) == is_met


# docs/protocol.md P11
def test_batch_is_in_one_entry(p: Partition) -> None:
    p.do(Batch(b"a", tuple(Put(b"k%d" % number, b"v" * 50_000) for number in range(20))))
    assert len(decode(p.log.acknowledged[-1].payload).keys) == 20


@pytest.mark.parametrize(
    "ops",
    [
        (),
        tuple(Put(b"k%d" % number, b"v" * (1 << 19)) for number in range(3)),
        (Scan(b"", b"", 1),),
        (DeleteRange(b"", b""),),
        (Batch(b"a", (Get(b"a"),)),),
    ],
)
def test_invalid_batch_is_refused_as_a_whole(p: Partition, ops: Any) -> None:
    assert isinstance(p.do(Batch(b"a", (Put(b"a", b"1"), *ops) if ops else ())), InvalidRequest)
    assert p.state.seq == 0


def test_one_value_may_fill_a_batch(p: Partition) -> None:
    assert p.do(Batch(b"a", (Put(b"a", b"v" * (1 << 20)),))) == [1]


# ── ranges ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_range_delete_includes_keys_in_flight(p: Partition) -> None:
    p.do(*(Put(b"k%d" % number, b"v") for number in range(6)))
    p.submit(Put(b"k35", b"v"), Delete(b"k4"))
    (token,) = p.submit(DeleteRange(b"k3", b"k6"))
    p.acknowledge(2)
    assert p.result(token) == 3
    assert [key for key, _ in p.do(Scan(b"", b"", 9))[0]] == [b"k0", b"k1", b"k2"]


def test_long_range_delete_returns_the_total_count(p: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "RANGE_KEYS_MAX", 10)
    p.do(*(Put(b"%03d" % number, b"v") for number in range(95)))
    before = len(p.log.acknowledged)
    request = RequestId(b"x" * 16, 1, 1, TIME_MS)
    (token,) = p.submit(DeleteRange(b"", b"", request))
    (again,) = p.submit(DeleteRange(b"", b"", request))
    while p.log.in_flight:
        p.acknowledge()
    assert p.result(token) == 95
    assert isinstance(p.result(again), Overloaded), "in flight: nothing may overtake its end"
    assert p.do(DeleteRange(b"", b"", request)) == 95
    assert len(p.log.acknowledged) - before == 10
    assert p.state.key_count == 0


def test_interrupted_range_delete_is_unknown(p: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "RANGE_KEYS_MAX", 10)
    p.do(*(Put(b"%03d" % number, b"v") for number in range(95)))
    (token,) = p.submit(DeleteRange(b"", b""))
    p.acknowledge()
    p.leader.stop(StoreError("test"))
    assert isinstance(p.result(token), OutcomeUnknown)


def test_range_delete_whose_last_part_is_unsent_is_unknown(p: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "RANGE_KEYS_MAX", 10)
    p.do(*(Put(b"%03d" % number, b"v") for number in range(15)))
    (token,) = p.submit(DeleteRange(b"", b""))
    p.acknowledge()
    p.log.fail(NotEnoughBookies("test"))
    p.settle()
    assert isinstance(p.result(token), OutcomeUnknown)


def test_range_delete_in_flight_is_recognised(p: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "RANGE_KEYS_MAX", 10)
    p.do(*(Put(b"%03d" % number, b"v") for number in range(95)))
    (first,) = p.submit(DeleteRange(b"", b"", RequestId(b"c" * 16, 7, 1, TIME_MS)))
    (again,) = p.submit(DeleteRange(b"", b"", RequestId(b"c" * 16, 7, 5, TIME_MS)))
    while p.log.in_flight:
        p.acknowledge()
    assert p.result(first) == 95
    assert isinstance(p.result(again), Overloaded)


def test_range_delete_grouped_with_a_malformed_operation_runs_once(
    p: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations that arrived together are evaluated again, one by one: the range must not be taken for one in
    flight."""
    monkeypatch.setattr(evaluate, "RANGE_KEYS_MAX", 10)
    p.do(*(Put(b"%03d" % number, b"v") for number in range(95)))
    request = RequestId(b"c" * 16, 7, 1, TIME_MS)
    malformed: Any = Put(b"k", "text")  # type: ignore[arg-type]
    first, refused = p.submit(DeleteRange(b"", b"", request), malformed)
    while p.log.in_flight:
        p.acknowledge()
    assert p.result(first) == 95
    assert isinstance(p.result(refused), InvalidRequest)
    assert p.do(DeleteRange(b"", b"", request)) == 95


def test_overdue_range_delete_can_be_retried(p: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "RANGE_KEYS_MAX", 10)
    p.do(*(Put(b"%03d" % number, b"v") for number in range(95)))
    request = RequestId(b"c" * 16, 7, 1, TIME_MS)
    (token,) = p.submit(DeleteRange(b"", b"", request))
    p.wait(2 * p.config.queue_wait_max_s)
    p.acknowledge(len(p.log.in_flight))
    assert isinstance(p.result(token), OutcomeUnknown)
    assert p.do(DeleteRange(b"", b"", request)) == 55


# ── scans ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_scan_continues_after_the_previous_page(p: Partition) -> None:
    keys = [b"%03d" % number for number in range(50)]
    p.do(*(Put(key, b"v") for key in keys))
    found, start = [], b"005"
    while start is not None:
        items, start = p.do(Scan(start, b"045", 7))
        assert len(items) <= 7
        found += [key for key, _ in items]
    assert found == keys[5:45]


def test_scan_by_token_keeps_the_keys_of_a_token_together(p: Partition) -> None:
    keys = [b"{%d}%d" % (tag, number) for tag in range(10) for number in range(5)]
    p.do(*(Put(key, b"v") for key in keys))
    found: list[bytes] = []
    token: int | None = 0
    while token is not None:
        items, token = p.do(ScanTokens(token, 7))
        page = [key for key, _ in items]
        assert len(page) % 5 == 0
        found += page
    assert found == sorted(keys, key=lambda key: (rings.key_hash.token_of(key), key))


def test_page_is_bounded_in_keys_and_bytes(p: Partition) -> None:
    p.do(*(Put(b"%04d" % number, b"v") for number in range(1100)))
    items, following = p.do(Scan(b"", b"", 0))
    assert (len(items), following) == (1000, b"1000")
    p.do(*(Put(b"big%d" % number, b"v" * (1 << 19)) for number in range(5)))
    items, following = p.do(Scan(b"big", b"", 100))
    assert (len(items), following) == (2, b"big2")
    items, following = p.do(Scan(b"big", b"", 100, Flag.KEYS_ONLY))
    assert ([record.value for _, record in items], following) == ([b""] * 5, None)


def test_long_scan_by_token_is_consistent_and_yields_to_the_loop(p: Partition) -> None:
    p.do(*(Put(b"{t}%05d" % number, b"old") for number in range(3000)))
    tokens = p.submit(ScanTokens(0, 10, Level.LINEARIZABLE, Flag.KEYS_ONLY), Put(b"{t}02999", b"new"))
    p.acknowledge()
    p.settle()
    items, following = p.result(tokens[0])
    assert (len(items), following) == (3000, None)
    assert items[-1][1].version == 3000


def test_scan_that_finds_expired_keys_after_a_stop_is_answered(p: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "ROWS_PER_STEP", 1)
    p.do(*(Put(b"%03d" % number, b"v", 100, RELATIVE) for number in range(200)))
    p.wait(0.2)
    (token,) = p.submit(ScanTokens(0, 1000))
    assert p.result(token) == "waits"
    p.leader.stop(NotLeader("p1"))
    for _ in range(20):
        p.settle()
    assert isinstance(p.result(token), NotLeader)


def test_token_with_too_many_keys_for_a_page_is_refused(p: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "TOKEN_KEYS_MAX", 5)
    p.do(*(Put(b"{t}%d" % number, b"v") for number in range(7)))
    assert isinstance(p.do(ScanTokens(0, 1)), InvalidRequest)


def test_entries_carry_checks_regularly() -> None:
    p = Partition(PartitionConfig(check_every=5, expiry_sweep_s=0)).start()
    for number in range(20):
        p.do(Put(b"a", b"%d" % number))
    checks = [decode(logged.payload).check_seq for logged in p.log.acknowledged]
    assert [seq for seq in checks if seq] == [4, 9, 14, 19]
    p.leader.stop(StoreError("test"))
    p.open()
    p.start()
    first = decode(p.log.acknowledged[0].payload)
    assert (first.kinds[0], first.check_seq, first.check_crc) == (EntryKind.EPOCH_START, 20, p.state.crc)
