"""Plain SETs that begin in one call, compared with those that begin one by one: no client sees a difference."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any, cast

import pytest

from kvstore.errors import Overloaded
from kvstore.limits import KEY_BYTES_MAX
from kvstore.partition.state.commands import Get, Put, Record
from kvstore.server.redis import parser
from kvstore.server.redis.connection import REPORT_EVERY, RespConnection
from kvstore.server.redis.pipeline import pipeline
from kvstore.server.redis.pipeline.fast_path import FastPath
from kvstore.server.redis.pipeline.in_flight_limit import COMMANDS_MAX
from kvstore.server.redis.pipeline.latency import EVERY
from kvstore.server.redis.pipeline.reply_memory import ReplyMemory
from kvstore.server.redis.pipeline.reply_queue import FORMAT_BITS
from kvstore.server.redis.replies import Fmt
from tests.server.backends import Collector
from tests.server.redis.resp_port import RespPort, redis_port
from tests.server.redis.test_parser import packed
from tests.waiting import wait_until

END = b"$3\r\nend\r\n"


def some_pipelines(seed: int) -> list[bytes]:
    """Return pipelines of one client: mostly SETs of few keys, and commands that must not begin with them."""
    draw = random.Random(seed)
    pipelines = []
    for _ in range(30):
        others = draw.choice((0.0, 0.0, 0.0, 0.1, 0.5))
        commands = []
        for _ in range(draw.choice((3, 4, 16, 17, 80))):
            key = b"k%d" % draw.randrange(60)
            value = draw.choice((b"", b"v%d" % draw.randrange(1000), b"a\r\nb", b"x" * 5000))
            if draw.random() >= others:
                commands.append((b"SET", key, value))
            else:
                commands.append(
                    draw.choice(
                        [
                            (b"GET", key),
                            (b"GET", key),
                            (b"DEL", key),
                            (b"set", key, value),
                            (b"sEt", key, value),
                            (b"SET", b"", value),
                            (b"SET", b"k" * (KEY_BYTES_MAX + 1), value),
                            (b"SET", key, value, b"PX", b"60000"),
                            (b"INCR", b"n"),
                            (b"PING",),
                            (b"MULTI",),
                            (b"EXEC",),
                        ]
                    )
                )
        pipelines.append(b"".join(packed(*words) for words in commands))
    return [*pipelines, packed(b"DISCARD")]


async def replies(resp: RespPort, pipelines: list[bytes]) -> bytes:
    async with resp.raw() as raw:
        for each in pipelines:
            raw.writer.write(each)
        raw.writer.write(packed(b"ECHO", b"end"))
        return await raw.read_until(END)


@pytest.mark.parametrize("seed", range(20))
async def test_fast_path_gives_the_same_replies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    found = []
    for together_min, alike_min in ((pipeline.BATCHED_MIN, parser._ALIKE_MIN), (1 << 30, 1 << 30)):
        monkeypatch.setattr(pipeline, "BATCHED_MIN", together_min)
        monkeypatch.setattr(parser, "_ALIKE_MIN", alike_min)
        async with redis_port(tmp_path / str(together_min)) as resp:
            got = await replies(resp, some_pipelines(seed))
            rows = [await get_all(resp)]
            found.append((got, rows))
    assert found[0] == found[1]


async def is_true(what: bool) -> bool:
    return what


async def get_all(resp: RespPort) -> list[bytes | None]:
    sink = Collector()
    keys = [b"n", *(b"k%d" % number for number in range(60))]
    for token, key in enumerate(keys):
        resp.backend.submit((Get(key),), sink, (token,))
    await wait_until(lambda: is_true(len(sink.results) == len(keys)), what="all keys are read")
    found = [sink.results[token] for token in range(len(keys))]
    return [each.value if isinstance(each, Record) else None for each in found]


async def test_plain_sets_reach_their_leader_in_one_call(resp: RespPort, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    submit = resp.backend.submit
    monkeypatch.setattr(resp.backend, "submit", lambda ops, *rest: calls.append(len(ops)) or submit(ops, *rest))
    async with resp.raw() as raw:
        count = pipeline.BATCHED_MIN
        await raw.ask(b"".join(packed(b"SET", b"k%d" % each, b"v") for each in range(count)), b"+OK\r\n" * count)
    assert calls == [count]


async def test_set_waits_for_an_earlier_read_of_its_key(resp: RespPort) -> None:
    async with resp.raw() as raw:
        await raw.ask(packed(b"SET", b"k3", b"old"), b"+OK\r\n")
        resp.backend.held_reads = []
        raw.writer.write(packed(b"GET", b"k3"))
        await wait_until(lambda: is_true(bool(resp.backend.held_reads)), what="the read is under way")
        raw.writer.write(b"".join(packed(b"SET", b"k%d" % each, b"new") for each in range(8)))
        await wait_until(
            lambda: is_true(any(op.key == b"k2" for op in resp.backend.submitted)), what="the first are begun"
        )
        assert not any(isinstance(op, Put) and op.value == b"new" and op.key == b"k3" for op in resp.backend.submitted)
        resp.backend.do_held_reads()
        expected = b"$3\r\nold\r\n" + b"+OK\r\n" * 8
        assert await raw.read(len(expected)) == expected


async def test_errors_appear_at_their_own_commands(resp: RespPort) -> None:
    resp.backend.failure = Overloaded("no room")
    async with resp.raw() as raw:
        raw.writer.write(b"".join(packed(b"SET", b"k%d" % each, b"v") for each in range(6)))
        for _ in range(6):
            assert (await raw.read_line()).startswith(b"-TRYAGAIN")


class Unread:
    """The stream of a client that reads nothing: it pauses its protocol when too much waits."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.protocol: RespConnection
        self.high = 0
        self.is_closed = False

    def set_write_buffer_limits(self, high: int) -> None:
        self.high = high

    def write(self, data: bytes) -> None:
        was_full = len(self.written) > self.high
        self.written += data
        if len(self.written) > self.high and not was_full:
            self.protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return 0 if self.is_closed else len(self.written)

    def get_extra_info(self, name: str) -> None:
        return None

    def pause_reading(self) -> None:
        """Do nothing, because the client sends what it likes."""

    def resume_reading(self) -> None:
        """Do nothing, as in pause_reading."""

    def close(self) -> None:
        self.is_closed = True

    abort = close


def unread(resp: RespPort) -> tuple[RespConnection, Unread]:
    connection, stream = RespConnection(resp.server), Unread()
    stream.protocol = connection
    connection.connection_made(cast(Any, stream))
    return connection, stream


async def test_unread_replies_of_the_fast_path_are_counted(resp: RespPort) -> None:
    async with resp.raw() as raw:
        await raw.ask(packed(b"SET", b"k", b"x" * 2000), b"+OK\r\n")
    connection, stream = unread(resp)
    while not connection.replies.is_full:
        connection.data_received(packed(b"GET", b"k"))
        await asyncio.sleep(0)
    resp.server.reply_memory.check()
    assert resp.server.reply_memory.bytes >= len(stream.written) > stream.high


async def test_reserved_memory_is_counted_out_once(resp: RespPort) -> None:
    memory = resp.server.reply_memory = ReplyMemory(lambda: 0.0, 100)
    connection, other = unread(resp)[0].replies, unread(resp)[0].replies
    assert connection.reserve(50)
    assert memory.take(other, 40), "which is gone at the next look"
    connection.hold_back(0.0)
    connection.reply(b"x" * 20)
    connection.write()
    assert memory.bytes >= connection.held_bytes == 20


async def test_replies_to_a_disconnected_client_are_not_kept(resp: RespPort) -> None:
    """Replies that arrived before their turn were kept, a megabyte each, and counted for no client."""
    connection, _ = unread(resp)
    replies = connection.replies
    replies.issued = 40
    found = Record(b"x" * (1 << 20), 1, 1, 1, 0)
    for number in range(20, 30):
        replies.complete(number << FORMAT_BITS | Fmt.VALUE, found)
    connection.connection_lost(None)
    for number in range(30, 40):
        replies.complete(number << FORMAT_BITS | Fmt.VALUE, found)
    assert sum(map(len, replies.early.values())) == 0
    for number in range(20):
        replies.complete(number << FORMAT_BITS | Fmt.VALUE, found)
    assert replies.in_flight() == 0


async def test_single_get_that_takes_a_turn_is_timed(resp: RespPort) -> None:
    async with resp.raw() as raw:
        resp.server.rounds.left = EVERY
        await raw.ask(packed(b"PING"), b"+PONG\r\n")
        gets = resp.server.rounds.histograms["GET"]
        for _ in range(2 * EVERY):
            resp.backend.held_reads = []
            raw.writer.write(packed(b"GET", b"k"))
            await wait_until(lambda: is_true(bool(resp.backend.held_reads)), what="the read is under way")
            resp.backend.do_held_reads()
            assert await raw.read(5) == b"$-1\r\n"
        assert gets.count == 2
        left = resp.server.rounds.left
        await raw.ask(packed(b"PING"), b"+PONG\r\n")
        assert resp.server.rounds.left == left - 1


async def test_transaction_waits_while_the_limit_is_reached(resp: RespPort) -> None:
    async with resp.raw() as raw:
        resp.server.in_flight_limit.begin(2 * COMMANDS_MAX, 0)
        raw.writer.write(packed(b"MULTI") + packed(b"SET", b"k", b"v") + packed(b"EXEC"))
        assert await raw.read(len(b"+OK\r\n+QUEUED\r\n")) == b"+OK\r\n+QUEUED\r\n"
        resp.server.in_flight_limit.end(2 * COMMANDS_MAX, 0)
        assert await raw.ask(packed(b"PING"), b"*1\r\n+OK\r\n+PONG\r\n") == b"*1\r\n+OK\r\n+PONG\r\n"


def some_rounds(draw: random.Random) -> list[bytes]:
    """Return pipelines and single commands, some in pieces."""
    rounds = []
    for each in some_pipelines(draw.randrange(1000))[:12]:
        cut = draw.choice((0, 100, 3000))
        rounds += [each[:cut], each[cut:]]
        for _ in range(draw.randrange(6)):
            key = b"k%d" % draw.randrange(60)
            others = [(b"READONLY",), (b"READWRITE",), (b"GETDEL", key), (b"INCR", b"n")]
            rounds.append(packed(*draw.choice([(b"GET", key), (b"SET", key, b"w" * draw.choice((0, 3000))), *others])))
    return [*rounds, packed(b"DISCARD")]


@pytest.mark.parametrize("seed", range(20))
async def test_nothing_stays_counted_whatever_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    found = []
    for name in ("short", "long"):
        if name == "long":
            monkeypatch.setattr(pipeline, "BATCHED_MIN", 1 << 30)
            monkeypatch.setattr(FastPath, "begin_single", lambda *_: False)
            monkeypatch.setattr(FastPath, "begin_plain", lambda _, waiting: next(waiting, None))
        draw = random.Random(seed)
        async with redis_port(tmp_path / name) as resp:
            connection, stream = unread(resp)
            stream.high = 1 << 40
            for data in some_rounds(draw):
                connection.data_received(data)
                for _ in range(draw.choice((0, 1, 3, 50))):
                    await asyncio.sleep(0)
            replies = connection.replies
            await wait_until(lambda: is_true(replies.issued == replies.answered), what="all is answered")  # noqa: B023
            limit = resp.server.in_flight_limit
            assert not connection.pipeline.waiting
            assert (limit.commands + limit.more, limit.bytes, replies._held, replies._reserved, replies.early) == (
                0,
                0,
                0,
                0,
                {},
            )
            assert all(each.leader._queue.bytes == 0 for each in resp.backend.partitions.values())
            found.append((bytes(stream.written), replies.issued, await get_all(resp)))
    assert found[0] == found[1]


async def test_syncs_are_reported_during_a_turn_with_many_clients(tmp_path: Path) -> None:
    heard_before: list[int] = []
    commands = 0

    def report() -> None:
        heard_before.append(commands)

    async with redis_port(tmp_path, report_syncs=report) as resp:
        clients = [unread(resp)[0] for _ in range(4 * REPORT_EVERY)]
        for connection in clients:
            commands += 1
            connection.data_received(packed(b"SET", b"k", b"v"))
        assert heard_before == [1, *(1 + number * REPORT_EVERY for number in range(1, 4))]
