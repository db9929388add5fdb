"""Queries about the server itself: they must hold neither its event loop nor more memory than clients read."""

from __future__ import annotations

import pytest

from kvstore.server.redis.commands.row import OPTIONS_MAX
from kvstore.server.redis.plans import PATTERN_BYTES_MAX
from tests.server.redis.resp_port import RespPort
from tests.server.redis.test_parser import packed
from tests.waiting import wait_until


@pytest.mark.parametrize(
    "command", ["PING", "ECHO a", "NOSUCH", "SELECT 0", "HELLO", "MULTI", "COMMAND", "INFO", "GET k"]
)
async def test_command_of_a_client_that_reads_nothing_does_not_begin(resp: RespPort, command: str) -> None:
    async with resp.raw() as raw:
        await raw.ask(packed(b"PING"), b"+PONG\r\n")
        (connection,) = resp.server._connections
        connection.pause_writing()
        raw.writer.write(f"{command}\r\n".encode() * 100)

        async def has_come() -> bool:
            return resp.server.commands == 101

        await wait_until(has_come, what="the commands have come")
        assert connection.replies.issued == 1
        connection.resume_writing()
        await wait_until(lambda: is_answered(resp, 101), what="they are answered when it reads again")


@pytest.mark.parametrize("command", ["COMMAND", "INFO", "CLIENT LIST", "CONFIG GET *"])
async def test_large_replies_are_made_one_per_turn(resp: RespPort, command: str) -> None:
    """A packet of CLIENT LIST commands made thousands of replies before any was sent: gigabytes with many clients."""
    async with resp.raw() as raw:
        await raw.ask(packed(b"PING"), b"+PONG\r\n")
        (connection,) = resp.server._connections
        connection.data_received(f"{command}\r\n".encode() * 50)
        assert connection.replies.answered == 1
        await wait_until(lambda: is_answered(resp, 51), what="all are answered")


async def is_answered(resp: RespPort, count: int) -> bool:
    (connection,) = resp.server._connections
    return connection.replies.answered == count


@pytest.mark.parametrize("command", [[b"KEYS"], [b"SCAN", b"0", b"MATCH"], [b"CONFIG", b"GET"]])
async def test_pattern_that_compiles_slowly_is_refused(resp: RespPort, command: list[bytes]) -> None:
    async with resp.raw() as raw:
        raw.writer.write(packed(*command, b"[^a]" * (PATTERN_BYTES_MAX // 4)))
        assert (await raw.read_line()).startswith(b"*")
    async with resp.raw() as raw:
        raw.writer.write(packed(*command, b"a" * (PATTERN_BYTES_MAX + 1)))
        assert await raw.read_line() == b"-ERR expected a pattern of at most 1024 bytes, got more\r\n"


@pytest.mark.parametrize(
    "command", ["SCAN 0", "CONFIG GET", "INFO", "HELLO 3", "CLIENT", "SET k v", "EXPIRE k 1", "PEXPIREAT k 1"]
)
async def test_options_are_bounded(resp: RespPort, command: str) -> None:
    async with resp.raw() as raw:
        raw.writer.write(packed(*command.encode().split(), *[b"x"] * OPTIONS_MAX))
        name = command.split()[0].lower()
        assert await raw.read_line() == f"-ERR wrong number of arguments for '{name}' command\r\n".encode()


async def test_many_browsers_leave_one_line_in_the_log(resp: RespPort, caplog: pytest.LogCaptureFixture) -> None:
    """A line for each connection would fill the log of a node whose port an unauthenticated peer calls again and
    again."""
    for _ in range(5):
        async with resp.raw() as raw:
            raw.writer.write(b"POST / HTTP/1.1\r\nHost: n1\r\n\r\n")
            assert await raw.read_to_end() == b""
    assert sum("speaks HTTP" in record.getMessage() for record in caplog.records) == 1
