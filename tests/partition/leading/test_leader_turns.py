"""One turn of the event loop evaluates and reads a bounded amount, and the operations that wait for entries in flight
are bounded too."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.errors import OutcomeUnknown, Overloaded, Unavailable
from kvstore.partition.config import PartitionConfig
from kvstore.partition.leading.reading import ENTRY_READ_MAX
from kvstore.partition.state.commands import (
    Batch,
    Check,
    Delete,
    DeleteRange,
    Expire,
    Flag,
    Get,
    Op,
    Put,
    Range,
    RequestId,
)
from tests.partition.one_partition import TIME_MS, Caller, Partition

ABSENT_OR_OLD = int(Flag.IF_ABSENT | Flag.RETURN_OLD)
RELATIVE = int(Flag.RELATIVE_TTL)


@pytest.fixture
def p() -> Partition:
    return Partition().start()


def stuck(**settings: Any) -> Partition:
    """A partition with a key, and an entry in flight that is never acknowledged."""
    p = Partition(PartitionConfig(expiry_sweep_s=0, lease_ms=500, **settings)).start()
    p.do(Put(b"k", b"x" * (32 << 10)))
    p.submit(Put(b"other", b"1"))
    return p


def fill(p: Partition, count: int, size: int) -> list[bytes]:
    keys = [b"k%04d" % number for number in range(count)]
    for begin in range(0, count, 8):
        p.do(*(Put(key, b"x" * size) for key in keys[begin : begin + 8]))
    return keys


def reads_of(p: Partition, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the bytes of each read of several records from now on."""
    sizes: list[int] = []
    multi_get = p.engine.multi_get

    def counting(keys: list[bytes]) -> Any:
        rows = multi_get(keys)
        sizes.append(sum(len(row) for row in rows if row is not None))
        return rows

    monkeypatch.setattr(p.engine, "multi_get", counting)
    return sizes


def decisions_of(p: Partition, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record how many operations are evaluated at a time, from now on."""
    counts: list[int] = []
    evaluate = p.leader._evaluator.evaluate

    def counting(items: Any, date_ms: int) -> Any:
        decided = evaluate(items, date_ms)
        counts.append(len(items) - len(decided.rest))
        return decided

    monkeypatch.setattr(p.leader._evaluator, "evaluate", counting)
    return counts


# docs/protocol.md P10
def test_values_of_effectless_writes_are_bounded_while_an_entry_is_stuck() -> None:
    bound = 4 << 20
    p = stuck(queue_bytes_max=bound, queue_items_max=1000)
    tokens = p.submit(*(Put(b"k", b"", flags=ABSENT_OR_OLD) for _ in range(3000)))
    unlogged = p.leader._unlogged
    assert bound <= unlogged.bytes <= bound + 2 * ENTRY_READ_MAX
    assert len(p.leader._queue) == 1000 - unlogged.count > 0
    refused = [p.result(token) for token in tokens if p.result(token) != "waits"]
    assert {type(each) for each in refused} == {Overloaded}, "operations beyond the bound are refused at once"
    assert len(refused) < len(tokens)
    p.acknowledge()
    while p.leader._queue or p.log.in_flight:
        p.settle()
        p.acknowledge(len(p.log.in_flight))
    assert not {type(p.result(token)) for token in tokens} - {tuple, Overloaded}
    assert (unlogged.count, unlogged.bytes, unlogged.is_full) == (0, 0, False)


# docs/protocol.md P10
def test_writes_without_effects_are_refused_after_waiting_too_long() -> None:
    p = stuck()
    tokens: list[int] = []
    for _ in range(20):
        tokens += p.submit(Put(b"k", b"y", flags=int(Flag.IF_ABSENT)), Delete(b"absent"))
        p.wait(1)
    results = [p.result(token) for token in tokens]
    answered = [each for each in results if each != "waits"]
    assert len(answered) >= 2 * 13
    assert {type(each) for each in answered} == {Unavailable}, "nothing of it was done"
    assert p.leader._unlogged.count == len(results) - len(answered)


def test_recognised_retry_is_unknown_after_waiting_too_long() -> None:
    p = stuck()
    again = Put(b"other2", b"1", request=RequestId(b"c" * 16, 1, 1, TIME_MS))
    p.submit(again)
    (retry, refused) = p.submit(again, Put(b"k", b"y", flags=int(Flag.IF_ABSENT)))
    p.wait(10)
    assert isinstance(p.result(retry), OutcomeUnknown)
    assert isinstance(p.result(refused), Unavailable)


# docs/protocol.md P10
@pytest.mark.parametrize("read", [Get(b"k"), Range(b"", b"", 10, int(Flag.BARE))], ids=["key", "range"])
def test_read_waiting_for_a_stuck_delete_is_refused_in_time(p: Partition, read: Op) -> None:
    p.do(Put(b"k", b"v", 300, RELATIVE), Put(b"z", b"1"))
    p.wait(0.31)
    tokens = p.submit(read)
    p.wait(4)
    assert p.result(tokens[0]) == "waits"
    tokens += p.submit(Get(b"k"))
    p.wait(3)
    assert isinstance(p.result(tokens[0]), Unavailable)
    while p.log.in_flight:
        p.acknowledge(len(p.log.in_flight))
    assert p.result(tokens[1]) is None
    assert len(p.leader.reads) == 0


# docs/protocol.md P4
@pytest.mark.parametrize("read", [Get(b"k"), Range(b"", b"", 10, int(Flag.BARE))], ids=["key", "range"])
def test_read_of_an_expired_key_needs_no_delete_once_record_time_passed(read: Op) -> None:
    p = Partition(PartitionConfig(expiry_sweep_s=0, lease_ms=500)).start()
    p.do(Put(b"k", b"v", 1000, RELATIVE))
    p.wait(0.8)
    p.do(Put(b"z", b"1"))
    p.wait(0.25)
    p.engine.behind = True  # type: ignore[attr-defined]  # a slow disk: no write is decided on
    (token,) = p.submit(read)
    for _ in range(8):
        p.acknowledge(len(p.log.in_flight))  # the lease is renewed
        p.wait(0.1)
    assert p.result(token) in (None, ([b"z"], None))


def test_read_reports_that_its_delete_was_never_tried() -> None:
    p = Partition(PartitionConfig(expiry_sweep_s=0, lease_ms=500)).start()
    p.do(Put(b"k", b"v", 300, RELATIVE))
    p.wait(0.25)
    p.do(Put(b"z", b"1"))
    p.wait(0.1)
    p.engine.behind = True  # type: ignore[attr-defined]
    (token,) = p.submit(Get(b"k"))
    p.wait(8)
    assert isinstance(p.result(token), Unavailable)
    assert p.leader.serving


def test_operations_without_effects_are_evaluated_in_several_turns(
    p: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    p.do(Put(b"k", b"v"))
    counts = decisions_of(p, monkeypatch)
    turns: list[int] = []
    fill_up = p.leader._fill

    def counting(now: float) -> None:
        before = len(counts)
        fill_up(now)
        turns.append(len(counts) - before)

    monkeypatch.setattr(p.leader, "_fill", counting)
    tokens = p.submit(*(Put(b"k", b"", flags=ABSENT_OR_OLD) for _ in range(5000)))
    assert max(turns) == 1
    assert max(counts) <= 1000
    assert all(p.result(token)[0] is False for token in tokens)
    counts.clear()
    checks = tuple(Check(b"c%d" % number, 0) for number in range(10_000))
    p.submit(*(Batch(b"c0", checks) for _ in range(4)))
    assert counts == [1, 1, 1, 1]
    assert max(turns) == 1


def test_each_large_record_is_read_about_once(p: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = fill(p, 128, 64 << 10)
    sizes = reads_of(p, monkeypatch)
    assert all(p.do(*(Expire(key, 60_000, RELATIVE) for key in keys)))
    assert sum(sizes) <= 2 * len(keys) * (65 << 10)


@pytest.mark.parametrize("how", ["delete_range", "puts", "batches"])
def test_reads_per_call_and_per_entry_are_bounded(p: Partition, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    keys = fill(p, 96, 512 << 10)
    before = len(p.log.acknowledged)
    sizes = reads_of(p, monkeypatch)
    puts = [Put(key, b"small") for key in keys]
    if how == "delete_range":
        assert p.do(DeleteRange(b"", b"")) == len(keys)
    elif how == "puts":
        p.do(*puts)
    else:
        p.do(*(Batch(keys[at], tuple(puts[at : at + 16])) for at in range(0, 96, 16)))
    assert max(sizes) <= 32 * (513 << 10), "the first read, while record sizes are unknown"
    assert sorted(sizes)[-2] <= 2 * ENTRY_READ_MAX
    assert len(p.log.acknowledged) - before >= 4
    assert p.state.key_count == (0 if how == "delete_range" else len(keys))


def test_deletes_of_large_expired_records_continue_in_the_next_entry(p: Partition) -> None:
    for number in range(12):
        p.do(Put(b"k%02d" % number, b"x" * (1 << 20), 60_000, RELATIVE))
    before = len(p.log.acknowledged)
    p.wait(61)
    caller = Caller()
    p.loop.call_soon(p.leader._reap, [b"k%02d" % number for number in range(12)], caller)
    p.settle()
    while p.log.in_flight:
        p.acknowledge(len(p.log.in_flight))
    assert p.state.key_count == 0
    assert 3 <= len(p.log.acknowledged) - before <= 4
    assert caller.results == {0: None}
