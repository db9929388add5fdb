"""A bookie's connections: what both protocols answer with, what clients have not read, and who may wait for news.
Decides only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

UNREAD_HIGH_BYTES = 1 << 20
"""Answers that a client has not read; from here on its connection is not served on."""
UNREAD_SURE_BYTES = 4 << 20
"""What a connection may hold for certain: what was under way before it was not served on still becomes ready."""
UNREAD_TOGETHER_BYTES = 128 << 20
"""Of all connections; beyond it those with more than UNREAD_SURE_BYTES get no more entries."""
UNREAD_WITH_FENCES_BYTES = 2 * UNREAD_TOGETHER_BYTES
"""The same for answers to fencing reads: others that are not taken do not keep a recovery waiting."""
UNREAD_MAX_BYTES = 32 << 20
POLLS_SURE = 64
"""Long polls that a connection may have for certain."""
POLLS_TOGETHER = 4096
"""Of all connections; beyond it those with more than POLLS_SURE get no more. All that wait for one ledger are answered
in one turn of the event loop."""


class ResponseEncoders(Protocol):
    """The encoders that both versions of the protocol have: the module of each."""

    def encode_add_response(self, _txn: int, status: int, ledger: int, entry: int, /) -> bytes: ...
    def encode_read_response(
        self, _txn: int, status: int, ledger: int, entry: int, body: bytes | None = ..., _max_lac: int | None = ..., /
    ) -> bytes: ...
    def encode_auth_response(self, _txn: int, /) -> bytes: ...


class ClientConnection(Protocol):
    """A connection."""

    @property
    def unread_bytes(self) -> int:
        """Answers that its client has not read."""
        ...


def has_room(
    connection: ClientConnection, size: int, connections: Iterable[ClientConnection], *, is_fence: bool = False
) -> bool:
    """Whether an answer of `size` bytes may be kept for a connection until its client reads it. A fencing read that
    finds none has set its fence all the same; its client, a recovery, knows nothing of the entry then."""
    unread = connection.unread_bytes + size
    if unread <= UNREAD_SURE_BYTES:
        return True
    together = UNREAD_WITH_FENCES_BYTES if is_fence else UNREAD_TOGETHER_BYTES
    return unread <= UNREAD_MAX_BYTES and sum(each.unread_bytes for each in connections) + size <= together


def may_poll(own: int, together: int) -> bool:
    """Whether a connection with so many long polls, of so many of all, may have one more."""
    return own < POLLS_SURE or together < POLLS_TOGETHER
