"""Reads of a range that changes its owner: its source answers until it sends RELEASE, then nobody until its target has
logged OWN, then the target. No clock is used (docs/protocol.md M7, M9)."""

from __future__ import annotations

import pytest

from kvstore.errors import Moved, NotLeader
from kvstore.partition.config import PartitionConfig
from kvstore.partition.leading import range_reads
from kvstore.partition.state.commands import Count, Flag, Get, Level, Put, Range, Scan
from kvstore.partition.state.move_records import Drop, Freeze, Release
from kvstore.partition.state.scope import bound
from kvstore.partition.state.tokens import EVERYTHING
from kvstore.types import Position
from tests.partition.leading.test_leader_moving import (
    M1,
    M2,
    MOVING,
    P2,
    S1,
    STAYING,
    founded,
    imported,
    log,
    owned,
    send,
)
from tests.partition.one_partition import TIME_MS, UNKNOWN, Partition


@pytest.fixture
def p() -> Partition:
    p = founded(MOVING, STAYING)
    p.do(Put(M1, b"1"), Put(M2, b"short", expires_ms=TIME_MS + 500), Put(S1, b"2"))
    return p


def freeze(p: Partition) -> Position:
    return log(p, Freeze(1, P2, MOVING))


def release(p: Partition) -> None:
    log(p, Release(1, freeze(p), 2))


def answer_of(work: range_reads.Steps) -> object:
    while True:
        try:
            next(work)
        except StopIteration as ended:
            return ended.value


# ── the source ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("level", [Level.LINEARIZABLE, Level.STRICT])
def test_released_range_is_not_read_from_the_send(p: Partition, level: Level) -> None:
    named = freeze(p)
    assert p.do(Get(M1)).value == b"1", "a frozen range is read"
    releasing = send(p, Release(1, named, 2))
    (read,) = p.submit(Get(M1, level))
    assert not releasing.done()
    p.acknowledge(len(p.log.in_flight))
    assert isinstance(p.result(read), Moved)
    assert p.do(Get(S1, level)).value == b"2"


def test_read_waiting_for_a_proof_is_not_answered_after_the_release(p: Partition) -> None:
    named = freeze(p)
    (read,) = p.submit(Get(M1, Level.STRICT))
    releasing = send(p, Release(1, named, 2))
    p.acknowledge(len(p.log.in_flight))
    assert releasing.done()
    assert isinstance(p.result(read), Moved)


def test_released_range_is_not_read_with_or_without_leases() -> None:
    for lease_ms in (0, 100_000):
        p = Partition(PartitionConfig(expiry_sweep_s=0, lease_ms=lease_ms)).start()
        p.do(Put(M1, b"1"))
        send(p, Freeze(1, P2, MOVING))
        p.acknowledge()
        send(p, Release(1, p.state.ownership.frozen[0].position, 1))
        assert isinstance(p.do(Get(M1)), Moved)


# docs/protocol.md M1
def test_count_excludes_keys_dropped_before_it_ends(p: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    """The count goes through the keys as they were when it began."""
    monkeypatch.setattr(range_reads, "ROWS_PER_STEP", 1)
    release(p)
    owned = p.state.ownership.owned
    work = range_reads.steps(p.state, Range(b"", b"", 0, Flag.COUNT_ONLY), TIME_MS, owned)
    next(work)
    log(p, Drop(1, b""))
    assert p.state.ownership.owned == owned
    assert answer_of(work) == range_reads.ScanPage(1, None)


def test_released_range_takes_no_other_operations(p: Partition) -> None:
    release(p)
    assert isinstance(p.do(Put(M1, b"3")), Moved)
    for op in (bound(Scan(b"", b"", 0), EVERYTHING), bound(Count(level=Level.LINEARIZABLE), EVERYTHING)):
        assert isinstance(p.do(op), Moved)


def test_no_other_leader_reads_a_released_range(p: Partition) -> None:
    release(p)
    p.leader.stop(NotLeader(p.state.partition))
    p.open()
    p.start()
    assert isinstance(p.do(Get(M1)), Moved)


def test_release_of_unknown_outcome_ends_leader_and_reads(p: Partition) -> None:
    releasing = send(p, Release(1, freeze(p), 2))
    (read,) = p.submit(Get(M1))
    assert isinstance(p.result(read), Moved)
    p.log.fail(UNKNOWN)
    p.settle()
    assert releasing.exception() is not None
    assert isinstance(p.do(Get(M1)), NotLeader), "unknown outcome: this leader has ended"


# ── the target ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_target_answers_as_soon_as_it_owns_the_range(p: Partition) -> None:
    release(p)
    target = founded(STAYING)
    imported(target, p)
    assert isinstance(target.do(Get(M1)), Moved)
    owned(target, p)
    assert target.do(Get(M1)).value == b"1"
    assert target.do(Put(M1, b"3")) > p.state.seq
    assert target.leader.serving_ranges.may_freeze(2, MOVING), "it may be passed on at once"
