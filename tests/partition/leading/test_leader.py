"""When a leader sends, answers, and refuses."""

from typing import Any

import pytest

from kvstore.errors import (
    ConditionFailed,
    InvalidRequest,
    LedgerFenced,
    NotEnoughBookies,
    NotLeader,
    OutcomeUnknown,
    Overloaded,
    Unavailable,
)
from kvstore.partition.config import PartitionConfig
from kvstore.partition.state.commands import Batch, Delete, DeleteRange, Expire, Flag, Get, Increment, Op, Put, Scan
from kvstore.partition.state.entry import EntryKind
from tests.partition.one_partition import TIME_MS, UNKNOWN, Partition
from tests.partition.state.engine_memory import MemoryEngine


@pytest.fixture
def p() -> Partition:
    return Partition().start()


def test_leader_serves_once_its_first_record_is_applied() -> None:
    p = Partition()
    started = p.loop.create_task(p.leader.start())
    p.settle()
    assert p.sent_kinds() == [EntryKind.EPOCH_START]
    (early,) = p.submit(Get(b"k"))
    assert isinstance(p.result(early), NotLeader)
    assert not p.leader.serving
    p.acknowledge()
    assert started.done()
    assert p.leader.serving
    assert (p.state.epoch, p.state.seq) == (1, 0)


def test_leader_does_not_serve_when_its_first_record_is_lost() -> None:
    p = Partition()
    started = p.loop.create_task(p.leader.start())
    p.settle()
    p.log.fail(UNKNOWN)
    p.settle()
    assert isinstance(started.exception(), OutcomeUnknown)
    assert not p.leader.serving
    assert p.stopped == []


def test_leader_lost_in_the_turn_of_its_first_record_does_not_serve() -> None:
    """Regression: it counted as serving, answered no write, and nobody ended its lead."""
    p = Partition()
    started = p.loop.create_task(p.leader.start())
    p.settle()
    p.log.acknowledge()
    p.log.tell_lost(LedgerFenced("x"))
    p.settle()
    assert isinstance(started.exception(), LedgerFenced)
    assert not p.leader.serving
    (late,) = p.submit(Put(b"a", b"1"))
    assert isinstance(p.result(late), NotLeader)


# ── group commit ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_first_mutation_on_an_idle_partition_leaves_at_once(p: Partition) -> None:
    p.submit(Put(b"a", b"1"))
    assert [entry.keys for entry in p.in_flight()] == [[b"a"]]
    assert p.loop.time() == 0


def test_mutations_of_one_turn_share_an_entry(p: Partition) -> None:
    tokens = p.submit(Put(b"a", b"1"), Put(b"b", b"2"), Put(b"a", b"3"))
    (entry,) = p.in_flight()
    assert (entry.keys, entry.first_seq) == ([b"a", b"b", b"a"], 1)
    p.acknowledge()
    assert [p.result(token) for token in tokens] == [1, 2, 3]


def test_reads_and_puts_of_one_call_take_separate_paths(p: Partition) -> None:
    p.leader.submit((Put(b"a", b"1"), Scan(b"", b"", 10), Put(b"b", b"2")), p.caller, (101, 102, 103))
    p.settle()
    (entry,) = p.in_flight()
    assert entry.keys == [b"a", b"b"]
    p.acknowledge()
    assert [p.result(token) for token in (101, 103)] == [1, 2]
    assert not isinstance(p.result(102), Exception)


def test_mutations_gather_while_all_slots_are_taken(p: Partition) -> None:
    for number in range(8):
        p.submit(Put(b"k%d" % number, b"v"))
    assert [entry.keys for entry in p.in_flight()] == [[b"k0"], [b"k1"], [b"k2"], [b"k3"]]
    p.acknowledge()
    assert [entry.keys for entry in p.in_flight()] == [[b"k1"], [b"k2"], [b"k3"], [b"k4", b"k5", b"k6", b"k7"]]


def test_entry_is_bounded_and_one_operation_may_exceed_it(p: Partition) -> None:
    large = b"x" * (200 << 10)
    p.submit(*(Put(b"k%d" % number, large) for number in range(6)), Put(b"huge", b"x" * (1 << 20)))
    assert [len(entry.keys) for entry in p.in_flight()] == [2, 2, 2, 1]


def test_answers_wait_until_the_entry_is_applied(p: Partition) -> None:
    (token,) = p.submit(Put(b"a", b"1"))
    assert p.result(token) == "waits"
    seen: list[Any] = []
    p.caller.on_complete = lambda token, result: seen.append(p.state.get(b"a"))
    p.acknowledge()
    assert p.result(token) == 1
    assert seen[0].value == b"1"


def test_unacknowledged_entry_is_not_applied(p: Partition) -> None:
    p.submit(Put(b"a", b"1"))
    assert p.state.get(b"a") is None
    assert p.state.seq == 0


def test_sink_is_never_called_from_inside_submit(p: Partition) -> None:
    for op in (Get(b"k"), Put(b"", b""), Scan("k", b"", 1), Put(b"k", b"")):
        p.leader.submit((op,), p.caller, (p.tokens,))
        assert p.result(p.tokens) == "waits"
        p.tokens += 1
    p.settle()
    p.leader.stop(NotLeader("p1"))
    p.leader.submit((Get(b"k"),), p.caller, (p.tokens,))
    assert p.result(p.tokens) == "waits"
    p.settle()
    assert isinstance(p.result(p.tokens), NotLeader)


def test_sink_is_flushed_after_a_group_of_results(p: Partition) -> None:
    tokens = p.submit(Put(b"a", b"1"), Put(b"b", b"2"), Get(b"c"))
    assert p.caller.flushed == {tokens[2]}
    p.acknowledge()
    assert p.caller.flushed == set(tokens)


# ── answers that depend on state ──────────────────────────────────────────────────────────────────────────────────────


def test_failed_condition_waits_for_the_entries_it_depends_on(p: Partition) -> None:
    first, second = p.submit(Put(b"a", b"1"))[0], p.submit(Put(b"a", b"2", flags=Flag.IF_ABSENT))[0]
    assert p.result(second) == "waits"
    p.acknowledge()
    assert p.result(first) == 1
    assert isinstance(p.result(second), ConditionFailed)
    assert p.state.seq == 1


def test_failed_condition_on_a_lost_entry_is_not_reported(p: Partition) -> None:
    p.submit(Put(b"a", b"1"))
    (failed,) = p.submit(Put(b"a", b"2", flags=Flag.IF_ABSENT))
    p.log.fail(UNKNOWN)
    p.settle()
    assert isinstance(p.result(failed), NotLeader)


def test_failed_condition_needs_the_lease(p: Partition) -> None:
    p.do(Put(b"a", b"1"))
    p.wait(0.6)
    (failed,) = p.submit(Put(b"a", b"2", flags=Flag.IF_ABSENT))
    assert p.result(failed) == "waits"
    assert p.sent_kinds() == [EntryKind.EMPTY]
    p.acknowledge()
    assert isinstance(p.result(failed), ConditionFailed)


def test_operation_without_effect_logs_nothing(p: Partition) -> None:
    p.do(Put(b"a", b"1"))
    assert p.do(Delete(b"b")) == 0
    assert isinstance(p.do(Put(b"a", b"2", flags=Flag.IF_VERSION, version=9)), ConditionFailed)
    assert (p.state.seq, len(p.log.acknowledged)) == (1, 2)


def test_operations_see_earlier_ones_in_flight(p: Partition) -> None:
    first = p.submit(Increment(b"n", 1))[0]
    second, third = p.submit(Increment(b"n", 1), Increment(b"n", 1))
    p.acknowledge(2)
    assert [p.result(token) for token in (first, second, third)] == [(1, 1), (2, 2), (3, 3)]


# ── failures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def fill(p: Partition) -> tuple[list[int], list[int]]:
    """Put four entries in flight, and queue operations behind them."""
    flying = [p.submit(Put(b"k%d" % number, b"v"))[0] for number in range(4)]
    return flying, p.submit(Put(b"q", b"v"), Delete(b"k0"))


# docs/protocol.md P9
@pytest.mark.parametrize("error", [UNKNOWN, LedgerFenced("x"), Unavailable("y")])
def test_lost_lead_makes_in_flight_unknown_and_queued_not_done(p: Partition, error: Any) -> None:
    flying, queued = fill(p)
    p.log.fail(error)
    p.settle()
    assert {type(p.result(token)) for token in flying} == {OutcomeUnknown}
    assert {type(p.result(token)) for token in queued} == {NotLeader}
    assert p.stopped == [error]
    assert not p.leader.serving
    assert p.log.closed


def test_unsent_entry_is_not_done(p: Partition) -> None:
    (token,) = p.submit(Put(b"a", b"1"))
    p.log.fail(NotEnoughBookies("2 of 3"))
    p.settle()
    assert isinstance(p.result(token), NotEnoughBookies)


# docs/protocol.md P41, G13
def test_lead_ends_for_the_reason_of_its_log(p: Partition) -> None:
    (token,) = p.submit(Put(b"a", b"1"))
    p.log.lost = NotEnoughBookies("no ack quorum for 6 s")
    p.log.fail(UNKNOWN)
    p.settle()
    assert isinstance(p.result(token), OutcomeUnknown)
    assert p.stopped == [p.log.lost]


def test_lost_log_ends_the_lead(p: Partition) -> None:
    flying, queued = fill(p)
    p.log.tell_lost(OutcomeUnknown("fenced"))
    p.settle()
    assert {type(p.result(token)) for token in flying} == {OutcomeUnknown}
    assert {type(p.result(token)) for token in queued} == {NotLeader}
    p.log.acknowledge(4)
    p.settle()
    assert p.state.seq == 0, "nothing is applied by a leader that has stopped"
    assert len(p.stopped) == 1


def test_stop_answers_everything_and_notifies_nobody(p: Partition) -> None:
    flying, queued = fill(p)
    p.wait(1)
    (read,) = p.submit(Get(b"k0"))
    p.leader.stop(NotLeader("p1"))
    assert {type(p.result(token)) for token in flying} == {OutcomeUnknown}
    assert {type(p.result(token)) for token in [*queued, read]} == {NotLeader}
    assert p.stopped == []


def test_entry_that_cannot_be_applied_ends_the_process(p: Partition) -> None:
    (token,) = p.submit(Put(b"a", b"1"))
    p.state.seq = type(p.state.seq)(7)
    p.acknowledge()
    assert len(p.fatal) == 1
    assert isinstance(p.result(token), OutcomeUnknown)
    assert len(p.stopped) == 1


# ── bounds ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_full_queue_refuses() -> None:
    p = Partition(PartitionConfig(queue_items_max=10, entries_in_flight_max=1)).start()
    p.submit(Put(b"a", b"1"))
    tokens = p.submit(*(Put(b"k%d" % number, b"v") for number in range(12)))
    refused = [p.result(token) for token in tokens[10:]]
    assert all(isinstance(each, Overloaded) for each in refused)
    assert {p.result(token) for token in tokens[:10]} == {"waits"}
    p.acknowledge()
    p.acknowledge()
    assert [p.result(token) for token in tokens[:10]] == list(range(2, 12))


@pytest.mark.parametrize(
    "large", [Put(b"k", b"v" * (1 << 20)), DeleteRange(b"k", b"v" * (1 << 20))], ids=["put", "delete_range"]
)
def test_queue_full_of_bytes_refuses(large: Op) -> None:
    p = Partition(PartitionConfig(queue_bytes_max=4 << 20, entries_in_flight_max=1)).start()
    p.submit(Put(b"a", b"1"))
    tokens = p.submit(*[large] * 5)
    assert isinstance(p.result(tokens[-1]), Overloaded)
    assert p.result(tokens[0]) == "waits"


def test_queue_fits_a_thousand_connections_of_sixteen() -> None:
    p = Partition().start()
    ops = [Put(b"%d" % number, b"v" * 100) for number in range(16_000)]
    assert not [each for each in p.do(*ops) if not isinstance(each, int)]


def test_leader_pauses_writes_while_the_engine_is_behind() -> None:
    engine = MemoryEngine()
    p = Partition(engine=engine).start()
    p.do(Put(b"a", b"1"))
    engine.behind = True
    (held,) = p.submit(Put(b"a", b"2"))
    p.wait(0.2)
    assert p.in_flight() == []
    assert p.do(Get(b"a")).value == b"1"
    engine.behind = False
    p.wait(0.02)
    p.acknowledge()
    assert p.result(held) == 2


# docs/protocol.md P10
def test_expired_queue_items_are_refused_and_not_appended() -> None:
    p = Partition(PartitionConfig(entries_in_flight_max=1, queue_wait_max_s=5)).start()
    flying = p.submit(Put(b"a", b"1"))[0]
    late = p.submit(Put(b"b", b"1"))[0]
    p.wait(4)
    in_time = p.submit(Put(b"c", b"1"))[0]
    p.wait(3)
    assert isinstance(p.result(late), Unavailable)
    assert p.result(flying) == p.result(in_time) == "waits"
    p.acknowledge()
    assert [entry.keys for entry in p.in_flight()] == [[b"c"]]


@pytest.mark.parametrize(
    "op",
    [
        Put(b"", b"v"),
        Put(b"k" * 4097, b"v"),
        Put(b"k", b"v" * ((1 << 20) + 1)),
        Batch(b"k", ()),
    ],
)
def test_impossible_operations_are_refused(p: Partition, op: Any) -> None:
    assert isinstance(p.do(op), InvalidRequest)
    assert p.state.seq == 0


@pytest.mark.parametrize(
    "op",
    [
        Put(b"k", "text"),
        Put("k", b"v"),
        Delete(b"k", None),
        Batch(b"k", ((3, b"k"),)),
        Put(b"k", b"v", 0, 0, 0, (b"short", 1, 1, TIME_MS)),
        Put(b"k", b"v", 0, 0, 0, (b"x" * 16, 1 << 64, 1, TIME_MS)),
        Put(b"k", b"v", 0, 0, 0, (b"x" * 16, 1, -1, TIME_MS)),
        Put(b"k", b"v", (1 << 64) - 1),
        Put(b"k", b"v", 1 << 62, Flag.RELATIVE_TTL),
        Expire(b"a", (1 << 64) - 1),
    ],
)
def test_malformed_operation_is_refused_alone(p: Partition, op: Any) -> None:
    before, bad, after = p.do(Put(b"a", b"1"), op, Put(b"c", b"1"))
    assert isinstance(bad, InvalidRequest)
    assert (before, after) == (1, 2)
    assert p.do(Put(b"a", b"2")) == 3
    assert p.leader.serving
    assert not p.loop.errors


# ── handing over ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_release_drains_then_stops_answering_then_logs(p: Partition) -> None:
    flying, queued = fill(p)
    release = p.loop.create_task(p.leader.release())
    p.settle()
    (refused,) = p.submit(Put(b"late", b"v"))
    assert isinstance(p.result(refused), NotLeader)
    assert p.sent_kinds() == []
    p.acknowledge(4)
    assert p.sent_kinds() == []
    p.log.on_append = lambda entry: None
    p.acknowledge()
    assert [p.result(token) for token in (*flying, *queued)] == [1, 2, 3, 4, 5, 6]
    assert p.sent_kinds() == [EntryKind.RELEASE_LEAD]
    assert p.leader._read_lease.lease_until < p.now()
    p.acknowledge()
    assert release.done()
    assert release.exception() is None
    assert p.log.sealed
    assert p.state.released
    assert p.leader._read_lease.lease_until < p.now(), "the acknowledged release renewed the lease"
    assert p.stopped == []


def test_lease_is_gone_when_the_release_record_is_sent(p: Partition) -> None:
    p.do(Put(b"a", b"1"))
    leases: list[float] = []
    p.log.on_append = lambda entry: leases.append(p.leader._read_lease.lease_until)
    assert p.leader._read_lease.lease_until > p.now()
    p.loop.create_task(p.leader.release())
    p.settle()
    assert leases[0] < p.now()
    assert not p.leader._read_lease.proves(0)


def test_lost_release_is_reported(p: Partition) -> None:
    release = p.loop.create_task(p.leader.release())
    p.settle()
    p.log.fail(UNKNOWN)
    p.settle()
    assert isinstance(release.exception(), OutcomeUnknown)


def test_unacknowledged_release_ends_in_bounded_time(p: Partition) -> None:
    (token,) = p.submit(Put(b"a", b"1"))
    release = p.loop.create_task(p.leader.release())
    p.wait(11)
    assert isinstance(release.exception(), Unavailable)
    assert isinstance(p.result(token), OutcomeUnknown)


def test_leader_continues_where_the_former_one_ended(p: Partition) -> None:
    p.do(Put(b"a", b"1"), Put(b"b", b"1"))
    p.leader.stop(NotLeader("p1"))
    p.open()
    p.start()
    assert p.do(Put(b"a", b"2")) == 3
    record = p.do(Get(b"a"))
    assert (record.value, record.version, record.created) == (b"2", 3, 1)
    assert (p.state.epoch, p.state.key_count) == (2, 2)


def test_leader_statistics_count() -> None:
    p = Partition().start()
    p.do(Put(b"a", b"1"), Get(b"a"))
    told = p.leader.statistics()
    assert (told["entries"], told["mutations"], told["epoch"]) == (2, 1, 1)


def test_release_cancelled_while_draining_keeps_the_leader_serving(p: Partition) -> None:
    """Regression: it neither served nor had stopped, and waiting operations were never answered."""
    p.submit(Put(b"a", b"1"))
    release = p.loop.create_task(p.leader.release(0.25))
    p.settle()
    release.cancel()
    p.settle()
    assert release.cancelled()
    assert p.leader.serving
    p.acknowledge()
    assert p.do(Put(b"b", b"1")) == 2
