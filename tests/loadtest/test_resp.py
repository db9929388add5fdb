"""`kvstore bench run --resp`: plain commands through a Redis endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import hiredis
import pytest

from kvstore.errors import (
    InvalidRequest,
    NotAuthenticated,
    NotEnoughBookies,
    OutcomeUnknown,
    Overloaded,
    PermissionDenied,
    RateExceeded,
    Retryable,
    StoreError,
    Unavailable,
)
from kvstore.loadtest import loads
from kvstore.loadtest.loads import Generator, LoadSpec
from kvstore.loadtest.resp import Lost, ReplyError, RespCallers, connect
from kvstore.server.redis.replies import failure
from tests.loadtest.test_loads import ticking

Answer = Callable[[list[bytes]], bytes | None]


@asynccontextmanager
async def resp_server(answer: Answer, pong: bytes | None = b"+PONG\r\n") -> AsyncIterator[str]:
    """Run a server that answers each command so; None: it closes the connection."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        commands = hiredis.Reader()
        while data := await reader.read(1 << 16):
            commands.feed(data)
            while (command := commands.gets()) is not False:
                said = pong if pong is not None and command == [b"PING"] else answer(command)
                if said is None:
                    writer.close()
                    return
                writer.write(said)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"
    finally:
        server.close()
        for writer in writers:  # an open one would be reported in the middle of another test
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


async def callers(address: str, load: LoadSpec) -> RespCallers:
    found = RespCallers(address, load, timeout_s=30)
    await found.open(load.in_flight)
    return found


async def test_every_operation_is_the_command_of_its_name() -> None:
    seen: list[list[bytes]] = []
    load = LoadSpec(in_flight=1, value_bytes=3)
    async with resp_server(lambda command: seen.append(command) or b"+OK\r\n") as address:
        opened = await callers(address, load)
        for call in opened.calls().values():
            await call(b"k")
        opened.close()
    value = seen[1][2]
    assert seen == [[b"GET", b"k"], [b"SET", b"k", value], [b"INCR", b"n-k"], [b"DEL", b"k"]]
    assert len(value) == 3


async def test_load_is_run_over_as_many_connections_as_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "time", ticking())
    load = LoadSpec(seconds=0.2, warmup_s=0, in_flight=3, mix=(("get", 1),))
    async with resp_server(lambda command: b"$-1\r\n") as address:
        opened = await callers(address, load)
        found = await Generator(load, opened.calls()).run()
        opened.close()
    assert found.operations > 0
    assert not found.errors
    (row,) = found.rows()
    assert row["service_p50_ms"] <= row["p50_ms"]


async def test_error_reply_is_an_error_and_the_connection_stays_open() -> None:
    replies = iter([b"-ERR no\r\n", b"+OK\r\n"])
    async with resp_server(lambda command: next(replies)) as address:
        opened = await callers(address, LoadSpec(in_flight=1))
        put = opened.calls()["put"]
        with pytest.raises(InvalidRequest, match="ERR no"):
            await put(b"k")
        await put(b"k")
        opened.close()


async def test_refused_connection_is_reported_at_once_with_its_kind() -> None:
    for words, kind in (
        (b"NOAUTH Authentication required.", NotAuthenticated),
        (b"NOPERM user a lacks the right read", PermissionDenied),
    ):
        async with resp_server(lambda command, words=words: b"-%b\r\n" % words, pong=None) as address:  # type: ignore[misc]
            with pytest.raises(kind, match=words.decode()):
                await callers(address, LoadSpec(in_flight=1))


@pytest.mark.parametrize(
    "reason",
    [OutcomeUnknown("lost"), Overloaded("full"), RateExceeded("n", 1, 1, 1), Unavailable("nobody"), NotEnoughBookies()],
)
async def test_unknown_outcomes_and_retryable_errors_are_distinguished(reason: StoreError) -> None:
    """With the message of the Redis endpoint of a node; a write of unknown outcome is not an invalid request."""
    async with resp_server(lambda _: failure(reason)) as address:
        opened = await callers(address, LoadSpec(in_flight=1))
        with pytest.raises(StoreError) as raised:
            await opened.calls()["put"](b"k")
        opened.close()
    assert isinstance(raised.value, OutcomeUnknown) == isinstance(reason, OutcomeUnknown)
    assert isinstance(raised.value, Retryable) == isinstance(reason, Retryable)


async def test_errors_open_no_more_connections() -> None:
    async with resp_server(lambda command: b"-ERR no\r\n") as address:
        opened = await callers(address, LoadSpec(in_flight=1))
        first = opened._free[0]
        for _ in range(3):
            with pytest.raises(InvalidRequest):
                await opened.calls()["get"](b"k")
        assert opened._free == [first]
        opened.close()


async def test_connection_that_is_lost_leaves_the_outcome_open_and_is_replaced() -> None:
    replies = iter([None, b"+OK\r\n"])
    async with resp_server(lambda command: next(replies)) as address:
        opened = await callers(address, LoadSpec(in_flight=1))
        put = opened.calls()["put"]
        with pytest.raises(OutcomeUnknown):
            await put(b"k")
        await put(b"k")
        opened.close()


async def test_connection_that_is_lost_while_nobody_uses_it_is_replaced() -> None:
    async with resp_server(lambda command: b"+OK\r\n") as address:
        opened = await callers(address, LoadSpec(in_flight=1))
        put = opened.calls()["put"]
        await put(b"k")
        opened.close()
        async with asyncio.timeout(30):
            await put(b"k")
        opened.close()


async def test_address_is_judged_before_it_is_used() -> None:
    with pytest.raises(InvalidRequest, match="--resp"):
        RespCallers("nowhere", LoadSpec(), timeout_s=30)
    with pytest.raises(InvalidRequest, match="without user or password") as raised:
        RespCallers("anna:secret@127.0.0.1:6379", LoadSpec(), timeout_s=30)
    assert "secret" not in str(raised.value)
    async with resp_server(lambda command: None) as address:
        pass
    with pytest.raises(Unavailable, match=address):
        await callers(address, LoadSpec(in_flight=1))


async def test_commands_of_one_turn_leave_together_and_are_answered_in_order() -> None:
    seen: list[list[bytes]] = []

    def count(command: list[bytes]) -> bytes:
        seen.append(command)
        return b":%d\r\n" % len(seen)

    async with resp_server(count) as address:
        connection = await connect(address, timeout_s=30)
        answers = [connection.call(b"INCR", b"n%d" % number) for number in range(100)]
        assert await asyncio.gather(*answers) == list(range(1, 101))
        connection.close()
    assert [command[1] for command in seen] == [b"n%d" % number for number in range(100)]


async def test_error_replies_are_raised_by_ask_and_returned_by_ask_all() -> None:
    replies = {b"GET": b"$-1\r\n", b"BAD": b"-ERR no\r\n", b"EXEC": b"*2\r\n+OK\r\n-ERR half\r\n"}
    async with resp_server(lambda command: replies[command[0]]) as address:
        connection = await connect(address, timeout_s=30)
        with pytest.raises(ReplyError, match="ERR no"):
            await connection.ask(b"BAD", timeout_s=30)
        nothing, refused, half = await connection.ask_all([(b"GET", b"k"), (b"BAD",), (b"EXEC",)], timeout_s=30)
        assert (nothing, str(refused), half[0], str(half[1])) == (None, "ERR no", b"OK", "ERR half")
        assert [type(each) for each in (refused, half[1])] == [ReplyError, ReplyError]
        connection.close()


async def test_commands_without_a_reply_raise_lost_when_their_time_is_over() -> None:
    async with resp_server(lambda command: b"") as address:
        connection = await connect(address, timeout_s=30)
        waiting = connection.call(b"SET", b"j", b"v")
        with pytest.raises(Lost):
            await connection.ask(b"SET", b"k", b"v", timeout_s=0.05)
        assert connection.is_lost
        for later in (waiting, connection.call(b"GET", b"k")):
            with pytest.raises(Lost):
                await later


async def test_reply_to_a_cancelled_caller_does_not_shift_later_replies() -> None:
    counted = iter(range(1, 10))
    async with resp_server(lambda command: b":%d\r\n" % next(counted)) as address:
        connection = await connect(address, timeout_s=30)
        first, second = connection.call(b"INCR", b"n"), connection.call(b"INCR", b"n")
        first.cancel()
        assert await second == 2
        connection.close()
