"""The servers that get replicas when a server is drained or lost."""

from __future__ import annotations

from kvstore.ring import Ring
from kvstore.ring.replicas import begin_replacing, drain
from kvstore.server.placement.assign import COMING_MAX, Begin, Finish, Forget, GiveUp, decide, homeless, replicas_held
from kvstore.server.placement.newcomers import NOTHING, STUCK_S, Newcomers
from kvstore.types import PartitionId, ServerId
from tests.ring.rings import new_ring

N1, N2, N3, N4, N5 = (ServerId(f"n{i}") for i in range(1, 6))
THREE = dict.fromkeys((N1, N2, N3), "")
FOUR = {**THREE, N4: ""}
P1 = PartitionId("p1")


def ring_of(count: int, servers: dict[ServerId, str] = THREE) -> Ring:
    return new_ring([PartitionId(f"p{i}") for i in range(1, count + 1)], servers, 3)


def settle(ring: Ring, alive: dict[ServerId, str], gone: frozenset[ServerId] = frozenset()) -> Ring:
    """Return the ring after all decisions, with newcomers that catch up at once."""
    for _ in range(100):
        caught_up = frozenset((each.id, new) for each in ring.partitions.values() for new, _ in each.replacing)
        changes = decide(ring, alive, gone, caught_up)
        if not changes:
            return ring
        for change in changes:
            ring = change.step(ring)
    raise AssertionError("it does not end")


def test_nothing_moves_without_need() -> None:
    assert decide(ring_of(3), FOUR, frozenset(), frozenset()) == []


def test_drained_server_loses_all_replicas_without_shortage() -> None:
    after = settle(drain(ring_of(5), N1), FOUR)
    assert replicas_held(after) == {N2: 5, N3: 5, N4: 5}
    assert all(len(member.replicas) == 3 for member in after.partitions.values())


def test_replica_without_target_stays_and_is_reported() -> None:
    ring = drain(ring_of(2), N1)
    assert decide(ring, THREE, frozenset(), frozenset()) == []
    assert homeless(ring, THREE, N1) == ["p1", "p2"]
    assert homeless(ring, FOUR, N1) == []


# docs/protocol.md H15
def test_replica_of_a_drained_process_leaves_for_no_machine_with_a_replica() -> None:
    beside = {**THREE, ServerId("n2.2"): "", ServerId("n3.2"): ""}
    ring = drain(ring_of(2), N1)
    assert decide(ring, beside, frozenset(), frozenset()) == []
    assert homeless(ring, beside, N1) == ["p1", "p2"]
    n12 = ServerId("n1.2")
    assert homeless(ring, {**beside, n12: ""}, N1) == []
    assert decide(ring, {**beside, n12: ""}, frozenset(), frozenset())[0] == Begin(P1, n12, N1)
    assert decide(drain(ring, n12), {**beside, n12: "", N4: ""}, frozenset(), frozenset())[0] == Begin(P1, N4, N1)


def test_replicas_of_a_lost_server_are_recreated() -> None:
    alive = {each: zone for each, zone in FOUR.items() if each != N2}
    assert decide(ring_of(1), alive, frozenset(), frozenset()) == [], "not before it has been away for long enough"
    assert decide(ring_of(1), alive, frozenset({N2}), frozenset()) == [Begin(P1, N4, N2)]


def test_newcomer_replaces_only_after_catching_up() -> None:
    ring = begin_replacing(drain(ring_of(1), N1), P1, N4, N1)
    assert decide(ring, FOUR, frozenset(), frozenset()) == []
    assert decide(ring, FOUR, frozenset(), frozenset({(P1, N4)})) == [Finish(P1, N4)]


def test_lost_newcomer_is_cancelled() -> None:
    ring = begin_replacing(drain(ring_of(1), N1), P1, N4, N1)
    assert decide(ring, THREE, frozenset({N4}), frozenset()) == [GiveUp(P1, N4)]


def test_server_accepts_few_newcomers_at_once() -> None:
    changes = decide(drain(ring_of(8), N1), FOUR, frozenset(), frozenset())
    assert len(changes) == COMING_MAX


def test_newcomers_go_to_least_loaded_server_of_another_zone() -> None:
    zones = {N1: "a", N2: "b", N3: "c", N4: "b", N5: "a"}
    ring = drain(ring_of(4, {N1: "a", N2: "b", N3: "c"}), N1)
    changes = decide(ring, zones, frozenset(), frozenset())
    assert {change.newcomer for change in changes} == {N5}, "b has one of each already"


def test_drained_server_gets_no_replicas() -> None:
    ring = drain(ring_of(1), N4)
    assert decide(ring, FOUR, frozenset({N2}), frozenset()) == []


def test_drained_server_is_forgotten_once_empty_and_gone() -> None:
    ring = settle(drain(ring_of(2), N1), FOUR)
    assert ring.draining == (N1,)
    alive = {each: zone for each, zone in FOUR.items() if each != N1}
    assert decide(ring, alive, frozenset(), frozenset()) == [], "it may be back in a moment"
    assert decide(ring, alive, frozenset({N1}), frozenset()) == [Forget(N1)]
    assert settle(ring, alive, frozenset({N1})).draining == ()


def test_drained_server_with_stranded_replica_is_remembered() -> None:
    ring = drain(ring_of(2), N1)
    assert decide(ring, {N2: "", N3: ""}, frozenset({N1}), frozenset()) == []


# docs/protocol.md H6
def test_stuck_newcomer_gives_way_to_another_server() -> None:
    ring = begin_replacing(drain(ring_of(1), N1), P1, N4, N1)
    five, stuck = {**FOUR, N5: ""}, frozenset({(P1, N4)})
    assert decide(ring, FOUR, frozenset(), frozenset(), stuck=stuck) == [], "there is no other"
    assert decide(ring, five, frozenset(), frozenset(), stuck=stuck, resting={N5}) == [], "nor one that does better"
    assert decide(ring, five, frozenset(), frozenset(), stuck=stuck) == [GiveUp(P1, N4)]
    assert decide(ring, five, frozenset(), frozenset({(P1, N4)}), stuck=stuck) == [Finish(P1, N4)]
    asked_for = begin_replacing(ring_of(1), P1, N4, N1)
    assert decide(asked_for, five, frozenset(), frozenset(), stuck=stuck) == [], "nobody would make another one"


def test_resting_server_gets_replicas_only_as_last_choice() -> None:
    ring = drain(ring_of(1), N1)
    assert decide(ring, {**FOUR, N5: ""}, frozenset(), frozenset(), resting={N4}) == [Begin(P1, N5, N1)]
    assert decide(ring, FOUR, frozenset(), frozenset(), resting={N4}) == [Begin(P1, N4, N1)]


def test_one_blocked_server_does_not_block_others() -> None:
    """It has the fewest replicas and is best for each of the twenty, but none of its newcomers ever starts."""
    ring, alive = ring_of(20, {N1: "", N2: "", N3: "", N5: ""}), {N1: "", N3: "", N4: "", N5: ""}
    newcomers, now = Newcomers(), 0.0
    while now < 1.5 * STUCK_S:
        now += 1.0
        coming = [(each.id, new) for each in ring.partitions.values() for new, _ in each.replacing]
        newcomers.note({pair: NOTHING for pair in coming if pair[1] == N4}, now)
        caught_up = frozenset(pair for pair in coming if pair[1] != N4)
        stuck = newcomers.stuck(now)
        for change in decide(ring, alive, frozenset({N2}), caught_up, frozenset(), stuck, newcomers.resting(now)):
            ring = change.step(ring)
            if isinstance(change, GiveUp):
                newcomers.given_up(change.newcomer, now)
    assert replicas_held(ring) == {N1: 20, N3: 20, N5: 20}
