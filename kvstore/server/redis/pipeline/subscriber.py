"""The subscriptions of one Redis client, and the messages on their way to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvstore.server.redis.channels import Channels, Frames
from kvstore.server.redis.pipeline.reply_queue import ReplyQueue
from kvstore.server.redis.session import RespSession

UNREAD_BYTES_MAX = 32 << 20
"""Bytes that a subscriber has not read at which it is disconnected: Redis's `client-output-buffer-limit pubsub`. The
memory for the replies of all clients limits slow subscribers together, and earlier."""
UNREAD_BYTES, UNREAD_S = 8 << 20, 60.0
"""A subscriber that has left this many bytes unread for this many seconds is disconnected."""


class ClientSubscriber:
    """The subscriptions of one client. Messages of one event-loop turn are written together, after the replies to the
    commands of that turn."""

    def __init__(
        self,
        channels: Channels,
        session: RespSession,
        replies: ReplyQueue,
        *,
        now: Callable[[], float],
        flush: Callable[[], None],
        note_slow: Callable[[], None],
    ) -> None:
        """`flush` sends the replies that are due. `note_slow` is called when the client is disconnected because it
        reads too slowly."""
        self.channels: dict[bytes, None] = {}
        self.patterns: dict[bytes, None] = {}
        self._registry, self._session, self._replies = channels, session, replies
        self._now, self._flush, self._note_slow = now, flush, note_slow
        self._unsent: list[bytes] = []
        """Messages of this turn of the event loop."""

    def subscribe(self, names: list[bytes], *, are_patterns: bool) -> list[int]:
        """Subscribe to channels or patterns, to all or to none. Return the number of the client's subscriptions after
        each of them. Raises CommandError."""
        own = self.patterns if are_patterns else self.channels
        add = self._registry.subscribe_patterns if are_patterns else self._registry.subscribe
        add(self, names)
        counts = []
        for each in names:
            own[each] = None
            counts.append(self.count)
        self._note_count()
        return counts

    def unsubscribe(self, names: list[bytes], *, are_patterns: bool) -> list[int]:
        """Unsubscribe from channels or patterns. Return the number of the client's subscriptions after each of
        them."""
        own = self.patterns if are_patterns else self.channels
        remove = self._registry.unsubscribe_patterns if are_patterns else self._registry.unsubscribe
        remove(self, names)
        counts = []
        for each in names:
            own.pop(each, None)
            counts.append(self.count)
        self._note_count()
        return counts

    def end(self) -> None:
        """Unsubscribe from everything and drop the messages that have not been sent."""
        self._registry.unsubscribe(self, self.channels)
        self._registry.unsubscribe_patterns(self, self.patterns)
        self.channels, self.patterns = {}, {}
        self._unsent.clear()
        self._note_count()

    @property
    def count(self) -> int:
        """Number of subscriptions."""
        return len(self.channels) + len(self.patterns)

    def _note_count(self) -> None:
        self._session.subscribed(self.count)

    # ── messages ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def push(self, frames: Frames) -> None:
        """Send a message to the client at the end of this turn of the event loop."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send)
        self._unsent.append(frames[self._session.protocol])

    def settle(self) -> None:
        """Queue the messages of this turn ahead of later replies. Call this before a reply that says that a
        subscription begins or ends."""
        self._replies.due += self._unsent
        self._unsent.clear()

    def _send(self) -> None:
        if self._replies.is_gone:
            return
        self.settle()
        self._flush()
        since = self._replies.full_since
        if since is None or self._replies.is_gone:
            return
        unread = self._replies.held_bytes
        if unread > UNREAD_BYTES_MAX or (unread > UNREAD_BYTES and self._now() - since > UNREAD_S):
            self._note_slow()
            self._replies.abort()
