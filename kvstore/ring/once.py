"""Applies an operator's change of the ring at most once, and only if the change is still the one that the operator was
shown (docs/protocol.md, H11). Decides only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b

from kvstore.ring.codec import encode
from kvstore.ring.moves import Journey
from kvstore.ring.operations import ID, RingOperation, find, mark_of, remember
from kvstore.ring.ring import Ring

HASH_BYTES = 8


def hash_of(request: bytes) -> str:
    """Return the hash by which a repeated request is recognized."""
    return blake2b(request, digest_size=HASH_BYTES).hexdigest()


def once(ring: Ring, id: str, asked: str, step: Callable[[Ring], Ring]) -> Ring:
    """Return `step(ring)`, with the operation recorded in the ring under `id`. If the operation was already done,
    return `ring` unchanged. Nothing is recorded if `id` is empty or the step changes nothing.

    `asked` is the hash of the request (`hash_of`). Raises ValueError if `id` is malformed, was used for another
    request, or belongs to an operation so old that the ring no longer holds its result.
    """
    if id and not ID.fullmatch(id):
        raise ValueError(f"operation {id[:80]!r}: expected at most 64 lower-case letters, digits and dashes")
    done = find(ring.operations, id)
    if done is not None:
        if done.asked != asked:
            raise ValueError(f"operation {id} was another request, done as ring version {done.version}; use another id")
        return ring
    if id and mark_of(id) in ring.forgotten:
        raise ValueError(
            f"operation {id} was done too many operations ago to report its result; check the ring, and for "
            "another change use another id"
        )
    after = step(ring)
    if not id or after is ring:
        return after
    joined = tuple(sorted(after.partitions.keys() - ring.partitions.keys()))
    made = RingOperation(id, asked, ring.version, after.version, ring.next_move, after.next_move, joined)
    operations, forgotten = remember(after.operations, after.forgotten, made)
    return replace(after, operations=operations, forgotten=forgotten)


def plan_token(before: Ring, after: Ring) -> str:
    """Return a token that identifies a change: the version of the ring that it changes, and a hash of the resulting
    ring. The token does not depend on when the change is planned."""
    change = encode(replace(after, journey=Journey(), operations=(), forgotten=()))
    return f"{before.version}-{blake2b(change, digest_size=HASH_BYTES).hexdigest()}"


def check_plan(token: str, before: Ring, after: Ring) -> None:
    """Raise ValueError if `token` is set and does not identify this change: the ring or the servers have changed since
    the operator was shown the plan."""
    found = plan_token(before, after)
    if token and token != found:
        shown = token.partition("-")[0]
        if shown != str(before.version):
            raise ValueError(f"plan {token} is of ring version {shown}, which is {before.version} by now; plan again")
        raise ValueError(f"plan {token} has become {found}, because servers came or went; plan again")
