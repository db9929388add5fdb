"""FLUSHDB and FLUSHALL: all keys of a store that is a test's, and none of any other."""

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
from tests.server.redis.door import redis_door


@pytest.mark.parametrize("words", [("FLUSHDB",), ("FLUSHALL",), ("flushdb", "ASYNC"), ("FLUSHALL", "sync")])
async def test_a_flush_deletes_every_key(tmp_path: Path, words: tuple[str, ...]) -> None:
    async with redis_door(tmp_path, allows_flush=True) as door, redis.Redis(host=door.host, port=door.port) as client:
        for number in range(100):
            await client.set(f"key{number}", number, ex=None if number % 2 else 60)
        assert await client.execute_command(*words) in (True, b"OK")
        assert await client.dbsize() == 0
        await client.set("key1", "again")
        assert await client.get("key1") == b"again"


async def test_a_flush_is_refused_where_the_settings_do_not_allow_it(tmp_path: Path) -> None:
    async with redis_door(tmp_path) as door, redis.Redis(host=door.host, port=door.port) as client:
        await client.set("key", "1")
        for words in (("FLUSHDB",), ("flushall", "SYNC")):
            with pytest.raises(exceptions.ResponseError, match="redis_flush = true allows it"):
                await client.execute_command(*words)
        assert await client.get("key") == b"1"


async def test_a_right_that_is_taken_away_amid_a_flush_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done is not told as refused."""
    writes = (AddRole("writes"), GrantRight("writes", Right.WRITE), GrantRole("nothing", "writes"))
    access = Access(table(*writes))
    async with (
        redis_door(tmp_path, allows_flush=True, access=access) as door,
        redis.Redis(host=door.host, port=door.port, username="nothing", password="secret") as client,
    ):
        submit, flushed = door.backend.submit, list[Op]()

        def revoking(ops: Sequence[Op], sink: Sink, tokens: Sequence[int], *more: Any) -> None:
            for op, token in zip(ops, tokens, strict=True):
                submit((op,), sink, (token,), *more)
                if op[0] == Code.DELETE_RANGE:
                    flushed.append(op)
                    access.take(table(*writes, RevokeRole("nothing", "writes")))

        monkeypatch.setattr(door.backend, "submit", revoking)  # before anybody logs in, who then goes by it
        for number in range(100):
            await client.set(f"key{number}", number)
        with pytest.raises(exceptions.ResponseError, match="some partitions are empty by now, but not all"):
            await client.execute_command("FLUSHDB")
        assert len(flushed) == 1
        left = [each.state.key_count for each in door.backend.partitions.values()]
        assert sorted(count > 0 for count in left) == [False, True, True]


async def test_a_flush_of_something_is_no_flush(tmp_path: Path) -> None:
    async with (
        redis_door(tmp_path, allows_flush=True) as door,
        redis.Redis(host=door.host, port=door.port).client() as client,
    ):
        await client.set("key", "1")
        with pytest.raises(exceptions.ResponseError, match="syntax error"):
            await client.execute_command("FLUSHDB", "key")
        await client.execute_command("MULTI")
        with pytest.raises(exceptions.ResponseError):
            await client.execute_command("FLUSHDB")
        await client.execute_command("DISCARD")
        assert await client.get("key") == b"1"


async def test_flush_and_reset_of_the_slow_log_are_recorded_as_changes(tmp_path: Path) -> None:
    kept = KeptLines()
    async with (
        redis_door(tmp_path, allows_flush=True, audit=kept) as door,
        redis.Redis(host=door.host, port=door.port) as client,
    ):
        await client.execute_command("FLUSHALL")
        await client.execute_command("SLOWLOG", "RESET")
    found = [(each["call"], each["outcome"]) for each in kept.documents()]
    assert found == [
        ("FLUSHALL", "BEGUN"), ("FLUSHALL", "OK"), ("SLOWLOG RESET", "BEGUN"), ("SLOWLOG RESET", "OK"),
    ]  # fmt: skip
