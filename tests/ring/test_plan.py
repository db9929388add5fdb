"""The effects of plans on the ring: which partition gets what, and that every token always has exactly one owner."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sortedcontainers import SortedDict

from kvstore.ring import (
    MURMUR3,
    SLOTS_HASH,
    TOKENS,
    KeyHash,
    Member,
    Move,
    MoveId,
    MoveState,
    PartitionState,
    Ring,
    decode,
    encode,
    new_ring,
    plan,
    steps,
)
from kvstore.types import PartitionId
from tests.ring.rings import SERVERS, advance, balance, differences, grown, ids, members, owned, ring_of, settle

SLOT = SLOTS_HASH.unit
P1, P2, P4 = PartitionId("p1"), PartitionId("p2"), PartitionId("p4")


def test_newcomer_owns_nothing_until_its_first_move_is_done() -> None:
    ring = grown(3, 1)
    assert owned(ring)[P4] == 0
    assert ring.partitions[P4].state is PartitionState.JOINING
    assert differences(ring, ring_of(3)) == 0


def test_join_moves_at_most_the_newcomers_share() -> None:
    ring = grown(9, 1)
    moved = sum(move.size for move in ring.moves.values())
    assert len(ring.moves) <= 16
    assert TOKENS // 11 < moved <= TOKENS // 10
    assert {move.target for move in ring.moves.values()} == {"p10"}


# docs/protocol.md H4
@pytest.mark.parametrize(("count", "more"), [(1, 2), (3, 5), (3, 1), (10, 10), (17, 2), (40, 1), (100, 4)])
def test_join_leaves_no_partition_a_twentieth_above_the_mean(count: int, more: int) -> None:
    ring = settle(grown(count, more))
    assert balance(ring) <= 1.05
    assert len(ring.partitions) == count + more
    assert {member.state for member in ring.partitions.values()} == {PartitionState.SERVING}


# docs/protocol.md H2
def test_partitions_joining_together_get_ranges_from_present_owners() -> None:
    ring = grown(3, 5)
    assert {move.source for move in ring.moves.values()} <= set(ids(1, 3))
    assert settle(ring).shares() == pytest.approx(ring_of(8).shares())


@pytest.mark.parametrize(("count", "leavers"), [(8, 3), (3, 1), (3, 2), (40, 15)])
def test_leavers_give_everything_and_the_rest_stays_balanced(count: int, leavers: int) -> None:
    ring = ring_of(count)
    after = settle(plan.leave(ring, ids(1, leavers)))
    assert set(after.partitions) == set(ids(leavers + 1, count))
    assert after.retired == tuple(sorted(ids(1, leavers)))
    assert balance(after) <= 1.05
    assert differences(ring, after) == sum(owned(ring)[each] for each in ids(1, leavers))


def test_one_to_three_to_eight_to_five_stays_balanced() -> None:
    ring = settle(grown(1, 2))
    assert balance(ring) <= 1.05
    ring = settle(plan.join(ring, members(ids(4, 8))))
    assert balance(ring) <= 1.05
    ring = settle(plan.leave(ring, [PartitionId(each) for each in ("p1", "p5", "p8")]))
    assert balance(ring) <= 1.05
    assert not ring.moves


def test_removed_partition_cannot_return_under_its_id() -> None:
    ring = settle(plan.leave(ring_of(3), [P2]))
    with pytest.raises(ValueError, match="p2 is or was in the ring"):
        plan.join(ring, members([P2]))


def test_last_partition_cannot_leave() -> None:
    with pytest.raises(ValueError, match="at least one partition to stay"):
        plan.leave(ring_of(3), ids(1, 3))


def test_cancelling_a_plan_restores_the_ring() -> None:
    for before in (ring_of(3), settle(grown(3, 2))):
        for ring in (plan.join(before, members(ids(8, 9))), plan.leave(before, [P1])):
            after = settle(steps.cancel(ring, ring.moves))
            assert differences(before, after) == 0
            assert {each: member.state for each, member in after.partitions.items()} == dict.fromkeys(
                before.partitions, PartitionState.SERVING
            )


@pytest.mark.parametrize("seed", range(20))
def test_cancel_leaves_every_range_where_its_move_stands(seed: int) -> None:
    random = Random(seed)
    before = ring = plan.leave(grown(3, 2), [P1])
    for _ in range(random.randrange(60)):
        if ring.moves:
            ring = advance(ring, random.choice(sorted(ring.moves)))
    flipped = {move.end for move in ring.moves.values() if move.state is MoveState.FLIPPED}
    after = settle(steps.cancel(ring, ring.moves), random.choice)
    assert differences(ring, after) == 0
    assert flipped <= {end for end in before.tokens if after.owner_of(end) != ring_of(3).owner_of(end)}
    assert not after.moves


def test_second_plan_replans_moves_that_have_not_begun() -> None:
    ring = settle(plan.join(grown(3, 1), members(ids(5, 5))))
    assert balance(ring) <= 1.05
    assert set(ring.partitions) == set(ids(1, 5))


def test_second_plan_keeps_moves_in_progress() -> None:
    ring = grown(3, 1)
    begun = sorted(ring.moves)[:5]
    for id in begun:
        ring = steps.begin(ring, id, 1)
    again = plan.join(ring, members(ids(5, 5)))
    assert [again.moves[id] for id in begun] == [ring.moves[id] for id in begun]


def test_newcomer_removed_at_once_cancels_its_moves_and_retires() -> None:
    ring = grown(3, 1)
    ring = steps.begin(ring, min(ring.moves), 1)
    ring = plan.leave(ring, [P4])
    assert [move.state for move in ring.moves.values()] == [MoveState.CANCELLING]
    after = settle(ring)
    assert differences(after, ring_of(3)) == 0
    assert after.retired == (P4,)


def test_leaver_passes_on_a_range_that_it_still_gets() -> None:
    ring = grown(3, 1)
    first = min(ring.moves)
    ring = plan.leave(steps.begin(ring, first, 1), [P4])
    ring = steps.finish(steps.flip(ring, first), first)
    assert {move.source for move in ring.moves.values()} == {P4}
    assert settle(ring).retired == (P4,)


def test_shift_takes_the_largest_ranges_and_cuts_the_last() -> None:
    ring, unit = plan.shift(ring_of(3), P1, P2, 100_000_000), ring_of(3).hash.unit
    size = sum(move.size for move in ring.moves.values())
    assert 100_000_000 <= size < 100_000_000 + unit, "rounded up to whole slots"
    assert {(move.source, move.target) for move in ring.moves.values()} == {(P1, P2)}
    assert owned(settle(ring))[P2] == owned(ring_of(3))[P2] + size


def test_shift_of_more_than_a_partition_owns_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens of p1 to move"):
        plan.shift(ring_of(3), P1, P2, TOKENS)


def test_range_moves_from_all_its_owners() -> None:
    ring = plan.shift_range(ring_of(3), 0, TOKENS // 8 - 1, P2)
    after = settle(ring)
    assert all(after.owner_of(token) == P2 for token in range(0, TOKENS // 8, 1_000_003))
    assert after.owner_of(TOKENS // 8) == ring_of(3).owner_of(TOKENS // 8)
    assert differences(ring_of(3), after) == sum(move.size for move in ring.moves.values())


# docs/protocol.md M12
def test_range_in_progress_cannot_move_again() -> None:
    ring = grown(3, 1)
    move = ring.moves[min(ring.moves)]
    with pytest.raises(ValueError, match="is under way"):
        plan.shift_range(steps.begin(ring, move.id, 1), move.first, move.end, P2)


@pytest.mark.parametrize(("first", "last"), [(1, SLOT - 1), (0, SLOT), (SLOT // 2, SLOT + 5)])
def test_part_of_a_slot_cannot_move(first: int, last: int) -> None:
    ring = new_ring(ids(1, 3), SERVERS, 3, SLOTS_HASH)
    with pytest.raises(ValueError, match=rf"expected whole slots .* are 0 to {(last // SLOT + 1) * SLOT - 1}$"):
        plan.shift_range(ring, first, last, P2)
    assert all(ring.hash.ends_unit(end) for end in plan.shift_range(ring, 0, SLOT - 1, P2).tokens)


def test_large_range_moves_in_parts_of_a_32nd() -> None:
    both = {P1: Member(P1, ()), P2: Member(P2, ())}
    whole = Ring(1, both, SortedDict({TOKENS - 1: P1}), hash=ring_of(1).hash)
    ring = plan.shift(whole, P1, P2, TOKENS // 2)
    assert len(ring.moves) == 16
    assert len(settle(ring).tokens) == 2


def test_moves_never_wrap_around() -> None:
    hash = ring_of(1).hash
    odd = Ring(1, {P1: Member(P1, ())}, SortedDict({6 * hash.unit - 1: P1}), hash=hash)
    ring = plan.join(odd, members([P2]))
    assert all(move.first <= move.end for move in ring.moves.values())
    assert balance(settle(ring)) <= 1.05


def test_progress_counts_everything_planned() -> None:
    ring = plan.join(ring_of(3), members([P4]), now_ms=77)
    planned = sum(move.size for move in ring.moves.values())
    assert (ring.journey.moves, ring.journey.tokens, ring.journey.began_ms) == (len(ring.moves), planned, 77)
    ring = plan.join(ring, members(ids(5, 5)), now_ms=99)
    assert ring.journey.tokens == sum(move.size for move in ring.moves.values())
    assert ring.journey.began_ms == 77
    assert settle(ring).journey.moves == 0


def test_cancelled_moves_do_not_count_as_progress() -> None:
    ring = grown(3, 1)
    done, under_way, *rest = sorted(ring.moves)
    ring = steps.finish(steps.flip(steps.begin(ring, done, 1), done), done)
    ring = steps.begin(ring, under_way, 1)
    ring = steps.cancel(ring, rest)
    assert (ring.journey.moves, len(ring.moves)) == (2, 1), "one is done, one is in progress"
    ring = steps.cancel(plan.join(ring, members(ids(5, 5))), [under_way])
    planned = [move for move in ring.moves.values() if move.id != under_way]
    ring = steps.cancelled(ring, under_way)
    assert ring.journey.moves == len(planned) + 1
    assert ring.journey.tokens >= sum(move.size for move in planned)


# docs/protocol.md H3
def test_flip_of_a_move_that_has_not_begun_is_refused() -> None:
    ring = grown(3, 1)
    with pytest.raises(ValueError, match="copying or cancelling or flipped, but it is planned"):
        steps.flip(ring, min(ring.moves))


# docs/protocol.md H7
def test_routed_version_changes_only_with_routing() -> None:
    ring = grown(3, 1)
    id = min(ring.moves)
    assert ring.routed == ring_of(3).routed
    assert steps.begin(ring, id, 1).routed == ring.routed
    flipped = steps.flip(steps.begin(ring, id, 1), id)
    assert flipped.routed == flipped.version
    assert steps.finish(flipped, id).routed == flipped.version


def test_move_steps_are_idempotent() -> None:
    ring = grown(3, 1)
    id = min(ring.moves)
    ring = steps.begin(ring, id, 1)
    assert steps.begin(ring, id, 1) is ring
    ring = steps.flip(ring, id)
    assert steps.flip(ring, id) is ring
    ring = steps.finish(ring, id)
    assert steps.finish(ring, id) is ring
    assert steps.cancel(ring, [id]) is ring
    assert steps.set_pace(ring, ring.pace) is ring


def test_move_outside_the_rings_ranges_is_refused() -> None:
    ring = ring_of(3)
    bad = Move(MoveId(1), P1, P2, 3, 5)
    with pytest.raises(ValueError, match="is not a range of ring version"):
        replace(ring, moves={bad.id: bad}, next_move=MoveId(2))


class Changes(RuleBasedStateMachine):
    """Any plans, steps and cancels in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.names = 2

    @initialize(hash=st.sampled_from([MURMUR3, SLOTS_HASH]))
    def begin(self, hash: KeyHash) -> None:
        self.ring = self.before = new_ring(ids(1, 2), SERVERS, 3, hash)

    def change(self, ring: Ring) -> None:
        assert ring.version > self.ring.version or ring is self.ring
        self.before, self.ring = self.ring, ring

    @precondition(lambda self: len(self.ring.partitions) < 12)
    @rule(count=st.integers(1, 4))
    def join(self, count: int) -> None:
        self.change(plan.join(self.ring, members(ids(self.names + 1, self.names + count))))
        self.names += count

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        staying = [each for each, member in self.ring.partitions.items() if member.state in ("serving", "joining")]
        if len(staying) > 1:
            some = st.lists(st.sampled_from(sorted(staying)), min_size=1, max_size=len(staying) - 1, unique=True)
            self.change(plan.leave(self.ring, data.draw(some)))

    @precondition(lambda self: self.ring.moves)
    @rule(data=st.data(), count=st.integers(1, 30))
    def step(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            if self.ring.moves:
                self.change(advance(self.ring, data.draw(st.sampled_from(sorted(self.ring.moves)))))
                self.only_flips_change_owners()

    @precondition(lambda self: self.ring.moves)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        some = data.draw(st.lists(st.sampled_from(sorted(self.ring.moves)), min_size=1, unique=True))
        self.change(steps.cancel(self.ring, some))

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        retired = [each for each, member in self.ring.partitions.items() if member.state == "retired"]
        if retired:
            self.change(steps.forget(self.ring, data.draw(st.sampled_from(sorted(retired)))))

    @invariant()
    def only_flips_change_owners(self) -> None:
        flipped = {
            id: move
            for id, move in self.ring.moves.items()
            if move.state is MoveState.FLIPPED and self.before.moves[id].state is not MoveState.FLIPPED
        }
        moved = differences(self.before, self.ring)
        assert moved == sum(move.size for move in flipped.values())
        assert self.ring.routed > self.before.routed or not moved, "a comparison of versions must show it"
        self.before = self.ring

    @invariant()
    def the_znode_says_all(self) -> None:
        again = decode(encode(self.ring))
        for name in (
            "version",
            "partitions",
            "tokens",
            "moves",
            "next_move",
            "pace",
            "journey",
            "retired",
            "routed",
            "hash",
        ):
            assert getattr(again, name) == getattr(self.ring, name), name

    @invariant()
    def nobody_is_stuck(self) -> None:
        coming = {move.target for move in self.ring.moves.values()}
        busy = coming | {move.source for move in self.ring.moves.values()}
        for each, size in owned(self.ring).items():
            state = self.ring.partitions[each].state
            assert state is not PartitionState.JOINING or each in coming
            assert state is not PartitionState.LEAVING or each in busy
            assert state is not PartitionState.RETIRED or (size == 0 and each not in busy)

    def teardown(self) -> None:
        ring = settle(self.ring)
        assert {member.state for member in ring.partitions.values()} == {PartitionState.SERVING}


def test_changes_in_any_order() -> None:
    run_state_machine_as_test(Changes, settings=settings(max_examples=30, stateful_step_count=20, deadline=None))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-3, 3).filter(bool), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_chains_of_joins_and_leaves_stay_balanced(changes: list[int], random: Random) -> None:
    ring, names = ring_of(3), 3
    for change in changes:
        if change > 0:
            ring = plan.join(ring, members(ids(names + 1, names + change)))
            names += change
        elif len(ring.partitions) > -change + 2:
            ring = plan.leave(ring, random.sample(sorted(ring.partitions), -change))
        ring = settle(ring, random.choice)
        assert balance(ring) <= 1.05
        assert max(list(ring.tokens.values()).count(each) for each in ring.partitions) <= 64
