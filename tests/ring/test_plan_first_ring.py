"""The faults of the very first ring, which ours must not have: one token for each partition, at the hash of its name;
of two partitions with one hash, one was lost; partitions could never leave; and views of the ring had no version."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.ring import TOKENS, Ring, decode, encode, plan, steps
from kvstore.types import PartitionId
from tests.ring.rings import (
    SERVERS,
    advance,
    balance,
    differences,
    grown,
    ids,
    members,
    new_ring,
    owned,
    ring_of,
    settle,
)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.text("abcdefgh", min_size=1, max_size=6), min_size=2, max_size=40, unique=True))
def test_partitions_have_tokens_whatever_their_names(names: list[str]) -> None:
    ring = new_ring([PartitionId(name) for name in names], SERVERS, 3)
    assert set(ring.tokens.values()) == set(names)
    assert all(size > 0 for size in owned(ring).values())
    assert len(ring.tokens) == sum(list(ring.tokens.values()).count(PartitionId(name)) for name in names)


def test_join_takes_no_partitions_last_token() -> None:
    ring = ring_of(2)
    for number in range(3, 60):
        ring = settle(plan.join(ring, members([PartitionId(f"p{number}")])))
        assert set(ring.tokens.values()) == set(ring.partitions), f"after p{number} joined"


def test_thousand_partitions_share_the_ring_evenly() -> None:
    ring = ring_of(1_000)
    assert balance(ring) <= 1.05
    assert min(owned(ring).values()) > TOKENS // 1_000 // 2


def test_removed_partition_owns_nothing_and_gets_no_keys() -> None:
    gone = PartitionId("p2")
    ring = settle(plan.leave(ring_of(5), [gone]))
    assert gone not in ring.partitions
    assert gone not in ring.tokens.values()
    assert all(ring.partition_of(b"key%d" % number) != gone for number in range(10_000))


def test_equal_versions_route_alike_and_changes_have_a_new_version() -> None:
    seen: dict[int, Ring] = {}
    ring = grown(3, 2)
    while ring.moves:
        view = decode(encode(ring))
        assert differences(view, ring) == 0
        for other in seen.values():
            assert (other.routed == view.routed) == (differences(other, view) == 0), "versions identify rings"
        seen[ring.version] = view
        ring = advance(ring, min(ring.moves))


def test_second_of_two_concurrent_changes_must_reread() -> None:
    """The store refuses the second write (tests/server/cluster/test_ring_store.py); the second writer then finds both
    changes, or a reason."""
    ring = ring_of(3)
    first, second = plan.join(ring, members(ids(4, 4))), plan.join(ring, members(ids(5, 5)))
    assert first.version == second.version == ring.version + 1
    both = plan.join(first, members(ids(5, 5)))
    assert set(both.partitions) == set(ids(1, 5))
    assert balance(settle(both)) <= 1.05
    assert steps.cancel(both, []) is both
