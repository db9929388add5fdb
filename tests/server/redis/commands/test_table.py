"""The rows of the Redis commands, and the commands and pages that show them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.server.redis.commands.row import InMulti
from kvstore.server.redis.commands.table import COMMANDS, FAMILIES
from kvstore.server.redis.commands.unsupported import UNSUPPORTED
from tests.server.redis.behaviour.test_access import line_of
from tests.server.redis.resp_port import redis_port
from tests.server.redis.script import GOLDEN
from tests.server.redis.test_parser import packed

REDIS_7 = GOLDEN / "names_of_redis.txt"
"""The reply of Redis 7.0 to `COMMAND LIST`, without subcommands."""


def test_every_command_of_redis_has_a_row() -> None:
    names = REDIS_7.read_bytes().split()
    assert len(names) == 240
    assert [name for name in names if name not in COMMANDS | UNSUPPORTED] == []


def test_no_two_rows_have_the_same_name() -> None:
    names = [row.name for family in FAMILIES for row in family.rows]
    assert len(names) == len(set(names))
    assert COMMANDS.keys() & UNSUPPORTED.keys() == set()


def test_every_row_has_a_summary_or_a_reason() -> None:
    assert [name for name, row in COMMANDS.items() if not row.summary.endswith(".")] == []
    assert [row.name for row in UNSUPPORTED.values() if not row.reason] == []


def test_later_versions_of_redis_have_rows_too() -> None:
    """7.2 to 8.4; the list above is from Redis 7.0."""
    later = b"WAITAOF XACKDEL XCFGSET XDELEX DELEX DIGEST MSETEX VADD VSIM HGETEX HSETEX HGETDEL HPEXPIREAT".split()
    assert [name for name in later if name not in COMMANDS | UNSUPPORTED] == []


@pytest.mark.parametrize("name", sorted(name for name, row in COMMANDS.items() if row.in_multi is InMulti.REFUSED))
async def test_command_refused_in_multi_discards_the_transaction(tmp_path: Path, name: bytes) -> None:
    async with redis_port(tmp_path) as resp, resp.raw() as raw:
        assert await line_of(raw, b"MULTI") == b"+OK\r\n"
        refused = b"-ERR %b is not allowed in transactions\r\n" % name
        assert await line_of(raw, name, *[b"1"] * (COMMANDS[name].least - 1)) == refused
        assert (await line_of(raw, b"EXEC")).startswith(b"-EXECABORT ")


async def test_command_docs_shows_the_summaries_of_the_rows(tmp_path: Path) -> None:
    async with redis_port(tmp_path) as resp, resp.raw() as raw:
        summary = COMMANDS[b"GET"].summary.encode()
        expected = b"*2\r\n$3\r\nget\r\n*4\r\n$7\r\nsummary\r\n$%d\r\n%b\r\n" % (len(summary), summary)
        expected += b"$5\r\ngroup\r\n$6\r\nstring\r\n"
        assert await raw.ask(packed(b"COMMAND", b"DOCS", b"get", b"nosuch"), expected) == expected
        assert await line_of(raw, b"COMMAND", b"DOCS") == b"*%d\r\n" % (2 * len(COMMANDS))


@pytest.mark.parametrize("name", ["LPOS", "SMOVE", "ZRANGEBYLEX", "HSTRLEN", "XINFO", "MONITOR", "DUMP", "SAVE"])
async def test_error_of_unsupported_command_names_the_docs(tmp_path: Path, name: str) -> None:
    async with redis_port(tmp_path) as resp, resp.raw() as raw:
        raw.writer.write(packed(name.encode(), b"a", b"b"))
        said = await raw.read_line()
    assert said.startswith(f"-ERR unknown command '{name}'".encode())
    assert said.endswith(b"see docs/reference/redis.md)\r\n")
