"""The Pub/Sub channels of one server: which clients subscribe to which channels and patterns, and the messages to them.
Decides only.

A message is never stored. It goes to the clients that are subscribed when it is published, and channel_peers.py sends
it to the other servers, whose subscribers receive it too (docs/design/0030).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, Protocol

from kvstore.env.shares import may_take
from kvstore.server.redis import replies
from kvstore.server.redis.channel_work import ChannelWork
from kvstore.server.redis.plans import CommandError
from kvstore.server.routing.keys import literal_prefix, matcher

CHANNEL_BYTES_MAX = 1_024
PATTERN_BYTES_MAX = 256
"""Maximum length of a subscribed pattern in bytes. Every message is matched against every pattern of the server."""
PER_CLIENT_MAX = 4_096
"""Maximum number of channels of one client. One SUBSCRIBE may name all of them, which takes about 10 ms."""
PATTERNS_PER_CLIENT_MAX = 64
SUBSCRIPTIONS_MAX = 100_000
"""Maximum number of subscriptions to channels and patterns, over all clients of the server."""
WILD_BYTES_MAX, WILD_BYTES_MIN = 2_048, 4
"""Maximum number of bytes of all different patterns of the server, each from its first wildcard on, and the number of
bytes with which a shorter pattern counts. To match a message takes about a nanosecond for each of these bytes and each
byte of the channel, so at most 2.5 ms."""
SUBSCRIBERS_PER_OPERATION = 16
"""Number of subscribers of a channel for which a message counts as one more operation in the rate of its namespace."""
MESSAGE_WORK = 5
"""Work to publish a message, in addition to matching it and to one unit for each subscriber (channel_work.py)."""
NAMES_PER_WORK, COMPILE_WORK = 2, 100
"""Number of subscriptions that begin or end per unit of work, and work to subscribe to one pattern."""


class Message(NamedTuple):
    """A message as it is sent to clients. All its subscribers share these bytes."""

    channel: bytes
    heads: dict[int, bytes]
    """The bytes before the body, by protocol version."""
    body: bytes


class Subscriber(Protocol):
    """A client with subscriptions. Implemented by kvstore.server.redis.pipeline.subscriber.ClientSubscriber."""

    channels: dict[bytes, None]
    patterns: dict[bytes, None]
    owner: str
    """The user of the client, or its network if access control is off."""

    def push(self, message: Message) -> None:
        """Send a message to the client soon."""
        ...


class _Pattern(NamedTuple):
    prefix: bytes
    """The literal bytes with which every matching channel begins."""
    matches: Callable[[bytes], bool]
    subscribers: dict[Subscriber, None]


class _Share:
    """The subscriptions of all clients of one owner."""

    def __init__(self) -> None:
        self.subscriptions = 0
        self.patterns: Counter[bytes] = Counter()
        """Number of clients that subscribe to each pattern."""


class Channels:
    """The subscriptions of all clients of one server.

    An owner, a user or a network, may use no more of a limit than it leaves free (kvstore/env/shares.py).
    """

    def __init__(self) -> None:
        self.send: Callable[[bytes, bytes], None] = lambda channel, message: None
        """Sends a message to the other servers. Set by the owner of the links to them."""
        self.work = ChannelWork()
        self.subscriptions = 0
        """Number of subscriptions to channels and patterns."""
        self.published = self.delivered = 0
        """Numbers of messages published here, and of messages sent to clients."""
        self._channels: dict[bytes, dict[Subscriber, None]] = {}
        self._patterns: dict[bytes, _Pattern] = {}
        self._wild_bytes = 0
        self._shares: dict[str, _Share] = {}

    # ── subscriptions ─────────────────────────────────────────────────────────────────────────────────────────────────

    def subscribe(self, subscriber: Subscriber, channels: Collection[bytes]) -> None:
        """Add the client's subscriptions to these channels: all of them, or none. Raises CommandError."""
        new = dict.fromkeys(each for each in channels if check_channel(each) not in subscriber.channels)
        if len(subscriber.channels) + len(new) > PER_CLIENT_MAX:
            raise CommandError(f"ERR expected at most {PER_CLIENT_MAX} channels of one client, got more")
        self._check_share(subscriber, len(new))
        for each in new:
            self._channels.setdefault(each, {})[subscriber] = None
        self._count(subscriber, len(new))
        self.work.add(len(channels) // NAMES_PER_WORK)

    def subscribe_patterns(self, subscriber: Subscriber, patterns: Collection[bytes]) -> None:
        """Add the client's subscriptions to these patterns: all of them, or none. Raises CommandError."""
        new = dict.fromkeys(each for each in patterns if _check_pattern(each) not in subscriber.patterns)
        if len(subscriber.patterns) + len(new) > PATTERNS_PER_CLIENT_MAX:
            raise CommandError(f"ERR expected at most {PATTERNS_PER_CLIENT_MAX} patterns of one client, got more")
        self._check_share(subscriber, len(new))
        more = sum(_wild_bytes(each) for each in new if each not in self._patterns)
        own = self._share(subscriber).patterns.keys() | new
        if more and not may_take(sum(map(_wild_bytes, own)), WILD_BYTES_MAX - self._wild_bytes - more):
            raise CommandError(
                f"ERR expected at most {WILD_BYTES_MAX} bytes of patterns after their first wildcards at this node, "
                "and at most as many of one user or network as are free; got more"
            )
        for each in new:
            if each not in self._patterns:
                self._patterns[each] = _Pattern(literal_prefix(each), matcher(each), {})
            self._patterns[each].subscribers[subscriber] = None
        self._wild_bytes += more
        self._count(subscriber, len(new))
        for each in new:
            self._count_pattern(subscriber, each, 1)
        self.work.add(COMPILE_WORK * len(new))

    def unsubscribe(self, subscriber: Subscriber, channels: Collection[bytes]) -> None:
        """Remove the client's subscriptions to those of the channels that it is subscribed to."""
        ended = 0
        for each in channels:
            if (clients := self._channels.get(each)) is not None and subscriber in clients:
                del clients[subscriber]
                ended += 1
                if not clients:
                    del self._channels[each]
        self._count(subscriber, -ended)
        self.work.add(len(channels) // NAMES_PER_WORK)

    def unsubscribe_patterns(self, subscriber: Subscriber, patterns: Iterable[bytes]) -> None:
        """Remove the client's subscriptions to those of the patterns that it is subscribed to."""
        for each in patterns:
            if (pattern := self._patterns.get(each)) is not None and subscriber in pattern.subscribers:
                del pattern.subscribers[subscriber]
                self._count_pattern(subscriber, each, -1)
                self._count(subscriber, -1)
                if not pattern.subscribers:
                    del self._patterns[each]
                    self._wild_bytes -= _wild_bytes(each)

    # ── shares ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def change_owner(self, subscriber: Subscriber, owner: str) -> None:
        """Count the client's subscriptions for another owner from now on, because it has authenticated again."""
        if owner == subscriber.owner:
            return
        count = len(subscriber.channels) + len(subscriber.patterns)
        for each in subscriber.patterns:
            self._count_pattern(subscriber, each, -1)
        self._count(subscriber, -count)
        subscriber.owner = owner
        self._count(subscriber, count)
        for each in subscriber.patterns:
            self._count_pattern(subscriber, each, 1)

    def _share(self, subscriber: Subscriber) -> _Share:
        return self._shares.get(subscriber.owner) or _Share()

    def _check_share(self, subscriber: Subscriber, more: int) -> None:
        free = SUBSCRIPTIONS_MAX - self.subscriptions - more
        if more and not may_take(self._share(subscriber).subscriptions + more, free):
            raise CommandError(
                f"ERR expected at most {SUBSCRIPTIONS_MAX} subscriptions to this node, and at most as many of one "
                "user or network as are free; got more"
            )

    def _count(self, subscriber: Subscriber, more: int) -> None:
        if not more:
            return
        self.subscriptions += more
        share = self._shares.setdefault(subscriber.owner, _Share())
        share.subscriptions += more
        if not share.subscriptions:
            del self._shares[subscriber.owner]

    def _count_pattern(self, subscriber: Subscriber, pattern: bytes, more: int) -> None:
        patterns = self._shares[subscriber.owner].patterns
        patterns[pattern] += more
        if not patterns[pattern]:
            del patterns[pattern]

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
        count, body = 0, b""
        if clients := self._channels.get(channel):
            body = replies.bulk(message)
            count = _push(clients, Message(channel, _heads(b"message", channel), body))
        for name, pattern in self._patterns.items():
            if channel.startswith(pattern.prefix) and pattern.matches(channel):
                body = body or replies.bulk(message)
                count += _push(pattern.subscribers, Message(channel, _heads(b"pmessage", name, channel), body))
        self.delivered += count
        matching = len(self._patterns) // 8 + (self._wild_bytes * len(channel) >> 10)
        self.work.add(MESSAGE_WORK + matching + count + (len(message) >> 12) * (count + 1))
        return count

    # ── reports ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def pattern_count(self) -> int:
        """Number of different patterns."""
        return len(self._patterns)

    def names(self) -> list[bytes]:
        """Return the channels that have subscribers, not counting patterns."""
        return list(self._channels)

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


def _wild_bytes(pattern: bytes) -> int:
    return max(WILD_BYTES_MIN, len(pattern) - len(literal_prefix(pattern)))


def _heads(*words: bytes) -> dict[int, bytes]:
    names = b"".join(map(replies.bulk, words))
    return {protocol: head % (len(words) + 1) + names for protocol, head in replies.PUSH.items()}


def _push(subscribers: Collection[Subscriber], message: Message) -> int:
    for each in subscribers:
        each.push(message)
    return len(subscribers)
