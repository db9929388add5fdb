"""The subscriptions of one Redis client, and the messages on their way to it."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.server.redis.channels import Channels, Message
from kvstore.server.redis.pipeline.reply_queue import ReplyQueue
from kvstore.server.redis.session import RespSession

UNREAD_BYTES_MAX = 32 << 20
"""Bytes that a subscriber has not read at which it is disconnected: Redis's `client-output-buffer-limit pubsub`. The
memory for the replies of all clients limits slow subscribers together, and earlier."""
UNREAD_BYTES, UNREAD_S = 8 << 20, 60.0
"""A subscriber that has left this many bytes unread for this many seconds is disconnected."""
SEND_WORK = 20
"""Work to send messages to one client, in addition to a unit for every 4 KiB (channel_work.py)."""


class ClientSubscriber:
    """The subscriptions of one client. Messages of one event-loop turn are written together, after the replies to the
    commands of that turn. If many clients have messages, they take turns."""

    def __init__(
        self,
        channels: Channels,
        session: RespSession,
        replies: ReplyQueue,
        *,
        owner: str,
        readable: tuple[bytes, ...] | None,
        now: Callable[[], float],
        flush: Callable[[], None],
        note_slow: Callable[[], None],
    ) -> None:
        """`owner` and `readable`: see the attributes. `flush` sends the replies that are due. `note_slow` is called
        when the client is disconnected because it reads too slowly."""
        self.channels: dict[bytes, None] = {}
        self.patterns: dict[bytes, None] = {}
        self.owner = owner
        """The user of the client, or its network if access control is off."""
        self.readable = readable
        """Prefixes of the channels that the user may read; None: all. A right that is revoked ends the subscription
        soon, and its messages at once."""
        self._registry, self._session, self._replies = channels, session, replies
        self._now, self._flush, self._note_slow = now, flush, note_slow
        self._unsent: list[Message] = []
        """Messages that wait for their turn of the event loop."""
        self._large_since: float | None = None
        """Time since which the client has left more than UNREAD_BYTES unread."""

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

    def change_user(self, owner: str, readable: tuple[bytes, ...] | None) -> None:
        """Continue with the rights of this user."""
        self._registry.change_owner(self, owner)
        self.readable = readable

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

    def push(self, message: Message) -> None:
        """Send a message to the client in a later turn of the event loop."""
        if self.readable is not None and not message.channel.startswith(self.readable):
            return
        if not self._unsent:
            self._registry.work.soon(self._send, SEND_WORK)
        self._unsent.append(message)

    def settle(self) -> None:
        """Queue the waiting messages ahead of later replies. Call this before a reply that says that a subscription
        begins or ends."""
        self._queue()

    def _queue(self) -> int:
        """Queue the waiting messages and return the number of their bytes."""
        due, protocol, size = self._replies.due, self._session.protocol, 0
        for message in self._unsent:
            due.append(message.heads[protocol])
            due.append(message.body)
            size += len(message.body)
        self._unsent.clear()
        return size

    def _send(self) -> int:
        if self._replies.is_gone:
            self._unsent.clear()
            return 1
        size = self._queue()
        self._flush()
        if self._is_too_slow():
            self._note_slow()
            self._replies.abort()
        return SEND_WORK + (size >> 12)

    def _is_too_slow(self) -> bool:
        if self._replies.full_since is None or self._replies.is_gone:
            self._large_since = None
            return False
        unread, now = self._replies.held_bytes, self._now()
        if unread <= UNREAD_BYTES:
            self._large_since = None
            return False
        if self._large_since is None:
            self._large_since = now
        return unread > UNREAD_BYTES_MAX or now - self._large_since > UNREAD_S
