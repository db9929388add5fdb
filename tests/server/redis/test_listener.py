"""The Redis port as clients see it: redis-py in both protocol versions, over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio as redis
from redis.exceptions import ExecAbortError, ResponseError

from kvstore.limits import VALUE_BYTES_MAX
from tests.server.redis.pipeline.test_reply_memory import go_on_reading, stop_reading
from tests.server.redis.resp_port import RespPort
from tests.server.redis.test_parser import packed
from tests.waiting import wait_until


@pytest.fixture(params=[2, 3], ids=["RESP2", "RESP3"])
async def client(resp: RespPort, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    async with redis.Redis(host=resp.host, port=resp.port, protocol=request.param) as connected:
        yield connected


async def test_set_value_is_returned_by_get(client: Any) -> None:
    assert await client.get("k") is None
    assert await client.set("k", b"\x00\r\n\xff") is True
    assert await client.get("k") == b"\x00\r\n\xff"


async def test_set_with_unmet_condition_returns_null(client: Any) -> None:
    assert await client.set("k", 1, xx=True) is None
    assert await client.set("k", 1, nx=True) is True
    assert await client.set("k", 2, nx=True) is None
    assert await client.set("k", 2, xx=True) is True
    assert await client.get("k") == b"2"


async def test_set_get_returns_the_old_value(client: Any) -> None:
    assert await client.set("k", "a", get=True) is None
    assert await client.set("k", "b", get=True) == b"a"
    assert await client.set("k", "c", nx=True, get=True) == b"b"
    assert await client.get("k") == b"b"
    assert await client.execute_command("GETSET", "k", "d") == b"b"
    assert await client.getdel("k") == b"d"
    assert await client.getdel("k") is None


async def test_append_beyond_the_limit_is_refused_with_the_size(client: Any) -> None:
    await client.set("k", b"x" * VALUE_BYTES_MAX)
    with pytest.raises(ResponseError, match=f"value of at most {VALUE_BYTES_MAX} bytes, got {VALUE_BYTES_MAX + 1}"):
        await client.append("k", b"y")
    assert await client.strlen("k") == VALUE_BYTES_MAX


async def test_times_to_live(client: Any) -> None:
    assert await client.ttl("k") == -2
    await client.set("k", "v")
    assert await client.ttl("k") == -1
    assert await client.expire("k", 100) == 1
    assert 40 <= await client.ttl("k") <= 100
    assert 40_000 <= await client.pttl("k") <= 100_000
    assert await client.expire("k", 20, gt=True) == 0
    assert await client.persist("k") == 1
    assert await client.ttl("k") == -1
    await client.set("k", "v", ex=200)
    await client.set("k", "w", keepttl=True)
    assert 140 <= await client.ttl("k") <= 200
    assert await client.execute_command("SETEX", "k", 10, "v") in (True, b"OK")
    assert await client.execute_command("PSETEX", "k", 10_000, "v") in (True, b"OK")
    assert await client.execute_command("SETNX", "k", "w") == 0
    assert await client.expireat("k", 1) == 1
    assert await client.get("k") is None
    assert await client.expire("nothing", 100) == 0


async def test_past_expiry_deletes_the_key(client: Any) -> None:
    await client.set("k", "v")
    assert await client.expire("k", -1) == 1
    assert await client.exists("k") == 0


async def test_counters(client: Any) -> None:
    assert await client.incr("n") == 1
    assert await client.incrby("n", 41) == 42
    assert await client.decr("n") == 41
    assert await client.decrby("n", 40) == 1
    await client.set("n", "ten")
    with pytest.raises(ResponseError, match=r"^value is not an integer or out of range$"):
        await client.incr("n")
    await client.set("n", str((1 << 63) - 1))
    with pytest.raises(ResponseError, match=r"^increment or decrement would overflow$"):
        await client.incr("n")


async def test_strings_and_their_parts(client: Any) -> None:
    assert await client.append("k", "Hello ") == 6
    assert await client.append("k", "World") == 11
    assert await client.strlen("k") == 11
    assert await client.strlen("nothing") == 0
    assert await client.getrange("k", 0, 4) == b"Hello"
    assert await client.getrange("k", -5, -1) == b"World"
    assert await client.getrange("k", 5, 3) == b""
    assert await client.getrange("nothing", 0, -1) == b""
    assert await client.type("k") == b"string"
    assert await client.type("nothing") == b"none"


async def test_many_keys_are_split_over_partitions(client: Any) -> None:
    pairs = {f"key-{i}": str(i) for i in range(100)}
    assert await client.mset(pairs) is True
    assert await client.mget([*pairs, "nothing"]) == [*(v.encode() for v in pairs.values()), None]
    assert await client.exists(*pairs, "key-0", "nothing") == 101
    assert await client.dbsize() == 100
    assert await client.delete(*list(pairs)[:60], "nothing") == 60
    assert await client.unlink(*list(pairs)[60:]) == 40
    assert await client.dbsize() == 0


async def test_scan_visits_every_key(client: Any) -> None:
    wanted = {b"key-%d" % i for i in range(500)}
    await client.mset(dict.fromkeys(wanted, b"v"))
    assert {key async for key in client.scan_iter(count=7)} == wanted
    assert {key async for key in client.scan_iter(match="key-1?", count=1000)} == {b"key-1%d" % i for i in range(10)}
    assert {key async for key in client.scan_iter(_type="list")} == set()
    assert set(await client.keys("key-4[0-1]")) == {b"key-40", b"key-41"}


async def test_transaction_is_one_batch_with_one_reply_per_command(client: Any) -> None:
    async with client.pipeline(transaction=True) as pipe:
        pipe.set("{t}a", 1).incr("{t}a").get("{t}a").delete("{t}b").mset({"{t}c": 1, "{t}d": 2}).exists("{t}c", "{t}x")
        pipe.incr("{t}e").ttl("{t}a").mget("{t}c", "{t}x")
        assert await pipe.execute() == [True, 2, b"2", 0, True, 1, 1, -1, [b"1", None]]


async def test_failing_command_of_a_transaction_fails_alone(client: Any) -> None:
    await client.set("{t}s", "text")
    async with client.pipeline(transaction=True) as pipe:
        pipe.set("{t}a", 1).incr("{t}s").set("{t}b", 2)
        first, failed, last = await pipe.execute(raise_on_error=False)
    assert (first, last) == (True, True)
    assert str(failed) == "value is not an integer or out of range"
    assert await client.mget("{t}a", "{t}b") == [b"1", b"2"]


async def test_transaction_over_two_partitions_is_refused_whole(client: Any, resp: RespPort) -> None:
    ring = resp.backend.topology.ring
    keys = [f"key-{i}" for i in range(20)]
    assert len({ring.partition_of(key.encode()) for key in keys}) > 1
    async with client.pipeline(transaction=True) as pipe:
        for key in keys:
            pipe.set(key, 1)
        with pytest.raises(ResponseError, match="hash to the same slot"):
            await pipe.execute()
    assert await client.exists(*keys) == 0


async def test_wrong_command_fails_its_transaction(client: Any) -> None:
    async with client.pipeline(transaction=True) as pipe:
        pipe.set("{t}a", 1).execute_command("NONSENSE", 1)
        with pytest.raises((ResponseError, ExecAbortError)):
            await pipe.execute()
    assert await client.exists("{t}a") == 0


async def test_wrong_arguments_fail_only_their_own_command_of_a_transaction(client: Any) -> None:
    async with client.pipeline(transaction=True) as pipe:
        pipe.set("{t}a", 1).execute_command("INCRBY", "{t}a", "x").incr("{t}a")
        first, second, third = await pipe.execute(raise_on_error=False)
    assert (first, third) == (True, 2)
    assert isinstance(second, ResponseError)
    assert "not an integer" in str(second)


@pytest.mark.parametrize(
    ("first", "last", "found"),
    [(0, -100, "a"), (-1, -3, ""), (-100, -100, "a"), (-2, -100, ""), (-3, 100, "abc"), (2, 1, "")],
)
async def test_ranges_are_clamped_as_in_redis(client: Any, first: int, last: int, found: str) -> None:
    await client.set("k", "abc")
    assert await client.getrange("k", first, last) in (found, found.encode())


async def test_distant_expiry_times_are_accepted(client: Any) -> None:
    assert await client.set("k", "v", px=1 << 61)
    assert await client.pexpireat("k", 1 << 62)
    assert await client.expire("k", -(1 << 62) // 1000)
    assert await client.exists("k") == 0


async def test_pipeline_sees_its_own_writes_in_order(client: Any) -> None:
    async with client.pipeline(transaction=False) as pipe:
        for i in range(50):
            pipe.set(f"k{i % 5}", i).get(f"k{i % 5}").append(f"k{i % 5}", "!").get(f"k{i % 5}").strlen(f"k{i % 5}")
        replies = await pipe.execute()
    expected: list[object] = []
    for i in range(50):
        expected += [True, b"%d" % i, len(str(i)) + 1, b"%d!" % i, len(str(i)) + 1]
    assert replies == expected


async def test_long_pipeline_is_answered_in_order(client: Any) -> None:
    async with client.pipeline(transaction=False) as pipe:
        for i in range(5000):
            pipe.set(f"key-{i}", i)
        assert await pipe.execute() == [True] * 5000
        for i in range(5000):
            pipe.get(f"key-{i}")
        assert await pipe.execute() == [b"%d" % i for i in range(5000)]


async def test_info_has_the_figures_that_tools_show(client: Any) -> None:
    """redis-cli --stat prints the smallest integer for each missing figure."""
    found = await client.info()
    wanted = {"uptime_in_seconds", "connected_clients", "blocked_clients", "total_connections_received"}
    assert wanted | {"total_commands_processed"} <= found.keys()
    assert found["total_connections_received"] >= found["connected_clients"] >= 1
    assert len(await client.config_get("append*")) == 2
    assert (await client.execute_command("COMMAND", "INFO", "get"))["get"]["arity"] == 2


async def test_server_commands_of_clients_are_answered(client: Any) -> None:
    assert await client.ping() is True
    assert await client.echo("hi") == b"hi"
    assert (await client.info())["redis_mode"] == "standalone"
    assert (await client.info("kvstore"))["node_id"] == "n1"
    assert (await client.config_get("appendonly")) in ({"appendonly": "yes"}, {b"appendonly": b"yes"})
    assert await client.client_setname("me") is True
    assert await client.client_getname() in ("me", b"me")
    assert await client.client_id() > 0
    assert len(await client.client_list()) >= 1
    seconds, _ = await client.time()
    assert seconds > 1_600_000_000
    assert await client.wait(1, 100) == 1
    assert await client.command_count() > 40
    assert await client.execute_command("READONLY") in (True, b"OK")
    assert await client.execute_command("SELECT", 0) in (True, b"OK")
    with pytest.raises(ResponseError, match="DB index is out of range"):
        await client.execute_command("SELECT", 1)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("NONSENSE", "a"), "unknown command 'NONSENSE', with args beginning with: 'a'"),
        (("GET",), "wrong number of arguments for 'get' command"),
        (("SET", "k", "v", "WHAT"), "syntax error"),
        (("SET", "k", "v", "EX", "0"), "invalid expire time in 'set' command"),
        (("SET", "k", "v", "EX", "x"), "value is not an integer or out of range"),
        (("SET", "k", "v", "EX", "x", "WHAT"), "syntax error"),
        (("SET", "k", "v", "EX", "10", "PX", "10"), "syntax error"),
        (("SET", "k", "v", "EX", "010"), "value is not an integer or out of range"),
        (("PSETEX", "k", "9223372036854775807", "v"), "invalid expire time in 'psetex' command"),
        (("EXPIRE", "k", "9223372036854775807"), "invalid expire time in 'expire' command"),
        (("INCRBY", "k", "-0"), "value is not an integer or out of range"),
        (("SET", "k", "v", "NX", "XX"), "syntax error"),
        (("SET", "k" * 4097, "v"), "expected a key of at most"),
        (("GET", ""), "an empty key"),
        (("INCRBY", "k", "9223372036854775808"), "value is not an integer or out of range"),
        (("EXPIRE", "k", "1", "NX", "GT"), "not compatible"),
        (("SCAN", "x"), "invalid cursor"),
        (("CONFIG", "SET", "a", "b"), "CONFIG supports only GET"),
        (("EXEC",), "EXEC without MULTI"),
    ],
    ids=lambda value: " ".join(value)[:24] if isinstance(value, tuple) else "",
)
async def test_wrong_commands_get_redis_errors_and_keep_the_connection(
    client: Any, command: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ResponseError, match=words):
        await client.execute_command(*command)
    assert await client.ping() is True


@pytest.mark.parametrize("command", [("MSET", "{key}", "v", "{other}", "v"), ("DEL", "{key}", "{other}")])
async def test_partly_refused_command_is_not_reported_as_refused(
    client: Any, resp: RespPort, command: tuple[str, ...]
) -> None:
    ring = resp.backend.topology.ring
    keys = [f"key-{i}" for i in range(20)]
    there = ring.partition_of(keys[0].encode())
    other = next(key for key in keys if ring.partition_of(key.encode()) != there)
    await client.mset({keys[0]: 1})
    await client.mset({other: 1})
    resp.backend.partitions[ring.partition_of(other.encode())].stop()
    with pytest.raises(ResponseError, match="1 of 2 keys were written"):
        await client.execute_command(*(word.format(key=keys[0], other=other) for word in command))
    with pytest.raises(ResponseError, match="is led by"):
        await client.execute_command("SET", other, "v")


async def test_stop_waits_for_a_client_to_read_its_replies(resp: RespPort) -> None:
    """Otherwise writes that were applied, with replies behind a large one, would have an unknown outcome for the
    client."""
    keys = [b"{k}%d" % number for number in range(16)]
    async with resp.raw() as raw:
        for key in keys:
            await raw.ask(packed(b"SET", key, b"v" * 1_000_000), b"+OK\r\n")
        stop_reading(raw)
        raw.writer.write(packed(b"MGET", *keys) + packed(b"SET", b"k", b"v"))

        async def is_answered() -> bool:
            return all(each.replies.answered == len(keys) + 2 for each in resp.server._connections)

        await wait_until(is_answered, what="all is answered")
        stop = asyncio.create_task(resp.server.close())
        await asyncio.sleep(0)
        go_on_reading(raw)
        found = await raw.read_to_end()
        assert (found.count(b"v"), found[-5:]) == (16_000_000, b"+OK\r\n")
        await stop
