"""The feeds that a watch follows."""

from __future__ import annotations

from kvstore.ring import plan
from kvstore.server.feed.pages import interest_in
from kvstore.server.feed.watch_plan import FeedToFollow, WatchPlan
from kvstore.types import PartitionId
from tests.ring.rings import ids, members, ring_of, settle

P1, P2 = PartitionId("p1"), PartitionId("p2")


def test_partition_that_left_is_not_new_when_server_lags() -> None:
    """The watch continues after it, with the changes that p2 received. The start of p1's log would be a step back."""
    both = settle(plan.join(ring_of(1), members(ids(2, 2))))
    left = settle(plan.leave(both, [P1]))
    watch = WatchPlan(interest_in(b"", b""))
    assert watch.begin(left, {P2: 7}) == [FeedToFollow(P2, 7)]
    watch.positions[P2] = 7
    assert watch.joined(both) == []
    assert watch.joined(left) == []
    grown = plan.join(left, members(ids(3, 3)))
    assert [follow.partition for follow in watch.joined(grown)] == [PartitionId("p3")]
