"""A read never lies: what may be answered, when, and with which proof."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.errors import InvalidRequest, NotCaughtUp, NotLeader, Unavailable
from kvstore.partition.config import PartitionConfig
from kvstore.partition.leading import queries, range_reads
from kvstore.partition.leading.leader_reads import AT_ONCE, STEPPING_MAX, TURN_BYTES, LeaderReads
from kvstore.partition.leading.read_lease import ReadLease
from kvstore.partition.state.commands import Count, Flag, Get, Level, Meta, Put, Range, Scan, ScanTokens
from kvstore.partition.state.entry import EntryKind
from kvstore.partition.state.rows import ORDER
from tests.partition.one_partition import Partition

STRICT, SESSION, STALE = Level.STRICT, Level.SESSION, Level.STALE


@pytest.fixture
def p() -> Partition:
    made = Partition().start()
    made.do(Put(b"a", b"1"))
    return made


def value(record: Any) -> Any:
    return record if record is None or isinstance(record, str) else record.value


# ── the gate ──────────────────────────────────────────────────────────────────────────────────────────────────────────


# docs/protocol.md P17
def test_lease_counts_from_the_first_send_of_an_acknowledged_append() -> None:
    gate = ReadLease(0.5)
    gate.send()
    assert not gate.has_lease(100.0)
    gate.acknowledge(sent_at=100.0)
    assert gate.has_lease(100.49)
    assert not gate.has_lease(100.5)


def test_late_acknowledgement_of_an_earlier_send_keeps_the_lease() -> None:
    gate = ReadLease(0.5)
    for sent_at in (100.0, 99.0):
        gate.send()
        gate.acknowledge(sent_at)
    assert gate.lease_until == 100.5


def test_only_an_append_sent_after_the_read_proves_it() -> None:
    gate = ReadLease(0.5)
    gate.send()
    ticket = gate.sent
    gate.acknowledge(100.0)
    assert not gate.proves(ticket)
    gate.send()
    assert not gate.proves(ticket)
    gate.acknowledge(100.0)
    assert gate.proves(ticket)
    assert not gate.proves(gate.sent)


# docs/protocol.md P21
def test_closed_lease_stays_closed() -> None:
    gate = ReadLease(0.5)
    gate.send()
    gate.send()
    gate.acknowledge(100.0)
    gate.close()
    gate.acknowledge(100.1)
    assert not gate.has_lease(100.1)
    assert not gate.proves(0)
    assert not gate.wants_renewal(101)


def test_lease_never_exists_with_length_zero() -> None:
    gate = ReadLease(0)
    gate.send()
    gate.acknowledge(100.0)
    assert not gate.has_lease(100.0)
    assert not gate.wants_renewal(200.0)


# ── leases ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_leased_read_is_answered_in_its_turn(p: Partition) -> None:
    p.wait(0.1)
    (token,) = p.submit(Get(b"a"))
    assert value(p.result(token)) == b"1"
    assert p.in_flight() == []


def test_lease_ends_by_the_clock_of_the_send(p: Partition) -> None:
    p.wait(0.6)
    p.submit(Put(b"a", b"2"))
    p.wait(0.4)
    p.acknowledge()
    assert p.leader.statistics()["lease_left_s"] == pytest.approx(0.1)
    p.wait(0.15)
    (token,) = p.submit(Get(b"a"))
    assert p.result(token) == "waits"


def test_read_without_lease_waits_for_an_empty_append(p: Partition) -> None:
    p.wait(0.6)
    first, second = p.submit(Get(b"a"), Get(b"b"))
    assert p.result(first) == "waits"
    assert p.sent_kinds() == [EntryKind.EMPTY]
    p.submit(Get(b"a"))
    p.acknowledge()
    assert value(p.result(first)) == b"1"
    assert p.result(second) is None
    assert p.in_flight() == []


# docs/protocol.md P18
def test_lease_is_checked_for_each_read(p: Partition) -> None:
    assert value(p.result(p.submit(Get(b"a"))[0])) == b"1"
    p.wait(0.499)
    assert value(p.result(p.submit(Get(b"a"))[0])) == b"1"
    p.wait(0.002)
    assert p.result(p.submit(Get(b"a"))[0]) == "waits"


# docs/protocol.md P20
def test_reads_without_writes_renew_the_lease_in_time(p: Partition) -> None:
    renewals = 0
    for _ in range(100):
        p.wait(0.02)
        (token,) = p.submit(Get(b"a"))
        assert value(p.result(token)) == b"1"
        renewals += len(p.sent_kinds())
        p.acknowledge(len(p.log.in_flight))
    assert 4 <= renewals <= 8, "2 s of reads with a lease of 0.5 s"


def test_lease_is_not_renewed_without_reads(p: Partition) -> None:
    p.wait(10)
    assert p.in_flight() == []


def test_every_read_appends_when_leases_are_off() -> None:
    p = Partition(PartitionConfig(lease_ms=0, expiry_sweep_s=0)).start()
    (token,) = p.submit(Get(b"a"))
    assert p.sent_kinds() == [EntryKind.EMPTY]
    p.acknowledge()
    assert p.result(token) is None
    (token,) = p.submit(Get(b"a"))
    assert p.result(token) == "waits"


def test_reads_see_only_acknowledged_entries(p: Partition) -> None:
    p.submit(Put(b"a", b"2"))
    assert value(p.result(p.submit(Get(b"a"))[0])) == b"1"
    p.acknowledge()
    assert value(p.result(p.submit(Get(b"a"))[0])) == b"2"


def test_waiting_read_sees_everything_acknowledged_before_its_answer(p: Partition) -> None:
    p.wait(0.6)
    write, read = p.submit(Put(b"a", b"2"), Get(b"a"))
    p.acknowledge()
    assert p.result(write) == 2
    assert value(p.result(read)) == b"2"


def test_read_is_refused_after_waiting_too_long(p: Partition) -> None:
    p.wait(0.6)
    lease, strict = p.submit(Get(b"a"), Get(b"a", STRICT))
    p.wait(7)
    assert isinstance(p.result(lease), Unavailable)
    assert isinstance(p.result(strict), Unavailable)


def test_reads_are_refused_when_the_leader_stops(p: Partition) -> None:
    (strict,) = p.submit(Get(b"a", STRICT))
    p.leader.stop(NotLeader("p1"))
    assert isinstance(p.result(strict), NotLeader)


# ── strict ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_strict_read_waits_for_an_append_sent_after_it(p: Partition) -> None:
    p.submit(Put(b"a", b"2"))
    (token,) = p.submit(Get(b"a", STRICT))
    assert p.sent_kinds() == [EntryKind.EMPTY]
    p.acknowledge()
    assert p.result(token) == "waits", "the put was sent before the read arrived"
    p.acknowledge()
    assert value(p.result(token)) == b"2"


def test_strict_reads_of_one_turn_share_an_append(p: Partition) -> None:
    reads = p.submit(Get(b"a", STRICT), Get(b"b", STRICT))
    assert len(p.in_flight()) == 1
    p.acknowledge()
    assert [value(p.result(token)) for token in reads] == [b"1", None]
    _, read = p.submit(Put(b"b", b"2"), Get(b"b", STRICT))
    assert [entry.keys for entry in p.in_flight()] == [[b"b"]]
    p.acknowledge()
    assert value(p.result(read)) == b"2"


# docs/protocol.md P19
def test_proof_is_never_used_for_a_later_read(p: Partition) -> None:
    (first,) = p.submit(Get(b"a", STRICT))
    (second,) = p.submit(Get(b"a", STRICT))
    assert len(p.in_flight()) == 2
    p.acknowledge()
    assert value(p.result(first)) == b"1"
    assert p.result(second) == "waits"
    p.acknowledge()
    (third,) = p.submit(Get(b"a", STRICT))
    assert value(p.result(second)) == b"1"
    assert p.result(third) == "waits"


def test_strict_reads_wait_for_a_slot_when_all_are_taken(p: Partition) -> None:
    for number in range(4):
        p.submit(Put(b"k%d" % number, b"v"))
    (token,) = p.submit(Get(b"k3", STRICT))
    p.acknowledge()
    assert p.sent_kinds() == [EntryKind.EMPTY]
    p.acknowledge(3)
    assert p.result(token) == "waits"
    p.acknowledge()
    assert value(p.result(token)) == b"v"


# ── levels and sequences ──────────────────────────────────────────────────────────────────────────────────────────────


# docs/protocol.md P22
@pytest.mark.parametrize("op", [Get(b"a", seq=2), Meta(b"a", seq=2), Scan(b"", b"", 9, seq=2), Get(b"a", SESSION, 2)])
def test_leader_behind_the_requests_sequence_refuses(p: Partition, op: Any) -> None:
    assert isinstance(p.do(op), NotCaughtUp)
    p.do(Put(b"b", b"1"))
    assert not isinstance(p.do(op), NotCaughtUp)


def test_stale_reads_need_no_lease(p: Partition) -> None:
    p.wait(1)
    assert value(p.result(p.submit(Get(b"a", STALE))[0])) == b"1"
    assert p.in_flight() == []


def test_session_reads_of_a_leader_need_a_lease(p: Partition) -> None:
    """A deposed leader may have a state from before a range went away and came back."""
    p.wait(1)
    (token,) = p.submit(Get(b"a", SESSION, 1))
    assert p.result(token) == "waits"
    p.acknowledge()
    assert value(p.result(token)) == b"1"


def test_every_kind_of_read_waits_for_the_lease(p: Partition) -> None:
    p.wait(1)
    tokens = p.submit(Get(b"a"), Meta(b"a"), Scan(b"", b"", 9), ScanTokens(0, 9), Count())
    assert {p.result(token) for token in tokens} == {"waits"}
    p.acknowledge()
    assert [p.result(token) for token in tokens][1:2] == [(1, 1, 1, p.state.get(b"a").written_ms, 0)]
    assert p.result(tokens[4]) == 1
    assert [key for key, _ in p.result(tokens[2])[0]] == [b"a"]


@pytest.mark.parametrize(
    "op",
    [Get("a"), Get(b"a", 0, None), Get(b"a", None, 0), Scan("a", b"", 1), ScanTokens("t", 1)],
)
def test_malformed_read_is_refused_alone(p: Partition, op: Any) -> None:
    good, bad, also_good = p.submit(Get(b"a"), op, Get(b"a"))
    assert isinstance(p.result(bad), InvalidRequest)
    assert value(p.result(good)) == value(p.result(also_good)) == b"1"
    assert not p.loop.errors


# ── memory ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_large_values_are_read_over_many_turns(p: Partition) -> None:
    p.do(Put(b"fat", bytes(1 << 20)))
    most = unsent = 0

    def note(token: int, result: Any) -> None:
        nonlocal most, unsent
        unsent += len(result.value)
        most = max(most, unsent)

    def flush() -> None:
        nonlocal unsent
        unsent = 0

    p.caller.on_complete, p.caller.flush = note, flush  # type: ignore[method-assign]
    p.submit(*[Get(b"fat")] * AT_ONCE)
    most = 0
    tokens = p.submit(*[Get(b"fat")] * 100)
    p.settle()
    assert all(value(p.result(token)) == bytes(1 << 20) for token in tokens)
    assert most <= 2 * TURN_BYTES


def test_small_values_are_read_in_one_turn(p: Partition) -> None:
    flushes = 0

    def flush() -> None:
        nonlocal flushes
        flushes += 1

    p.caller.flush = flush  # type: ignore[method-assign]
    tokens = p.submit(*[Get(b"a")] * 3 * AT_ONCE)
    assert [value(p.result(token)) for token in tokens] == [b"1"] * 3 * AT_ONCE
    assert flushes == 1


def scans_begun(p: Partition, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record how many scans had begun, turn by turn of the event loop."""
    begun: list[int] = [0]
    steps = queries.steps

    def counted(*args: Any) -> Any:
        begun[-1] += 1
        return steps(*args)

    def turn() -> None:
        begun.append(0)
        p.loop.call_soon(turn)

    monkeypatch.setattr(queries, "steps", counted)
    p.loop.call_soon(turn)
    return begun


def test_turn_begins_few_scans(p: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    p.do(Put(b"b", b"2"))
    begun = scans_begun(p, monkeypatch)
    tokens = p.submit(*[Scan(b"", b"", 10)] * 5 * STEPPING_MAX)
    p.settle()
    assert all([key for key, _ in p.result(token)[0]] == [b"a", b"b"] for token in tokens)
    assert max(begun) <= STEPPING_MAX
    assert sum(begun) == len(tokens)


def test_waiting_scans_are_refused_when_the_leader_stops(p: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaderReads, "_begin", lambda self: None)
    tokens = p.submit(*[Scan(b"", b"", 10)] * 3)
    assert [p.result(token) for token in tokens] == ["waits"] * 3
    p.leader.stop(NotLeader("p1"))
    p.settle()
    assert all(isinstance(p.result(token), NotLeader) for token in tokens)


# docs/protocol.md P37
def test_multi_turn_reads_end_when_the_leader_stops(p: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read has an iterator of an engine that may be closed next."""
    monkeypatch.setattr(range_reads, "ROWS_PER_STEP", 1)
    p.do(Put(b"b", b"2"))
    iterate, given_back = p.state.engine.iterate, []

    def watched(begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        try:
            yield from iterate(begin, end)
        finally:
            given_back.append(begin[:1])

    monkeypatch.setattr(p.state.engine, "iterate", watched)
    resume, steps = LeaderReads._step, []
    monkeypatch.setattr(LeaderReads, "_step", lambda *each: steps.append(each))
    (token,) = p.submit(Range(b"", b"", 0, Flag.COUNT_ONLY))
    p.settle()
    ((reads, generator),) = steps
    next(generator)
    assert ORDER not in given_back, "it continues"
    p.leader.stop(NotLeader("p1"))
    assert ORDER in given_back
    resume(reads, generator)
    p.settle()
    assert isinstance(p.result(token), NotLeader)
