"""The limit of what all Redis connections of a server have in flight."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstore.errors import Unavailable
from kvstore.server.redis.pipeline.in_flight_limit import FEW, InFlightLimit
from tests.server.redis.resp_port import RespPort, redis_port
from tests.server.redis.test_parser import packed
from tests.waiting import wait_until


class Client:
    """Begins `size` commands when it is woken."""

    def __init__(self, limit: InFlightLimit, size: int = 1) -> None:
        self.limit, self.size, self.woken = limit, size, 0

    def resume(self) -> None:
        self.woken += 1
        self.limit.begin(self.size, 0)


def test_limit_is_full_at_a_bound_and_open_at_half_of_both() -> None:
    limit = InFlightLimit(commands_max=10, bytes_max=100)
    limit.begin(9, 99)
    assert not limit.is_full
    limit.begin(1, 0)
    assert limit.is_full
    limit.end(5, 0)
    assert limit.is_full, "too many bytes are still under way"
    limit.end(0, 50)
    assert not limit.is_full
    limit.begin(0, 60)
    assert limit.is_full


def test_waiting_connections_resume_in_order_while_there_is_capacity() -> None:
    limit = InFlightLimit(commands_max=10, bytes_max=100)
    limit.begin(10, 0)
    first, second, third = Client(limit, 4), Client(limit, 4), Client(limit, 4)
    for each in (first, second, third):
        limit.wait(each)
    limit.forget(second)
    limit.end(4, 0)
    assert (first.woken, third.woken) == (0, 0)
    limit.end(2, 0)
    assert (first.woken, second.woken, third.woken) == (1, 0, 1), "4 + 4 more fit below 10 one after the other"
    assert limit.is_full
    limit.end(12, 0)
    assert (first.woken, second.woken, third.woken) == (1, 0, 1)


@pytest.fixture
async def resp(tmp_path: Path) -> AsyncIterator[RespPort]:
    async with redis_port(tmp_path) as opened:
        opened.server.in_flight_limit = InFlightLimit(commands_max=40, bytes_max=4_000)
        yield opened


@pytest.mark.parametrize("size", [1, 300], ids=["many", "large"])
async def test_connections_beyond_the_limit_wait_and_are_all_answered(resp: RespPort, size: int) -> None:
    raws = [await resp.connect() for _ in range(8)]
    resp.backend.hold()
    for number, raw in enumerate(raws):
        for i in range(100):
            raw.writer.write(packed(b"SET", b"%d-%d" % (number, i), b"x" * size))
            await raw.writer.drain()
    await wait_until(lambda: is_full(resp), what="the limit is reached")
    begun = len(resp.backend.submitted)
    assert begun < 800, "the rest waits in its connections"
    resp.backend.let_go()
    for raw in raws:
        assert await raw.read(500) == b"+OK\r\n" * 100
        raw.close()
    assert (resp.server.in_flight_limit.commands, resp.server.in_flight_limit.bytes) == (0, 0)


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        (packed(b"SET", b"k", b"x" * 500, b"EX", b"9"), b"+OK\r\n"),
        (packed(b"APPEND", b"{%d}", b"x" * 500), b":500\r\n"),
        (
            packed(b"MULTI") + packed(b"APPEND", b"{%d}", b"x" * 500) + packed(b"EXEC"),
            b"+OK\r\n+QUEUED\r\n*1\r\n:500\r\n",
        ),
    ],
    ids=["SET", "APPEND", "EXEC"],
)
async def test_value_of_every_write_counts(resp: RespPort, command: bytes, answer: bytes) -> None:
    """A leader's queue refused APPENDs and transactions of a few clients, because nothing slowed the clients down."""
    raws = [await resp.connect() for _ in range(10)]
    resp.backend.hold()
    for number, raw in enumerate(raws):
        raw.writer.write(command.replace(b"%d", b"%02d" % number))
    await wait_until(lambda: is_full(resp), what="the limit is reached")
    resp.backend.let_go()
    for raw in raws:
        assert await raw.read(len(answer)) == answer
        raw.close()
    await wait_until(lambda: is_empty(resp), what="nothing is counted any more")


@pytest.mark.parametrize("name", [b"MSET", b"EXISTS", b"MGET"])
async def test_command_of_several_keys_counts_for_each_of_them(resp: RespPort, name: bytes) -> None:
    """A bulk load in a pipeline has thousands of operations. A leader's queue would refuse them, and those of other
    clients too."""
    keys = [b"%d" % number for number in range(12)]
    words = [word for key in keys for word in (key, b"v")] if name == b"MSET" else keys
    answer = {b"MSET": b"+OK\r\n", b"EXISTS": b":0\r\n", b"MGET": b"*12\r\n" + b"$-1\r\n" * 12}[name]
    resp.backend.hold()
    resp.backend.held_reads = []
    async with resp.raw() as raw:
        raw.writer.write(packed(name, *words) * 50)
        await wait_until(lambda: is_full(resp), what="the limit is reached")
        assert len(resp.backend.submitted) <= 40 + len(keys)
        resp.backend.let_go()
        resp.backend.do_held_reads()
        assert await raw.read(50 * len(answer)) == answer * 50
        await wait_until(lambda: is_empty(resp), what="nothing is counted any more")


async def is_full(resp: RespPort) -> bool:
    return resp.server.in_flight_limit.is_full


async def test_connection_with_nothing_in_flight_does_not_wait_for_busy_ones(resp: RespPort) -> None:
    """Long reads of other connections, such as large ones, made every client wait for as long as they took."""
    resp.backend.held_reads = []
    greedy = [await resp.connect() for _ in range(2)]
    for raw in greedy:
        raw.writer.write(b"".join(packed(b"GET", b"%d" % number) for number in range(100)))
    await wait_until(lambda: is_full(resp), what="the limit is reached")
    async with resp.raw() as raw:
        for _ in range(3):
            raw.writer.write(packed(b"SET", b"k", b"v") + packed(b"APPEND", b"k", b"w") + packed(b"SET", b"k", b"x"))
            assert await raw.read(14) == b"+OK\r\n:2\r\n+OK\r\n"
        assert resp.server.in_flight_limit.is_full
        raw.writer.write(b"".join(packed(b"SET", b"k%d" % number, b"v") for number in range(30)))
        assert await raw.read(5 * 30) == b"+OK\r\n" * 30
    resp.backend.do_held_reads()
    for raw in greedy:
        assert await raw.read(500) == b"$-1\r\n" * 100
        raw.close()
    await wait_until(lambda: is_empty(resp), what="nothing is counted any more")


def test_connections_with_nothing_in_flight_are_bounded_too() -> None:
    limit = InFlightLimit(commands_max=10, bytes_max=100)
    limit.begin(10, 0)
    assert limit.has_spare()
    limit.begin(0, 100)
    assert not limit.has_spare(), "values take memory"
    limit.end(0, 100)
    limit.begin(10, 0)
    assert not limit.has_spare()
    limit.end(20, 0)
    assert (limit.is_full, limit.commands) == (False, 0)


def test_operations_of_large_commands_block_only_large_commands() -> None:
    limit = InFlightLimit(commands_max=10, bytes_max=100)
    limit.begin(1, 0, 20)
    assert limit.is_full
    assert limit.has_spare()
    assert limit.has_spare(FEW)
    assert not limit.has_spare(FEW + 1)
    limit.end(0, 0, 20)
    assert not limit.is_full


async def test_command_waiting_for_a_leader_stops_no_other_connection(resp: RespPort) -> None:
    keys = [b"%d" % number for number in range(200)]
    resp.backend.held_reads = []
    async with resp.raw() as large, resp.raw() as other:
        large.writer.write(packed(b"EXISTS", *keys))
        await wait_until(lambda: is_full(resp), what="the limit is reached")
        for _ in range(3):
            assert await other.ask(packed(b"SET", b"{k}", b"v"), b"+OK\r\n") == b"+OK\r\n"
            few = [word for key in (b"{k}a", b"{k}b") for word in (key, b"v")]
            assert await other.ask(packed(b"MSET", *few), b"+OK\r\n") == b"+OK\r\n"
            transaction = packed(b"MULTI") + packed(b"SET", b"{k}", b"w") + packed(b"EXEC")
            answer = b"+OK\r\n+QUEUED\r\n*1\r\n+OK\r\n"
            assert await other.ask(transaction, answer) == answer
        assert resp.server.in_flight_limit.is_full
        other.writer.write(packed(b"DEL", *keys) + packed(b"PING"))
        resp.backend.do_held_reads()
        assert await large.read(4) == b":0\r\n"
        assert await other.read(11) == b":0\r\n+PONG\r\n"
    await wait_until(lambda: is_empty(resp), what="nothing is counted any more")


async def test_nothing_stays_counted_when_a_connection_ends(resp: RespPort) -> None:
    raws = [await resp.connect() for _ in range(6)]
    raws[0].writer.write(packed(b"SET", b"a", b"v") + b"*1\r\n:1\r\n")
    raws[1].writer.write(packed(b"MULTI") + packed(b"SET", b"a", b"v") + packed(b"EXEC") + packed(b"QUIT"))
    raws[2].writer.write(packed(b"MSET", b"a", b"v", b"b", b"w") + packed(b"DBSIZE") + packed(b"NONSENSE"))
    raws[3].writer.write(packed(b"SET", b"a", b"x" * 2_000_000) + packed(b"SET", b"a", b"v", b"NX"))
    for raw in raws[:4]:
        await raw.read_line()
    resp.backend.hold()
    raws[4].writer.write(packed(b"SET", b"c", b"v" * 100) * 5)
    await raws[4].writer.drain()
    await wait_until(lambda: in_flight(resp), what="it is under way")
    raws[4].writer.transport.abort()
    resp.backend.let_go()
    resp.backend.failure = Unavailable("no leader")
    raws[5].writer.write(packed(b"SET", b"c", b"v") + packed(b"GET", b"c"))
    await raws[5].read_line()
    for raw in raws:
        raw.close()
    await wait_until(lambda: is_empty(resp), what="nothing is counted any more")


async def in_flight(resp: RespPort) -> bool:
    return resp.server.in_flight_limit.commands >= 5


async def is_empty(resp: RespPort) -> bool:
    limit = resp.server.in_flight_limit
    return (limit.commands, limit.more, limit.bytes) == (0, 0, 0)
