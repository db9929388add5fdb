"""Rings and their changes for tests: names, owners, and a mover that performs planned moves in any order."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from kvstore.ring import (
    MURMUR3,
    TOKENS,
    KeyHash,
    Member,
    MoveId,
    MoveState,
    PartitionState,
    Ring,
    builder,
    place_members,
    plan,
    steps,
)
from kvstore.types import PartitionId, ServerId

SERVERS = {ServerId(f"n{i}"): "" for i in range(1, 4)}
key_hash = MURMUR3
"""Key hash of new rings and states. The fixture `key_hash` (tests/conftest.py) runs tests with each."""


def ids(first: int, last: int) -> list[PartitionId]:
    return [PartitionId(f"p{i}") for i in range(first, last + 1)]


def new_ring(partitions: Sequence[PartitionId], servers: Mapping[ServerId, str], replicas: int) -> Ring:
    return builder.new_ring(partitions, servers, replicas, key_hash)


def unit_of(hash: KeyHash, key: bytes) -> tuple[int, int]:
    """Return the first and last token of the smallest range that can move with the key."""
    first = hash.token_of(key) // hash.unit * hash.unit
    return first, first + hash.unit - 1


def ring_of(count: int) -> Ring:
    return new_ring(ids(1, count), SERVERS, 3)


def members(partitions: Iterable[PartitionId]) -> list[Member]:
    return place_members(partitions, SERVERS, 3)


def owned(ring: Ring) -> dict[PartitionId, int]:
    """Return how many tokens each partition owns, and assert that none is missing."""
    found = dict.fromkeys(ring.partitions, 0)
    for span in ring.ranges():
        found[span.owner] += span.size
    assert sum(found.values()) == TOKENS
    return found


def balance(ring: Ring) -> float:
    """Return max/mean over the partitions that stay."""
    shares = [size for partition, size in owned(ring).items() if ring.partitions[partition].state == "serving"]
    return max(shares) * len(shares) / TOKENS


def differences(one: Ring, other: Ring) -> int:
    """Return how many tokens have another owner."""
    ends = sorted({*one.tokens, *other.tokens})
    return sum(
        (end - start) % TOKENS or TOKENS
        for start, end in zip([ends[-1], *ends], ends, strict=False)
        if one.owner_of(end) != other.owner_of(end)
    )


def advance(ring: Ring, id: MoveId) -> Ring:
    """Take the next step of one move, as its source and target would."""
    move = ring.moves[id]
    match move.state:
        case MoveState.PLANNED:
            return steps.begin(ring, id, move.attempt + 1)
        case MoveState.COPYING:
            return steps.flip(ring, id)
        case MoveState.FLIPPED:
            return steps.finish(ring, id)
        case MoveState.CANCELLING:
            return steps.cancelled(ring, id)


def settle(ring: Ring, pick: Callable[[list[MoveId]], MoveId] = min) -> Ring:
    """Perform all moves, one step at a time, and remove retired partitions."""
    while ring.moves:
        ring = advance(ring, pick(sorted(ring.moves)))
    for member in list(ring.partitions.values()):
        if member.state is PartitionState.RETIRED:
            ring = steps.forget(ring, member.id)
    return ring


def grown(count: int, more: int) -> Ring:
    return plan.join(ring_of(count), members(ids(count + 1, count + more)))
