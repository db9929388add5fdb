"""Who answers while a range changes hands: its source reads on until it is told to be silent, and its target answers
nothing before (docs/protocol.md M7, M9)."""

from __future__ import annotations

import pytest

from kvstore.errors import Moved, NotLeader, Overloaded, Unavailable
from kvstore.partition.commands import Level, count, get, put, scan
from kvstore.partition.config import PartitionConfig
from kvstore.partition.custody import GUARD_S, LINGER_S
from kvstore.partition.move_records import Drop, Freeze, Release
from kvstore.partition.scope import bound
from kvstore.partition.tokens import EVERYTHING
from kvstore.types import Position
from tests.partition.leading import TIME_MS, UNKNOWN, Partition
from tests.partition.test_moving import M1, M2, MOVING, P2, S1, STAYING, founded, imported, log, owned, send


@pytest.fixture
def p() -> Partition:
    p = founded(MOVING, STAYING)
    p.do(put(M1, b"1"), put(M2, b"short", expires_ms=TIME_MS + 500), put(S1, b"2"))
    return p


def freeze(p: Partition) -> Position:
    return log(p, Freeze(1, P2, MOVING))


def release(p: Partition) -> None:
    log(p, Release(1, freeze(p), 2))


# ── the source ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_who_releases_a_range_reads_it_on_until_it_is_to_be_silent(p: Partition) -> None:
    releasing = send(p, Release(1, freeze(p), 2))
    assert p.do(get(M1)).value == b"1", "before the release is acknowledged"
    assert releasing.done()
    assert p.do(get(M1)).value == b"1"
    assert isinstance(p.do(get(M1, Level.STRICT)), Moved), "clocks are not trusted with this"
    p.leader.custody.silence(1)
    assert isinstance(p.do(get(M1)), Moved)
    assert p.do(get(S1)).value == b"2"


def test_nothing_else_is_done_with_what_is_released(p: Partition) -> None:
    release(p)
    assert isinstance(p.do(put(M1, b"3")), Moved)
    for op in (bound(scan(b"", b"", 0), EVERYTHING), bound(count(Level.LINEARIZABLE), EVERYTHING)):
        assert isinstance(p.do(op), Moved)


def test_a_key_that_expires_after_its_release_is_its_owners_to_tell(p: Partition) -> None:
    release(p)
    assert p.do(get(M2)).value == b"short"
    p.wall_offset_ms = 1_000
    assert isinstance(p.do(get(M2)), Moved), "no entry here can tell the owner that it is gone"
    assert not p.log.under_way


def test_a_key_does_not_come_back_after_its_former_owner_has_called_it_absent(p: Partition, target: Partition) -> None:
    p.wall_offset_ms = 1_000  # its clock is ahead of the target's
    p.do(put(S1, b"3"))  # which says in its log what time it is
    shown = p.do(get(M2))
    target.leader.settle(1)
    assert target.do(get(M2)).value == b"short"
    assert isinstance(shown, Moved)


def test_reading_what_is_released_ends_by_itself(p: Partition) -> None:
    release(p)
    p.wait(LINGER_S - 0.01)
    assert p.do(get(M1)).value == b"1"
    p.wait(0.01)
    assert isinstance(p.do(get(M1)), Moved)


def test_reading_what_is_released_ends_before_its_rows_go(p: Partition) -> None:
    release(p)
    send(p, Drop(1, b""))
    assert isinstance(p.do(get(M1)), Moved)


def test_no_other_leader_reads_what_is_released(p: Partition) -> None:
    release(p)
    p.leader.stop(NotLeader(p.state.partition))
    p.open()
    p.start()
    assert isinstance(p.do(get(M1)), Moved)


def test_a_release_of_unknown_outcome_ends_its_leader_and_all_reads(p: Partition) -> None:
    releasing = send(p, Release(1, freeze(p), 2))
    p.log.fail(UNKNOWN)
    p.settle()
    assert releasing.exception() is not None
    assert isinstance(p.do(get(M1)), NotLeader)


def test_who_trusts_no_clocks_is_silent_from_the_send_on() -> None:
    p = Partition(PartitionConfig(expiry_sweep_s=0, lease_ms=0)).start()
    p.do(put(M1, b"1"))
    send(p, Freeze(1, P2, MOVING))
    p.acknowledge()
    send(p, Release(1, p.state.territory.frozen[0].position, 1))
    assert isinstance(p.do(get(M1)), Moved)


def test_who_does_not_know_of_the_release_cannot_say_that_all_are_silent(p: Partition) -> None:
    with pytest.raises(Unavailable):
        p.leader.custody.silence(1)
    send(p, Release(1, freeze(p), 2))
    with pytest.raises(Unavailable):
        p.leader.custody.silence(1)
    p.acknowledge()
    p.leader.custody.silence(1)


# ── the target ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def target(p: Partition) -> Partition:
    """Owns the range, and does not know whether its source is silent."""
    release(p)
    target = founded(STAYING)
    imported(target, p)
    target.leader.custody.guard(1, MOVING)
    owned(target, p)
    return target


def test_a_target_answers_nothing_before_the_source_is_silent(target: Partition) -> None:
    read, first, second = target.submit(get(M1), put(M1, b"3"), put(M1, b"4"))
    assert {target.result(each) for each in (read, first, second)} == {"waits"}
    assert target.do(put(S1, b"5")) == target.state.seq, "what it had goes on"
    for op in (bound(scan(b"", b"", 0), EVERYTHING), bound(count(Level.LINEARIZABLE), EVERYTHING)):
        assert isinstance(target.do(op), Moved)
    target.leader.expel()
    target.leader.settle(1)
    target.settle()
    assert target.result(read).value == b"1"
    target.acknowledge(len(target.log.under_way))
    assert target.result(first) < target.result(second)
    assert target.do(get(M1)).value == b"4"


def test_what_waits_for_silence_is_bounded_in_time_and_number(target: Partition) -> None:
    read, write = target.submit(get(M1), put(M1, b"3"))
    target.wait(2 * target.config.queue_wait_max_s)
    assert isinstance(target.result(read), Unavailable)
    assert isinstance(target.result(write), Unavailable)
    most = target.config.queue_items_max
    tokens = target.submit(*[get(M1)] * (most + 1))
    assert [type(each) for each in map(target.result, tokens) if each != "waits"] == [Overloaded]
    target.leader.stop(NotLeader(target.state.partition))
    assert isinstance(target.result(tokens[0]), NotLeader)


def test_a_range_is_not_given_on_before_its_former_owner_is_silent(target: Partition) -> None:
    assert not target.leader.custody.may_freeze(2, MOVING)
    target.leader.settle(1)
    assert target.leader.custody.may_freeze(2, MOVING)


def test_who_guards_a_range_can_let_go_of_the_lead(target: Partition) -> None:
    read, write = target.submit(get(M1), put(M1, b"3"))
    letting_go = target.loop.create_task(target.leader.release())
    target.settle()
    target.acknowledge(len(target.log.under_way))
    assert letting_go.done()
    assert isinstance(target.result(read), NotLeader)
    assert isinstance(target.result(write), NotLeader)


def test_the_guard_outlasts_whoever_reads_on() -> None:
    assert GUARD_S > LINGER_S
