"""Pub/Sub at one Redis port: messages between clients, bounds, slow subscribers and permissions."""

from __future__ import annotations

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
from kvstore.server.redis.pipeline import subscriber
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
        ("SUBSCRIPTIONS_MAX", b"SUBSCRIBE", b"expected at most 3 subscriptions to this node"),
        ("PATTERNS_PER_CLIENT_MAX", b"PSUBSCRIBE", b"expected at most 3 patterns of one client"),
        ("PATTERNS_MAX", b"PSUBSCRIBE", b"expected at most 3 patterns of clients of this node"),
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


def test_message_costs_nothing_per_subscriber_but_a_reference() -> None:
    """All subscribers of a protocol get the same bytes object."""

    class Subscriber:
        def __init__(self) -> None:
            self.channels: dict[bytes, None] = {}
            self.patterns: dict[bytes, None] = {}
            self.frames: list[channels.Frames] = []

        def push(self, frames: channels.Frames) -> None:
            self.frames.append(frames)

    registry, clients = channels.Channels(), [Subscriber() for _ in range(3)]
    for each in clients:
        registry.subscribe(each, [b"a"])
    assert registry.publish(b"a", b"x" * 1000) == 3
    assert len({id(each.frames[0]) for each in clients}) == 1
