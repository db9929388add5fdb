"""How long a leader delays entries while processors are short."""

import pytest

from kvstore.errors import NotLeader
from kvstore.partition.config import PartitionConfig
from kvstore.partition.leading.batch_delay import (
    CUT_SHORT_MAX,
    DELAY_MAX_S,
    ENOUGH_BYTES,
    ENOUGH_ITEMS,
    ENTRY_INTERVAL,
    SMOOTHING,
    TICK_S,
    BatchDelay,
)
from kvstore.partition.leading.range_delete import RANGE_KEYS_MAX
from kvstore.partition.state.commands import DeleteRange, Flag, Get, Put
from kvstore.partition.state.engine import BEHIND_S
from kvstore.partition.state.marks import MarkRecord
from tests.partition.one_partition import P1, Partition

TOOK_S = 0.0015
FULL_S = ENTRY_INTERVAL * TOOK_S


def used_to(took_s: float) -> BatchDelay:
    """Return a delay after many entries of this duration."""
    rest = BatchDelay()
    for _ in range(500):
        rest.last_took = took_s
        rest.begin(0.0, 2, 0, 0.0)
    return rest


# ── the rule ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("starved", "part"), [(0.0, 0.0), (0.1, 0.0), (0.175, 0.5), (0.25, 1.0), (1.0, 1.0)])
def test_delay_grows_as_processors_run_short(starved: float, part: float) -> None:
    rest = used_to(TOOK_S)
    rest.begin(10.0, 2, 0, starved)
    assert rest.left(10.0, 1, 100, 0) == pytest.approx(part * FULL_S)


def test_delay_is_full_while_the_partition_is_pinned() -> None:
    rest = used_to(0.0)
    rest.begin(10.0, 2, 0, 1.0, is_pinned=True)
    assert rest.left(10.0, 1, 100, 0) == DELAY_MAX_S
    rest.begin(20.0, 2, 0, 0.0, is_pinned=True)
    assert rest.left(20.0, 1, 100, 0) == 0, "with idle processors nothing waits"


def test_delay_ends_in_time() -> None:
    rest = used_to(TOOK_S)
    rest.begin(10.0, 2, 0, 1.0)
    assert rest.left(10.0 + FULL_S - 2 * TICK_S, 1, 100, 0) == pytest.approx(2 * TICK_S)
    assert rest.left(10.0 + FULL_S - TICK_S / 2, 1, 100, 0) == 0, "less than a timer's step cannot be waited for"
    assert rest.left(10.0 + FULL_S, 1, 100, 0) == 0


def test_delay_is_zero_at_first_and_while_entries_are_quick() -> None:
    assert BatchDelay().left(10.0, 1, 100, 0) == 0
    rest = used_to(0.0)
    rest.begin(10.0, 2, 0, 1.0)
    assert rest.left(10.0, 1, 100, 0) == 0


def test_delay_is_bounded_for_any_durations_and_clocks() -> None:
    rest = used_to(30.0)
    rest.begin(10.0, 2, 0, 1.0)
    assert rest.left(10.0, 1, 100, 0) == DELAY_MAX_S
    assert rest.left(-1000.0, 1, 100, 0) == DELAY_MAX_S


def test_large_entry_is_not_delayed() -> None:
    rest = used_to(TOOK_S)
    rest.begin(10.0, 2, 0, 1.0)
    assert rest.left(10.0, ENOUGH_ITEMS - 1, ENOUGH_BYTES - 1, 0) > 0
    assert rest.left(10.0, ENOUGH_ITEMS, 100, 0) == rest.left(10.0, 1, ENOUGH_BYTES, 0) == 0


def test_single_slow_entry_hardly_raises_the_delay() -> None:
    rest = used_to(0.0)
    rest.last_took = 0.03
    rest.begin(10.0, 2, 0, 1.0)
    assert rest.left(10.0, 1, 100, 0) == pytest.approx(ENTRY_INTERVAL * SMOOTHING * 0.03)


def test_single_caller_is_delayed_only_now_and_then() -> None:
    rest = used_to(TOOK_S)
    held = 0
    for number in range(10 * (CUT_SHORT_MAX + 1)):
        now = 10.0 + number
        rest.begin(now, 1, 0, 1.0)
        if rest.left(now, 1, 100, 0) > 0:
            held += 1
            rest.begin(now + FULL_S, 1, 0, 1.0)
    assert held == 10


def test_delay_ends_when_as_many_are_queued_as_after_the_last_full_delay() -> None:
    rest = used_to(TOOK_S)
    rest.begin(10.0, 3, 0, 1.0)
    assert rest.left(10.0 + FULL_S / 2, 8, 100, 0) > 0, "their number is unknown"
    rest.begin(10.0 + FULL_S, 8, 0, 1.0)
    assert rest.left(10.0 + FULL_S, 7, 100, 0) > 0, "one of the eight callers is still on its way"
    assert rest.left(10.0 + FULL_S, 8, 100, 0) == 0


def test_callers_of_a_small_entry_in_flight_are_awaited() -> None:
    rest = used_to(TOOK_S)
    rest.begin(10.0, 3, 0, 1.0)
    assert rest.left(10.0, 1, 100, 3) > 0
    rest.begin(10.0 + FULL_S, 8, 5, 1.0)
    assert rest.left(10.0 + FULL_S, 5, 100, 3) > 0, "the three come back and leave in the same entry"
    assert rest.left(10.0 + FULL_S, 8, 100, 3) == 0, "the five of the entry before were not counted"


def test_callers_of_large_entries_in_flight_are_not_awaited() -> None:
    rest = used_to(TOOK_S)
    rest.begin(10.0, 3, 0, 1.0)
    assert rest.left(10.0, 1, 100, ENOUGH_ITEMS) > 0, "their number is unknown"
    rest.begin(10.0 + FULL_S, 10, ENOUGH_ITEMS, 1.0)
    assert rest.left(10.0 + FULL_S, 10, 100, ENOUGH_ITEMS - 1) > 0
    assert rest.left(10.0 + FULL_S, 10, 100, ENOUGH_ITEMS) == 0


def test_fewer_callers_are_awaited_after_some_full_delays() -> None:
    rest = used_to(TOOK_S)
    now, awaited = 10.0, []
    rest.begin(now, 3, 0, 1.0)
    for gathered in (40, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8):
        assert rest.left(now, 7, 100, 0) > 0
        now += FULL_S
        rest.begin(now, gathered, 0, 1.0)
        awaited.append(next(items for items in range(ENOUGH_ITEMS) if rest.left(now, items, 100, 0) == 0))
    assert awaited == [40, 32, 26, 21, 17, 14, 12, 11, 10, 9, 8, 8]


def test_more_callers_than_awaited_are_awaited_from_then_on() -> None:
    rest = used_to(TOOK_S)
    rest.begin(10.0, 3, 0, 1.0)
    assert rest.left(10.0, 1, 100, 0) > 0
    rest.begin(10.0 + FULL_S, 8, 0, 1.0)
    assert rest.left(10.0 + FULL_S, 12, 100, 0) == 0
    rest.begin(10.0 + FULL_S, 12, 0, 1.0)
    assert rest.left(10.0 + FULL_S, 11, 100, 0) > 0


def test_early_end_does_not_count_as_the_number_of_callers() -> None:
    rest = used_to(TOOK_S)
    rest.begin(10.0, 3, 0, 1.0)
    assert rest.left(10.0, 2, 100, 0) > 0
    rest.end()
    rest.begin(10.0 + FULL_S / 2, 2, 0, 1.0)
    assert rest.left(10.0 + FULL_S / 2, 2, 100, 0) > 0


def test_next_full_delay_finds_more_callers() -> None:
    rest = used_to(TOOK_S)
    now = 10.0
    for here in (1, 1, 40):
        rest.begin(now, 1, 0, 1.0)
        for _ in range(CUT_SHORT_MAX if now > 10.0 else 0):
            assert rest.left(now, 1, 100, 0) == 0, "a single caller"
        assert rest.left(now, 1, 100, 0) > 0
        now += FULL_S
        rest.begin(now, here, 0, 1.0)
    assert rest.left(now, 39, 100, 0) > 0
    assert rest.left(now, 40, 100, 0) == 0


# ── the leader ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def p() -> Partition:
    """A leader whose entries take TOOK_S, and whose process lacks processors."""
    p = Partition().start()
    slow(p)
    return p


def slow(p: Partition) -> None:
    for _ in range(100):
        p.submit(Put(b"k", b"v"))
        p.wait(TOOK_S)
        p.acknowledge()
    p.wait(1)
    p.starved = 1.0


def test_operations_gather_after_an_entry_and_leave_in_one(p: Partition) -> None:
    p.submit(Put(b"a", b"1"))
    assert [entry.keys for entry in p.in_flight()] == [[b"a"]], "no entry was sent recently, so this one leaves at once"
    p.submit(Put(b"b", b"1"))
    p.wait(FULL_S / 2)
    tokens = p.submit(Put(b"c", b"1"))
    assert [entry.keys for entry in p.in_flight()] == [[b"a"]]
    p.acknowledge()
    assert p.in_flight() == [], "the delay continues when the entry is acknowledged"
    p.wait(FULL_S)
    assert [entry.keys for entry in p.in_flight()] == [[b"b", b"c"]]
    p.acknowledge()
    assert p.result(tokens[0]) == 103


def test_operations_leave_at_once_with_idle_processors(p: Partition) -> None:
    p.starved = 0.0
    p.submit(Put(b"a", b"1"))
    p.submit(Put(b"b", b"1"))
    assert [entry.keys for entry in p.in_flight()] == [[b"a"], [b"b"]]


def test_many_operations_leave_at_once(p: Partition) -> None:
    p.submit(Put(b"a", b"1"))
    p.submit(*(Put(b"k%d" % number, b"1") for number in range(ENOUGH_ITEMS)))
    assert [len(entry.keys) for entry in p.in_flight()] == [1, ENOUGH_ITEMS]


def test_read_that_waits_for_an_append_ends_the_delay() -> None:
    p = Partition(PartitionConfig(expiry_sweep_s=0, lease_ms=0)).start()
    slow(p)
    p.submit(Put(b"a", b"1"))
    p.submit(Put(b"b", b"1"))
    (read,) = p.submit(Get(b"a", Flag(0)))
    assert [entry.keys for entry in p.in_flight()] == [[b"a"], [b"b"]]
    p.acknowledge(2)
    assert p.result(read) != "waits"


def test_releasing_leader_does_not_delay(p: Partition) -> None:
    p.submit(Put(b"a", b"1"))
    (token,) = p.submit(Put(b"b", b"1"))
    released = p.loop.create_task(p.leader.release())
    p.settle()
    assert [entry.keys for entry in p.in_flight()] == [[b"a"], [b"b"]]
    while p.log.in_flight:
        p.acknowledge()
        p.settle()
    assert p.result(token) == 102
    assert released.done()


def test_consecutive_records_do_not_prolong_the_delay(p: Partition) -> None:
    p.submit(Put(b"a", b"1"))
    p.submit(Put(b"b", b"1"))
    for _ in range(3):
        proof = p.loop.create_task(p.leader.prove())
        p.wait(FULL_S / 3)
        while p.log.in_flight:
            p.acknowledge()
        assert proof.done()
    assert p.caller.results[max(p.caller.results)] == 102, "the write was sent in time"


def test_delayed_write_renews_the_lease(p: Partition) -> None:
    p.submit(Put(b"a", b"1"))
    p.acknowledge()
    p.submit(Put(b"b", b"1"))
    assert p.in_flight() == []
    p.leader._read_lease.lease_until = p.now() + 0.05
    p.submit(Get(b"a"))
    assert [entry.keys for entry in p.in_flight()] == [[b"b"]]


def test_read_of_an_expired_key_is_not_delayed(p: Partition) -> None:
    p.do(Put(b"brief", b"1", expires_ms=p.wall_ms() + 100))
    p.wait(0.2)
    p.submit(Put(b"a", b"1"))
    (read,) = p.submit(Get(b"brief"))
    assert [entry.keys for entry in p.in_flight()] == [[b"a"], [b"brief"]]
    p.acknowledge(2)
    assert p.result(read) is None


def test_parts_of_an_oversized_batch_are_not_delayed(p: Partition) -> None:
    p.starved = 0.0
    p.do(*(Put(b"r%04d" % number, b"1") for number in range(RANGE_KEYS_MAX + 500)))
    p.starved = 1.0
    p.wait(1)
    p.submit(DeleteRange(b"r", b"s"))
    assert [len(entry.keys) for entry in p.in_flight()] == [RANGE_KEYS_MAX, 500]


def test_leader_that_ends_during_a_delay_refuses_what_has_gathered(p: Partition) -> None:
    p.submit(Put(b"a", b"1"))
    (token,) = p.submit(Put(b"b", b"1"))
    p.leader.stop(NotLeader(P1))
    p.settle()
    assert isinstance(p.result(token), NotLeader)
    p.wait(1)
    assert [entry.keys for entry in p.in_flight()] == [[b"a"]]


def test_engine_that_is_behind_is_awaited_after_a_delay(p: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    p.submit(Put(b"a", b"1"))
    p.submit(Put(b"b", b"1"))
    monkeypatch.setattr(p.engine, "is_behind", lambda: True)
    p.wait(FULL_S + BEHIND_S / 2)
    assert [entry.keys for entry in p.in_flight()] == [[b"a"]]
    monkeypatch.undo()
    p.wait(2 * BEHIND_S)
    assert [entry.keys for entry in p.in_flight()] == [[b"a"], [b"b"]]


def test_leader_delays_longer_while_pinned(p: Partition) -> None:
    pinned = p.loop.create_task(p.leader.append_record(MarkRecord("pin", p.wall_ms() + 60_000, takes=True)))
    p.settle()
    p.acknowledge()
    assert pinned.done()
    p.submit(Put(b"a", b"1"))
    p.submit(Put(b"b", b"1"))
    p.acknowledge()
    p.wait(FULL_S + TICK_S)
    assert p.in_flight() == [], "it would have been sent by now"
    p.wait(DELAY_MAX_S - FULL_S)
    assert [entry.keys for entry in p.in_flight()] == [[b"b"]]
