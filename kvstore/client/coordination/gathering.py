"""Keys that end with their session, and what is made of them: groups, barriers, rendezvous. Decides only."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.client.coordination.lease import Lease
from kvstore.client.coordination.steps import Await, Find, Found, Recipe, Write
from kvstore.client.core import operations
from kvstore.errors import InvalidRequest, Refused

OPEN_S = 3600.0
"""How long a barrier stays open for parties that are late to hear of it."""


def put(lease: Lease, name: bytes, value: bytes) -> Recipe[int]:
    return (yield from _kept(lease, lease.path(name), value))


def _kept(lease: Lease, key: bytes, value: bytes) -> Recipe[int]:
    """Write a key of the session, and return its version. A new one of unknown outcome is kept no longer; one that was
    refused may be there as another session's."""
    is_new, is_unknown = key not in lease.keys, True
    try:
        (version,) = yield Write(puts={key: value})
        is_unknown = False
    except Refused:
        is_unknown = False
        raise
    finally:
        if is_new and is_unknown:
            lease.discard(key)
    return int(version)


def delete(lease: Lease, name: bytes) -> Recipe[None]:
    yield Write(drops=(lease.path(name),))


def join(lease: Lease, prefix: bytes, value: bytes) -> Recipe[int]:
    return (yield from _kept(lease, prefix + lease.id, value))


def leave(lease: Lease, prefix: bytes) -> Recipe[None]:
    yield Write(drops=(prefix + lease.id,))


def members(prefix: bytes) -> Recipe[Mapping[bytes, bytes]]:
    found: Found = yield Find(prefix)
    return _values(found, prefix)


def changed(prefix: bytes, known: Mapping[bytes, bytes], until: float) -> Recipe[Mapping[bytes, bytes]]:
    found: Found = yield Await(Find(prefix), lambda found: _values(found, prefix) != dict(known), until)
    return _values(found, prefix)


def _values(found: Found, prefix: bytes) -> dict[bytes, bytes]:
    return {key.removeprefix(prefix): item.value for key, item in found.items()}


def pass_barrier(lease: Lease, prefix: bytes, parties: int, until: float) -> Recipe[None]:
    """Arrive, and wait until `parties` have. Whoever goes on has made sure that all others will: the barrier is open
    from then on, though those who have passed it may end at once."""
    if parties < 1:
        raise InvalidRequest(f"want 1 party or more, got {parties}")
    arrival, opened = prefix + b"at-" + lease.id, prefix + b"open"
    try:
        yield Write(puts={arrival: b""})
        found: Found = yield Await(Find(prefix), lambda found: opened in found or len(found) >= parties, until)
        if opened not in found:
            yield Write(more=(operations.put(opened, b"", ttl_s=OPEN_S),))
    finally:
        lease.discard(arrival)  # who has passed is not waited for: the barrier is open


def meet(prefix: bytes, until: float) -> Recipe[bytes]:
    """Wait for what somebody has published there; of several that which was first."""
    found: Found = yield Await(Find(prefix), bool, until)
    return min(found.values(), key=lambda item: item.created).value
