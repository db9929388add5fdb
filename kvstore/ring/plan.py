"""Plans changes of the ring as moves of token ranges: partitions that join or leave, and ranges that go to another
partition. Decides only.

A plan compares the future ring with the current one. Each range whose owner differs becomes one move, directly from its
current owner, however many partitions join at once. If moves are already open, planning starts from their outcome:
moves that have not begun are planned again, and moves in progress are left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from sortedcontainers import SortedDict

from kvstore.ring.balance import Balance
from kvstore.ring.hashing import TOKENS
from kvstore.ring.moves import Journey, Move, MoveId, MoveState
from kvstore.ring.ring import Member, PartitionState, Ring, TokenRange
from kvstore.types import PartitionId

MOVE_TOKENS_MAX = TOKENS // 32
"""Larger ranges move in parts, so that a pause, a cancel or a restart never costs more than one part."""
_Owners = dict[int, PartitionId]
"""Owners by the end of their range."""
_GOING = (PartitionState.LEAVING, PartitionState.RETIRED)


def join(ring: Ring, members: Sequence[Member], *, now_ms: int = 0) -> Ring:
    """Plan that each of `members` joins the ring and receives its share. `now_ms` is the wall clock. Raises ValueError
    if a member's id is or ever was in the ring."""
    partitions = dict(ring.partitions)
    for member in members:
        if member.id in partitions or member.id in ring.retired:
            raise ValueError(f"partition {member.id} is or was in the ring; use an id that was never used")
        partitions[member.id] = replace(member, state=PartitionState.JOINING)
    future = future_owners(ring)
    balance = Balance(ring.hash, _ranges(future), _remaining_partitions(ring.partitions), _fixed(ring))
    for member in members:
        balance.join(member.id)
    return settled(planned(ring, partitions, future | balance.owners, now_ms=now_ms))


def leave(ring: Ring, leavers: Sequence[PartitionId], *, now_ms: int = 0) -> Ring:
    """Plan that all ranges that the leavers own, or were going to own, move to the remaining partitions. `now_ms` is
    the wall clock. Raises ValueError if a leaver is not in the ring, or if no partition would remain."""
    for leaver in leavers:
        _known(ring, leaver)
    going = set(leavers)
    staying = [each for each in _remaining_partitions(ring.partitions) if each not in going]
    if not staying:
        raise ValueError(f"expected at least one partition to stay, got {', '.join(sorted(going))} to leave")
    partitions = {
        each.id: replace(each, state=PartitionState.LEAVING) if each.id in going else each
        for each in ring.partitions.values()
    }
    moves = {each.id: _given_up(each) if each.target in going else each for each in ring.moves.values()}
    return settled(_emptied(replace(ring, partitions=partitions, moves=moves), now_ms=now_ms))


def shift(ring: Ring, source: PartitionId, target: PartitionId, size: int, *, now_ms: int = 0) -> Ring:
    """Plan that `size` tokens move from `source` to `target`: the source's largest ranges, of which the last one is
    cut. The size is rounded up to whole units of the key hash. `now_ms` is the wall clock. Raises ValueError if either
    partition is not in the ring or is leaving it, or if the source owns fewer tokens that are not already moving."""
    for partition in (source, target):
        _known(ring, partition, may_go=False)
    if source == target:
        raise ValueError(f"expected a target other than the source, got {source} twice")
    future, fixed = future_owners(ring), _fixed(ring)
    spans = [span for span in _ranges(future) if span.owner == source and span.end not in fixed]
    left = rounded = -(-size // ring.hash.unit) * ring.hash.unit
    for span in sorted(spans, key=lambda span: (-span.size, span.end)):
        if left <= 0:
            break
        taken = min(span.size, left)
        future[(span.start + taken) % TOKENS] = target
        left -= taken
    if left > 0 or size <= 0:
        raise ValueError(f"expected 1 to {rounded - left} tokens of {source} to move, got {size}")
    return settled(planned(ring, ring.partitions, future, now_ms=now_ms))


def shift_range(ring: Ring, first: int, last: int, target: PartitionId, *, now_ms: int = 0) -> Ring:
    """Plan that the tokens from `first` to `last`, both included, move to `target`. `now_ms` is the wall clock. Raises
    ValueError if the range is invalid or divides a unit of the key hash, the target is not in the ring or is leaving
    it, or part of the range is already moving."""
    _known(ring, target, may_go=False)
    if not 0 <= first <= last < TOKENS:
        raise ValueError(f"expected first <= last, both from 0 to {TOKENS - 1}, got {first} and {last}")
    if not (ring.hash.ends_unit(first - 1) and ring.hash.ends_unit(last)):
        unit = ring.hash.unit
        raise ValueError(
            f"expected whole slots of {unit} tokens, got {first} to {last}; the slots around them are "
            f"{first // unit * unit} to {(last // unit + 1) * unit - 1}"
        )
    for move in ring.moves.values():
        if move.end in _fixed(ring) and move.first <= last and first <= move.end:
            raise ValueError(f"move {move.id} of tokens {move.first} to {move.end} is under way")
    future = future_owners(ring)
    for end in (last, (first - 1) % TOKENS):
        future.setdefault(end, _owner_in(future, end))
    for end in [end for end in future if first <= end <= last]:
        future[end] = target
    return settled(planned(ring, ring.partitions, future, now_ms=now_ms))


def settled(ring: Ring) -> Ring:
    """Return the ring, under the same version, with each member in the state that its tokens and moves imply. If a
    leaving partition owns a range that has no move, plan the move."""
    if _is_stuck(ring):
        ring = replace(_emptied(ring, now_ms=0), version=ring.version)
    owners, moves = set(ring.tokens.values()), ring.moves.values()
    coming = {move.target for move in moves}
    open_ = coming | {move.source for move in moves}
    partitions = {}
    for member in ring.partitions.values():
        state = member.state
        if state is PartitionState.JOINING and member.id not in coming:
            state = PartitionState.SERVING if member.id in owners else PartitionState.RETIRED
        elif state is PartitionState.LEAVING and member.id not in open_ and member.id not in owners:
            state = PartitionState.RETIRED
        partitions[member.id] = member if state is member.state else replace(member, state=state)
    return replace(ring, partitions=partitions)


# docs/protocol.md H2
def planned(
    ring: Ring, partitions: Mapping[PartitionId, Member], future: Mapping[int, PartitionId], *, now_ms: int
) -> Ring:
    """Return the next version of the ring, with `partitions` as its members and the moves that turn the current owners
    into those in `future`."""
    moving = {move.end: move for move in ring.moves.values() if move.state is not MoveState.PLANNED}
    former = {(m.start, m.end, m.source, m.target): m for m in ring.moves.values() if m.end not in moving}
    tokens: list[tuple[int, PartitionId]] = []
    moves: dict[MoveId, Move] = {}
    next_move, may_merge = ring.next_move, False
    for span in _ranges(future):
        present = ring.owner_of(span.end)
        move = moving.get(span.end)
        if move is None and present == span.owner:
            if may_merge and tokens[-1][1] == present:
                tokens.pop()
            tokens.append((span.end, present))
            may_merge = span.end != TOKENS - 1
            continue
        may_merge = False
        for part in [span] if move else _parts(span, ring.hash.unit):
            tokens.append((part.end, present))
            each = move or former.get((part.start, part.end, present, part.owner))
            if each is None:
                each = Move(next_move, present, part.owner, part.start, part.end)
                next_move = MoveId(next_move + 1)
            moves[each.id] = each
    return replace(
        ring,
        version=ring.version + 1,
        partitions=partitions,
        tokens=SortedDict(tokens),
        moves=moves,
        next_move=next_move,
        journey=_journey(ring, moves, now_ms),
    )


def future_owners(ring: Ring) -> _Owners:
    """Return the owner of each range, by the range's end, after all open moves have completed. TOKENS - 1 always ends a
    range, so that no moving range wraps around."""
    future = dict(ring.tokens)
    future.setdefault(TOKENS - 1, ring.owner_of(TOKENS - 1))
    for move in ring.moves.values():
        to_leaver = ring.partitions[move.target].state in _GOING
        if move.state is MoveState.COPYING or (move.state is MoveState.PLANNED and not to_leaver):
            future[move.end] = move.target
    return future


def merged(ring: Ring) -> SortedDict[int, PartitionId]:
    """Return the ring's tokens with adjacent ranges of one owner merged, except ranges that are moving."""
    ends = {move.end for move in ring.moves.values()}
    tokens: list[tuple[int, PartitionId]] = []
    for end, owner in ring.tokens.items():
        last = tokens[-1] if tokens else None
        if last is not None and last[1] == owner and end not in ends and last[0] not in ends:
            tokens.pop()
        tokens.append((end, owner))
    return SortedDict(tokens)


def _given_up(move: Move) -> Move:
    return replace(move, state=MoveState.CANCELLING) if move.state is MoveState.COPYING else move


def _emptied(ring: Ring, *, now_ms: int) -> Ring:
    """Return the next version, in which everything that leavers own or are to own is planned to move to the partitions
    that stay."""
    future = future_owners(ring)
    leavers = [each.id for each in ring.partitions.values() if each.state is PartitionState.LEAVING]
    balance = Balance(ring.hash, _ranges(future), [*_remaining_partitions(ring.partitions), *leavers], _fixed(ring))
    balance.leave(leavers)
    return planned(ring, ring.partitions, future | balance.owners, now_ms=now_ms)


def _is_stuck(ring: Ring) -> bool:
    """Return True if a leaver owns, or is to get, a range that no move takes away."""
    leavers = {each.id for each in ring.partitions.values() if each.state is PartitionState.LEAVING}
    if not leavers:
        return False
    fixed = _fixed(ring)
    return any(owner in leavers and end not in fixed for end, owner in future_owners(ring).items())


def _journey(ring: Ring, moves: Mapping[MoveId, Move], now_ms: int) -> Journey:
    fresh = [move for move in moves.values() if move.id not in ring.moves]
    gone = [move for move in ring.moves.values() if move.id not in moves]
    count = len(fresh) - len(gone)
    size = sum(move.size for move in fresh) - sum(move.size for move in gone)
    if not ring.moves:
        return Journey(count, size, now_ms)
    known = ring.journey
    return replace(known, moves=known.moves + count, tokens=known.tokens + size)


def _ranges(owners: Mapping[int, PartitionId]) -> Iterator[TokenRange]:
    ends = sorted(owners)
    previous = ends[-1]
    for end in ends:
        yield TokenRange(previous, end, owners[end])
        previous = end


def _parts(span: TokenRange, unit: int) -> Iterator[TokenRange]:
    count = -(-span.size // MOVE_TOKENS_MAX)
    units = span.size // unit
    bounds = [(span.start + units * part // count * unit) % TOKENS for part in range(count + 1)]
    return (TokenRange(start, end, span.owner) for start, end in pairwise(bounds))


def _fixed(ring: Ring) -> frozenset[int]:
    """Return the ends of the ranges that a plan leaves alone."""
    return frozenset(move.end for move in ring.moves.values() if move.state is not MoveState.PLANNED)


def _remaining_partitions(partitions: Mapping[PartitionId, Member]) -> Iterable[PartitionId]:
    return [partition for partition in sorted(partitions) if partitions[partition].state not in _GOING]


def _owner_in(owners: Mapping[int, PartitionId], token: int) -> PartitionId:
    return owners[min((end for end in owners if end >= token), default=min(owners))]


def _known(ring: Ring, partition: PartitionId, *, may_go: bool = True) -> None:
    member = ring.partitions.get(partition)
    if member is None or (member.state in _GOING and not may_go):
        known = ", ".join(_remaining_partitions(ring.partitions))
        raise ValueError(f"expected a partition that stays in the ring ({known}), got {partition}")
