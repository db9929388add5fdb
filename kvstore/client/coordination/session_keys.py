"""Keys that end with their session, and the groups, barriers and rendezvous made of them. Decides only."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.client.coordination.lease import SessionLease
from kvstore.client.coordination.steps import AwaitStep, FindStep, Found, NameTaken, Recipe, WriteStep
from kvstore.client.core import operations
from kvstore.errors import ConditionFailed, InvalidRequest, Refused

OPEN_S = 3600.0
"""How long a barrier stays open for late parties, in seconds."""


# docs/protocol.md Q1
def put(lease: SessionLease, name: bytes, value: bytes, *, waits: bool) -> Recipe[int]:
    """Write a key of the session, and return its version. If the key belongs to another session, raise NameTaken or
    wait until it is gone. A write of unknown outcome is neither kept nor deleted, because the key may belong to another
    session by then: it expires."""
    key = lease.path(name)
    while True:
        try:
            (version,) = yield WriteStep(puts={key: value})
            return int(version)
        except ConditionFailed:
            if not waits:
                raise NameTaken(
                    f"{key!r} exists and does not belong to this session; waits=True waits until it is deleted"
                ) from None
        yield AwaitStep(FindStep(key, keys_only=True), lambda found: key not in found, is_key=True)


def delete(lease: SessionLease, key: bytes) -> Recipe[None]:
    """Delete a key if it belongs to the session. If the outcome is unknown, the key is not kept either."""
    if key not in lease.keys:
        return
    try:
        yield WriteStep(drops=(key,))
    except Refused:
        raise  # nothing was done
    except BaseException:
        lease.forget(key)
        raise


def join(lease: SessionLease, prefix: bytes, value: bytes) -> Recipe[None]:
    """Write the key with the session's id, which no other session writes."""
    key = prefix + lease.id
    is_new, is_unknown = key not in lease.keys, True
    try:
        yield WriteStep(puts={key: value})
        is_unknown = False
    except Refused:
        is_unknown = False
        raise
    finally:
        if is_new and is_unknown:
            lease.discard(key)


def members(prefix: bytes) -> Recipe[Mapping[bytes, bytes]]:
    found: Found = yield FindStep(prefix)
    return _values(found, prefix)


def changed(prefix: bytes, known: Mapping[bytes, bytes]) -> Recipe[Mapping[bytes, bytes]]:
    found: Found = yield AwaitStep(FindStep(prefix), lambda found: _values(found, prefix) != dict(known))
    return _values(found, prefix)


def _values(found: Found, prefix: bytes) -> dict[bytes, bytes]:
    return {key.removeprefix(prefix): item.value for key, item in found.items()}


def pass_barrier(lease: SessionLease, prefix: bytes, parties: int, party: bytes) -> Recipe[None]:
    """Arrive as `party`, and wait until `parties` different ones have arrived. The first to pass opens the barrier for
    all others, because parties that have passed may end at once."""
    if parties < 1 or not party:
        raise InvalidRequest(f"expected 1 party or more and the name of this one, got {parties}, {party!r}")
    arrival, opened = prefix + b"at-" + lease.id, prefix + b"open"

    def is_met(found: Found) -> bool:
        return opened in found or len({item.value for item in found.values()}) >= parties

    try:
        yield WriteStep(puts={arrival: party}, is_given_up=True)
        found: Found = yield AwaitStep(FindStep(prefix), is_met)
        if opened not in found:
            yield WriteStep(more=(operations.put(opened, b"", ttl_s=OPEN_S),))
    finally:
        lease.discard(arrival)  # nobody waits for a party that has passed: the barrier is open


def meet(prefix: bytes) -> Recipe[bytes]:
    """Wait for a published value. Of several the first one counts."""
    found: Found = yield AwaitStep(FindStep(prefix), bool)
    return min(found.values(), key=lambda item: item.created).value
