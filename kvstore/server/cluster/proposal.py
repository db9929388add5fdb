"""Converts an operator's request about the ring to the function that makes the change, and describes what the
function would change. Decides only."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy

from google.protobuf.message import Message

from kvstore.errors import InvalidRequest
from kvstore.proto import admin_pb2
from kvstore.ring import TOKENS, Move, MoveId, MoveState, Pace, PartitionState, Ring, TokenRange, place_members, steps
from kvstore.ring import plan as plans
from kvstore.ring.once import check_plan, hash_of
from kvstore.ring.operations import RingOperation
from kvstore.ring.placement import machine_count
from kvstore.types import PartitionId, ServerId

_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_NUMBERED = re.compile(r"p(\d{1,9})")
_Action = admin_pb2.ChangeRingRequest
_GOING = (PartitionState.LEAVING, PartitionState.RETIRED)
PARTITIONS_MAX = 1_000
"""Maximum number of partitions in a ring, for which plans, znodes and clients are designed."""

_NOT_ASKED = frozenset(("operation", "plan", "ring_version", "dry_run"))

Request = admin_pb2.ChangeRingRequest
Servers = Mapping[ServerId, str]
"""Running servers with their zones."""


def step_of(request: Request, servers: Servers, now_ms: int) -> Callable[[Ring], Ring]:
    """Return the function that makes the requested change of a ring. The function raises ValueError if the ring does
    not allow the change."""

    def step(ring: Ring) -> Ring:
        check_version(request.ring_version, ring)
        after = _changed(ring, request, servers, now_ms)
        check_plan(request.plan, ring, after)
        return after

    return step


def check_version(wanted: int, ring: Ring) -> None:
    """Raise ValueError if the request is for another version of the ring; 0 means any version."""
    if wanted and wanted != ring.version:
        raise ValueError(f"expected ring version {wanted}, it is now {ring.version}; read the ring again")


def asked(request: Message) -> str:
    """Return a hash of the requested change. The hash does not depend on the request's id and mode."""
    same = deepcopy(request)
    for field, _ in request.ListFields():
        if field.name in _NOT_ASKED:
            same.ClearField(field.name)
    return hash_of(same.SerializeToString(deterministic=True))


def _changed(ring: Ring, request: Request, servers: Servers, now_ms: int) -> Ring:
    match request.action:
        case _Action.SHOW:
            return ring
        case _Action.ADD:
            return _add(ring, request, servers, now_ms)
        case _Action.REMOVE:
            if not request.partitions:
                raise ValueError("expected partitions to remove, got none")
            return plans.leave(ring, [PartitionId(each) for each in request.partitions], now_ms=now_ms)
        case _Action.MOVE:
            return _move(ring, request, now_ms)
        case _Action.CANCEL:
            return _cancel(ring, request)
        case _:
            return steps.set_pace(ring, _pace(ring.pace, request))


def _add(ring: Ring, request: Request, servers: Servers, now_ms: int) -> Ring:
    count = len(request.partitions) or request.count or 1
    if len(ring.partitions) + count > PARTITIONS_MAX:
        raise ValueError(
            f"expected at most {PARTITIONS_MAX} partitions, got {count} in addition to {len(ring.partitions)}"
        )
    names = [PartitionId(each) for each in request.partitions] or next_ids(ring, count)
    for name in names:
        if not _ID.fullmatch(name):
            raise ValueError(f"expected lower-case letters, digits and dashes, at most 63, got {name!r}")
    if len(set(names)) != len(names):
        raise ValueError(f"expected each partition once, got {', '.join(names)}")
    may_hold = {server: zone for server, zone in servers.items() if server not in ring.draining}
    replicas = request.replicas or usual_replicas(ring)
    machines = machine_count(may_hold)
    if not request.replicas and replicas > machines:  # a lower number would stay when the other servers are back
        raise ValueError(
            f"expected {replicas} machines for new replicas, like the existing partitions, got {machines} with a "
            "server that can hold one now; start more servers, or set the number of replicas"
        )
    members = place_members(names, may_hold, replicas, ring.partitions.values(), PartitionState.JOINING)
    return plans.join(ring, members, now_ms=now_ms)


def _move(ring: Ring, request: Request, now_ms: int) -> Ring:
    target = PartitionId(request.target)
    if request.HasField("first") and request.HasField("last"):
        return plans.shift_range(ring, request.first, request.last, target, now_ms=now_ms)
    if not 0 < request.share <= 1:  # also rejects NaN
        raise ValueError(f"expected a share of the ring above 0 and at most 1, got {request.share:g}")
    size = round(request.share * TOKENS)
    return plans.shift(ring, PartitionId(request.source), target, size, now_ms=now_ms)


def _cancel(ring: Ring, request: Request) -> Ring:
    wanted = [MoveId(each) for each in request.moves] or list(ring.moves)
    for id in wanted:
        if id not in ring.moves:
            raise ValueError(f"move {id} is not in progress: it is done, was cancelled or never existed")
        if request.moves and ring.moves[id].state is MoveState.FLIPPED:
            raise ValueError(f"move {id} is done: {ring.moves[id].target} owns the range; move it back instead")
    after = steps.cancel(ring, wanted)
    if after is ring and not any(move.state is MoveState.CANCELLING for move in ring.moves.values()):
        raise ValueError("no open move can be cancelled")
    return after


def _pace(pace: Pace, request: Request) -> Pace:
    paused = {_Action.PAUSE: True, _Action.RESUME: False}.get(request.action, pace.paused)
    bytes_per_s = request.bytes_per_s if request.HasField("bytes_per_s") else pace.bytes_per_s
    parallel = request.parallel if request.HasField("parallel") else pace.parallel
    return Pace(paused, bytes_per_s, parallel)


def next_ids(ring: Ring, count: int) -> list[PartitionId]:
    """Return the next `count` ids of the form `p<number>` that were never used."""
    used = [_NUMBERED.fullmatch(each) for each in (*ring.partitions, *ring.retired)]
    first = 1 + max((int(match[1]) for match in used if match), default=0)
    return [PartitionId(f"p{number}") for number in range(first, first + count)]


def usual_replicas(ring: Ring) -> int:
    """Return the largest number of replicas of a partition. A newcomer and the replica that it replaces count once."""
    return max(len(member.replicas) - len(member.replacing) for member in ring.partitions.values())


# ── what it would change ──────────────────────────────────────────────────────────────────────────────────────────────


def proposal(
    before: Ring, after: Ring, keys: Mapping[PartitionId, int], record_bytes: Mapping[PartitionId, float]
) -> admin_pb2.ChangeRingResponse:
    """Describe the difference between two rings. `keys` and the mean `record_bytes` may lack some partitions."""
    shares, future = before.shares(), future_shares(after)
    answer = admin_pb2.ChangeRingResponse(
        version_before=before.version, balance_before=balance(before, shares), balance=balance(after, future)
    )
    for partition in sorted(after.partitions):
        row = answer.partitions.add(
            id=partition,
            state=after.partitions[partition].state.value,
            share_before=shares.get(partition, 0.0),
            share=future[partition],
        )
        if partition in keys:
            row.keys = keys[partition]
    _add_moves(answer, changed_moves(before, after), shares, keys, record_bytes)
    return answer


def recalled(
    done: RingOperation, ring: Ring, keys: Mapping[PartitionId, int], record_bytes: Mapping[PartitionId, float]
) -> admin_pb2.ChangeRingResponse:
    """Return the result of an operation that was made earlier, according to the current ring: the moves of the
    operation that are still open."""
    answer = proposal(ring, ring, keys, record_bytes)
    answer.version_before, answer.version, answer.was_done = done.before, done.version, True
    _add_moves(answer, open_moves(done, ring), ring.shares(), keys, record_bytes)
    return answer


def open_moves(done: RingOperation, ring: Ring) -> list[Move]:
    return [move for move in ring.moves.values() if done.first_move <= move.id < done.next_move]


def _add_moves(
    answer: admin_pb2.ChangeRingResponse,
    moves: Iterable[Move],
    shares: Mapping[PartitionId, float],
    keys: Mapping[PartitionId, int],
    record_bytes: Mapping[PartitionId, float],
) -> None:
    for move in moves:
        row_of_move = move_status(move, keys_of(move, shares, keys), record_bytes.get(move.source, 0.0))
        answer.moves.append(row_of_move)
        answer.keys += row_of_move.keys
        answer.bytes += row_of_move.bytes


def changed_moves(before: Ring, after: Ring) -> list[Move]:
    """Return the moves that are new in `after`, changed in it, or gone from it."""
    touched = [move for id, move in after.moves.items() if before.moves.get(id) != move]
    return touched + [move for id, move in before.moves.items() if id not in after.moves]


def move_status(move: Move, keys: float = 0.0, record_bytes: float = 0.0, copied: float = 0.0) -> admin_pb2.MoveStatus:
    """Return a move as a message. `keys` is the number of keys in the range, `copied` the fraction that the target
    has."""
    return admin_pb2.MoveStatus(
        id=move.id,
        source=move.source,
        target=move.target,
        first=move.first,
        last=move.end,
        state=move.state.value,
        attempt=move.attempt,
        keys=round(keys),
        bytes=round(keys * record_bytes),
        keys_copied=round(keys * copied),
        bytes_copied=round(keys * record_bytes * copied),
    )


def keys_of(move: Move, shares: Mapping[PartitionId, float], keys: Mapping[PartitionId, int]) -> float:
    """Estimate the number of keys in a move's range. The estimate assumes that a partition's keys are spread evenly
    over its tokens."""
    share = shares.get(move.source, 0.0)
    return keys.get(move.source, 0) * min(1.0, move.size / TOKENS / share) if share else 0.0


def future_shares(ring: Ring) -> dict[PartitionId, float]:
    """Return each partition's share of the hash space after all open moves."""
    owned = dict.fromkeys(ring.partitions, 0)
    for span in _ranges(plans.future_owners(ring)):
        owned[span.owner] += span.size
    return {partition: size / TOKENS for partition, size in owned.items()}


def _ranges(owners: Mapping[int, PartitionId]) -> Iterable[TokenRange]:
    ends = sorted(owners)
    starts = [ends[-1], *ends]
    return (TokenRange(start, end, owners[end]) for start, end in zip(starts, ends, strict=False))


def balance(ring: Ring, shares: Mapping[PartitionId, float]) -> float:
    """Return the largest share divided by the mean share of the partitions that stay."""
    staying = [shares[each.id] for each in ring.partitions.values() if each.state not in _GOING]
    return max(staying) * len(staying) if staying else 0.0


def eta_s(ring: Ring, now_ms: int, copied: Mapping[MoveId, float]) -> tuple[float, float | None]:
    """Return (fraction of the planned work that is done, seconds until the rest is done or None if unknown). `copied`
    is the copied fraction of each move in progress."""
    planned = ring.journey.tokens
    if not planned:
        return 1.0, None
    left = sum(
        move.size * (1 - copied.get(move.id, 0.0))
        for move in ring.moves.values()
        if move.state is not MoveState.FLIPPED
    )
    done = min(1.0, max(0.0, 1 - left / planned))
    elapsed_s = (now_ms - ring.journey.began_ms) / 1000
    if not done or ring.pace.paused or not ring.journey.began_ms or elapsed_s <= 0:
        return done, None
    return done, elapsed_s * (1 - done) / done


def refused(error: ValueError) -> InvalidRequest:
    """Return the error as clients receive it."""
    return InvalidRequest(str(error))
