"""Pub/Sub commands: subscriptions to channels, and messages to their subscribers on all nodes."""

from __future__ import annotations

from kvstore.access import Right, end_of_prefix
from kvstore.server.redis import replies
from kvstore.server.redis.channels import check_channel
from kvstore.server.redis.commands.asking import visible
from kvstore.server.redis.commands.performer import Performer
from kvstore.server.redis.commands.row import Alone, Command, Family, replying
from kvstore.server.redis.gate import ChannelNeed, Need
from kvstore.server.redis.parser import Words
from kvstore.server.redis.plans import CommandError, Context, Effect, Plan, check_pattern, check_value
from kvstore.server.routing.keys import literal_prefix, matcher


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

    return replying(make)


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

    return replying(make)


def _confirmed(performer: Performer, kind: bytes, names: list[bytes], counts: list[int]) -> bytes:
    """Return one message for each channel or pattern, with the number of the client's subscriptions."""
    head = replies.PUSH[performer.session.protocol] % 3 + replies.bulk(kind)
    return b"".join(head + name + replies.number(count) for name, count in zip(names, counts, strict=True))


# ── PUBSUB ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _pubsub(performer: Performer, words: Words) -> bytes:
    channels = performer.server.channels
    match words[1].upper(), words[2:]:
        case b"CHANNELS", [] | [_]:
            matches = matcher(check_pattern(words[2])) if len(words) == 3 else lambda _: True
            return replies.bulks(visible(performer, list(filter(matches, channels.names()))))
        case b"NUMSUB", named:
            shown = set(visible(performer, named))
            counts = [channels.subscribers_of(each) if each in shown else 0 for each in named]
            return replies.array(
                part
                for name, count in zip(named, counts, strict=True)
                for part in (replies.bulk(name), replies.number(count))
            )
        case b"NUMPAT", []:
            return replies.number(channels.pattern_count)
        case _:
            raise CommandError(
                "ERR unknown subcommand or wrong number of arguments. PUBSUB supports CHANNELS, NUMPAT and NUMSUB here"
            )


# ── rights ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def channels_need(right: Right, names: list[bytes]) -> ChannelNeed:
    """Return the need for a right on channels: the right on the keys of their names."""
    return ChannelNeed(right, tuple((name, name, name + b"\0") for name in names))


def patterns_need(patterns: list[bytes]) -> ChannelNeed:
    """Return the need for the messages of patterns: the right to read all keys that begin as the pattern does."""
    prefixes = [(each, literal_prefix(each)) for each in patterns]
    return ChannelNeed(Right.READ, tuple((each, prefix, end_of_prefix(prefix) or b"") for each, prefix in prefixes))


_LIMITS = "A channel name has 1 to 1,024 bytes. A client has at most 10,000 channels, and a node 100,000 subscriptions."
_PATTERN_LIMITS = "A pattern has 1 to 256 bytes. A client has at most 64 patterns, and a node 512 different ones."
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
            *("PUBLISH", "Send a message to the subscribers of a channel on all nodes.", _publish, 3, 3),
            lambda words: channels_need(Right.WRITE, words[1:2]),
            differs="A channel has the rights of a key of its name. Returns the number of "
            "subscriptions at the contacted node, as in Redis Cluster. In a transaction, the message is sent after "
            "the writes have taken effect. A message has at most 1 MiB.",
        ),
        Command(
            *("SUBSCRIBE", "Receive the messages of channels.", _SUBSCRIBE, 2, 0),
            lambda words: channels_need(Right.READ, words[1:]),
            differs=_LIMITS,
        ),
        Command(
            *("PSUBSCRIBE", "Receive the messages of channels that match patterns.", _PSUBSCRIBE, 2, 0),
            lambda words: patterns_need(words[1:]),
            differs="Needs the right on all names that begin with the literal start of the pattern. " + _PATTERN_LIMITS,
        ),
        Command("UNSUBSCRIBE", "Stop receiving the messages of channels.", _UNSUBSCRIBE, 1, 0, Need.LOGIN),
        Command("PUNSUBSCRIBE", "Stop receiving the messages of patterns.", _PUNSUBSCRIBE, 1, 0, Need.LOGIN),
        Command(
            *("PUBSUB", "Show channels with subscribers (CHANNELS, NUMPAT, NUMSUB).", replying(_pubsub), 2, 0),
            Need.LOGIN,
            differs="Describes the contacted node, as in Redis Cluster. Shows only channels that the user may read.",
        ),
    ),
)
