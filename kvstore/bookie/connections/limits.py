"""The limits of a bookie's connections on unread answers and long polls, and the encoders that both protocol versions
share. Decides only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

UNREAD_HIGH_BYTES = 1 << 20
"""Number of bytes of answers that a client has not read, above which no further requests of its connection are
handled."""
UNREAD_SURE_BYTES = 4 << 20
"""Number of bytes of unread answers that every connection may hold, so that requests complete that were in progress
when the connection was stopped."""
UNREAD_TOTAL_BYTES = 128 << 20
"""Maximum number of bytes of unread answers over all connections. Above it, connections with more than
UNREAD_SURE_BYTES get no more entries."""
UNREAD_WITH_FENCES_BYTES = 2 * UNREAD_TOTAL_BYTES
"""The same limit for answers to fencing reads, so that other unread answers do not delay a recovery."""
UNREAD_MAX_BYTES = 32 << 20
POLLS_SURE = 64
"""Number of long polls that every connection may have."""
POLLS_TOTAL_MAX = 4096
"""Maximum number of long polls over all connections. Above it, connections with more than POLLS_SURE get no more. All
polls of one ledger are answered in one turn of the event loop."""


class ResponseEncoders(Protocol):
    """The encoders that both protocol versions provide. The module of each version implements them."""

    def encode_add_response(self, _txn: int, status: int, ledger: int, entry: int, /) -> bytes: ...
    def encode_read_response(
        self, _txn: int, status: int, ledger: int, entry: int, body: bytes | None = ..., _max_lac: int | None = ..., /
    ) -> bytes: ...
    def encode_auth_response(self, _txn: int, /) -> bytes: ...


class ClientConnection(Protocol):
    """The part of a client's connection that the limit on unread answers needs."""

    @property
    def unread_bytes(self) -> int:
        """Bytes of answers that the client has not read yet."""
        ...


def has_capacity(
    connection: ClientConnection, size: int, connections: Iterable[ClientConnection], *, is_fence: bool = False
) -> bool:
    """Return True if an answer of `size` bytes may be kept for a connection until its client reads it. If the result is
    False for a fencing read, the fence is set, but the client, a recovery, does not receive the entry."""
    unread = connection.unread_bytes + size
    if unread <= UNREAD_SURE_BYTES:
        return True
    total = UNREAD_WITH_FENCES_BYTES if is_fence else UNREAD_TOTAL_BYTES
    return unread <= UNREAD_MAX_BYTES and sum(each.unread_bytes for each in connections) + size <= total


def may_poll(own: int, total: int) -> bool:
    """Return True if a connection that has `own` long polls may start another one while all connections together have
    `total`."""
    return own < POLLS_SURE or total < POLLS_TOTAL_MAX
