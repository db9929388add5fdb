"""The Pub/Sub channels of one server: which clients subscribe to which channels and patterns, and the messages to them.
Decides only.

A message is never stored. It goes to the clients that are subscribed when it is published, and channel_peers.py sends
it to the other servers, whose subscribers receive it too (docs/design/0030).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, Protocol

from kvstore.server.redis import replies
from kvstore.server.redis.plans import CommandError
from kvstore.server.routing.keys import literal_prefix, matcher

CHANNEL_BYTES_MAX = 1_024
PATTERN_BYTES_MAX = 256
"""Maximum length of a subscribed pattern in bytes. Every message is matched against every pattern of the server."""
PER_CLIENT_MAX = 10_000
"""Maximum number of channels of one client."""
PATTERNS_PER_CLIENT_MAX = 64
SUBSCRIPTIONS_MAX = 100_000
"""Maximum number of subscriptions to channels, over all clients of the server."""
PATTERNS_MAX = 512
"""Maximum number of different patterns, over all clients of the server."""

Frames = dict[int, bytes]
"""One message as it is sent to a client, by protocol version."""


class Subscriber(Protocol):
    """A client with subscriptions. Implemented by kvstore.server.redis.pipeline.subscriber.ClientSubscriber."""

    channels: dict[bytes, None]
    patterns: dict[bytes, None]

    def push(self, frames: Frames) -> None:
        """Send a message to the client soon."""
        ...


class _Pattern(NamedTuple):
    prefix: bytes
    """The literal bytes with which every matching channel begins."""
    matches: Callable[[bytes], bool]
    subscribers: dict[Subscriber, None]


class Channels:
    """The subscriptions of all clients of one server."""

    def __init__(self) -> None:
        self.send: Callable[[bytes, bytes], None] = lambda channel, message: None
        """Sends a message to the other servers. Set by the owner of the links to them."""
        self.subscriptions = 0
        """Number of subscriptions to channels."""
        self.published = self.delivered = 0
        """Numbers of messages published here, and of messages sent to clients."""
        self._channels: dict[bytes, dict[Subscriber, None]] = {}
        self._patterns: dict[bytes, _Pattern] = {}

    # ── subscriptions ─────────────────────────────────────────────────────────────────────────────────────────────────

    def subscribe(self, subscriber: Subscriber, channels: Collection[bytes]) -> None:
        """Add the client's subscriptions to these channels: all of them, or none. Raises CommandError."""
        new = dict.fromkeys(each for each in channels if check_channel(each) not in subscriber.channels)
        if len(subscriber.channels) + len(new) > PER_CLIENT_MAX:
            raise CommandError(f"ERR expected at most {PER_CLIENT_MAX} channels of one client, got more")
        if self.subscriptions + len(new) > SUBSCRIPTIONS_MAX:
            raise CommandError(f"ERR expected at most {SUBSCRIPTIONS_MAX} subscriptions to this node, got more")
        for each in new:
            self._channels.setdefault(each, {})[subscriber] = None
        self.subscriptions += len(new)

    def subscribe_patterns(self, subscriber: Subscriber, patterns: Collection[bytes]) -> None:
        """Add the client's subscriptions to these patterns: all of them, or none. Raises CommandError."""
        new = dict.fromkeys(each for each in patterns if _check_pattern(each) not in subscriber.patterns)
        if len(subscriber.patterns) + len(new) > PATTERNS_PER_CLIENT_MAX:
            raise CommandError(f"ERR expected at most {PATTERNS_PER_CLIENT_MAX} patterns of one client, got more")
        if len(self._patterns.keys() | new) > PATTERNS_MAX:
            raise CommandError(f"ERR expected at most {PATTERNS_MAX} patterns of clients of this node, got more")
        for each in new:
            if each not in self._patterns:
                self._patterns[each] = _Pattern(literal_prefix(each), matcher(each), {})
            self._patterns[each].subscribers[subscriber] = None

    def unsubscribe(self, subscriber: Subscriber, channels: Iterable[bytes]) -> None:
        """Remove the client's subscriptions to those of the channels that it is subscribed to."""
        for each in channels:
            if (clients := self._channels.get(each)) is not None and subscriber in clients:
                del clients[subscriber]
                self.subscriptions -= 1
                if not clients:
                    del self._channels[each]

    def unsubscribe_patterns(self, subscriber: Subscriber, patterns: Iterable[bytes]) -> None:
        """Remove the client's subscriptions to those of the patterns that it is subscribed to."""
        for each in patterns:
            if (pattern := self._patterns.get(each)) is not None and subscriber in pattern.subscribers:
                del pattern.subscribers[subscriber]
                if not pattern.subscribers:
                    del self._patterns[each]

    # ── messages ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def publish(self, channel: bytes, message: bytes) -> int:
        """Send a message to the subscribers of all servers. Return the number of subscriptions at this server that
        receive it."""
        self.published += 1
        self.send(channel, message)
        return self.deliver(channel, message)

    def deliver(self, channel: bytes, message: bytes) -> int:
        """Send a message to the subscribers of this server, and return their number. A client that is subscribed to
        the channel and to patterns receives the message once for each subscription, as in Redis."""
        count = 0
        if clients := self._channels.get(channel):
            count = _push(clients, _frames(b"message", channel, message))
        for name, pattern in self._patterns.items():
            if channel.startswith(pattern.prefix) and pattern.matches(channel):
                count += _push(pattern.subscribers, _frames(b"pmessage", name, channel, message))
        self.delivered += count
        return count

    # ── reports ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def pattern_count(self) -> int:
        """Number of different patterns."""
        return len(self._patterns)

    def names(self) -> list[bytes]:
        """Return the channels that have subscribers, not counting patterns, in order."""
        return sorted(self._channels)

    def subscribers_of(self, channel: bytes) -> int:
        """Return the number of clients that are subscribed to the channel, not counting patterns."""
        return len(self._channels.get(channel, ()))

    @property
    def channel_count(self) -> int:
        """Number of channels that have subscribers, not counting patterns."""
        return len(self._channels)


def check_channel(name: bytes) -> bytes:
    """Return the name of a channel. Raises CommandError if it cannot be one."""
    if not 0 < len(name) <= CHANNEL_BYTES_MAX:
        raise CommandError(f"ERR expected a channel of 1 to {CHANNEL_BYTES_MAX} bytes, got {len(name)}")
    return name


def _check_pattern(pattern: bytes) -> bytes:
    if not 0 < len(pattern) <= PATTERN_BYTES_MAX:
        raise CommandError(f"ERR expected a pattern of 1 to {PATTERN_BYTES_MAX} bytes, got {len(pattern)}")
    return pattern


def _frames(*words: bytes) -> Frames:
    body = b"".join(map(replies.bulk, words))
    return {protocol: head % len(words) + body for protocol, head in replies.PUSH.items()}


def _push(subscribers: Collection[Subscriber], frames: Frames) -> int:
    for each in subscribers:
        each.push(frames)
    return len(subscribers)
