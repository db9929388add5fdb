"""Pub/Sub commands: subscriptions to channels, and messages to their subscribers on all nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from kvstore.access import Right, end_of_prefix
from kvstore.server.redis import replies
from kvstore.server.redis.channels import CHANNEL_BYTES_MAX, PATTERN_BYTES_MAX, check_channel
from kvstore.server.redis.commands.asking import visible
from kvstore.server.redis.commands.performer import Performer
from kvstore.server.redis.commands.row import Alone, Command, Family, replying
from kvstore.server.redis.gate import ChannelNeed, Need
from kvstore.server.redis.parser import Words
from kvstore.server.redis.plans import (
    REPLY_BYTES_MAX,
    CommandError,
    Context,
    Effect,
    Plan,
    check_value,
)
from kvstore.server.routing.keys import literal_prefix, matcher

NAMES_AT_ONCE = 64
"""Number of channels that PUBSUB handles in one turn of the event loop. To match a long one takes 0.15 ms."""


def _publish(words: Words, context: Context) -> Plan:
    check_channel(words[1])
    check_value(words[2])
    return Effect(lambda: context.publish(words))


# ── subscriptions ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _subscribing(kind: bytes, *, are_patterns: bool) -> Alone:
    def make(performer: Performer, words: Words) -> bytes:
        subscriber = performer.subscriber()
        subscriber.settle()
        counts = subscriber.subscribe(words[1:], are_patterns=are_patterns)
        return _confirmed(performer, kind, list(map(replies.bulk, words[1:])), counts)

    return _channel_work(make)


def _unsubscribing(kind: bytes, *, are_patterns: bool) -> Alone:
    def make(performer: Performer, words: Words) -> bytes:
        subscriber = performer.subscriber()
        subscriber.settle()
        names = words[1:] or list(subscriber.patterns if are_patterns else subscriber.channels)
        if not names:
            null = replies.NULL[performer.session.protocol]
            return _confirmed(performer, kind, [null], [subscriber.count])
        counts = subscriber.unsubscribe(names, are_patterns=are_patterns)
        return _confirmed(performer, kind, list(map(replies.bulk, names)), counts)

    return _channel_work(make)


def _channel_work(make: Callable[[Performer, Words], bytes]) -> Alone:
    return replying(make)._replace(is_channel_work=True)


def _confirmed(performer: Performer, kind: bytes, names: list[bytes], counts: list[int]) -> bytes:
    """Return one message for each channel or pattern, with the number of the client's subscriptions."""
    head = replies.PUSH[performer.session.protocol] % 3 + replies.bulk(kind)
    return b"".join(head + name + replies.number(count) for name, count in zip(names, counts, strict=True))


# ── PUBSUB ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _pubsub(performer: Performer, words: Words) -> None:
    match words[1].upper(), words[2:]:
        case b"CHANNELS", [] | [_]:
            performer.run_alone(_active(performer, words))
        case b"NUMSUB", named:
            performer.run_alone(_counted(performer, named))
        case b"NUMPAT", []:
            performer.replies.reply(replies.number(performer.server.channels.pattern_count))
        case _:
            raise CommandError(
                "ERR unknown subcommand or wrong number of arguments. PUBSUB supports CHANNELS, NUMPAT and NUMSUB here"
            )


def _pubsub_bytes(performer: Performer, words: Words) -> int:
    if words[1].upper() != b"CHANNELS":
        return 0
    return 2 * min(REPLY_BYTES_MAX, performer.server.channels.channel_count * CHANNEL_BYTES_MAX)


async def _active(performer: Performer, words: Words) -> bytes:
    """Return the channels with subscribers that match and that the user may read."""
    pattern = words[2] if len(words) == 3 else b"*"
    if len(pattern) > PATTERN_BYTES_MAX:
        raise CommandError(f"ERR expected a pattern of at most {PATTERN_BYTES_MAX} bytes, got {len(pattern)}")
    matches, count, size, parts = matcher(pattern), 0, 0, list[bytes]()
    for some in _batched(performer.server.channels.names()):
        found = visible(performer, list(filter(matches, some)))
        count += len(found)
        parts.append(b"".join(map(replies.bulk, found)))
        size += len(parts[-1])
        if size > REPLY_BYTES_MAX:
            raise CommandError(f"ERR expected a reply of at most {REPLY_BYTES_MAX} bytes, got more; use a pattern")
        await asyncio.sleep(0)
    performer.check(words)
    return b"*%d\r\n%b" % (count, b"".join(parts))


async def _counted(performer: Performer, named: list[bytes]) -> bytes:
    """Return the number of subscribers of each channel, 0 for channels that the user may not read."""
    channels, parts = performer.server.channels, [b"*%d\r\n" % (2 * len(named))]
    for some in _batched(named):
        shown = set(visible(performer, list(some)))
        for each in some:
            count = channels.subscribers_of(each) if each in shown else 0
            parts.append(b"%b%b" % (replies.bulk(each), replies.number(count)))
        await asyncio.sleep(0)
    return b"".join(parts)


def _batched(names: list[bytes]) -> Iterator[list[bytes]]:
    """Divide names into parts, each for one turn of the event loop."""
    return (names[at : at + NAMES_AT_ONCE] for at in range(0, len(names), NAMES_AT_ONCE))


# ── rights ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def channels_need(right: Right, names: list[bytes]) -> ChannelNeed:
    """Return the need for a right on channels: the right on the keys of their names."""
    return ChannelNeed(right, names)


def patterns_need(patterns: list[bytes]) -> ChannelNeed:
    """Return the need for the messages of patterns: the right to read all keys that begin as the pattern does."""
    prefixes = [(each, literal_prefix(each)) for each in patterns]
    return ChannelNeed(Right.READ, (), [(each, prefix, end_of_prefix(prefix) or b"") for each, prefix in prefixes])


_SHARES = "A user, or a network if access control is off, has at most as many as it leaves free."
_LIMITS = (
    "A channel name has 1 to 1,024 bytes. A client has at most 4,096 channels, and a node 100,000 subscriptions. "
    + _SHARES
)
_PATTERN_LIMITS = (
    "A pattern has 1 to 256 bytes. A client has at most 64 patterns. The different patterns of a node have at most "
    "2,048 bytes, each from its first wildcard on, and at least 4. " + _SHARES
)
_SUBSCRIBE = _subscribing(b"subscribe", are_patterns=False)
_PSUBSCRIBE = _subscribing(b"psubscribe", are_patterns=True)
_UNSUBSCRIBE = _unsubscribing(b"unsubscribe", are_patterns=False)
_PUNSUBSCRIBE = _unsubscribing(b"punsubscribe", are_patterns=True)

OF_SUBSCRIBERS = frozenset(("SUBSCRIBE", "PSUBSCRIBE", "UNSUBSCRIBE", "PUNSUBSCRIBE", "PING", "QUIT", "RESET"))
"""The commands that a client with subscriptions may send in RESP2."""

FAMILY = Family(
    "Pub/Sub",
    "pubsub",
    (
        Command(
            "PUBLISH",
            "Send a message to the subscribers of a channel on all nodes.",
            _publish,
            3,
            3,
            lambda words: channels_need(Right.WRITE, words[1:2]),
            flag="pubsub",
            differs="A channel has the rights of a key of its name. Returns the number of "
            "subscriptions at the contacted node, as in Redis Cluster. In a transaction, the message is sent after "
            "the writes have taken effect. A message has at most 1 MiB. In the rate of a namespace, it counts as one "
            "operation, and one more for every 16 subscribers of the channel at the contacted node.",
        ),
        Command(
            "SUBSCRIBE",
            "Receive the messages of channels.",
            _SUBSCRIBE,
            2,
            0,
            lambda words: channels_need(Right.READ, words[1:]),
            flag="pubsub",
            differs=_LIMITS,
        ),
        Command(
            "PSUBSCRIBE",
            "Receive the messages of channels that match patterns.",
            _PSUBSCRIBE,
            2,
            0,
            lambda words: patterns_need(words[1:]),
            flag="pubsub",
            differs="Needs the right on all names that begin with the literal start of the pattern. " + _PATTERN_LIMITS,
        ),
        Command(
            "UNSUBSCRIBE", "Stop receiving the messages of channels.", _UNSUBSCRIBE, 1, 0, Need.LOGIN, flag="pubsub"
        ),
        Command(
            "PUNSUBSCRIBE", "Stop receiving the messages of patterns.", _PUNSUBSCRIBE, 1, 0, Need.LOGIN, flag="pubsub"
        ),
        Command(
            "PUBSUB",
            "Show channels with subscribers (CHANNELS, NUMPAT, NUMSUB).",
            Alone(_pubsub, _pubsub_bytes),
            2,
            0,
            Need.LOGIN,
            flag="pubsub",
            differs="Describes the contacted node, as in Redis Cluster. Shows only channels that the user may read.",
        ),
    ),
)
