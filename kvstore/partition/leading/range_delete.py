"""Tracks a DELETE_RANGE that takes several entries, and limits how much of it goes into one entry. Decides only."""

from __future__ import annotations

from typing import Any

import msgspec

from kvstore.errors import OutcomeUnknown, Refused, StoreError
from kvstore.partition.state.commands import DeleteRange, RequestId, Result, Sink
from kvstore.partition.state.draft import Draft
from kvstore.partition.state.overlay import Overlay
from kvstore.partition.state.tokens import Tokens

RANGE_KEYS_MAX = 1000
RANGE_BYTES_MAX = 1 << 20
"""Maximum number of keys, and of bytes of keys, that one entry deletes. A longer DELETE_RANGE continues in the next
entry."""

RangeId = tuple[bytes, int, int]
"""Client, sequence, hash of the key."""


class RestOfRange(DeleteRange):
    """The unfinished part of a DELETE_RANGE. Only the leader itself queues this operation."""

    count: int = 0
    """Number of keys deleted so far."""
    hash_of_key: int = 0
    """Hash of the key with which the whole range begins."""


class Reap(DeleteRange):
    """Delete those of `keys` that are past their expiry. Only the leader itself queues this operation."""

    key: bytes = b""
    end: bytes = b""  # type: ignore[misc]  # empty in every other class
    keys: list[bytes] = msgspec.field(default_factory=list)


class RangeSink(Sink):
    """The sink of a DELETE_RANGE that is partly evaluated. The operation is in flight until it is answered, and can no
    longer be refused."""

    def __init__(self, sink: Any, in_flight: set[RangeId], request: RequestId | None, hash_of_key: int) -> None:
        self._sink, self._in_flight = sink, in_flight
        self._id = None if request is None else (request[0], request[1], hash_of_key)
        if self._id is not None:
            in_flight.add(self._id)

    def forget(self) -> None:
        """Mark the operation as not in flight."""
        if self._id is not None:
            self._in_flight.discard(self._id)

    def complete(self, token: int, result: Result | StoreError) -> None:
        self.forget()
        if isinstance(result, Refused):
            result = OutcomeUnknown(f"some keys of the range were deleted before this error: {result}")
        self._sink.complete(token, result)

    def flush(self) -> None:
        self._sink.flush()


def cut(keys: list[bytes], following: bytes | None, size: int) -> tuple[list[bytes], bytes | None]:
    """Return the keys, at least one, that an entry of already `size` bytes may delete, and the first key that it may
    not delete. The limit is necessary because entries in flight may have written any number of keys, and an entry that
    is too large for a bookie would end the leadership."""
    for place, key in enumerate(keys):
        size += len(key)
        if place and (size > RANGE_BYTES_MAX or place == RANGE_KEYS_MAX):
            return keys[:place], key
    return keys, following


def written_between(overlay: Overlay, draft: Draft, start: bytes, end: bytes | None, tokens: Tokens) -> list[bytes]:
    """Return the keys in the range [start, end) and of these tokens that entries in flight, or the entry under
    construction, write."""
    changed = overlay.rows_between(start, end)
    own = draft.layer.rows.items()
    token_of = draft.hash.token_of
    changed.update({key: row for key, row in own if key >= start and (end is None or key < end)})
    return [key for key, row in changed.items() if row is not None and tokens.holds(token_of(key))]
