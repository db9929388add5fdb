"""Commands that tools send to a server."""

from __future__ import annotations

import asyncio
import shutil
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import pytest

from kvstore.env.slow_log import Slow, SlowLog
from kvstore.server.access.identities import Access
from kvstore.server.redis.commands.server import slow_entry
from tests.server.access.tables import table
from tests.server.redis.behaviour.test_access import line_of
from tests.server.redis.resp_port import redis_port
from tests.server.redis.test_parser import packed
from tests.waiting import PATIENCE_S


def test_slow_log_entry_has_the_fields_of_redis() -> None:
    slow = Slow(1_700_000_000_123, "leader", "PUT", "00ff", "p2", 0.0253, {"sync": 0.02}, 3, 0.0)
    words = b"*5\r\n$3\r\nPUT\r\n$9\r\nat=leader\r\n$8\r\nkey=00ff\r\n$12\r\npartition=p2\r\n$12\r\noperations=3\r\n"
    assert slow_entry(41, slow) == b"*6\r\n:41\r\n:1700000000\r\n:25300\r\n" + words + b"$0\r\n\r\n" * 2


async def test_slow_log_is_shown_counted_and_cleared(tmp_path: Path) -> None:
    async with redis_port(tmp_path) as resp, resp.raw() as raw:
        slow = resp.server.slow = SlowLog(100, lambda: 0.0, lambda: 1_000)
        for number in range(12):
            slow.note("endpoint", f"GET{number}", 0.2)
        assert await line_of(raw, b"SLOWLOG", b"LEN") == b":12\r\n"
        for asked, first, count in (((), 11, 10), ((b"3",), 11, 3), ((b"-1",), 11, 12)):
            raw.writer.write(packed(b"SLOWLOG", b"GET", *asked))
            head = b"*%d\r\n*6\r\n:%d\r\n:1\r\n:200000\r\n" % (count, first)
            assert await raw.read(len(head)) == head
            last = b"GET%d\r\n$11\r\nat=endpoint\r\n$0\r\n\r\n$0\r\n\r\n" % (12 - count)
            assert (await raw.read_until(last)).endswith(last)
        assert await line_of(raw, b"CONFIG", b"GET", b"slowlog-log-*") == b"*2\r\n"
        assert await raw.read_until(b"100000\r\n")
        assert await line_of(raw, b"SLOWLOG", b"RESET") == b"+OK\r\n"
        assert await line_of(raw, b"SLOWLOG", b"LEN") == b":0\r\n"
        slow.note("endpoint", "GET", 0.2)
        raw.writer.write(packed(b"SLOWLOG", b"GET"))
        assert (await raw.read_until(b":12\r\n")).startswith(b"*1\r\n"), "its number is no other one's"
        assert slow.total == 13, "what is counted stays"


async def test_slow_log_needs_admin_and_memory_usage_needs_read(tmp_path: Path) -> None:
    async with redis_port(tmp_path, access=Access(table())) as resp, resp.raw() as raw:
        assert await line_of(raw, b"AUTH", b"tenant", b"secret") == b"+OK\r\n"
        assert await line_of(raw, b"SET", b"t/a", b"1") == b"+OK\r\n"
        assert await line_of(raw, b"MEMORY", b"USAGE", b"t/a") == b":4\r\n"
        assert (await line_of(raw, b"MEMORY", b"USAGE", b"u/a")).startswith(b"-NOPERM ")
        for second in (b"GET", b"LEN", b"RESET"):
            assert (await line_of(raw, b"SLOWLOG", second)).startswith(b"-NOPERM ")
        assert await line_of(raw, b"ROLE") == b"*3\r\n"


async def test_info_counts_keys_for_users_that_may_read_all(tmp_path: Path) -> None:
    """redis-cli --stat showed no keys."""
    async with redis_port(tmp_path / "open") as resp, resp.raw() as raw:
        for number in range(20):
            assert await line_of(raw, b"SET", b"%d" % number, b"1") == b"+OK\r\n"
        for sections in ((), (b"keyspace",), (b"all",)):
            raw.writer.write(packed(b"INFO", *sections))
            assert await raw.read_until(b"# Keyspace\r\ndb0:keys=20\r\n")
            await raw.read_line()
        await raw.ask(packed(b"INFO", b"clients"), b"$")
        assert b"Keyspace" not in await raw.read_until(b"blocked_clients:0\r\n\r\n")
    async with redis_port(tmp_path / "asks", access=Access(table())) as resp, resp.raw() as raw:
        assert await line_of(raw, b"AUTH", b"tenant", b"secret") == b"+OK\r\n"
        raw.writer.write(packed(b"INFO") + packed(b"PING"))
        assert b"Keyspace" not in await raw.read_until(b"+PONG\r\n")


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="no redis-cli here")
@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("--bigkeys", "Biggest string found '\"large\"' has 3000 bytes"),
        ("--memkeys", "Biggest string found '\"large\"' has 3005 bytes"),
        ("--scan", "large\n"),
        ("--latency --raw", " "),
    ],
)
async def test_redis_cli_modes_work(tmp_path: Path, mode: str, says: str) -> None:
    async with redis_port(tmp_path) as resp, resp.raw() as raw:
        for key, size in ((b"large", 3000), (b"a", 1), (b"b", 2)):
            assert await line_of(raw, b"SET", key, bytes(size)) == b"+OK\r\n"
        done = await asyncio.create_subprocess_exec(
            "redis-cli", "-p", str(resp.port), *mode.split(), stdout=PIPE, stderr=STDOUT
        )
        async with asyncio.timeout(PATIENCE_S):
            said, _ = await done.communicate()
    assert (done.returncode, says in said.decode(), b"rror" in said) == (0, True, False), said
