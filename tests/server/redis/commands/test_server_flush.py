"""FLUSHDB and FLUSHALL: they delete all keys of a test store, and none of any other store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis
from redis import exceptions

from kvstore.access import AddRole, GrantRight, GrantRole, RevokeRole, Right
from kvstore.partition.state.commands import Code, Op, Sink
from kvstore.server.access.identities import Access
from tests.audited import KeptLines
from tests.server.access.tables import table
from tests.server.redis.resp_port import redis_port


@pytest.mark.parametrize("words", [("FLUSHDB",), ("FLUSHALL",), ("flushdb", "ASYNC"), ("FLUSHALL", "sync")])
async def test_flush_deletes_every_key(tmp_path: Path, words: tuple[str, ...]) -> None:
    async with redis_port(tmp_path, allows_flush=True) as resp, redis.Redis(host=resp.host, port=resp.port) as client:
        for number in range(100):
            await client.set(f"key{number}", number, ex=None if number % 2 else 60)
        assert await client.execute_command(*words) in (True, b"OK")
        assert await client.dbsize() == 0
        await client.set("key1", "again")
        assert await client.get("key1") == b"again"


async def test_flush_is_refused_when_it_is_disabled(tmp_path: Path) -> None:
    async with redis_port(tmp_path) as resp, redis.Redis(host=resp.host, port=resp.port) as client:
        await client.set("key", "1")
        for words in (("FLUSHDB",), ("flushall", "SYNC")):
            with pytest.raises(exceptions.ResponseError, match="set redis_flush = true"):
                await client.execute_command(*words)
        assert await client.get("key") == b"1"


async def test_flush_ends_when_its_right_is_revoked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Completed deletions are not reported as refused."""
    writes = (AddRole("writes"), GrantRight("writes", Right.WRITE), GrantRole("nothing", "writes"))
    access = Access(table(*writes))
    async with (
        redis_port(tmp_path, allows_flush=True, access=access) as resp,
        redis.Redis(host=resp.host, port=resp.port, username="nothing", password="secret") as client,
    ):
        submit, flushed = resp.backend.submit, list[Op]()

        def revoking(ops: Sequence[Op], sink: Sink, tokens: Sequence[int], *more: Any) -> None:
            for op, token in zip(ops, tokens, strict=True):
                submit((op,), sink, (token,), *more)
                if op.code == Code.DELETE_RANGE:
                    flushed.append(op)
                    access.take(table(*writes, RevokeRole("nothing", "writes")))

        monkeypatch.setattr(resp.backend, "submit", revoking)  # before any login, which then uses the table
        for number in range(100):
            await client.set(f"key{number}", number)
        with pytest.raises(exceptions.ResponseError, match="some partitions are empty by now, but not all"):
            await client.execute_command("FLUSHDB")
        assert len(flushed) == 1
        left = [each.state.key_count for each in resp.backend.partitions.values()]
        assert sorted(count > 0 for count in left) == [False, True, True]


async def test_flush_with_an_unknown_option_is_refused(tmp_path: Path) -> None:
    async with (
        redis_port(tmp_path, allows_flush=True) as resp,
        redis.Redis(host=resp.host, port=resp.port).client() as client,
    ):
        await client.set("key", "1")
        with pytest.raises(exceptions.ResponseError, match="syntax error"):
            await client.execute_command("FLUSHDB", "key")
        await client.execute_command("MULTI")
        with pytest.raises(exceptions.ResponseError):
            await client.execute_command("FLUSHDB")
        await client.execute_command("DISCARD")
        assert await client.get("key") == b"1"


async def test_flush_and_slow_log_reset_are_recorded_as_changes(tmp_path: Path) -> None:
    kept = KeptLines()
    async with (
        redis_port(tmp_path, allows_flush=True, audit=kept) as resp,
        redis.Redis(host=resp.host, port=resp.port) as client,
    ):
        await client.execute_command("FLUSHALL")
        await client.execute_command("SLOWLOG", "RESET")
    found = [(each["call"], each["outcome"]) for each in kept.documents()]
    assert found == [
        ("FLUSHALL", "BEGUN"), ("FLUSHALL", "OK"), ("SLOWLOG RESET", "BEGUN"), ("SLOWLOG RESET", "OK"),
    ]  # fmt: skip
