"""Entries in flight: how many there may be, and what follows an acknowledgement."""

from errno import EIO, EMFILE
from itertools import islice
from typing import Any

import pytest
from msgspec.structs import replace

from kvstore.errors import InvalidRequest, NotLeader, Overloaded
from kvstore.partition.config import IN_FLIGHT_LIMIT, PartitionConfig
from kvstore.partition.leading.entry_in_flight import ALL_IN_FLIGHT_MAX
from kvstore.partition.leading.range_reads import ROWS_PER_STEP
from kvstore.partition.state.commands import Get, Level, Op, Put, Scan, ScanTokens
from kvstore.partition.state.marks import MarkRecord
from kvstore.wal.leading.leader_log import IN_FLIGHT_MAX
from tests.partition.one_partition import Partition


@pytest.fixture
def p() -> Partition:
    return Partition().start()


def test_records_beyond_the_limit_are_refused_without_effects(p: Partition) -> None:
    """Regression: the log refused them without the leader's knowledge, so it waited for them forever and answered
    nobody."""
    assert ALL_IN_FLIGHT_MAX < IN_FLIGHT_MAX
    count = ALL_IN_FLIGHT_MAX + 4
    records = [p.loop.create_task(p.leader.append_record(MarkRecord("pin", 0, takes=False))) for _ in range(count)]
    proof = p.loop.create_task(p.leader.prove())
    p.settle()
    assert len(p.log.in_flight) == ALL_IN_FLIGHT_MAX
    assert [isinstance(each.exception(), Overloaded) for each in (*records, proof) if each.done()] == [True] * 5
    p.acknowledge(ALL_IN_FLIGHT_MAX)
    assert p.do(Put(b"a", b"1"), Put(b"b", b"1")) == [1, 2]
    assert p.state.position == p.log.acknowledged[-1].position
    assert p.do(Get(b"b", Level.STRICT)).value == b"1"


def test_leader_keeps_slots_for_records() -> None:
    """The disks are slow: nothing is acknowledged."""
    p = Partition(PartitionConfig(expiry_sweep_s=0, entries_in_flight_max=IN_FLIGHT_LIMIT)).start()
    tokens = []
    for number in range(2 * IN_FLIGHT_LIMIT):
        tokens += p.submit(Put(b"%d" % number, b"1"))
        p.settle()
    assert len(p.log.in_flight) == IN_FLIGHT_LIMIT
    record = p.loop.create_task(p.leader.append_record(MarkRecord("pin", 0, takes=False)))
    p.settle()
    assert len(p.log.in_flight) == IN_FLIGHT_LIMIT + 1
    while p.log.in_flight:
        p.acknowledge()
    assert record.done()
    assert [p.result(token) for token in tokens[:3]] == [1, 2, 3]
    assert not p.fatal


def test_batch_with_malformed_operation_is_sent_as_fast_as_the_log_takes(p: Partition) -> None:
    """They are evaluated one by one, an entry each: the log would refuse entries that the leader counts as sent."""
    many = ALL_IN_FLIGHT_MAX + 50
    malformed: Any = Put(b"bad", "text")  # type: ignore[arg-type]
    tokens = p.submit(*(Put(b"%d" % number, b"1") for number in range(many)), malformed)
    assert len(p.log.in_flight) == ALL_IN_FLIGHT_MAX
    while p.log.in_flight:
        p.acknowledge()
    assert [p.result(token) for token in tokens[:-1]] == list(range(1, many + 1))
    assert isinstance(p.result(tokens[-1]), InvalidRequest)
    assert p.state.position == p.log.acknowledged[-1].position


def test_unreadable_engine_after_an_acknowledgement_ends_the_process(
    p: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    p.do(Put(b"a", b"1"))
    (read,) = p.submit(Get(b"a", Level.STRICT))
    assert p.result(read) == "waits"

    def broken(*_: Any) -> Any:
        raise OSError(EIO, "read error")

    monkeypatch.setattr(p.engine, "multi_get", broken)
    monkeypatch.setattr(p.engine, "get", broken)
    p.acknowledge()
    assert len(p.fatal) == 1
    assert "cannot read the engine" in p.fatal[0]
    assert not p.leader.serving


@pytest.mark.parametrize("is_one_malformed", [False, True])
def test_writes_are_refused_when_the_engine_cannot_be_read(
    p: Partition, monkeypatch: pytest.MonkeyPatch, is_one_malformed: bool
) -> None:
    """They were taken from the queue, and nobody answered them. Leaders that send each other operations of transactions
    waited for such an answer forever."""
    found, calls = p.engine.multi_get, 0

    def broken(keys: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > is_one_malformed:
            raise OSError(EMFILE, "too many open files")
        return found(keys)

    monkeypatch.setattr(p.engine, "multi_get", broken)
    monkeypatch.setattr(p.engine, "get", broken)
    malformed = Put(b"x", 5)  # type: ignore[arg-type]
    tokens = p.submit(Put(b"a", b"1"), *([malformed] if is_one_malformed else ()), Put(b"b", b"1"), Put(b"c", b"1"))
    assert [type(p.result(token)) for token in tokens] == [NotLeader] * len(tokens)
    assert not p.leader.serving
    assert not p.fatal


@pytest.mark.parametrize("level", [Level.LINEARIZABLE, Level.STRICT])
@pytest.mark.parametrize("read", [Get(b"b"), Scan(b"", b"", 9), ScanTokens(0, 9)], ids=lambda read: type(read).__name__)
def test_reads_are_refused_when_the_engine_cannot_be_read(
    p: Partition, monkeypatch: pytest.MonkeyPatch, read: Op, level: Level
) -> None:
    """They were taken from their line, and nobody answered them."""

    def broken(*_: Any) -> Any:
        raise OSError(EMFILE, "too many open files")

    p.do(Put(b"b", b"1"))
    for name in ("get", "multi_get", "iterate"):
        monkeypatch.setattr(p.engine, name, broken)
    tokens = p.submit(replace(read, level=int(level)), Get(b"b", level))
    while p.log.in_flight:
        p.acknowledge()
    assert [type(p.result(token)) for token in tokens] == [NotLeader] * 2
    assert not p.leader.serving
    assert not p.fatal


def test_scan_is_refused_when_the_engine_cannot_be_read_between_two_turns(
    p: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = p.engine.iterate

    def broken(begin: bytes, end: bytes) -> Any:
        yield from islice(found(begin, end), ROWS_PER_STEP)
        raise OSError(EMFILE, "too many open files")

    p.do(*(Put(b"%d" % number, b"1") for number in range(2 * ROWS_PER_STEP)))
    monkeypatch.setattr(p.engine, "iterate", broken)
    (scan,) = p.submit(ScanTokens(0, 2 * ROWS_PER_STEP))
    assert isinstance(p.result(scan), NotLeader)
    assert not p.fatal


def test_sweep_that_cannot_read_the_engine_ends_the_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to end the process."""
    p = Partition(PartitionConfig(expiry_sweep_s=1)).start()

    def broken(*_: Any) -> Any:
        raise OSError(EMFILE, "too many open files")

    monkeypatch.setattr(p.engine, "iterate", broken)
    p.wait(1.1)
    assert not p.leader.serving
    assert not p.fatal
