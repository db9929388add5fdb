"""Makes changes of the ring that are done at most once, and only as they were shown (docs/protocol.md, H11). Decides
only."""

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
    """Hash a request."""
    return blake2b(request, digest_size=HASH_BYTES).hexdigest()


def once(ring: Ring, id: str, asked: str, step: Callable[[Ring], Ring]) -> Ring:
    """Return `step(ring)`, with the operation remembered under its id, or the same ring if the operation was done
    already. Without an id, or if nothing changes, nothing is remembered. Raises ValueError if the id belongs to another
    request, or to one so old that its result is forgotten."""
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
    """Name a change by its contents and by the ring that it changes, not by its time."""
    change = encode(replace(after, journey=Journey(), operations=(), forgotten=()))
    return f"{before.version}-{blake2b(change, digest_size=HASH_BYTES).hexdigest()}"


def check_plan(token: str, before: Ring, after: Ring) -> None:
    """Raise ValueError if this change is not the one that was shown."""
    found = plan_token(before, after)
    if token and token != found:
        shown = token.partition("-")[0]
        if shown != str(before.version):
            raise ValueError(f"plan {token} is of ring version {shown}, which is {before.version} by now; plan again")
        raise ValueError(f"plan {token} has become {found}, because servers came or went; plan again")
