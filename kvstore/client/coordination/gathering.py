"""Keys that end with their session, and groups made of them. Decides only."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.client.coordination.lease import Lease
from kvstore.client.coordination.steps import Await, Find, Found, Recipe, Write


def put(lease: Lease, name: bytes, value: bytes) -> Recipe[int]:
    return (yield from _kept(lease, lease.path(name), value))


def _kept(lease: Lease, key: bytes, value: bytes) -> Recipe[int]:
    """Write a key of the session, and return its version. A new one of unknown outcome is kept no longer."""
    is_new, is_written = key not in lease.keys, False
    try:
        (version,) = yield Write(puts={key: value})
        is_written = True
    finally:
        if is_new and not is_written:
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
    found: Found = yield Await(prefix, lambda found: _values(found, prefix) != dict(known), until)
    return _values(found, prefix)


def _values(found: Found, prefix: bytes) -> dict[bytes, bytes]:
    return {key.removeprefix(prefix): item.value for key, item in found.items()}
