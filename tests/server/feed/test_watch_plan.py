"""The feeds that a watch follows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvstore.partition.state.changes import Handed
from kvstore.partition.state.tokens import TokenSpan
from kvstore.ring import TOKENS, plan
from kvstore.server.feed.pages import interest_in
from kvstore.server.feed.watch_plan import FeedToFollow, WatchPlan
from kvstore.types import PartitionId, Seq
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


def handed(partition: str, peer: str, seq: int, peer_seq: int, *, is_owned: bool) -> Any:
    """Return an OWN or a RELEASE of all tokens in the log of `partition`."""
    change = Handed(is_owned, Seq(seq), PartitionId(peer), Seq(peer_seq), TokenSpan(0, TOKENS - 1), 1)
    return SimpleNamespace(handed=change, time_ms=1, after=seq)


def following_key() -> WatchPlan:
    """Return the plan of a watch of one key that moves from p1, at sequence 279, to p2."""
    watch = WatchPlan(interest_in(b"k", b"k\0"))
    watch.begin(ring_of(2), {})
    watch.positions |= {P1: 279, P2: 11}
    return watch


def test_own_ends_the_feed_that_it_takes_the_key_over_from() -> None:
    """p1's RELEASE came after p2 had ended, and the watch showed p2's changes again."""
    watch = following_key()
    assert watch.replaces(handed("p2", "p1", 11, 279, is_owned=True)) == P1
    watch.positions[P1] = 300  # p1 has got the key again since
    assert watch.replaces(handed("p2", "p1", 11, 279, is_owned=True)) is None
    watch.positions[P1] = 278
    assert watch.is_held(handed("p2", "p1", 11, 279, is_owned=True))
    assert WatchPlan(interest_in(b"", b"")).replaces(handed("p2", "p1", 11, 279, is_owned=True)) is None


def test_release_does_not_lead_to_a_feed_that_was_read_since() -> None:
    watch, release = following_key(), handed("p1", "p2", 279, 0, is_owned=False)
    watch.positions[P2] = 325
    watch.ended(P2)
    assert watch.continues_at(release, P1) is None
    assert watch.continues_at(handed("p1", "p2", 400, 0, is_owned=False), P1) == FeedToFollow(P2, time_ms=1)
