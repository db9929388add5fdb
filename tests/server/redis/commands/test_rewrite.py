"""Commands that read before they write, concurrent with other writers of their keys; conditional transactions;
locks; and clients of Redis Cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis
from redis import exceptions
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.lock import Lock

from kvstore.errors import OutcomeUnknown, Unavailable
from kvstore.partition.state.commands import Op
from kvstore.server.access.identities import Access
from kvstore.server.cluster.topology import Member
from kvstore.server.redis.commands import known_scripts as scripts
from kvstore.server.redis.commands import rewrite
from kvstore.server.redis.commands.atomic import Atomic
from kvstore.server.redis.plans import CommandError
from kvstore.types import PartitionId, ServerId
from tests.server.access.tables import table
from tests.server.redis.resp_port import RespPort, redis_port
from tests.server.redis.script import GOLDEN, read

CLIENTS, ROUNDS = 8, 20
IF_EQUAL = b"if redis.call('get',KEYS[1]) == ARGV[1] then return redis.call('del',KEYS[1]) else return 0 end"


@asynccontextmanager
async def clients(resp: RespPort, count: int = CLIENTS, **options: Any) -> AsyncIterator[list[redis.Redis]]:
    """Clients that wait as long as necessary: by default redis-py repeats a command after 5 s, which adds twice."""
    options = {"socket_timeout": None, **options}
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(redis.Redis(host=resp.host, port=resp.port, **options))
            for _ in range(count)
        ]


async def at_once(resp: RespPort, work: Callable[[redis.Redis, int], Coroutine[Any, Any, None]]) -> None:
    async with clients(resp) as all_of_them:
        await asyncio.gather(*(work(client, number) for number, client in enumerate(all_of_them)))


async def test_concurrent_float_increments_lose_nothing(resp: RespPort) -> None:
    async def add(client: redis.Redis, number: int) -> None:
        for _ in range(ROUNDS):
            await client.incrbyfloat("sum", 0.1)

    await at_once(resp, add)
    async with clients(resp, 1) as (client,):
        assert await client.get("sum") == b"%d" % (CLIENTS * ROUNDS // 10)


async def test_concurrent_range_writes_lose_nothing(resp: RespPort) -> None:
    async def write(client: redis.Redis, number: int) -> None:
        for round_ in range(ROUNDS):
            await client.setrange("parts", number * ROUNDS + round_, b"%d" % number)

    await at_once(resp, write)
    async with clients(resp, 1) as (client,):
        assert await client.get("parts") == b"".join(b"%d" % number * ROUNDS for number in range(CLIENTS))


async def test_concurrent_renames_move_a_key_once(resp: RespPort) -> None:
    renamed: list[int] = []
    refused: list[str] = []

    async def rename(client: redis.Redis, number: int) -> None:
        try:
            await client.rename("{t}a", f"{{t}}{number}")
            renamed.append(number)
        except exceptions.ResponseError as error:
            refused.append(str(error))

    async with clients(resp, 1) as (client,):
        await client.set("{t}a", b"x")
        await at_once(resp, rename)
        (winner,) = renamed
        assert refused == ["no such key"] * (CLIENTS - 1)
        assert [key async for key in client.scan_iter()] == [b"{t}%d" % winner]


async def test_counter_under_watch_counts_every_transaction(resp: RespPort) -> None:
    failed = 0

    async def add(client: redis.Redis, number: int) -> None:
        nonlocal failed
        for _ in range(ROUNDS):
            while True:
                async with client.pipeline() as pipe:
                    await pipe.watch("{n}a", "{n}b")
                    now = int(await pipe.get("{n}a") or 0)
                    pipe.multi()
                    pipe.set("{n}a", now + 1)
                    pipe.incr("{n}c")
                    try:
                        await pipe.execute()
                        break
                    except exceptions.WatchError:
                        failed += 1

    await at_once(resp, add)
    async with clients(resp, 1) as (client,):
        assert await client.mget("{n}a", "{n}c") == [b"%d" % (CLIENTS * ROUNDS)] * 2
    assert failed


async def test_watched_keys_and_transaction_must_be_in_one_partition(resp: RespPort) -> None:
    async with clients(resp, 1) as (client,):
        for words in (("RENAME", "a", "b"), ("COPY", "a", "b"), ("MSETNX", "a", 1, "b", 2)):
            with pytest.raises(exceptions.ClusterCrossSlotError, match=r"put the same {tag} into the keys"):
                await client.execute_command(*words)
        async with client.pipeline() as pipe:
            await pipe.watch(*"abcdef")
            pipe.multi()
            pipe.set("a", 1)
            with pytest.raises(exceptions.ClusterCrossSlotError):
                await pipe.execute()
        assert await client.exists(*"abcdef") == 0


async def test_rewrite_that_always_loses_is_refused(resp: RespPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "ATTEMPTS_MAX", 0)
    async with clients(resp, 1) as (client,):
        with pytest.raises(exceptions.ResponseError, match="other clients changed the key"):
            await client.incrbyfloat("a", 1)


async def test_watched_keys_above_the_limit_are_refused(resp: RespPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.server.redis.session.WATCHED_MAX", 2)
    async with clients(resp, 1) as (client,), client.pipeline() as pipe:
        await pipe.watch("a", "b", "a")
        with pytest.raises(exceptions.ResponseError, match="expected at most 2 watched keys"):
            await pipe.watch("c")


async def test_reader_may_not_rewrite_and_watches_only_readable_keys(tmp_path: Path) -> None:
    async with (
        redis_port(tmp_path, access=Access(table())) as resp,
        clients(resp, 1, username="tenant", password="secret", protocol=3) as (client,),
    ):
        mine, other = "t/{a}", "u/{a}"
        await client.set(mine, "1")
        assert await client.incrbyfloat(mine, 1) == 2.0
        for words in (("INCRBYFLOAT", other, 1), ("RENAME", mine, other), ("COPY", other, mine), ("WATCH", other)):
            with pytest.raises(exceptions.NoPermissionError):
                await client.execute_command(*words)
        assert await client.get(mine) == b"2"


async def test_watch_that_fails_watches_none_of_its_keys(tmp_path: Path) -> None:
    """The client, or the next user of its connection, got nil from an EXEC although it watched no key."""
    async with (
        redis_port(tmp_path, access=Access(table())) as resp,
        clients(resp, 1, username="tenant", password="secret", single_connection_client=True) as (client,),
    ):
        mine, other = "t/{a}", "u/{a}"
        with pytest.raises(exceptions.NoPermissionError):
            await client.execute_command("WATCH", mine, other)
        await client.set(mine, "1")
        await client.execute_command("MULTI")
        await client.execute_command("INCR", mine)
        assert await client.execute_command("EXEC") == [2]


# ── locks ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_redis_py_lock_from_acquire_to_release(resp: RespPort) -> None:
    async with clients(resp, 2) as (one, two):
        mine, its = one.lock("lock", timeout=30), two.lock("lock", timeout=30)
        assert await mine.acquire()
        assert not await its.acquire(blocking=False)
        assert await mine.extend(60)
        assert 60_000 < await one.pttl("lock") <= 90_000
        assert await mine.extend(60, replace_ttl=True)
        assert 30_000 < await one.pttl("lock") <= 60_000
        assert await mine.reacquire()
        assert await one.pttl("lock") <= 30_000
        await mine.release()
        assert await its.acquire(blocking=False)
        mine.local.token = b"mine"
        with pytest.raises(exceptions.LockNotOwnedError):
            await mine.release()
        await its.release()
        assert await one.exists("lock") == 0


async def test_lock_is_never_held_twice(resp: RespPort) -> None:
    holders = most = 0

    async def hold(client: redis.Redis, number: int) -> None:
        nonlocal holders, most
        for _ in range(ROUNDS):
            async with client.lock("lock", timeout=30, sleep=0.001):
                holders += 1
                most = max(most, holders)
                await client.incr("held")
                holders -= 1

    await at_once(resp, hold)
    assert most == 1


async def test_scripts_of_redis_py_are_known() -> None:
    known = scripts.Scripts()
    texts = (Lock.LUA_RELEASE_SCRIPT, Lock.LUA_EXTEND_SCRIPT, Lock.LUA_REACQUIRE_SCRIPT)
    assert [known.load(text.encode())[1] for text in texts] == [scripts.release, scripts.extend, scripts.renew]


async def test_concurrent_counts_of_a_rate_limiter_lose_nothing(resp: RespPort) -> None:
    """The key is created and counted by all clients at once, and keeps its first time to live."""
    text = next(
        words[1].decode()
        for script in read(GOLDEN / "redis_scripts.txt")
        for step in script.steps
        if b"incrby" in (words := step.words)[1]
    )

    async def count(client: redis.Redis, number: int) -> None:
        for _ in range(ROUNDS):
            await client.eval(text, 1, "count", 1000, 1)

    await at_once(resp, count)
    async with clients(resp, 1) as (client,):
        assert int(await client.get("count")) == CLIENTS * ROUNDS
        assert 0 < await client.ttl("count") <= 1000


@pytest.mark.parametrize("change", [b"redis.call", b"KEYS[1]", b"=="])
def test_changed_script_is_not_taken_for_the_known_one(change: bytes) -> None:
    known = scripts.Scripts()
    known.load(IF_EQUAL)
    with pytest.raises(CommandError, match="only the scripts of some libraries"):
        known.load(IF_EQUAL.replace(change, b"x" + change, 1))


async def test_unknown_script_is_refused(resp: RespPort) -> None:
    async with clients(resp, 1) as (client,):
        for text in ("return 1", "return redis.call('del', KEYS[1])", "x" * 100_000):
            with pytest.raises(exceptions.ResponseError, match="only the scripts of some libraries"):
                await client.eval(text, 1, "a")


def test_loaded_scripts_are_bounded() -> None:
    known = scripts.Scripts()
    for blanks in range(2 * scripts.LOADED_MAX):
        known.load(b" " * blanks + IF_EQUAL)
    assert len(known._loaded) == scripts.LOADED_MAX


# ── clients of clusters ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_redis_cluster_client_works(resp: RespPort) -> None:
    here = {ServerId("n1"): Member(id="n1", resp=f"{resp.host}:{resp.port}")}
    resp.backend.topology = replace(resp.backend.topology, servers=here)
    async with RedisCluster(host=resp.host, port=resp.port) as client:
        for number in range(20):
            assert await client.set(f"key-{number}", number)
            assert await client.get(f"key-{number}") == b"%d" % number
        assert await client.mset_nonatomic({"a": 1, "b": 2})
        assert await client.mget_nonatomic("a", "b") == [b"1", b"2"]
        await client.set("{t}a", 1)
        assert await client.rename("{t}a", "{t}b")
        assert await client.cluster_keyslot("{t}a") == client.keyslot("t")
        assert await client.publish("channel", "message") == 0, "the flag pubsub says where the channel's name is"


async def test_count_without_a_time_to_live_is_not_refused_as_a_whole() -> None:
    """A client that repeated it would count twice."""
    asked: list[Op] = []

    async def ask(op: Op) -> Any:
        asked.append(op)
        if len(asked) == 1:
            return [7, (1, 8)]
        raise Unavailable("no leader")

    call = scripts.Call(Atomic(ask, lambda key: PartitionId("p1")), b"visits", [b"60", b"1"], lambda: 0)
    with pytest.raises(OutcomeUnknown, match="counted"):
        await scripts.count(call)
