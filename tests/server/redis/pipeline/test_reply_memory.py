"""The memory that Redis connections hold for replies, individually and in total, whatever their clients request and
do not read."""

from __future__ import annotations

import socket
import struct
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import Unavailable
from kvstore.namespaces import Namespace
from kvstore.namespaces.rates import Rates
from kvstore.partition.state.commands import Code, Count, Op, Sink
from kvstore.server.config import Limits
from kvstore.server.redis import listener as resp_listener
from kvstore.server.redis.commands.asking import ask_partitions
from kvstore.server.redis.connection import RespConnection
from kvstore.server.redis.pipeline import reply_memory, reply_queue
from kvstore.server.redis.pipeline.in_flight_limit import InFlightLimit
from kvstore.server.redis.pipeline.reply_memory import CHECK_S, PATIENCE_S, REFUSE_S, ReplyMemory
from kvstore.types import PartitionId
from tests.server.redis.resp_port import Raw, RespPort, redis_port
from tests.server.redis.test_connection import bulk
from tests.server.redis.test_parser import packed
from tests.waiting import wait_until

MIB = 1 << 20


class Connection:
    def __init__(self, held: int = 0, full_since: float | None = None) -> None:
        self.held_bytes, self.full_since, self.heard = held, full_since, list[str]()

    def resume(self) -> None:
        self.heard.append("resume")

    def refuse(self) -> None:
        self.heard.append("refuse")

    def abort(self) -> None:
        self.heard.append("abort")
        self.held_bytes = 0


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_single_holder_always_has_capacity() -> None:
    room, one, other = ReplyMemory(Time(), 100), Connection(), Connection()
    assert room.take(one, 1_000)
    one.held_bytes = 1_000
    assert not room.take(other, 1)


def test_held_bytes_are_recounted() -> None:
    """Not as counted when memory last seemed scarce, which may be long ago."""
    room, one = ReplyMemory(Time(), 100), Connection(90)
    assert room.take(one, 90)
    assert room.held() == 90
    one.held_bytes = 0
    assert room.held() == 0


def test_returned_reservation_is_free_at_once() -> None:
    room, one, other, waiting = ReplyMemory(Time(), 100), Connection(), Connection(), Connection()
    for _ in range(100):
        assert room.take(one, 60)
        assert not room.give_back(one, 60), "nobody waits"
    assert room.take(one, 60)
    one.held_bytes = 60
    assert not room.take(other, 60)
    room.wait(waiting, 60)
    one.held_bytes = 20
    assert room.give_back(one, 40)
    assert not room.give_back(one, 0), "who waits is served once in a turn"
    room.serve()
    assert (room.bytes, waiting.heard, room.is_awaited) == (20, ["resume"], False)
    room.forget(one)
    room.give_back(one, 20)
    assert room.bytes == 20, "of one that is gone the next look finds nothing"


def test_written_replies_are_noticed_when_memory_seems_full() -> None:
    time = Time()
    room, one, other = ReplyMemory(time, 100), Connection(), Connection()
    assert room.take(one, 90)
    one.held_bytes = 40
    assert room.take(other, 60)
    other.held_bytes, one.held_bytes = 60, 0
    assert not room.take(one, 60), "it has just been looked at"
    time.now += CHECK_S
    assert room.take(one, 40)


def test_waiting_holders_resume_in_order_as_capacity_allows() -> None:
    time = Time()
    room, holder, first, second = ReplyMemory(time, 100), Connection(), Connection(), Connection()
    assert room.take(holder, 100)
    holder.held_bytes = 100
    room.wait(first, 60)
    room.wait(second, 10)
    holder.held_bytes = 50
    room.check()
    assert first.heard == second.heard == [], "the second would fit, but it came later"
    holder.held_bytes = 40
    room.check()
    assert first.heard == ["resume"]
    assert second.heard == ["resume"]
    assert not room.is_awaited


def test_commands_with_many_values_leave_memory_for_single_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_memory, "SINGLE_BYTES", 10)
    time = Time()
    room, many, single, waiting = ReplyMemory(time, 100), Connection(), Connection(), Connection()
    assert room.take(many, 60)
    many.held_bytes = 60
    assert not room.take(waiting, 20)
    assert room.take(single, 10)
    single.held_bytes = 10
    room.wait(waiting, 20)
    room.wait(single, 10)
    room.check()
    assert waiting.heard == []
    assert single.heard == ["resume"], "it does not wait behind what needs more"


def test_slow_readers_are_closed_only_as_needed_by_waiting_ones() -> None:
    time = Time()
    room = ReplyMemory(time, 100)
    small, large, reading, waiting = Connection(20, 0.0), Connection(50, 0.0), Connection(30), Connection()
    for each in (small, large, reading):
        assert room.take(each, each.held_bytes)
    room.wait(waiting, 10)
    time.now = PATIENCE_S
    room.check()
    assert waiting.heard == large.heard == []
    time.now = 2 * PATIENCE_S + CHECK_S
    room.check()
    assert (small.heard, large.heard, reading.heard, waiting.heard) == ([], ["abort"], [], ["resume"])
    assert room.closed == 1


def test_command_is_refused_when_no_memory_becomes_free() -> None:
    time = Time()
    room, reading, waiting = ReplyMemory(time, 100), Connection(100), Connection()
    assert room.take(reading, 100)
    room.wait(waiting, 10)
    time.now = REFUSE_S + CHECK_S
    room.check()
    assert waiting.heard == ["refuse"]
    assert reading.heard == []


def test_unread_replies_above_the_limit_close_the_largest_client() -> None:
    room, first, second = ReplyMemory(Time(), 100), Connection(70, 0.0), Connection(60, 0.0)
    room.add(first, 70)
    assert first.heard == []
    room.add(second, 60)
    assert (first.heard, second.heard) == (["abort"], [])


def value(version: int) -> bytes:
    return b"%07d" % version + b"x" * (MIB - 7)


def stop_reading(raw: Raw) -> None:
    raw.reader._transport.pause_reading()  # type: ignore[attr-defined]


def go_on_reading(raw: Raw) -> None:
    raw.reader._transport.resume_reading()  # type: ignore[attr-defined]


def held(resp: RespPort) -> int:
    return sum(connection.replies.held_bytes for connection in resp.server._connections)


async def is_put_off(resp: RespPort) -> bool:
    return resp.server.reply_memory.put_off > 0


async def test_slow_client_gets_all_replies_and_little_memory_is_held(resp: RespPort) -> None:
    """Also of partitions whose results arrive before their turn."""
    ring = resp.backend.topology.ring
    keys = [next(key for i in range(99) if ring.partition_of(key := b"%d" % i) == each) for each in ("p1", "p2", "p3")]
    async with resp.raw() as slow, resp.raw() as other:
        for key in keys:
            await slow.ask(packed(b"SET", key, value(0)), b"+OK\r\n")
        stop_reading(slow)
        slow.writer.write(b"".join(packed(b"GET", keys[i % 3]) + packed(b"ECHO", b"%d" % i) for i in range(60)))
        await wait_until(lambda: is_put_off(resp), what="replies are put off")
        for _ in range(20):
            assert await other.ask(packed(b"ECHO", b"!"), bulk(b"!")) == bulk(b"!")
            assert held(resp) <= reply_queue.HELD_BYTES_MAX + 2 * MIB
        go_on_reading(slow)
        for i in range(60):
            assert await slow.read(len(bulk(value(0)))) == bulk(value(0))
            assert await slow.read(len(bulk(b"%d" % i))) == bulk(b"%d" % i)
        assert resp.server.reply_memory.closed == 0


async def test_repeated_reads_never_go_back_in_time(resp: RespPort) -> None:
    async with resp.raw() as slow, resp.raw() as other:
        await other.ask(packed(b"SET", b"k", value(0)), b"+OK\r\n")
        stop_reading(slow)
        slow.writer.write((packed(b"GET", b"k") + packed(b"GETRANGE", b"k", b"0", b"6") + packed(b"MGET", b"k")) * 15)
        await wait_until(lambda: is_put_off(resp), what="replies are put off")
        go_on_reading(slow)
        seen = []
        for version in range(1, 16):
            seen.append((await slow.read(len(bulk(value(0)))))[10:17])
            seen.append((await slow.read(13))[4:11])
            seen.append((await slow.read(4 + len(bulk(value(0)))))[14:21])
            await other.ask(packed(b"SET", b"k", value(version)), b"+OK\r\n")
        assert seen == sorted(seen)
        assert seen[0] < seen[-1], "not all were read at once"


# docs/protocol.md N5
async def test_repeated_reads_are_charged_once(resp: RespPort, monkeypatch: pytest.MonkeyPatch) -> None:
    rates, submit = Rates(lambda: 0.0, Counter()), resp.backend.submit
    rates.take([Namespace(name="n", prefix=b"n", ops_per_s=10_000)])
    resp.server.rates = lambda: rates

    def counted(ops: Sequence[Op], sink: Sink, tokens: Sequence[int], *more: Any) -> None:
        for op, token in zip(ops, tokens, strict=True):
            assert rates.refusal_or_none([op.key]) is None
            submit((op,), sink, (token,), *more)

    async with resp.raw() as slow:
        await slow.ask(packed(b"SET", b"n", value(0)), b"+OK\r\n")
        monkeypatch.setattr(resp.backend, "submit", counted)
        stop_reading(slow)
        slow.writer.write((packed(b"GET", b"n") + packed(b"MGET", b"n")) * 15)
        await wait_until(lambda: is_put_off(resp), what="replies are put off")
        go_on_reading(slow)
        await slow.read((2 * len(bulk(value(0))) + 4) * 15)
    assert rates.passed == {"n": 30}


async def test_postponed_replies_of_a_disconnected_client_are_not_counted(resp: RespPort) -> None:
    raw = await resp.connect()
    await raw.ask(packed(b"SET", b"k", value(0)), b"+OK\r\n")
    stop_reading(raw)
    raw.writer.write(packed(b"GET", b"k") * 40 + packed(b"MGET", *[b"k"] * 20))
    await wait_until(lambda: is_put_off(resp), what="replies are put off")
    raw.writer.transport.abort()

    async def is_empty() -> bool:
        limit = resp.server.in_flight_limit
        return limit.commands + limit.more == 0 and not resp.server._connections

    await wait_until(is_empty, what="nothing is counted")


async def test_postponed_replies_of_slow_clients_take_no_others_slots(resp: RespPort) -> None:
    """With some hundred such clients, all operations in flight were theirs, and no other client was served."""
    limit = resp.server.in_flight_limit = InFlightLimit(commands_max=50, bytes_max=1_000)

    async def is_free() -> bool:
        has_come = sum(op.code == Code.PUT and op.key == b"n" for op in resp.backend.submitted) == begun
        return has_come and (limit.commands + limit.more, limit.bytes) == (0, 0)

    begun = 0
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(resp.raw())
        await other.ask(packed(b"SET", b"k", value(0)), b"+OK\r\n")
        slow = [await stack.enter_async_context(resp.raw()) for _ in range(3)]
        for raw in slow:
            stop_reading(raw)
            begun += 1
            raw.writer.write(packed(b"GET", b"k") * 30 + packed(b"SET", b"n", b"x" * 400))
            await wait_until(is_free, what="what its leader has answered is not under way")
        assert await other.ask(packed(b"GET", b"n"), bulk(b"x" * 400)) == bulk(b"x" * 400)
        for raw in slow:
            go_on_reading(raw)
            assert await raw.read(len(bulk(value(0))) * 30 + 5) == bulk(value(0)) * 30 + b"+OK\r\n"
        await wait_until(is_free, what="nothing is counted twice")


async def test_command_with_many_values_is_repeated_with_reserved_memory(resp: RespPort) -> None:
    async with resp.raw() as raw:
        await raw.ask(packed(b"SET", b"k", value(0)), b"+OK\r\n")
        expected = b"*20\r\n" + bulk(value(0)) * 20
        assert await raw.ask(packed(b"MGET", *[b"k"] * 20), expected) == expected
        assert resp.server.reply_memory.put_off == 1


async def test_slow_readers_do_not_keep_memory_from_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_memory, "PATIENCE_S", 0.1)
    async with redis_port(tmp_path, limits=Limits(output_bytes_max=12 * MIB)) as resp, AsyncExitStack() as stack:
        other = await stack.enter_async_context(resp.raw())
        await other.ask(packed(b"SET", b"k", value(0)), b"+OK\r\n")
        for _ in range(4):
            slow = await stack.enter_async_context(resp.raw())
            stop_reading(slow)
            slow.writer.write(packed(b"GET", b"k") * 64)
        await wait_until(lambda: is_put_off(resp), what="the room is full")
        expected = bulk(value(0))
        for _ in range(20):
            assert await other.ask(packed(b"GET", b"k"), expected) == expected
            assert held(resp) <= 12 * MIB + 4 * MIB
        assert resp.server.reply_memory.closed <= 4


async def test_transactions_that_read_begin_with_memory_for_all_results(tmp_path: Path) -> None:
    async with redis_port(tmp_path, limits=Limits(output_bytes_max=24 * MIB)) as resp, AsyncExitStack() as stack:
        raws = [await stack.enter_async_context(resp.raw()) for _ in range(6)]
        await raws[0].ask(packed(b"SET", b"k", value(0)), b"+OK\r\n")
        resp.backend.hold()
        for raw in raws:
            raw.writer.write(packed(b"MULTI") + packed(b"GET", b"k") * 4 + packed(b"INCR", b"{k}n") + packed(b"EXEC"))
            await raw.read(len(b"+OK\r\n" + b"+QUEUED\r\n" * 5))

        async def begun(count: int) -> bool:
            return sum(op.code == Code.BATCH for op in resp.backend.submitted) == count

        await wait_until(lambda: begun(2), what="as many have begun as there is room for")
        resp.backend.let_go()
        for raw in raws:
            assert (await raw.read(4 + 4 * len(bulk(value(0)))))[:4] == b"*5\r\n"
            assert (await raw.read_line())[:1] == b":"


async def test_memory_of_a_transaction_is_free_when_it_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not with the next count: a node executed some 150 transactions that read in a second."""
    monkeypatch.setattr(reply_memory, "CHECK_S", 1_000.0)
    monkeypatch.setattr(resp_listener, "CHECK_S", 1_000.0)
    begun = packed(b"MULTI") + packed(b"GET", b"k") * 4 + packed(b"SET", b"{k}n", b"v") + packed(b"EXEC")
    queued, answer = b"+OK\r\n" + b"+QUEUED\r\n" * 5, b"*5\r\n" + bulk(b"v") * 4 + b"+OK\r\n"
    async with redis_port(tmp_path, limits=Limits(output_bytes_max=24 * MIB)) as resp, AsyncExitStack() as stack:
        raws = [await stack.enter_async_context(resp.raw()) for _ in range(6)]
        await raws[0].ask(packed(b"SET", b"k", b"v"), b"+OK\r\n")
        for _ in range(10):
            assert await raws[0].ask(begun, queued + answer) == queued + answer
        assert not resp.server.reply_memory.is_awaited
        resp.backend.hold()
        for raw in raws:
            raw.writer.write(begun)
            await raw.read(len(queued))

        async def wait() -> bool:
            return len(resp.server.reply_memory._waiting) == 4

        await wait_until(wait, what="the others wait for room")
        resp.backend.let_go()
        for raw in raws:
            assert await raw.read(len(answer)) == answer


async def test_traversals_begin_with_memory_for_their_results(tmp_path: Path) -> None:
    async with redis_port(tmp_path, limits=Limits(output_bytes_max=24 * MIB)) as resp, AsyncExitStack() as stack:
        raws = [await stack.enter_async_context(resp.raw()) for _ in range(3)]
        await raws[0].ask(packed(b"SET", b"k", b"v"), b"+OK\r\n")
        others = Connection(held=24 * MIB - MIB // 2)
        resp.server.reply_memory.take(others, others.held_bytes)
        for raw, words in zip(
            raws, ([b"KEYS", b"*"], [b"SCAN", b"0", b"COUNT", b"10000"], [b"SCAN", b"0"]), strict=True
        ):
            raw.writer.write(packed(*words))
        assert await raws[2].read_line() == b"*2\r\n", "a few keys are little"

        async def wait() -> bool:
            return len(resp.server.reply_memory._waiting) == 2

        await wait_until(wait, what="both wait for room")
        assert [op.code for op in resp.backend.submitted if op.code == Code.COUNT] == []
        others.held_bytes = 0
        assert await raws[0].read_line() == b"*1\r\n"
        assert await raws[1].read_line() == b"*2\r\n"


async def test_traversal_is_refused_when_no_memory_becomes_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply_memory, "REFUSE_S", 0.0)
    async with redis_port(tmp_path, limits=Limits(output_bytes_max=24 * MIB)) as resp, resp.raw() as raw:
        others = Connection(held=MIB)
        resp.server.reply_memory.take(others, MIB)
        raw.writer.write(packed(b"KEYS", b"*") + packed(b"PING"))
        assert (await raw.read_line()).startswith(b"-TRYAGAIN overloaded")
        assert await raw.read_line() == b"+PONG\r\n"


async def test_transaction_refused_for_memory_leaves_no_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next user of the connection has not requested a watch. A refusal outside a transaction ends no WATCH."""
    monkeypatch.setattr(reply_memory, "REFUSE_S", 0.0)
    others, queued = Connection(held=24 * MIB), b"+OK\r\n+QUEUED\r\n"
    async with redis_port(tmp_path, limits=Limits(output_bytes_max=24 * MIB)) as resp, AsyncExitStack() as stack:
        raw, other = [await stack.enter_async_context(resp.raw()) for _ in range(2)]
        await raw.ask(packed(b"WATCH", b"k"), b"+OK\r\n")
        resp.server.reply_memory.take(others, 24 * MIB)
        raw.writer.write(packed(b"GETSET", b"n", b"v"))
        assert (await raw.read_line()).startswith(b"-TRYAGAIN overloaded")
        await other.ask(packed(b"SET", b"k", b"v"), b"+OK\r\n")
        await raw.ask(packed(b"MULTI") + packed(b"GET", b"k"), queued)
        others.held_bytes = 0
        assert await raw.ask(packed(b"EXEC"), b"*-1\r\n") == b"*-1\r\n", "it was still watched"

        await raw.ask(packed(b"WATCH", b"k") + packed(b"MULTI") + packed(b"GET", b"k"), b"+OK\r\n" + queued)
        others.held_bytes = 24 * MIB
        resp.server.reply_memory.add(others, 24 * MIB)
        raw.writer.write(packed(b"EXEC"))
        assert (await raw.read_line()).startswith(b"-TRYAGAIN overloaded")
        await other.ask(packed(b"SET", b"k", b"w"), b"+OK\r\n")
        others.held_bytes = 0
        await raw.ask(packed(b"MULTI") + packed(b"SET", b"k", b"x"), queued)
        raw.writer.write(packed(b"EXEC"))
        assert await raw.read_line() == b"*1\r\n"


async def test_values_are_not_gathered_for_a_disconnected_client(resp: RespPort) -> None:
    connection = RespConnection(resp.server)
    connection.replies.is_gone = True
    with pytest.raises(Unavailable):
        await ask_partitions(connection.pipeline, [b"DBSIZE"])(Count(level=0), PartitionId("p1"))
    assert resp.backend.submitted == []


async def test_rest_of_a_large_read_is_skipped_when_its_client_disconnects(resp: RespPort) -> None:
    resp.backend.held_reads = []
    async with resp.raw() as raw:
        raw.writer.write(packed(b"MGET", *(b"%d" % number for number in range(4 * reply_queue.READS_AT_ONCE))))

        async def begun() -> bool:
            return len(resp.backend.submitted) == reply_queue.READS_AT_ONCE

        await wait_until(begun, what="some have begun")
        raw.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sinks = {id(sink): sink for _, sink, _ in resp.backend.held_reads}

    async def is_gone() -> bool:
        return all(sink.is_gone for sink in sinks.values())

    await wait_until(is_gone, what="the server knows that the client is gone")
    resp.backend.do_held_reads()

    async def ended() -> bool:
        return resp.server.in_flight_limit.commands + resp.server.in_flight_limit.more == 0

    await wait_until(ended, what="the command has ended")
    assert len(resp.backend.submitted) == reply_queue.READS_AT_ONCE


async def test_commands_that_return_old_values_begin_a_few_at_a_time(resp: RespPort) -> None:
    count = 64
    async with resp.raw() as raw:
        resp.backend.hold()
        raw.writer.write(b"".join(packed(b"GETSET", b"%d" % i, b"v") for i in range(count)))

        async def begun() -> bool:
            return len(resp.backend.submitted) > 0

        await wait_until(begun, what="some have begun")
        assert len(resp.backend.submitted) * MIB * 2 <= reply_queue.RESERVED_BYTES_MAX
        resp.backend.let_go()
        assert await raw.read(5 * count) == b"$-1\r\n" * count
