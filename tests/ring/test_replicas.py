"""Replicas change servers one at a time, and never before the newcomer has caught up."""

import pytest

from kvstore.ring import decode, encode, plan, steps
from kvstore.ring.replicas import (
    begin_replacing,
    drain,
    finish_replacing,
    give_up_replacing,
    prefer_leader,
    undrain,
)
from kvstore.types import PartitionId, ServerId
from tests.ring.rings import advance, ring_of, settle

P1 = PartitionId("p1")
N1, N2, N3, N4 = (ServerId(f"n{i}") for i in range(1, 5))


# docs/protocol.md H6
def test_newcomer_takes_the_replaced_replicas_place() -> None:
    before = ring_of(3)
    ring = begin_replacing(before, P1, N4, N1)
    assert set(ring.partitions[P1].replicas) == {N1, N2, N3, N4}
    after = finish_replacing(ring, P1, N4)
    assert after.partitions[P1].replicas == tuple(N4 if n == N1 else n for n in before.partitions[P1].replicas)
    assert after.partitions[P1].replacing == ()


# docs/protocol.md H15
def test_replica_moves_within_its_machine_but_not_beside_another() -> None:
    before = ring_of(3)
    with pytest.raises(ValueError, match=r"to move to a server on another machine, got n2\.2"):
        begin_replacing(before, P1, ServerId("n2.2"), N1)
    ring = begin_replacing(before, P1, ServerId("n1.2"), N1)
    after = finish_replacing(ring, P1, ServerId("n1.2"))
    assert set(after.partitions[P1].replicas) == {ServerId("n1.2"), N2, N3}


def test_abandoning_a_replacement_restores_the_replicas() -> None:
    before = ring_of(3)
    after = give_up_replacing(begin_replacing(before, P1, N4, N1), P1, N4)
    assert after.partitions == before.partitions


def test_znode_names_replacements() -> None:
    ring = drain(begin_replacing(ring_of(3), P1, N4, N1), N1)
    again = decode(encode(ring))
    assert (again.partitions, again.draining) == (ring.partitions, (N1,))
    assert undrain(again, N1).draining == ()


@pytest.mark.parametrize(("newcomer", "leaving"), [(N2, N1), (N4, N4)])
def test_replica_moves_only_from_a_holder_to_a_server_without_one(newcomer: ServerId, leaving: ServerId) -> None:
    with pytest.raises(ValueError, match="a replica on n1, n2, n3 to move to a server on another machine"):
        begin_replacing(ring_of(3), P1, newcomer, leaving)


def test_replica_is_replaced_by_one_newcomer_at_a_time() -> None:
    ring = begin_replacing(ring_of(3), P1, N4, N1)
    with pytest.raises(ValueError, match="is being replaced"):
        begin_replacing(ring, P1, ServerId("n5"), N1)
    with pytest.raises(ValueError, match="is being replaced"):
        begin_replacing(ring, P1, ServerId("n5"), N4)


def test_replica_steps_are_idempotent() -> None:
    ring = begin_replacing(ring_of(3), P1, N4, N1)
    assert begin_replacing(ring, P1, N4, N1) is ring
    ring = finish_replacing(ring, P1, N4)
    assert finish_replacing(ring, P1, N4) is ring
    assert give_up_replacing(ring, P1, N4) is ring
    ring = drain(ring, N1)
    assert drain(ring, N1) is ring
    assert undrain(ring, N2) is ring


def test_retired_partition_is_on_no_server() -> None:
    ring = ring_of(3)
    ring = plan.leave(ring, [P1])
    while ring.moves:
        ring = advance(ring, min(ring.moves))
    assert not ring.partitions[P1].is_on(N1)
    assert P1 not in settle(ring).partitions
    with pytest.raises(ValueError, match="expected one of"):
        begin_replacing(ring, P1, N4, N1)
    assert steps.forget(ring, P1).retired == (P1,)


def test_preferred_leader_moves_to_front_and_others_keep_their_order() -> None:
    ring = ring_of(3)
    first, second, third = ring.partitions[P1].replicas
    after = prefer_leader(ring, P1, third)
    assert after.partitions[P1].replicas == (third, first, second)
    assert (after.version, after.routed) == (ring.version + 1, ring.routed), "no key has another owner"
    assert prefer_leader(after, P1, third) is after


def test_only_lasting_replica_can_be_preferred_leader() -> None:
    ring = begin_replacing(ring_of(3), P1, N4, N1)
    for server in (N4, N1, ServerId("n9")):
        with pytest.raises(ValueError, match="lasting replica"):
            prefer_leader(ring, P1, server)
    with pytest.raises(ValueError, match="expected one of"):
        prefer_leader(ring, PartitionId("p9"), N2)
