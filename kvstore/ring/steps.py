"""Steps of moving ranges, and the pace of all moves. Each step takes a ring and returns the next version, or the same
ring if the step is already done. Decides only; the caller stores the result by compare-and-set."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sortedcontainers import SortedDict

from kvstore.ring.moves import Journey, Move, MoveId, MoveState, Pace
from kvstore.ring.plan import merged, settled
from kvstore.ring.ring import PartitionState, Ring
from kvstore.types import PartitionId

_COPYING, _CANCELLING, _FLIPPED = MoveState.COPYING, MoveState.CANCELLING, MoveState.FLIPPED


# docs/protocol.md H3
def begin(ring: Ring, id: MoveId, attempt: int) -> Ring:
    """Start copying: the target may log its import as copy attempt `attempt`. Raises ValueError if the move does not
    exist, is being cancelled, or has been flipped."""
    move = _open(ring, id, MoveState.PLANNED, _COPYING)
    if (move.state, move.attempt) == (_COPYING, attempt):
        return ring
    return _with(ring, replace(move, state=_COPYING, attempt=attempt))


def flip(ring: Ring, id: MoveId, seq: int = 0) -> Ring:
    """Route the range to the target. According to the logs, the target has owned the range since its sequence `seq` or
    earlier. A move that is being cancelled can still be flipped, because the release may have been logged before the
    cancel. Raises ValueError if the move does not exist or has not begun."""
    move = _open(ring, id, _COPYING, _CANCELLING, _FLIPPED)
    if move.state is _FLIPPED:
        return ring
    tokens = SortedDict(ring.tokens)
    tokens[move.end] = move.target
    moves = {**ring.moves, id: replace(move, state=_FLIPPED)}
    version = ring.version + 1
    target = ring.partitions[move.target]
    owned = replace(target, owned_seq=max(seq, target.owned_seq), owned_at=version)
    partitions = {**ring.partitions, move.target: owned}
    return replace(ring, version=version, routed=version, tokens=tokens, moves=moves, partitions=partitions)


def finish(ring: Ring, id: MoveId) -> Ring:
    """Remove a move after its source has dropped the range. Raises ValueError if the move has not been flipped."""
    if id not in ring.moves:
        return ring
    _open(ring, id, _FLIPPED)
    return _without(ring, {id})


def cancel(ring: Ring, ids: Iterable[MoveId]) -> Ring:
    """Cancel moves. A move that has not begun is removed at once. A move in progress is marked, and is removed once its
    source and target have agreed. Moves that are flipped or unknown are left alone. A leaving partition whose move is
    cancelled stays in the ring."""
    chosen = [ring.moves[id] for id in sorted(set(ids)) if id in ring.moves]
    gone = {move.id for move in chosen if move.state is MoveState.PLANNED}
    asked = {move.id: replace(move, state=_CANCELLING) for move in chosen if move.state is _COPYING}
    if not gone and not asked:
        return ring
    staying = {move.source for move in chosen if move.id in gone or move.id in asked}
    partitions = {
        each.id: replace(each, state=PartitionState.SERVING)
        if each.id in staying and each.state is PartitionState.LEAVING
        else each
        for each in ring.partitions.values()
    }
    ring = _uncount_moves(ring, gone)
    return _without(replace(ring, partitions=partitions, moves={**ring.moves, **asked}), gone)


def cancelled(ring: Ring, id: MoveId) -> Ring:
    """Remove a cancelled move after the source has logged that it keeps the range and the target has dropped its copy.
    Raises ValueError if the move was not being cancelled."""
    if id not in ring.moves:
        return ring
    _open(ring, id, _CANCELLING)
    return _without(_uncount_moves(ring, {id}), {id})


def set_pace(ring: Ring, pace: Pace) -> Ring:
    """Set the pace of moves: pause or resume them, or change their speed."""
    return ring if ring.pace == pace else replace(ring, version=ring.version + 1, pace=pace)


def forget(ring: Ring, partition: PartitionId) -> Ring:
    """Remove a retired partition from the ring after its log has been removed. Its id is never reused. Raises
    ValueError if the partition has not retired."""
    if partition not in ring.partitions:
        return ring
    if ring.partitions[partition].state is not PartitionState.RETIRED:
        raise ValueError(f"partition {partition} is {ring.partitions[partition].state}, expected a retired partition")
    partitions = {each: member for each, member in ring.partitions.items() if each != partition}
    retired = tuple(sorted({*ring.retired, partition}))
    version = ring.version + 1
    return replace(ring, version=version, routed=version, partitions=partitions, retired=retired)


def _open(ring: Ring, id: MoveId, *states: MoveState) -> Move:
    move = ring.moves.get(id)
    if move is None or move.state not in states:
        found = "gone" if move is None else str(move.state)
        raise ValueError(f"move {id}: expected it to be {' or '.join(states)}, but it is {found}")
    return move


def _with(ring: Ring, move: Move) -> Ring:
    return replace(ring, version=ring.version + 1, moves={**ring.moves, move.id: move})


def _uncount_moves(ring: Ring, gone: set[MoveId]) -> Ring:
    """Return the same ring without counting these moves as planned: progress is that of the others."""
    tokens = sum(ring.moves[id].size for id in gone)
    journey = ring.journey
    return replace(ring, journey=replace(journey, moves=journey.moves - len(gone), tokens=journey.tokens - tokens))


def _without(ring: Ring, gone: set[MoveId]) -> Ring:
    moves = {id: move for id, move in ring.moves.items() if id not in gone}
    journey = ring.journey if moves else Journey()
    ring = replace(ring, version=ring.version + 1, moves=moves, journey=journey)
    return settled(replace(ring, tokens=merged(ring)))
