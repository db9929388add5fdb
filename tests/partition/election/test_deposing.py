"""When replicas that follow a leader may depose it."""

from __future__ import annotations

import pytest

from kvstore.errors import InvalidRequest
from kvstore.partition.election.deposing import CONFIRM_S, Sight, is_gone, may_depose
from kvstore.types import ServerId

B, C, D = ServerId("b"), ServerId("c"), ServerId("d")
AGREES = Sight(CONFIRM_S, reaches_me=True)
HEARS = Sight(None, reaches_me=True)
HEARD_A_MOMENT_AGO = Sight(CONFIRM_S - 0.5, reaches_me=True)
CUT_OFF_FROM_ME = Sight(9.0, reaches_me=False)


# docs/protocol.md P40
@pytest.mark.parametrize(
    ("replicas", "sights", "may"),
    [
        (3, {B: AGREES}, True),
        (3, {}, False),  # the third replica is dead: one observer deposes nobody
        (3, {B: HEARS}, False),
        (3, {B: HEARD_A_MOMENT_AGO}, False),
        (3, {B: CUT_OFF_FROM_ME}, False),  # the asker would be deposed next
        (2, {}, False),
        (5, {B: AGREES}, False),
        (5, {B: AGREES, C: AGREES}, True),
        (5, {B: AGREES, C: AGREES, D: HEARS}, True),  # reachable by one of four
        (5, {B: AGREES, C: HEARS, D: HEARS}, False),
        (5, {B: AGREES, C: CUT_OFF_FROM_ME, D: CUT_OFF_FROM_ME}, False),
    ],
)
def test_silent_leader_is_deposed_by_a_majority_alone(replicas: int, sights: dict[ServerId, Sight], may: bool) -> None:
    assert may_depose(replicas, sights) is may


# docs/protocol.md P40
@pytest.mark.parametrize(
    ("others", "sights", "registered", "gone"),
    [
        ([], {}, [], True),  # two replicas: there is nobody to ask
        ([B], {B: Sight(0.01, reaches_me=False)}, [B], True),  # its link broke a moment ago
        ([B], {B: HEARS}, [B], False),
        ([B], {}, [B], False),  # it lives and does not answer: this replica may be the one that is cut off
        ([B], {}, [], True),  # it has no session
        ([B, C, D], {B: AGREES, C: AGREES, D: HEARS}, [B, C, D], False),
    ],
)
def test_refused_connection_counts_unless_another_replica_may_hear_the_leader(
    others: list[ServerId], sights: dict[ServerId, Sight], registered: list[ServerId], gone: bool
) -> None:
    assert is_gone(others, sights, registered) is gone


def test_sight_survives_the_wire_and_garbage_is_refused() -> None:
    for sight in (AGREES, HEARS, CUT_OFF_FROM_ME):
        assert Sight.decode(sight.encode()) == sight
    for garbage in (b"", b"1", b"[1]", b'["x", true]', b"{}"):
        with pytest.raises(InvalidRequest, match="expected"):
            Sight.decode(garbage)
