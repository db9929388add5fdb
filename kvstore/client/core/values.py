"""The values that clients get and give: items, conditions, batches. Decides only."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

from kvstore.proto import kv_pb2


class Level(IntEnum):
    """How fresh a read must be."""

    LINEARIZABLE = kv_pb2.LINEARIZABLE
    """It sees every write that was acknowledged before the read began. The default."""
    STRICT = kv_pb2.STRICT
    """The same, without trusting any clock. Costs a round to the bookies."""
    SESSION = kv_pb2.SESSION
    """It sees at least what this client has written and read. Any replica may answer."""
    STALE = kv_pb2.STALE
    """It sees some past state. Any replica may answer, at once."""


class Item(NamedTuple):
    """A key that was found."""

    value: bytes
    version: int
    """Rises with each write of the key; what `if_version` compares."""
    created: int
    """The version with which the key came to be."""
    written_ms: int
    """When it was last written: milliseconds since 1970."""
    expires_ms: int
    """When it will be gone; 0: never."""


class Meta(NamedTuple):
    """A key that was found, without its value."""

    length: int
    """Of the value, in bytes."""
    version: int
    created: int
    written_ms: int
    expires_ms: int


class Page(NamedTuple):
    """Some keys of a range, in order."""

    items: list[tuple[bytes, Item]]
    """Perhaps fewer than were asked for, or none, though more follow: a page is bounded in bytes too."""
    token: str | None
    """What the next page is asked with, by whomever and whenever; None: there is no more."""


class Deleted(NamedTuple):
    """How far a deletion of many keys has come."""

    total: int
    """Keys deleted by this call so far."""
    token: str | None
    """What another call goes on with; None: all are deleted."""


class Replaced(NamedTuple):
    """The result of `replace`."""

    applied: bool
    """False: the condition was not met, and nothing was written."""
    version: int
    """The key's version now."""
    old: Item | None
    """What the key held before; None: it was absent."""


Token = Mapping[str, int]
"""How far a client has seen each partition, and under RING the ring. Another client that takes it reads at least as far
(Level.SESSION)."""
RING = ""
"""No partition has this name."""
