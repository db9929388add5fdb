"""A Redis connection as bytes: order of replies, malformed input, slow readers, bounds."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis

from kvstore.errors import (
    NotCaughtUp,
    NotEnoughBookies,
    NotLeader,
    OutcomeUnknown,
    Overloaded,
    StoreError,
    Unavailable,
)
from kvstore.namespaces import Namespace
from kvstore.namespaces.rates import Rates
from kvstore.partition.state.commands import Code, Level, Op, Sink
from kvstore.partition.state.traits import INTERNAL
from kvstore.server.config import Limits
from kvstore.server.redis import listener as resp_listener
from kvstore.server.redis.parser import AT_ONCE_MAX, BULK_BYTES_MAX
from kvstore.server.redis.pipeline import reply_queue
from kvstore.server.redis.pipeline.pipeline import BATCHED_MIN
from tests.server.redis.resp_port import RespPort, redis_port
from tests.server.redis.test_parser import packed
from tests.waiting import PATIENCE_S, wait_until


def bulk(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)


async def test_replies_are_in_command_order_when_a_partition_is_slow(resp: RespPort) -> None:
    ring = resp.backend.topology.ring
    slow, fast = (
        next(key for i in range(100) if ring.partition_of(key := b"k%d" % i) == partition) for partition in ("p1", "p2")
    )
    async with resp.raw() as raw:
        resp.backend.partitions["p1"].log.is_held = True
        raw.writer.write(packed(b"SET", slow, b"1") + packed(b"INCR", fast) + packed(b"PING") + packed(b"GET", fast))
        async with redis_client(resp) as other:
            await wait_until(lambda: other.exists(fast), what="the fast write is done")
        resp.backend.let_go()
        expected = b"+OK\r\n:1\r\n+PONG\r\n" + bulk(b"1")
        assert await raw.read(len(expected)) == expected


@pytest.mark.parametrize(
    ("write", "read", "answers"),
    [
        (packed(b"SET", b"k", b"new"), packed(b"GET", b"k"), b"+OK\r\n" + bulk(b"new")),
        (packed(b"SETNX", b"k", b"new"), packed(b"GET", b"k"), b":1\r\n" + bulk(b"new")),
        (packed(b"SET", b"k", b"new"), packed(b"STRLEN", b"k"), b"+OK\r\n:3\r\n"),
        (packed(b"MSET", b"j", b"1", b"k", b"new"), packed(b"MGET", b"k"), b"+OK\r\n*1\r\n" + bulk(b"new")),
        (packed(b"INCR", b"k"), packed(b"EXISTS", b"j", b"k"), b":1\r\n:1\r\n"),
    ],
    ids=["SET GET", "SETNX GET", "SET STRLEN", "MSET MGET", "INCR EXISTS"],
)
async def test_read_waits_for_an_earlier_write_of_its_connection(
    resp: RespPort, write: bytes, read: bytes, answers: bytes
) -> None:
    async with resp.raw() as raw:
        resp.backend.hold()
        raw.writer.write(write + read)
        await wait_until(lambda: has_changed(resp), what="the write is submitted")
        assert not any(op.code in (Code.GET, Code.META) for op in resp.backend.submitted)
        resp.backend.let_go()
        assert await raw.read(len(answers)) == answers


@pytest.mark.parametrize("read", [packed(b"GET", b"k"), packed(b"MGET", b"j", b"k"), packed(b"STRLEN", b"k")])
@pytest.mark.parametrize("write", [packed(b"SET", b"k", b"new"), packed(b"DEL", b"k"), packed(b"APPEND", b"k", b"!")])
async def test_write_waits_for_an_earlier_read_of_its_connection(resp: RespPort, read: bytes, write: bytes) -> None:
    async with resp.raw() as raw, resp.raw() as other:
        await raw.ask(packed(b"SET", b"k", b"old"), b"+OK\r\n")
        before = len(resp.backend.submitted)
        resp.backend.held_reads = []
        raw.writer.write(read + write)
        await wait_until(lambda: at_least(len(resp.backend.submitted), before + 1), what="the read is submitted")
        await other.ask(packed(b"PING"), b"+PONG\r\n")
        assert {op.code for op in resp.backend.submitted[before:]} <= {Code.GET, Code.META}
        resp.backend.do_held_reads()
        assert await raw.read_line() in (b"$3\r\n", b":3\r\n", b"*2\r\n")
        await wait_until(lambda: at_least(len(resp.backend.submitted), before + 2), what="the write follows")


async def test_read_is_not_answered_before_an_earlier_one(resp: RespPort, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first read may see a later state."""
    async with resp.raw() as raw:
        await raw.ask(packed(b"SET", b"k", b"v"), b"+OK\r\n")
        before = len(resp.backend.submitted)
        resp.backend.held_reads = []
        raw.writer.write(packed(b"GET", b"k"))
        await wait_until(lambda: at_least(len(resp.backend.submitted), before + 1), what="the first is submitted")
        monkeypatch.setattr(resp.backend, "read_now", lambda _: pytest.fail("it was looked up at once"))
        raw.writer.write(packed(b"GET", b"k"))
        await wait_until(lambda: at_least(len(resp.backend.submitted), before + 2), what="the second is submitted")
        raw.writer.write(packed(b"GET", b"k") * BATCHED_MIN)
        count = 2 + BATCHED_MIN
        await wait_until(lambda: at_least(len(resp.backend.submitted), before + count), what="the rest is submitted")
        resp.backend.do_held_reads()
        assert await raw.read(count * len(bulk(b"v"))) == bulk(b"v") * count


async def test_reads_in_transactions_or_of_other_levels_take_the_slow_path(
    resp: RespPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resp.backend, "read_now", lambda _: pytest.fail("it was looked up at once"))
    count = BATCHED_MIN
    async with resp.raw() as raw:
        for asked, wanted in (
            (packed(b"MULTI"), b"+OK\r\n"),
            (packed(b"GET", b"k") * count, b"+QUEUED\r\n" * count),
            (packed(b"EXEC"), b"*%d\r\n" % count + b"$-1\r\n" * count),
            (packed(b"READONLY"), b"+OK\r\n"),
            (packed(b"GET", b"k") * count, b"$-1\r\n" * count),
        ):
            assert await raw.ask(asked, wanted) == wanted


@pytest.mark.parametrize(("get", "set_"), [(b"GET", b"SET"), (b"get", b"set")])
async def test_pipelined_reads_are_looked_up_together(
    resp: RespPort, monkeypatch: pytest.MonkeyPatch, get: bytes, set_: bytes
) -> None:
    """In lower case too, as go-redis and ioredis write the commands."""
    puts, submit = list[int](), resp.backend.submit
    read_now, asked = resp.backend.read_now, []
    monkeypatch.setattr(resp.backend, "read_now", lambda keys: asked.append(keys) or read_now(keys))
    async with resp.raw() as raw:
        await raw.ask(packed(set_, b"k", b"v"), b"+OK\r\n")
        await raw.ask(packed(get, b"k"), bulk(b"v"))
        assert asked == [[b"k"]]
        few = BATCHED_MIN - 1
        assert await raw.ask(packed(get, b"k") * few, bulk(b"v") * few) == bulk(b"v") * few
        assert asked == [[b"k"]]
        wanted = bulk(b"v") * BATCHED_MIN
        assert await raw.ask(packed(get, b"k") * BATCHED_MIN, wanted) == wanted
        assert asked == [[b"k"], [b"k"] * BATCHED_MIN]
        monkeypatch.setattr(resp.backend, "submit", lambda ops, *rest: puts.append(len(ops)) or submit(ops, *rest))
        done = b"+OK\r\n" * BATCHED_MIN
        assert await raw.ask(packed(set_, b"k", b"w") * BATCHED_MIN, done) == done
        assert puts == [BATCHED_MIN]


@pytest.mark.parametrize("protocol", [2, 3])
async def test_pipelined_reads_get_the_replies_of_single_ones(resp: RespPort, protocol: int) -> None:
    """Among keys of other partitions and absent keys, large values, expiries and other commands."""
    rng = random.Random(protocol)
    kinds = {
        b"small": packed(b"SET", b"{k}small", b"v"),
        b"large": packed(b"SET", b"{k}large", b"x" * 5_000),
        b"short": packed(b"SET", b"{k}short", b"v", b"EX", b"1000"),
        b"absent": b"",
    }
    async with resp.raw() as raw:
        raw.writer.write(packed(b"HELLO", b"%d" % protocol) + packed(b"PING"))
        await raw.read_until(b"+PONG\r\n")
        raw.writer.write(b"".join(kinds.values()))
        assert await raw.read(5 * 3) == b"+OK\r\n" * 3
        null = b"_\r\n" if protocol == 3 else b"$-1\r\n"
        answers = {b"{k}small": bulk(b"v"), b"{k}large": bulk(b"x" * 5_000), b"{k}short": bulk(b"v")}
        for turn in range(60):
            names = rng.choices(list(kinds), [20, 1, 1, 5] if turn % 2 else [1, 0, 0, 1], k=rng.randrange(2, 90))
            asked = [packed(b"GET", b"{k}" + name) for name in names]
            wanted = [answers.get(b"{k}" + name, null) for name in names]
            if turn % 3 == 0:
                place = rng.randrange(len(names))
                other = rng.choice([(b"EXISTS {k}small", b":1\r\n"), (b"SET {k}small v", b"+OK\r\n")])
                asked.insert(place, packed(*other[0].split()))
                wanted.insert(place, other[1])
            raw.writer.write(b"".join(asked))
            assert await raw.read(len(b"".join(wanted))) == b"".join(wanted)


async def has_changed(resp: RespPort) -> bool:
    return any(op.code not in (Code.GET, Code.META) for op in resp.backend.submitted)


async def test_malformed_frame_closes_the_connection_after_earlier_replies(resp: RespPort) -> None:
    async with resp.raw() as raw, resp.raw() as other:
        raw.writer.write(packed(b"SET", b"k", b"v") + b"*1\r\n:1\r\n" + packed(b"SET", b"k", b"w"))
        assert await raw.read_to_end() == b"+OK\r\n-ERR Protocol error: expected '$', got ':'\r\n"
        expected = bulk(b"v")
        assert await other.ask(packed(b"GET", b"k"), expected) == expected


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        (packed(b"SET", b"k", b"x" * (BULK_BYTES_MAX + 1)), b"-ERR expected an argument of at most"),
        (packed(b"SET", b"k", b"x" * ((1 << 20) + 1)), b"-ERR expected a value of at most"),
        (packed(b"SET", b"k" * 4097, b"v"), b"-ERR expected a key of at most"),
        (packed(b"NONSENSE"), b"-ERR unknown command"),
        (packed(b"GET"), b"-ERR wrong number of arguments"),
        (packed(b"INCR", b"k", b"k", b"k"), b"-ERR wrong number of arguments"),
        (packed(b""), b"-ERR unknown command"),
    ],
    ids=["huge argument", "large value", "long key", "unknown", "too few", "too many", "empty"],
)
async def test_oversized_unknown_and_malformed_commands_keep_the_connection(
    resp: RespPort, command: bytes, answer: bytes
) -> None:
    async with resp.raw() as raw:
        raw.writer.write(command + packed(b"PING"))
        assert (await raw.read_line()).startswith(answer)
        assert await raw.read_line() == b"+PONG\r\n"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NotLeader("p1"), b"-TRYAGAIN "),
        (NotCaughtUp("x"), b"-TRYAGAIN "),
        (Overloaded("full"), b"-TRYAGAIN overloaded"),
        (Unavailable("p1 has no leader"), b"-CLUSTERDOWN "),
        (NotEnoughBookies("1 of 2"), b"-NOREPLICAS Not enough good replicas to write."),
        (OutcomeUnknown("timeout\r\nx"), b"-UNKNOWN the write may or may not have been done: timeout  x"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, StoreError) else "",
)
@pytest.mark.parametrize(
    "command",
    [
        (b"SET", b"k", b"v"),
        (b"GET", b"k"),
        (b"DEL", b"a", b"b"),
        (b"MGET", b"a", b"b"),
        (b"INCR", b"k"),
        (b"TTL", b"k"),
        (b"STRLEN", b"k"),
        (b"SET", b"k", b"v", b"GET"),
        (b"EXISTS", b"k"),
        (b"DBSIZE",),
        (b"SCAN", b"0"),
    ],
    ids=lambda words: words[0].decode(),
)
async def test_failures_have_the_codes_that_clients_inspect(
    resp: RespPort, command: tuple[bytes, ...], error: StoreError, words: bytes
) -> None:
    resp.backend.failure = error
    async with resp.raw() as raw:
        raw.writer.write(packed(*command) + packed(b"PING"))
        assert (await raw.read_line()).startswith(words)
        assert await raw.read_line() == b"+PONG\r\n"


async def test_hello_changes_only_later_replies(resp: RespPort) -> None:
    async with resp.raw() as raw:
        raw.writer.write(packed(b"GET", b"no") + packed(b"HELLO", b"3") + packed(b"GET", b"no"))
        assert await raw.read_line() == b"$-1\r\n"
        assert await raw.read_line() == b"%7\r\n"
        assert (await raw.reader.readuntil(b"_\r\n")).endswith(b"*0\r\n_\r\n")


async def test_readonly_makes_reads_stale_until_readwrite(resp: RespPort) -> None:
    async with resp.raw() as raw:
        stream = packed(b"READONLY") + packed(b"GET", b"k") + packed(b"READWRITE") + packed(b"GET", b"k")
        await raw.ask(stream, b"+OK\r\n$-1\r\n+OK\r\n$-1\r\n")
    levels = [op.level for op in resp.backend.submitted if op.code == Code.GET]
    assert levels == [Level.STALE, Level.LINEARIZABLE]


@pytest.mark.parametrize(
    ("ending", "reply"),
    [
        (packed(b"UNWATCH"), b"+OK\r\n"),
        (packed(b"MULTI") + packed(b"DISCARD"), b"+OK\r\n+OK\r\n"),
        (packed(b"MULTI") + packed(b"DEL", b"k") + packed(b"EXEC"), b"+OK\r\n+QUEUED\r\n*1\r\n:0\r\n"),
        (packed(b"READONLY"), b"+OK\r\n"),
    ],
    ids=["unwatch", "discard", "exec", "readonly"],
)
async def test_read_under_a_watch_is_not_stale(resp: RespPort, ending: bytes, reply: bytes) -> None:
    """EXEC would compare the version that WATCH saw, and write a value made of an older one."""

    def stale() -> int:
        return sum(op.code == Code.GET and op.level == Level.STALE for op in resp.backend.submitted)

    get, none = packed(b"GET", b"k"), b"$-1\r\n"
    async with resp.raw() as raw:
        await raw.ask(packed(b"READONLY") + get, b"+OK\r\n" + none)
        assert stale() == 1
        assert await raw.ask(packed(b"WATCH", b"k") + get, b"+OK\r\n" + none) == b"+OK\r\n" + none
        assert await raw.ask(get, none) == none
        assert stale() == 1
        assert await raw.ask(ending, reply) == reply
        await raw.ask(get, none)
        assert stale() == (1 if b"READONLY" in ending else 2)


async def test_quit_and_end_of_input_wait_for_replies_in_flight(resp: RespPort) -> None:
    async with resp.raw() as raw:
        raw.writer.write(packed(b"SET", b"k", b"v") + packed(b"QUIT") + packed(b"SET", b"k", b"w"))
        assert await raw.read_to_end() == b"+OK\r\n+OK\r\n"
    async with resp.raw() as raw:
        raw.writer.write(packed(b"GET", b"k"))
        raw.writer.write_eof()
        assert await raw.read_to_end() == bulk(b"v")


async def test_commands_in_flight_on_one_connection_are_bounded(resp: RespPort) -> None:
    """A connection begins with a lower limit, which rises while all replies fit."""
    first, most = reply_queue.IN_FLIGHT_FIRST, reply_queue.IN_FLIGHT_MAX
    count = 3 * most
    sets = b"".join(packed(b"SET", b"key-%d" % i, b"v") for i in range(count))
    async with resp.raw() as raw:
        begun = 0
        for bound in (first, most):
            resp.backend.hold()
            raw.writer.write(sets)
            await wait_until(
                lambda least=begun + bound: at_least(len(resp.backend.submitted), least), what="the bound is reached"
            )
            async with redis_client(resp) as other:
                await other.ping()
            assert len(resp.backend.submitted) == begun + bound
            resp.backend.let_go()
            assert await raw.read(5 * count) == b"+OK\r\n" * count
            begun = len(resp.backend.submitted)


async def test_oversized_reply_is_an_error_and_reads_little(resp: RespPort) -> None:
    async with resp.raw() as client:
        await client.ask(packed(b"SET", b"k", b"x" * (1 << 20)), b"+OK\r\n")
        begun = len(resp.backend.submitted)
        client.writer.write(packed(b"MGET", *[b"k"] * 10_000))
        assert (await client.read_line()).startswith(b"-ERR expected a reply of at most 33554432 bytes")
        assert len(resp.backend.submitted) - begun <= reply_queue.READS_AT_ONCE
        assert await client.ask(packed(b"PING"), b"+PONG\r\n") == b"+PONG\r\n"
        small = [b"k-%d" % number for number in range(2_000)]
        await client.ask(packed(b"MSET", *(each for key in small for each in (key, key))), b"+OK\r\n")
        expected = b"*2000\r\n" + b"".join(map(bulk, small))
        assert await client.ask(packed(b"MGET", *small), expected) == expected


async def test_connection_above_the_limit_is_refused(tmp_path: Path) -> None:
    async with redis_port(tmp_path, limits=Limits(connections_max=2)) as resp, resp.raw() as one, resp.raw() as two:
        assert await one.ask(packed(b"PING"), b"+PONG\r\n") == await two.ask(packed(b"PING"), b"+PONG\r\n")
        async with resp.raw() as third:
            assert await third.read_to_end() == b"-ERR max number of clients reached\r\n"
        two.close()
        await wait_until(lambda: at_least(1, resp.server.statistics()["resp_connections"]), what="a place is free")
        async with resp.raw() as fourth:
            assert await fourth.ask(packed(b"PING"), b"+PONG\r\n") == b"+PONG\r\n"


async def test_connections_of_one_network_leave_slots_for_another(tmp_path: Path) -> None:
    async with redis_port(tmp_path, limits=Limits(connections_max=3)) as resp, AsyncExitStack() as stack:

        async def opened(host: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection(resp.host, resp.port, local_addr=(host, 0))
            stack.callback(writer.close)
            return reader, writer

        async def answer(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bytes:
            connection[1].write(packed(b"PING"))
            async with asyncio.timeout(PATIENCE_S):
                return await connection[0].readline()

        many = [await opened("127.0.0.1") for _ in range(3)]
        assert [await answer(each) for each in many] == [b"+PONG\r\n"] * 3
        few = await opened("127.0.1.1")
        assert await answer(few) == b"+PONG\r\n"
        async with asyncio.timeout(PATIENCE_S):
            assert await many[0][0].read() == b"", "the oldest is closed"
            for host in ("127.0.0.1", "127.0.1.1"):
                assert (await (await opened(host))[0].read()).startswith(b"-ERR max number of clients")
        assert [await answer(each) for each in (few, *many[1:])] == [b"+PONG\r\n"] * 3


@pytest.mark.parametrize("line", [b"PING\r\n", b"x\n", b"\n"], ids=["PING", "unknown", "empty"])
async def test_client_has_its_turn_after_a_limited_number_of_commands(resp: RespPort, line: bytes) -> None:
    """A single client that sent empty lines held the event loop of a node for seconds, and the node lost its leases."""
    count, turns, most, before = 20_000, 0, 0, 0
    async with resp.raw() as raw:
        assert await raw.ask(packed(b"PING"), b"+PONG\r\n") == b"+PONG\r\n"
        (connection,) = resp.server._connections
        raw.writer.write(line * count + packed(b"QUIT"))
        replies = asyncio.ensure_future(raw.read_to_end())
        while not replies.done():
            await asyncio.sleep(0)
            turns, most, before = turns + 1, max(most, connection.replies.issued - before), connection.replies.issued
        assert (await replies).count(b"\r\n") == count * (line != b"\n") + 1
    assert turns >= count // AT_ONCE_MAX
    assert most <= 2 * AT_ONCE_MAX


async def test_incomplete_commands_are_bounded_over_all_connections(
    resp: RespPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resp_listener, "INPUT_BYTES_MAX", 1 << 20)
    begun = b"*2\r\n$3\r\nGET\r\n$1000000\r\n" + b"x" * 500_000
    async with resp.raw() as one, resp.raw() as two:
        one.writer.write(begun + b"x" * 400_000)
        await wait_until(lambda: at_least(resp.server.statistics()["resp_input_bytes"], 900_000), what="it has come")
        two.writer.write(begun)
        assert await one.read_to_end() == b"-ERR the server holds too many incomplete commands; try again\r\n", (
            "the largest is closed"
        )
        two.writer.write(b"x" * 500_000 + b"\r\n" + packed(b"PING"))
        assert (await two.read_line()).startswith(b"-ERR expected a key of at most")
        assert await two.read_line() == b"+PONG\r\n"
        assert resp.server.statistics()["resp_input_bytes"] == 0


async def test_queued_commands_are_bounded_per_connection_and_in_total(
    resp: RespPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = b"v" * 1_000_000
    async with resp.raw() as one, resp.raw() as two:
        queued = b"+OK\r\n" + b"+QUEUED\r\n" * 4
        await one.ask(packed(b"MULTI") + packed(b"SET", b"{t}k", value) * 4, queued)
        assert resp.server.statistics()["resp_input_bytes"] > 4_000_000
        one.writer.write(packed(b"SET", b"{t}k", value) + packed(b"EXEC"))
        assert (await one.read_line()).startswith(
            b"-ERR expected at most 1048576 bytes of keys and values in a transaction"
        )
        assert (await one.read_line()).startswith(b"-EXECABORT")
        assert resp.server.statistics()["resp_input_bytes"] == 0
        monkeypatch.setattr(resp_listener, "INPUT_BYTES_MAX", 3_000_000)
        await one.ask(packed(b"MULTI") + packed(b"SET", b"{t}k", value) * 2, queued[:23])
        two.writer.write(packed(b"MULTI") + packed(b"SET", b"{t}k", value))
        assert await one.read_to_end() == b"-ERR the server holds too many incomplete commands; try again\r\n", (
            "the largest is closed"
        )
        assert await two.read(len(b"+OK\r\n+QUEUED\r\n")) == b"+OK\r\n+QUEUED\r\n"
        assert await two.ask(packed(b"EXEC"), b"*1\r\n+OK\r\n") == b"*1\r\n+OK\r\n"


async def test_watched_keys_are_bounded_in_total(resp: RespPort, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connection may watch 4 MiB of keys, and there may be 10,000 connections."""
    keys = [b"{t}%0*d" % (4_000, number) for number in range(20)]
    async with resp.raw() as one, resp.raw() as two:
        await one.ask(packed(b"WATCH", *keys), b"+OK\r\n")
        await wait_until(lambda: at_least(resp.server.statistics()["resp_input_bytes"], 80_000), what="it is counted")
        assert await one.ask(packed(b"PING"), b"+PONG\r\n") == b"+PONG\r\n"
        await one.ask(packed(b"UNWATCH"), b"+OK\r\n")
        assert resp.server.statistics()["resp_input_bytes"] == 0
        monkeypatch.setattr(resp_listener, "INPUT_BYTES_MAX", 120_000)
        await one.ask(packed(b"WATCH", *keys), b"+OK\r\n")
        two.writer.write(packed(b"WATCH", *keys[:10]))
        assert await one.read_to_end() == b"-ERR the server holds too many incomplete commands; try again\r\n", (
            "the largest is closed"
        )
        answer = b"+OK\r\n+OK\r\n*0\r\n"
        assert await two.ask(packed(b"MULTI") + packed(b"EXEC"), answer) == answer
        assert resp.server.statistics()["resp_input_bytes"] == 0


@pytest.mark.parametrize("name", [b"MGET", b"EXISTS", b"TOUCH"])
async def test_reads_of_one_command_are_submitted_in_portions(resp: RespPort, name: bytes) -> None:
    """A leader that received an EXISTS of 65,535 keys at once seemed to be down, and the reply was CLUSTERDOWN."""
    keys = [b"%d" % number for number in range(3 * reply_queue.READS_AT_ONCE)]
    resp.backend.held_reads = []
    async with resp.raw() as raw:
        raw.writer.write(packed(name, *keys))
        await wait_until(lambda: has_held_reads(resp), what="the command has begun")
        assert len(resp.backend.held_reads) == reply_queue.READS_AT_ONCE
        resp.backend.do_held_reads()
        answer = b"*%d\r\n" % len(keys) + b"$-1\r\n" * len(keys) if name == b"MGET" else b":0\r\n"
        assert await raw.read(len(answer)) == answer


@pytest.mark.parametrize(
    "later", [packed(b"SET", b"{t}2499", b"new"), packed(b"APPEND", b"{t}2499", b"!")], ids=["SET", "APPEND"]
)
async def test_writes_of_one_command_are_submitted_in_portions_in_order(resp: RespPort, later: bytes) -> None:
    """A leader's queue refused some of 65,535 DELs, so the command never succeeded as a whole."""
    keys = [b"{t}%d" % number for number in range(2_500)]
    resp.backend.hold()
    async with resp.raw() as raw:
        raw.writer.write(packed(b"MSET", *(word for key in keys for word in (key, b"old"))) + later)
        await wait_until(lambda: has_changed(resp), what="the command has begun")
        assert len(resp.backend.submitted) <= reply_queue.WRITES_AT_ONCE
        resp.backend.let_go()
        assert await raw.read_line() == b"+OK\r\n"
        await raw.read_line()
        value = b"new" if later.startswith(b"*3\r\n$3") else b"old!"
        assert await raw.ask(packed(b"GET", keys[-1]), bulk(value)) == bulk(value)
        raw.writer.write(packed(b"DEL", *keys))
        assert await raw.read_line() == b":2500\r\n"


async def has_held_reads(resp: RespPort) -> bool:
    return bool(resp.backend.held_reads)


# docs/protocol.md N5
async def test_rate_admits_a_command_of_several_keys_whole_or_not_at_all(
    resp: RespPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a command with more keys than may be read at once, and than the bucket of its namespace holds."""
    now, many = 0.0, [b"n/%d" % number for number in range(2 * reply_queue.READS_AT_ONCE)]
    rates = Rates(lambda: now, Counter())
    rates.take([Namespace(name="n", prefix=b"n/", ops_per_s=100)])
    resp.server.rates = lambda: rates
    submit = resp.backend.submit

    def counted(ops: Sequence[Op], sink: Sink, tokens: Sequence[int], *more: Any) -> None:
        """As in the dispatcher."""
        for op, token in zip(ops, tokens, strict=True):
            refusal = rates.refusal_or_none([op.key])
            submit((op,), sink, (token,), *more) if refusal is None else resp.backend._fail(sink, token, refusal)

    monkeypatch.setattr(resp.backend, "submit", counted)
    read, written = packed(b"MGET", *many), packed(b"MSET", *(word for key in many for word in (key, b"v")))
    nothing = b"*%d\r\n" % len(many) + b"$-1\r\n" * len(many)
    async with resp.raw() as raw:
        assert await raw.ask(read, nothing) == nothing
        assert rates.passed == {"n": len(many)}
        for refused in (written, packed(b"DEL", *many), packed(b"MULTI") + packed(b"GET", b"n/1") + packed(b"EXEC")):
            raw.writer.write(refused)
            assert b"-TRYAGAIN " in await raw.read_until(b" ms\r\n")
        now += len(many) / 100
        assert await raw.ask(read, nothing) == nothing, "nothing was written, and nothing taken"
        now += len(many) / 100
        assert await raw.ask(written, b"+OK\r\n") == b"+OK\r\n"


@pytest.mark.parametrize(("command", "most"), [(b"TTL", 101), (b"PTTL", 101_000)])
async def test_time_to_live_is_that_at_exec(
    resp: RespPort, monkeypatch: pytest.MonkeyPatch, command: bytes, most: int
) -> None:
    begun = packed(b"MULTI") + packed(b"SET", b"k", b"v", b"EX", b"100") + packed(command, b"k")
    now_ms, behind_ms = resp.server.now_ms, 1_000_000
    monkeypatch.setattr(resp.server, "now_ms", lambda: now_ms() - behind_ms)
    async with resp.raw() as raw:
        await raw.ask(begun, b"+OK\r\n+QUEUED\r\n+QUEUED\r\n")
        behind_ms = 0
        await raw.ask(packed(b"EXEC"), b"*2\r\n+OK\r\n")
        assert 0 < int((await raw.read_line())[1:]) <= most


async def test_oversized_command_fails_its_transaction(resp: RespPort) -> None:
    """A client that got an error for QUEUED may rely on EXEC doing nothing. Outside a transaction nothing fails."""
    large = packed(b"SET", b"{t}b", b"v" * (BULK_BYTES_MAX + 1))
    async with resp.raw() as raw:
        raw.writer.write(packed(b"MULTI") + packed(b"SET", b"{t}a", b"1") + large + packed(b"EXEC"))
        assert await raw.read(len(b"+OK\r\n+QUEUED\r\n")) == b"+OK\r\n+QUEUED\r\n"
        assert (await raw.read_line()).startswith(b"-ERR expected an argument of at most")
        assert (await raw.read_line()).startswith(b"-EXECABORT")
        assert await raw.ask(packed(b"EXISTS", b"{t}a"), b":0\r\n") == b":0\r\n"
        raw.writer.write(large)
        assert (await raw.read_line()).startswith(b"-ERR expected an argument of at most")
        done = b"+OK\r\n+QUEUED\r\n*1\r\n+OK\r\n"
        assert await raw.ask(packed(b"MULTI") + packed(b"SET", b"{t}a", b"1") + packed(b"EXEC"), done) == done


async def at_least(value: int, least: int) -> bool:
    return value >= least


def redis_client(resp: RespPort) -> redis.Redis:
    return redis.Redis(host=resp.host, port=resp.port)


async def test_read_behind_a_transaction_sees_all_of_it(resp: RespPort) -> None:
    """Also a key that is not the transaction's first."""
    a, b = b"{t}a", b"{t}b"
    transaction = packed(b"MULTI") + packed(b"SET", a, b"1") + packed(b"SET", b, b"2") + packed(b"EXEC")
    expected = b"+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n+OK\r\n+OK\r\n" + bulk(b"2")
    async with resp.raw() as raw:
        await raw.ask(packed(b"SET", b, b"old"), b"+OK\r\n")
        assert await raw.ask(transaction + packed(b"GET", b), expected) == expected


async def test_capacity_of_an_aborted_transaction_is_free_for_the_next(resp: RespPort) -> None:
    """Nothing is in flight, so no reply would ever let the second transaction continue."""
    queued = packed(b"MULTI") + packed(b"GET", b"k") * 9 + packed(b"SET", b"k")
    async with resp.raw() as raw:
        raw.writer.write((queued + packed(b"EXEC")) * 2 + packed(b"PING"))
        answers = await raw.read_until(b"+PONG\r\n")
        assert answers.count(b"-EXECABORT") == 2


# docs/protocol.md Tx1
@pytest.mark.parametrize("code", sorted(INTERNAL))
async def test_operation_of_leaders_is_no_command(resp: RespPort, code: int) -> None:
    async with resp.raw() as raw:
        for name in (Code(code).name.encode(), b"%d" % code):
            raw.writer.write(packed(b"MULTI") + packed(name, b"a", b"1") + packed(b"EXEC") + packed(name, b"a"))
            replies = [await raw.read_line() for _ in range(4)]
            assert replies[0] == b"+OK\r\n"
            assert replies[1].startswith(b"-ERR unknown command"), replies
            assert replies[2].startswith(b"-EXECABORT"), replies
            assert replies[3].startswith(b"-ERR unknown command"), replies
    assert resp.backend.submitted == []
