"""The values that clients accept and return. Decides only."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

from kvstore.proto import kv_pb2


class Level(IntEnum):
    """How fresh a read must be."""

    LINEARIZABLE = kv_pb2.LINEARIZABLE
    """The read sees every write that was acknowledged before the read began. The default."""
    STRICT = kv_pb2.STRICT
    """Like LINEARIZABLE, without trust in any clock. Costs one round trip to the bookies."""
    SESSION = kv_pb2.SESSION
    """The read sees at least what this client has written and read. Any replica may answer."""
    STALE = kv_pb2.STALE
    """The read sees some past state. Any replica may answer, at once."""


class Item(NamedTuple):
    """The value of a key, with its versions and times."""

    value: bytes
    version: int
    """Rises with each write of the key. `if_version` compares it."""
    created: int
    """Version with which the key was created."""
    written_ms: int
    """Time of the last write, in milliseconds since 1970."""
    expires_ms: int
    """Time of expiry, in milliseconds since 1970; 0: never."""


class Meta(NamedTuple):
    """A key that is present, without its value."""

    length: int
    """Length of the value, in bytes."""
    version: int
    created: int
    written_ms: int
    expires_ms: int


class Page(NamedTuple):
    """Some keys of a range, in order."""

    items: list[tuple[bytes, Item]]
    """May be fewer than `limit`, or none, although more follow: a page is bounded in bytes, too."""
    token: str | None
    """Token of the next page; None if there are no more keys. Any process may use it at any time."""


class Deleted(NamedTuple):
    """The progress of a deletion of many keys."""

    total: int
    """Number of keys that this call has deleted so far."""
    token: str | None
    """Token with which another call continues; None if all are deleted."""


class Replaced(NamedTuple):
    """The result of `replace`: whether the value was written, and the old item."""

    applied: bool
    """False if the condition was not met, so that nothing was written."""
    version: int
    """Version of the key now."""
    old: Item | None
    """Item that the key held before; None if it was absent."""


Token = Mapping[str, int]
"""How far a client has seen each partition, and the ring (under RING). A client that absorbs it reads at least as far.
"""
RING = ""
"""No partition has this name."""
