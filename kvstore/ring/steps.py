"""Steps of one move, or of all moves. Each takes a ring and returns the next version, or the same ring if the step is
done already. Decides only; the caller stores the result by compare-and-set."""

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
    """Let the target log its import as `attempt`. Raises ValueError if the move is gone, being cancelled, or
    further."""
    move = _open(ring, id, MoveState.PLANNED, _COPYING)
    if (move.state, move.attempt) == (_COPYING, attempt):
        return ring
    return _with(ring, replace(move, state=_COPYING, attempt=attempt))


def flip(ring: Ring, id: MoveId, seq: int = 0) -> Ring:
    """Route to the target, which owns the range in the logs since its sequence `seq` or before. Also valid for a move
    that is being cancelled: the release was logged first. Raises ValueError if the move is gone or has not begun."""
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
    """Remove a move whose source has dropped the range. Raises ValueError if the move was not flipped."""
    if id not in ring.moves:
        return ring
    _open(ring, id, _FLIPPED)
    return _without(ring, {id})


def cancel(ring: Ring, ids: Iterable[MoveId]) -> Ring:
    """Cancel moves. Moves that have not begun are gone at once; for moves in progress, source and target must agree
    first. Moves that are done in the logs are left alone. A partition that was leaving stays."""
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
    ring = _no_more_wanted(ring, gone)
    return _without(replace(ring, partitions=partitions, moves={**ring.moves, **asked}), gone)


def cancelled(ring: Ring, id: MoveId) -> Ring:
    """Remove a cancelled move: the source has logged that it keeps the range, and the target has dropped its copy.
    Raises ValueError if the move was not being cancelled."""
    if id not in ring.moves:
        return ring
    _open(ring, id, _CANCELLING)
    return _without(_no_more_wanted(ring, {id}), {id})


def set_pace(ring: Ring, pace: Pace) -> Ring:
    """Pause or resume moves, or change their speed."""
    return ring if ring.pace == pace else replace(ring, version=ring.version + 1, pace=pace)


def forget(ring: Ring, partition: PartitionId) -> Ring:
    """Remove a retired partition whose log is gone. Its id is never reused. Raises ValueError if the partition has not
    retired."""
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


def _no_more_wanted(ring: Ring, gone: set[MoveId]) -> Ring:
    """Return the same ring without counting these moves as planned: progress is that of the others."""
    tokens = sum(ring.moves[id].size for id in gone)
    journey = ring.journey
    return replace(ring, journey=replace(journey, moves=journey.moves - len(gone), tokens=journey.tokens - tokens))


def _without(ring: Ring, gone: set[MoveId]) -> Ring:
    moves = {id: move for id, move in ring.moves.items() if id not in gone}
    journey = ring.journey if moves else Journey()
    ring = replace(ring, version=ring.version + 1, moves=moves, journey=journey)
    return settled(replace(ring, tokens=merged(ring)))
