"""Bounds of the gateway: sizes while bodies arrive, requests and bytes in flight, slow and disconnected clients; and
its metrics."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvstore.env.slow_log import SlowLog, hash_of
from kvstore.errors import Overloaded
from kvstore.limits import VALUE_BYTES_MAX
from kvstore.rpc.http import connection
from kvstore.rpc.http.messages import HttpResponse
from kvstore.server.gateway import capacity, gateway
from tests.server.gateway.world import World, gateway_world
from tests.waiting import PATIENCE_S, wait_until


async def connected(world: World, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = world.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    return reader, writer


async def status_of(reader: asyncio.StreamReader) -> int:
    async with asyncio.timeout(PATIENCE_S):
        return int((await reader.readline()).split()[1])


HEAD = b"PUT /v1/keys/k HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: %d\r\n\r\n" % (VALUE_BYTES_MAX + 1),
        b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n" % (VALUE_BYTES_MAX + 1),
        b"Content-Length: %d\r\nContent-Type: application/json\r\n\r\n" % (gateway.JSON_BYTES_MAX + 1),
    ],
)
async def test_too_large_body_is_refused_before_it_arrives(world: World, head: bytes) -> None:
    reader, writer = await connected(world, HEAD + head)
    assert await status_of(reader) == 413
    writer.close()
    assert world.backend.submitted == []


async def test_body_of_unknown_length_is_refused_once_it_is_too_large(world: World) -> None:
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    reader, writer = await connected(world, HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    for _ in range(VALUE_BYTES_MAX // 0x10000 + 1):
        writer.write(chunk)
    assert await status_of(reader) == 413, "the end has not come"
    writer.close()
    assert world.backend.submitted == []


async def test_too_large_value_in_json_is_refused(world: World) -> None:
    body = b'{"value": "%b"}' % (b"x" * (VALUE_BYTES_MAX + 1))
    answer = await world.ask("PUT", "/v1/keys/k", body, Content_Type="application/json")
    assert (answer.status, answer.json["reason"]) == (413, "INVALID_REQUEST")


async def test_expect_100_continue_is_answered(world: World) -> None:
    reader, writer = await connected(world, HEAD + b"Content-Length: 1\r\nExpect: 100-continue\r\n\r\n")
    assert await status_of(reader) == 100
    assert await reader.readline() == b"\r\n"
    writer.write(b"v")
    assert await status_of(reader) == 200
    writer.close()


async def test_compressed_body_is_stored_unchanged(world: World) -> None:
    answer = await world.ask("PUT", "/v1/keys/k", b"\x1f\x8b", Content_Encoding="gzip")
    assert (answer.status, "Content-Encoding" in answer.json["message"]) == (415, True)
    assert world.backend.submitted == []


@pytest.mark.parametrize("lines", [b"gzip, chunked", b"gzip\r\nTransfer-Encoding: chunked", b"identity, chunked"])
async def test_unknown_transfer_coding_is_refused(world: World, lines: bytes) -> None:
    """The remaining encoding would be stored as the value."""
    body = b"\r\n\r\n2\r\n\x1f\x8b\r\n0\r\n\r\n"
    reader, writer = await connected(world, HEAD + b"Connection: close\r\nTransfer-Encoding: " + lines + body)
    assert await status_of(reader) in (400, 501)
    writer.close()
    assert world.backend.submitted == []
    reader, writer = await connected(world, HEAD + b"Transfer-Encoding: Chunked\r\n\r\n1\r\nv\r\n0\r\n\r\n")
    assert await status_of(reader) == 200
    writer.close()


async def test_condition_is_decided_after_the_whole_body(world: World) -> None:
    """Errors in the headers are reported before the body."""
    await world.ask("PUT", "/v1/keys/k", b"1")
    head = HEAD + b'Content-Length: 4\r\nIf-Match: "1"\r\n\r\n'
    reader, writer = await connected(world, head + b"ha")
    await wait_until(lambda: holds(world, 2), what="half of it has come")
    assert (await world.ask("PUT", "/v1/keys/k", b"2")).json == {"version": 2}
    writer.write(b"lf")
    assert await status_of(reader) == 412
    writer.close()
    assert (await world.ask("GET", "/v1/keys/k")).body == b"2"
    head = HEAD + b"Content-Length: 4\r\nExpect: 100-continue\r\nIf-Match: 1\r\n\r\n"
    reader, writer = await connected(world, head)
    assert await status_of(reader) == 400, "and not that it may go on"
    writer.close()


async def test_incomplete_body_stores_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client disconnects or stops sending."""
    _, writer = await connected(world, HEAD + b"Content-Length: 10\r\n\r\nhalf")
    await wait_until(lambda: holds(world, 4), what="the half has come")
    writer.close()
    await wait_until(lambda: holds(world, 0), what="it is forgotten")
    monkeypatch.setattr(gateway, "BODY_S", 0.01)
    reader, writer = await connected(world, HEAD + b"Content-Length: 10\r\n\r\nhalf")
    assert await status_of(reader) == 408
    writer.close()
    reader, writer = await connected(world, HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n")
    found = await reader.read()
    assert found.startswith(b"HTTP/1.1 400 ")
    assert b'"expected a request in HTTP/1.1, got something else: Invalid character in chunk size"' in found
    writer.close()
    assert world.backend.submitted == []


async def holds(world: World, size: int) -> bool:
    return world.gateway._capacity.bytes == size


async def test_requests_above_the_limit_are_refused_and_health_is_served(tmp_path: Path) -> None:
    async with gateway_world(tmp_path, connections_max=32) as world:
        world.backend.hold()
        async with asyncio.TaskGroup() as tasks:
            held = [tasks.create_task(world.ask("PUT", f"/v1/keys/{number}", b"v")) for number in range(8)]
            await wait_until(lambda: requests(world, 8), what="eight under way")
            answer = await world.ask("GET", "/v1/keys/k")
            assert (answer.status, answer.json["reason"]) == (429, "OVERLOADED")
            assert (await world.ask("GET", "/healthz")).status == 200
            world.backend.let_go()
        assert [each.result().status for each in held] == [200] * 8
        assert world.gateway.statistics()["http_overloaded_total"] == 1
        assert (await world.ask("GET", "/v1/keys/1")).status == 200


async def requests(world: World, count: int) -> bool:
    return bool(world.gateway.statistics()["http_requests"] == count)


async def test_bytes_of_bodies_and_responses_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.ask("PUT", "/v1/keys/k", b"v" * 100)
    monkeypatch.setattr(world.gateway._capacity, "_bytes_max", 120)
    assert (await world.ask("GET", "/v1/keys/k")).status == 200, "one of any size is always done"
    _, writer = await connected(world, HEAD + b"Content-Length: 100\r\n\r\n" + b"x" * 50)
    await wait_until(lambda: holds(world, 50), what="the half has come")
    assert (await world.ask("GET", "/v1/keys/k")).status == 429
    assert (await world.ask("PUT", "/v1/keys/k", b"v" * 100)).status == 429
    assert (await world.ask("PUT", "/v1/keys/k?return_old=true", b"w")).status == 200, "what is done is told"
    assert world.backend.submitted[-1].value == b"w"
    writer.close()
    await wait_until(lambda: holds(world, 0), what="nothing is held")


async def test_one_large_batch_is_parsed_in_a_turn(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 bodies of one client whose last bytes came together held the event loop for a second."""
    count, turn, parsed_in = 8, 0, list[int]()
    parse = gateway.requests.batch_of
    monkeypatch.setattr(gateway.requests, "batch_of", lambda asked, body: parsed_in.append(turn) or parse(asked, body))
    body = b'{"operations": [%b{}]}' % (b" " * gateway.TURN_BYTES)
    head = b"POST /v1/batch HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    clients = [await connected(world, head % len(body) + body[:-1]) for _ in range(count)]
    await wait_until(lambda: holds(world, count * (len(body) - 1)), what="all but the last bytes")
    for _, writer in clients:
        writer.write(body[-1:])
    while len(parsed_in) < count:
        await asyncio.sleep(0)
        turn += 1
    assert len(set(parsed_in)) == count
    for reader, writer in clients:
        assert await status_of(reader) == 400
        writer.close()


def test_response_to_a_completed_write_is_always_sent() -> None:
    bounds = capacity.GatewayCapacity(1, bytes_max=10)
    with bounds.request("a") as load:
        load.take(10)
        load.take(50, must=True)
        assert bounds.bytes == 60
    assert bounds.bytes == 0


def test_requests_and_bytes_of_one_network_leave_capacity_for_another() -> None:
    bounds = capacity.GatewayCapacity(4, bytes_max=100)
    with ExitStack() as under_way:
        first, _ = [under_way.enter_context(bounds.request("many")) for _ in range(2)]
        with pytest.raises(Overloaded, match="at most as many of one network as are free"), bounds.request("many"):
            pass
        first.take(50)
        with pytest.raises(Overloaded, match="or those of your network"):
            first.take(1)
        few = under_way.enter_context(bounds.request("few"))
        few.take(25)
        with pytest.raises(Overloaded):
            few.take(1)
        with bounds.request("one"):
            pass
    assert [*bounds._requests_of, *bounds._bytes_of] == [], "no network is remembered"
    with bounds.request("many") as alone:
        alone.take(200)  # one of any size is always done


async def test_response_that_the_client_does_not_read_is_aborted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    given_up, send = asyncio.Event(), gateway._send

    async def watched(request: Any, told: HttpResponse) -> None:
        await send(request, told)
        if request.connection._transport.is_closing():
            given_up.set()

    monkeypatch.setattr(connection, "SEND_S", 0.05)
    monkeypatch.setattr(gateway, "_send", watched)
    assert (await world.ask("PUT", "/v1/keys/k", b"v" * VALUE_BYTES_MAX)).status == 200
    reader, writer = await connected(world, b"GET /v1/keys/k HTTP/1.1\r\nHost: localhost\r\n\r\n" * 16)
    async with asyncio.timeout(PATIENCE_S):
        await given_up.wait()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(17 * VALUE_BYTES_MAX)
    await wait_until(lambda: is_free(world), what="the place is free")
    writer.close()


async def is_free(world: World) -> bool:
    return not world.gateway.statistics()["http_requests"]


async def test_closing_gateway_refuses_requests(world: World) -> None:
    world.gateway.close()
    answer = await world.ask("PUT", "/v1/keys/k", b"v")
    assert (answer.status, answer.json["outcome"]) == (503, "refused")
    assert world.backend.submitted == []


async def test_every_route_is_timed_and_slow_requests_are_noted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    env: Any = world.gateway._env
    slow = SlowLog(1, env.clock.now, env.clock.date_ms)
    monkeypatch.setattr(slow, "limit_s", 0.0)
    monkeypatch.setattr(world.gateway, "_env", env.__class__(**{**_fields(env), "slow": slow}))
    await world.ask("PUT", "/v1/keys/k", b"v")
    await world.ask("GET", "/v1/keys/k?level=none")
    (note,) = [each for each in slow.latest() if each.operation == "PUT"]
    assert (note.at, note.key, note.partition) == (
        "endpoint",
        hash_of(b"k"),
        world.backend.topology.ring.partition_of(b"k"),
    )
    timed = world.gateway.statistics()["http_request_s"]
    assert {name: each.count for name, each in timed.items() if each.count} == {"put": 1, "get": 1}


def _fields(env: Any) -> dict[str, Any]:
    return {name: getattr(env, name) for name in env.__dataclass_fields__}


@pytest.mark.parametrize(
    ("method", "target", "headers"),
    [
        ("POST", "/v1/append/k", {"If_Match": '"99999"'}),
        ("POST", "/v1/append/k", {"Kvstore_TTL_Ms": "1000"}),
        ("POST", "/v1/expire/k?ttl_ms=100000", {"If_Match": '"99999"'}),
        ("POST", "/v1/increment/k", {"If_None_Match": "*"}),
        ("DELETE", "/v1/keys/k", {"If_None_Match": "*"}),
        ("PUT", "/v1/keys/k", {"If_Unmodified_Since": "Mon, 01 Jan 1990 00:00:00 GMT"}),
        ("PUT", "/v1/keys/k", {"Content_Range": "bytes 3-5/6"}),
        ("POST", "/v1/append/k", {"Content_Range": "bytes 3-5/6"}),
        ("PUT", "/v1/keys/k", {"X_HTTP_Method_Override": "DELETE"}),
    ],
)
async def test_condition_header_that_a_write_ignores_is_refused(
    world: World, method: str, target: str, headers: dict[str, str]
) -> None:
    """To apply the write without the condition would be wrong (RFC 9110, 13.1)."""
    await world.ask("PUT", "/v1/keys/k", b"1")
    answer = await world.ask(method, target, b"2" if method != "DELETE" else b"", **headers)
    assert answer.status == 400
    assert "expected no" in answer.body.decode()
    assert (await world.ask("GET", "/v1/keys/k")).body == b"1"


async def test_request_with_too_many_header_bytes_is_refused_unread(world: World) -> None:
    tags = b"If-None-Match: " + b'"1",' * 4000 + b"\r\n"
    reader, writer = await connected(world, b"GET /v1/keys/k HTTP/1.1\r\nHost: localhost\r\n" + tags * 5 + b"\r\n")
    assert await status_of(reader) == 431
    await reader.read()  # the connection ends: later bytes are not read
    writer.close()
    assert world.backend.submitted == []


async def test_entity_tags_are_bounded(world: World) -> None:
    await world.ask("PUT", "/v1/keys/k", b"1")
    most = ", ".join(['"1"'] * 100)
    assert (await world.ask("GET", "/v1/keys/k", If_None_Match=most)).status == 304
    answer = await world.ask("GET", "/v1/keys/k", If_None_Match=f'{most}, "1"')
    assert (answer.status, "at most 100 entity tags" in answer.body.decode()) == (400, True)


async def test_key_is_never_truncated(world: World) -> None:
    """A client that does not know of fragments sends the # as it is."""
    await world.ask("PUT", "/v1/keys/user", b"precious")
    host, _, port = world.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"DELETE /v1/keys/user#1 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    await reader.read()
    writer.close()
    assert (await world.ask("GET", "/v1/keys/user")).body == b"precious"
