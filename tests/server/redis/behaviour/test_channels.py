"""Pub/Sub at one Redis port: messages between clients, bounds, slow subscribers and permissions."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import redis.asyncio as redis

from kvstore.access import Change, GrantRight, RevokeRight, Right
from kvstore.limits import VALUE_BYTES_MAX
from kvstore.namespaces import Namespace
from kvstore.namespaces.rates import Rates
from kvstore.server.access.identities import Access
from kvstore.server.config import Limits
from kvstore.server.redis import channels
from kvstore.server.redis.channel_work import TURN_WORK
from kvstore.server.redis.pipeline import pipeline, subscriber
from kvstore.server.redis.plans import CommandError
from tests.server.access.tables import table
from tests.server.redis.behaviour.test_access import line_of, logged_in
from tests.server.redis.pipeline.test_reply_memory import go_on_reading, stop_reading
from tests.server.redis.resp_port import Raw, RespPort, redis_port
from tests.server.redis.test_parser import packed
from tests.waiting import wait_until


def message(*words: bytes, protocol: int = 2) -> bytes:
    head = b"*" if protocol == 2 else b">"
    return head + b"%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


async def begin(raw: Raw, name: bytes, *named: bytes, protocol: int = 2) -> None:
    """Subscribe and read the confirmations."""
    head = b"*3\r\n" if protocol == 2 else b">3\r\n"
    raw.writer.write(packed(name, *named))
    for number, each in enumerate(named, 1):
        expected = head + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in (name.lower(), each))
        expected += b":%d\r\n" % number
        assert await raw.read(len(expected)) == expected


async def hello(raw: Raw) -> None:
    raw.writer.write(packed(b"HELLO", b"3"))
    await raw.read_until(b"modules\r\n*0\r\n")


async def test_message_reaches_every_subscriber_in_its_protocol(resp: RespPort) -> None:
    async with resp.raw() as two, resp.raw() as three, resp.raw() as pattern, resp.raw() as other, resp.raw() as raw:
        await begin(two, b"SUBSCRIBE", b"news", b"more")
        await hello(three)
        await begin(three, b"SUBSCRIBE", b"news", protocol=3)
        await begin(pattern, b"PSUBSCRIBE", b"n*s")
        await begin(other, b"SUBSCRIBE", b"new")
        assert await line_of(raw, b"PUBLISH", b"news", b"a\r\nb") == b":3\r\n"
        expected = message(b"message", b"news", b"a\r\nb")
        assert await two.ask(b"", expected) == expected
        expected = message(b"message", b"news", b"a\r\nb", protocol=3)
        assert await three.ask(b"", expected) == expected
        expected = message(b"pmessage", b"n*s", b"news", b"a\r\nb")
        assert await pattern.ask(b"", expected) == expected
        assert await line_of(other, b"PING") == b"*2\r\n"  # nothing came before it


async def test_messages_arrive_in_the_order_of_their_publisher(resp: RespPort) -> None:
    async with resp.raw() as raw, resp.raw() as publisher:
        await begin(raw, b"SUBSCRIBE", b"a")
        publisher.writer.write(b"".join(packed(b"PUBLISH", b"a", b"%d" % number) for number in range(500)))
        expected = b"".join(message(b"message", b"a", b"%d" % number) for number in range(500))
        assert await raw.read(len(expected)) == expected


async def test_subscriber_finds_what_was_written_before_the_message(resp: RespPort) -> None:
    """Also if the publisher does not wait for the reply to its write."""
    async with resp.raw() as raw, resp.raw() as reader, resp.raw() as publisher:
        await begin(raw, b"SUBSCRIBE", b"k")
        resp.backend.hold()
        publisher.writer.write(packed(b"SET", b"k", b"1") + packed(b"PUBLISH", b"k", b"written"))
        await line_of(reader, b"PING")
        assert await line_of(raw, b"PING") == b"*2\r\n"
        await raw.read(len(b"$4\r\npong\r\n$0\r\n\r\n"))
        resp.backend.let_go()
        expected = message(b"message", b"k", b"written")
        assert await raw.read(len(expected)) == expected
        assert await reader.ask(packed(b"GET", b"k"), b"$1\r\n1\r\n") == b"$1\r\n1\r\n"


async def test_nothing_arrives_after_unsubscribing(resp: RespPort) -> None:
    async with resp.raw() as raw, resp.raw() as publisher:
        await begin(raw, b"SUBSCRIBE", b"a", b"b")
        raw.writer.write(packed(b"UNSUBSCRIBE", b"a"))
        await raw.read_until(b":1\r\n")
        assert await line_of(publisher, b"PUBLISH", b"a", b"x") == b":0\r\n"
        assert await line_of(publisher, b"PUBLISH", b"b", b"y") == b":1\r\n"
        expected = message(b"message", b"b", b"y")
        assert await raw.read(len(expected)) == expected


async def test_subscriptions_end_with_the_connection(resp: RespPort) -> None:
    async with resp.raw() as raw, resp.raw() as publisher:
        await begin(raw, b"SUBSCRIBE", b"a")
        await begin(publisher, b"PSUBSCRIBE", b"*")
        assert await line_of(publisher, b"RESET") == b"+RESET\r\n"
        raw.close()

        async def is_forgotten() -> bool:
            return resp.server.channels.subscriptions == 0

        await wait_until(is_forgotten, what="the subscription has ended")
        assert await line_of(publisher, b"PUBSUB", b"NUMPAT") == b":0\r\n"
        assert await line_of(publisher, b"PUBLISH", b"a", b"x") == b":0\r\n"


async def test_redis_py_listens_in_both_protocols(resp: RespPort) -> None:
    for protocol in (2, 3):
        async with redis.Redis(host=resp.host, port=resp.port, protocol=protocol) as client, client.pubsub() as found:
            await found.subscribe("a")
            await found.psubscribe("b*")
            seen = []
            async with client.pipeline() as pipe:
                pipe.set("k", "v")
                pipe.publish("a", "one")
                await pipe.execute()
            await client.publish("b2", "two")
            while len(seen) < 4:
                if (each := await found.get_message(timeout=1)) is not None:
                    seen.append((each["type"], each["channel"], each["data"]))
            assert seen == [
                ("subscribe", b"a", 1),
                ("psubscribe", b"b*", 2),
                ("message", b"a", b"one"),
                ("pmessage", b"b2", b"two"),
            ]


# ── bounds ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_names_and_messages_have_bounds(resp: RespPort) -> None:
    async with resp.raw() as raw:
        for name in (b"", b"x" * (channels.CHANNEL_BYTES_MAX + 1)):
            refused = b"-ERR expected a channel of 1 to 1024 bytes, got %d\r\n" % len(name)
            assert await line_of(raw, b"PUBLISH", name, b"x") == refused
            assert await line_of(raw, b"SUBSCRIBE", b"good", name) == refused
        for name in (b"", b"x" * (channels.PATTERN_BYTES_MAX + 1)):
            refused = b"-ERR expected a pattern of 1 to 256 bytes, got %d\r\n" % len(name)
            assert await line_of(raw, b"PSUBSCRIBE", b"good", name) == refused
        refused = b"-ERR expected a value of at most %d bytes, got more\r\n" % VALUE_BYTES_MAX
        assert await line_of(raw, b"PUBLISH", b"a", b"x" * (VALUE_BYTES_MAX + 1)) == refused
        assert await line_of(raw, b"PUBLISH", b"good", b"x") == b":0\r\n"  # nothing of a refused command took effect


@pytest.mark.parametrize(
    ("bound", "name", "error"),
    [
        ("PER_CLIENT_MAX", b"SUBSCRIBE", b"expected at most 3 channels of one client"),
        ("PATTERNS_PER_CLIENT_MAX", b"PSUBSCRIBE", b"expected at most 3 patterns of one client"),
    ],
)
async def test_subscriptions_have_bounds(
    resp: RespPort, monkeypatch: pytest.MonkeyPatch, bound: str, name: bytes, error: bytes
) -> None:
    monkeypatch.setattr(channels, bound, 3)
    async with resp.raw() as raw:
        await begin(raw, name, b"a", b"b")
        assert error in await line_of(raw, name, b"b", b"c", b"d")
        raw.writer.write(packed(name, b"a", b"b", b"c", b"c"))
        for count in (2, 2, 3, 3):
            await raw.read_until(b":%d\r\n" % count)
        assert error in await line_of(raw, name, b"d")


async def test_slow_subscriber_is_disconnected_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber, "UNREAD_BYTES_MAX", 4 << 20)
    async with redis_port(tmp_path) as resp, resp.raw() as slow, resp.raw() as good, resp.raw() as publisher:
        await begin(slow, b"SUBSCRIBE", b"a")
        await begin(good, b"SUBSCRIBE", b"a")
        stop_reading(slow)
        sent = 0
        while resp.server.slow_subscribers_closed == 0:
            assert sent < 200, "the slow subscriber was never disconnected"
            assert (await line_of(publisher, b"PUBLISH", b"a", b"x" * (1 << 20)))[:1] == b":"
            assert len(await good.read(len(message(b"message", b"a", b"x" * (1 << 20))))) > 1 << 20
            sent += 1
        assert await line_of(publisher, b"PUBLISH", b"a", b"last") == b":1\r\n"
        go_on_reading(slow)
        with suppress(ConnectionError):  # or the end of the connection without an error
            await slow.read_to_end()


async def test_subscriber_that_stays_slow_is_disconnected(resp: RespPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber, "UNREAD_BYTES", 1 << 20)
    monkeypatch.setattr(subscriber, "UNREAD_S", 0.0)
    async with resp.raw() as slow, resp.raw() as publisher:
        await begin(slow, b"SUBSCRIBE", b"a")
        stop_reading(slow)
        for _ in range(200):
            await line_of(publisher, b"PUBLISH", b"a", b"x" * (1 << 20))
            if resp.server.slow_subscribers_closed:
                break
        assert resp.server.slow_subscribers_closed == 1


async def test_slow_subscribers_share_the_memory_for_replies(tmp_path: Path) -> None:
    limits = Limits(output_bytes_max=8 << 20)
    async with redis_port(tmp_path, limits=limits) as resp, resp.raw() as publisher:
        slow = [await resp.connect() for _ in range(4)]
        for each in slow:
            await begin(each, b"SUBSCRIBE", b"a")
            stop_reading(each)
        most = 0
        for _ in range(64):
            await line_of(publisher, b"PUBLISH", b"a", b"x" * (1 << 20))
            most = max(most, resp.server.reply_memory.held())
        assert resp.server.reply_memory.closed > 0
        assert most < 24 << 20
        for each in slow:
            each.close()


# ── permissions ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def access() -> Access:
    return Access(table())


@asynccontextmanager
async def guarded(root: Path, access: Access) -> AsyncIterator[RespPort]:
    async with redis_port(root, access=access) as opened:
        yield opened


async def test_channels_need_the_rights_of_keys_of_their_names(tmp_path: Path, access: Access) -> None:
    async with guarded(tmp_path, access) as resp, logged_in(resp, b"tenant") as tenant:
        for words, right, what in (
            ((b"SUBSCRIBE", b"t/a", b"u"), b"read", b"subscribe of channel 'u'"),
            ((b"SUBSCRIBE", b"t"), b"read", b"subscribe of channel 't'"),
            ((b"PSUBSCRIBE", b"t*"), b"read", b"psubscribe of channel 't*'"),
            ((b"PSUBSCRIBE", b"*"), b"read", b"psubscribe of channel '*'"),
            ((b"PSUBSCRIBE", b"[t]/*"), b"read", b"psubscribe of channel '[t]/*'"),
            ((b"PUBLISH", b"u", b"x"), b"write", b"publish of channel 'u'"),
        ):
            refused = b"-NOPERM user tenant lacks the right %b for %b\r\n" % (right, what)
            assert await line_of(tenant, *words) == refused
        async with logged_in(resp, b"reader") as reader:
            await begin(reader, b"SUBSCRIBE", b"t/a", b"u")
            assert (await line_of(tenant, b"PUBLISH", b"t/a", b"x")) == b":1\r\n"
            expected = message(b"message", b"t/a", b"x")
            assert await reader.read(len(expected)) == expected
            expected = b"*1\r\n$3\r\nt/a\r\n"  # not the channel u
            assert await tenant.ask(packed(b"PUBSUB", b"CHANNELS"), expected) == expected
            expected = b"*4\r\n$3\r\nt/a\r\n:1\r\n$1\r\nu\r\n:0\r\n"
            assert await tenant.ask(packed(b"PUBSUB", b"NUMSUB", b"t/a", b"u"), expected) == expected
        async with logged_in(resp, b"reader") as reader:
            assert (await line_of(reader, b"PUBLISH", b"u", b"x")).startswith(
                b"-NOPERM user reader lacks the right write"
            )
        await begin(tenant, b"PSUBSCRIBE", b"t/*")


@pytest.mark.parametrize(("name", "named"), [(b"SUBSCRIBE", b"t/a"), (b"PSUBSCRIBE", b"t/*")])
async def test_subscriber_is_disconnected_when_its_right_is_revoked(
    tmp_path: Path, access: Access, name: bytes, named: bytes
) -> None:
    async with guarded(tmp_path, access) as resp, logged_in(resp, b"tenant") as tenant:
        await begin(tenant, name, named)
        access.take(table(GrantRight("owns", Right.READ, b"u/")))
        assert await line_of(tenant, b"PING") == b"*2\r\n"
        await tenant.read(len(b"$4\r\npong\r\n$0\r\n\r\n"))
        revoke: tuple[Change, ...] = (RevokeRight("owns", Right.READ, b"t/"),)
        access.take(table(*revoke))
        assert (await tenant.read_to_end()).startswith(b"-NOPERM user tenant lacks the right read for ")
        assert resp.server.channels.subscriptions == resp.server.channels.pattern_count == 0


async def test_users_share_the_subscriptions_of_a_node(
    tmp_path: Path, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "SUBSCRIPTIONS_MAX", 9)
    async with (
        guarded(tmp_path, access) as resp,
        logged_in(resp, b"tenant") as tenant,
        logged_in(resp, b"tenant") as same,
        logged_in(resp, b"reader") as reader,
    ):
        await begin(tenant, b"SUBSCRIBE", b"t/1", b"t/2")
        await begin(same, b"SUBSCRIBE", b"t/1", b"t/2")
        assert b"of one user or network" in await line_of(same, b"SUBSCRIBE", b"t/3")
        await begin(reader, b"SUBSCRIBE", b"t/1", b"t/2")
        assert b"of one user or network" in await line_of(reader, b"SUBSCRIBE", b"t/3")


async def test_clients_of_one_network_share_its_subscriptions(resp: RespPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "SUBSCRIPTIONS_MAX", 9)
    async with resp.raw() as first, resp.raw() as second:
        await begin(first, b"SUBSCRIBE", b"1", b"2")
        await begin(second, b"SUBSCRIBE", b"1", b"2")
        assert b"of one user or network" in await line_of(second, b"SUBSCRIBE", b"3")
        assert await line_of(first, b"RESET") == b"+RESET\r\n"
        second.writer.write(packed(b"SUBSCRIBE", b"3"))
        assert await second.read_until(b":3\r\n") == b"*3\r\n$9\r\nsubscribe\r\n$1\r\n3\r\n:3\r\n"


async def test_revoked_right_ends_messages_at_once(tmp_path: Path, access: Access) -> None:
    """Connections are closed over several turns of the event loop. Messages of the meantime must not be sent."""
    async with guarded(tmp_path, access) as resp, logged_in(resp, b"tenant") as tenant:
        await begin(tenant, b"SUBSCRIBE", b"t/a")
        resp.server.channels.publish(b"t/a", b"allowed")
        access.take(table(RevokeRight("owns", Right.READ, b"t/")))
        resp.server.channels.publish(b"t/a", b"secret")
        found = await tenant.read_to_end()
        assert b"allowed" in found
        assert b"secret" not in found


async def test_queued_message_needs_the_right_at_exec(tmp_path: Path, access: Access) -> None:
    async with guarded(tmp_path, access) as resp, resp.raw() as reader, logged_in(resp, b"tenant") as tenant:
        assert await line_of(reader, b"AUTH", b"reader", b"secret") == b"+OK\r\n"
        await begin(reader, b"SUBSCRIBE", b"t/a")
        for words in ((b"MULTI",), (b"PUBLISH", b"t/a", b"secret")):
            assert (await line_of(tenant, *words))[:1] == b"+"
        access.take(table(RevokeRight("owns", Right.WRITE, b"t/")))
        assert await line_of(tenant, b"EXEC") == b"*1\r\n"
        assert (await tenant.read_line()).startswith(b"-NOPERM user tenant lacks the right write for publish")
        assert await line_of(reader, b"PING") == b"*2\r\n"


async def test_login_as_another_user_ends_forbidden_subscriptions(tmp_path: Path, access: Access) -> None:
    async with guarded(tmp_path, access) as resp, logged_in(resp, b"reader") as raw:
        await hello(raw)
        await begin(raw, b"SUBSCRIBE", b"u", protocol=3)
        assert await line_of(raw, b"AUTH", b"tenant", b"secret") == b"+OK\r\n"
        assert (await raw.read_line()).startswith(b"-NOPERM user tenant lacks the right read for subscribe")
        assert await raw.read_to_end() == b""


async def test_messages_count_for_the_rate_of_their_namespace(resp: RespPort, monkeypatch: pytest.MonkeyPatch) -> None:
    async with resp.raw() as raw:
        rates = Rates(lambda: 0.0, Counter())
        rates.take([Namespace(name="tenant", prefix=b"t/", ops_per_s=1, burst=4)])
        monkeypatch.setattr(resp.server, "rates", lambda: rates)
        found = [await line_of(raw, b"PUBLISH", b"t/a", b"x") for _ in range(5)]
        assert found[:4] == [b":0\r\n"] * 4
        assert found[4].startswith(b"-TRYAGAIN ")
        assert await line_of(raw, b"PUBLISH", b"u", b"x") == b":0\r\n"


async def test_message_to_many_subscribers_counts_as_several_operations(
    resp: RespPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "SUBSCRIBERS_PER_OPERATION", 1)
    async with resp.raw() as raw, resp.raw() as first, resp.raw() as second:
        rates = Rates(lambda: 0.0, Counter())
        rates.take([Namespace(name="tenant", prefix=b"t/", ops_per_s=1, burst=5)])
        monkeypatch.setattr(resp.server, "rates", lambda: rates)
        for each in (first, second):
            await begin(each, b"SUBSCRIBE", b"t/a")
        assert await line_of(raw, b"PUBLISH", b"t/a", b"x") == b":2\r\n"
        assert (await line_of(raw, b"PUBLISH", b"t/a", b"x")).startswith(b"-TRYAGAIN ")
        assert [await line_of(raw, b"PUBLISH", b"t/b", b"x") for _ in range(2)] == [b":0\r\n"] * 2


class Subscriber:
    """A client at the registry, without a connection."""

    def __init__(self, owner: str = "a") -> None:
        self.channels: dict[bytes, None] = {}
        self.patterns: dict[bytes, None] = {}
        self.owner = owner
        self.found: list[channels.Message] = []

    def push(self, message: channels.Message) -> None:
        self.found.append(message)


async def test_message_costs_nothing_per_subscription_but_a_reference() -> None:
    """All subscribers of a channel and of all patterns share the bytes of the message. Otherwise one message of 1 MiB
    that matches 500 patterns would take half a gigabyte."""
    registry, clients = channels.Channels(), [Subscriber() for _ in range(3)]
    for each in clients:
        registry.subscribe(each, [b"a"])
        registry.subscribe_patterns(each, [b"*", b"a*", b"[ab]"])
    assert registry.publish(b"a", b"x" * 1000) == 12
    assert len({id(message.body) for each in clients for message in each.found}) == 1


# ── shares and turns ──────────────────────────────────────────────────────────────────────────────────────────────────


def filled(registry: channels.Channels, owner: str, are_patterns: bool) -> int:
    """Return the number of subscriptions that an owner gets when it takes all that it can."""
    count = 0
    while True:
        client = Subscriber(owner)
        for _ in range(channels.PATTERNS_PER_CLIENT_MAX):
            name = b"%s%d*" % (owner.encode(), count)
            own = client.patterns if are_patterns else client.channels
            try:
                (registry.subscribe_patterns if are_patterns else registry.subscribe)(client, [name])
            except CommandError:
                return count
            own[name] = None
            count += 1


@pytest.mark.parametrize("are_patterns", [False, True])
async def test_owner_leaves_as_many_subscriptions_as_it_takes(
    are_patterns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "SUBSCRIPTIONS_MAX", 512)
    registry = channels.Channels()
    most = channels.WILD_BYTES_MAX // channels.WILD_BYTES_MIN if are_patterns else 512
    assert most == 512
    taken = [filled(registry, owner, are_patterns) for owner in "abcd"]
    assert taken == [256, 128, 64, 32]


async def test_shares_follow_what_clients_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "SUBSCRIPTIONS_MAX", 9)
    registry, first, second = channels.Channels(), Subscriber("a"), Subscriber("b")
    for each in (first, second):  # a pattern that both have counts once for the server and once for each
        registry.subscribe_patterns(each, [b"p*"])
        each.patterns[b"p*"] = None
    registry.subscribe(first, [b"1", b"2", b"3"])
    first.channels |= dict.fromkeys((b"1", b"2", b"3"))
    with pytest.raises(CommandError, match="expected at most 9 subscriptions"):
        registry.subscribe(first, [b"4"])
    registry.change_owner(first, "b")
    with pytest.raises(CommandError, match="of one user or network"):
        registry.subscribe(second, [b"4"])
    registry.change_owner(first, "c")
    registry.subscribe(second, [b"4"])
    registry.unsubscribe(second, [b"4"])
    for each in (first, second):
        registry.unsubscribe(each, list(each.channels))
        registry.unsubscribe_patterns(each, list(each.patterns))
    assert registry.subscriptions == registry.pattern_count == registry._wild_bytes == 0
    assert registry._shares == {}


async def most_published_per_turn(registry: channels.Channels) -> int:
    """Return the largest number of messages that were published in one turn of the event loop until now stays."""
    most, before, idle = 0, registry.published, 0
    while idle < 50:
        await asyncio.sleep(0)
        most, idle = max(most, registry.published - before), 0 if registry.published > before else idle + 1
        before = registry.published
    return most


@pytest.mark.parametrize("is_transaction", [False, True])
async def test_many_messages_of_one_client_are_spread_over_turns(resp: RespPort, is_transaction: bool) -> None:
    """Leases must be renewed meanwhile."""
    async with resp.raw() as raw, resp.raw() as publisher:
        await begin(raw, b"SUBSCRIBE", b"a")
        words = [packed(b"PUBLISH", b"a", b"%d" % number) for number in range(3_000)]
        if is_transaction:
            words = [packed(b"MULTI"), *words, packed(b"EXEC")]
        publisher.writer.write(b"".join(words))
        registry, most = resp.server.channels, 0
        while registry.published < 3_000:
            most = max(most, await most_published_per_turn(registry))
        assert most <= TURN_WORK // channels.MESSAGE_WORK + 1
        expected = b"".join(message(b"message", b"a", b"%d" % number) for number in range(3_000))
        assert await raw.read(len(expected)) == expected
        expected = b":1\r\n" * 3_000
        if is_transaction:
            expected = b"+OK\r\n" + b"+QUEUED\r\n" * 3_000 + b"*3000\r\n" + expected
        assert await publisher.read(len(expected)) == expected


async def test_message_to_many_clients_is_sent_over_many_turns(resp: RespPort) -> None:
    clients = [await resp.connect() for _ in range(250)]
    for each in clients:
        await begin(each, b"SUBSCRIBE", b"a")
    async with resp.raw() as publisher:
        publisher.writer.write(packed(b"PUBLISH", b"a", b"1") + packed(b"PUBLISH", b"a", b"2") + packed(b"GET", b"k"))
        expected = b":250\r\n:250\r\n$-1\r\n"
        assert await publisher.read(len(expected)) == expected
        expected = message(b"message", b"a", b"1") + message(b"message", b"a", b"2")
        for each in clients:
            assert await each.read(len(expected)) == expected
            each.close()


async def test_slow_work_on_a_message_counts_before_the_next() -> None:
    """The worst pattern takes as many turns as it takes time."""
    registry, client = channels.Channels(), Subscriber()
    for number in range(3):
        pattern = b"*" + b"a" * 250 + b"%d*" % number
        registry.subscribe_patterns(client, [pattern])
        client.patterns[pattern] = None
    await asyncio.sleep(0)
    registry.publish(b"a" * channels.CHANNEL_BYTES_MAX, b"x")
    registry.publish(b"a" * channels.CHANNEL_BYTES_MAX, b"x")
    registry.publish(b"a" * channels.CHANNEL_BYTES_MAX, b"x")
    assert registry.work.is_busy
    await registry.work.wait_free()
    assert not registry.work.is_busy


async def test_subscriber_is_not_sent_messages_while_its_connection_closes(resp: RespPort) -> None:
    """Its socket may take long to close, and every write to it would be a line in the log."""
    async with resp.raw() as raw, resp.raw() as publisher:
        await begin(raw, b"SUBSCRIBE", b"a")
        stop_reading(raw)
        while not (connection := next(iter(resp.server._connections))).replies.is_full:
            await line_of(publisher, b"PUBLISH", b"a", b"x" * (1 << 20))
        raw.writer.write(b"*x\r\n")

        async def is_closing() -> bool:
            return connection.pipeline.is_closing

        await wait_until(is_closing, what="the protocol error is seen")
        assert resp.server.channels.subscriptions == 0


async def test_hello_changes_the_protocol_of_messages_that_wait(resp: RespPort) -> None:
    async with resp.raw() as raw, resp.raw() as publisher:
        await hello(raw)
        await begin(raw, b"SUBSCRIBE", b"a", protocol=3)
        raw.writer.write(packed(b"PUBLISH", b"a", b"x") + packed(b"HELLO", b"2"))
        assert await raw.read_line() == b":1\r\n"
        await raw.read_until(b"modules\r\n*0\r\n")
        expected = message(b"message", b"a", b"x")
        assert await raw.read(len(expected)) == expected
        assert await line_of(raw, b"GET", b"k") == (
            b"-ERR Can't execute 'get': only (P|S)SUBSCRIBE / (P|S)UNSUBSCRIBE / PING / QUIT / RESET are allowed in "
            b"this context\r\n"
        )
        assert await line_of(publisher, b"PUBLISH", b"a", b"y") == b":1\r\n"


async def test_pubsub_describes_many_channels(resp: RespPort) -> None:
    async with resp.raw() as raw, resp.raw() as other:
        names = [b"c%d" % number for number in range(1_000)]
        await begin(raw, b"SUBSCRIBE", *names)
        expected = b"*1000\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(each), each) for each in names)
        assert await other.ask(packed(b"PUBSUB", b"CHANNELS", b"c*"), expected) == expected
        expected = b"*2000\r\n" + b"".join(b"$%d\r\n%b\r\n:1\r\n" % (len(each), each) for each in names)
        assert await other.ask(packed(b"PUBSUB", b"NUMSUB", *names), expected) == expected
        assert await line_of(other, b"PUBSUB", b"NUMSUB") == b"*0\r\n"
        refused = b"-ERR expected a pattern of at most 256 bytes, got 257\r\n"
        assert await line_of(other, b"PUBSUB", b"CHANNELS", b"x" * 257) == refused
