"""When the lead is handed to the preferred replica, and what the two say to each other."""

import pytest

from kvstore.errors import InvalidRequest
from kvstore.partition.election.handover import (
    AGAIN_S,
    APART_S,
    CLOSE_BEHIND,
    HandoverTurns,
    PreferredStability,
    Prepare,
    Take,
)
from kvstore.partition.election.ranking import LeaderRecord, Published
from kvstore.types import Seq, ServerId

LEADER_SEQ = Seq(50_000)
STEADY_S = 8.0


def said(nonce: str = "one", seq: int = LEADER_SEQ, *, is_stopped: bool = False) -> Published:
    return Published(Seq(seq), Seq(0), 3, nonce, is_stopped=is_stopped)


def looked(steady: PreferredStability, what: Published | None, *moments: float, spread: float = 0.0) -> list[bool]:
    return [steady.look(what, LEADER_SEQ, now, spread=spread) for now in moments]


def test_preferred_replica_gets_lead_after_its_process_was_up_long_enough() -> None:
    assert looked(PreferredStability(STEADY_S), said(), 100, 107.9, 108) == [False, False, True]


def test_preferred_replica_starts_again_after_restart() -> None:
    steady = PreferredStability(STEADY_S)
    looked(steady, said("one"), 100, 107)
    assert looked(steady, said("two"), 108, 115.9, 116) == [False, False, True]
    assert steady.nonce == "two"


def test_preferred_replica_starts_again_after_absence_or_lag() -> None:
    for gap in (None, said(seq=LEADER_SEQ - CLOSE_BEHIND - 1)):
        steady = PreferredStability(STEADY_S)
        looked(steady, said(), 100)
        looked(steady, gap, 107)
        assert looked(steady, said(), 108, 115, 116) == [False, False, True]


def test_handovers_of_partitions_are_spread_over_time() -> None:
    assert looked(PreferredStability(STEADY_S), said(), 0, 8, 11.9, 12, spread=1.0) == [False, False, False, True]


def test_handover_is_retried_later_after_a_failure() -> None:
    steady = PreferredStability(STEADY_S)
    looked(steady, said(), 0)
    steady.tried(8, released=False)
    assert looked(steady, said(), 8, 8 + AGAIN_S) == [False, True]


def test_required_uptime_doubles_with_each_handover() -> None:
    steady = PreferredStability(STEADY_S)
    looked(steady, said(), 0)
    steady.tried(8, released=True)
    assert looked(steady, said(), 20, 35, 36) == [False, False, True]


def test_server_takes_part_in_one_handover_at_a_time() -> None:
    turns = HandoverTurns()
    assert [turns.take(now) for now in (0, 0, APART_S - 0.1, APART_S, APART_S)] == [True, False, False, True, False]


def test_handover_messages_round_trip() -> None:
    prepare = Prepare(ServerId("n1"), "nonce", Seq(7), True)
    take = Take(LeaderRecord(ServerId("n1"), 3, "nonce"), 9)
    assert Prepare.decode(prepare.encode()) == prepare
    assert Take.decode(take.encode()) == take


@pytest.mark.parametrize("body", [b"", b"{}", b"[1]", b"[1, 2]", b'["a", "b"]'])
def test_malformed_handover_messages_are_refused(body: bytes) -> None:
    for each in (Prepare, Take):
        with pytest.raises(InvalidRequest):
            each.decode(body)


def test_stopped_replica_is_not_handed_the_lead() -> None:
    """Of a partition that rests it is as far as all; each attempt would take a turn from those that can."""
    steady = PreferredStability(STEADY_S)
    assert not any(looked(steady, said(is_stopped=True), *map(float, range(80))))
    assert looked(steady, said(), 1_000, 1_000 + STEADY_S) == [False, True]
