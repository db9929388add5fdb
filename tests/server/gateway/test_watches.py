"""Watches over HTTP, as server-sent events: their content, where a client continues, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import orjson
import pytest
from msgspec import to_builtins

from kvstore.errors import StoreError
from kvstore.proto import kv_pb2
from kvstore.server.feed import watch as feed_watch
from kvstore.server.gateway import watches
from kvstore.server.gateway.answers import change_of
from tests.server.feed.world import owned_by
from tests.server.gateway.world import World, gateway_world
from tests.waiting import PATIENCE_S, wait_until


class Event(NamedTuple):
    """One event, as EventSource parses it."""

    id: str
    name: str
    data: Any


class Events:
    """A stream of events, read by the rules of the standard."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content
        self.last_id = ""

    async def next_or_none(self) -> Event | None:
        """Return the next event; None: the stream has ended."""
        name, data = "message", ""
        async with asyncio.timeout(PATIENCE_S):
            while line := (await self._content.readline()).decode():
                field, _, value = line.rstrip("\n").partition(": ")
                match field:
                    case "id":
                        self.last_id = value
                    case "event":
                        name = value
                    case "data":
                        data += value
                    case "" if data:
                        return Event(self.last_id, name, orjson.loads(data))
        return None

    async def take(self, count: int) -> list[Event]:
        """Return this many changes and skip other events."""
        found: list[Event] = []
        while len(found) < count:
            event = await self.next_or_none()
            assert event is not None, "the stream goes on"
            if event.name == "change":
                found.append(event)
        return found


@asynccontextmanager
async def watching(world: World, query: str = "", **headers: str) -> AsyncIterator[Events]:
    """Return a watch that has begun."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    async with world.http.get(f"{world.url}/v1/watch{query}", headers=sent) as answer:
        assert answer.status == 200, await answer.read()
        assert answer.headers["Content-Type"] == "text/event-stream"
        events = Events(answer.content)
        begun = await events.next_or_none()
        assert begun is not None
        assert begun.name == "position"
        yield events


async def test_changes_are_sent_as_logged(world: World) -> None:
    log = world.feeds.logs["p1"]
    async with watching(world) as events:
        assert events.last_id == "p1=0,p2=0"
        log.put((b"a", b"1"), (b"\xff", b"\xfe"))
        log.delete(b"a")
        shown = [each.data for each in await events.take(3)]
    assert {name: shown[0][name] for name in ("partition", "key", "version", "time_ms")} == {
        "partition": "p1", "key": "a", "version": 1, "time_ms": 1_000,
    }  # fmt: skip
    assert (shown[0]["item"]["value"], shown[0]["item"]["version"]) == ("1", 1)
    assert (shown[1]["key_base64"], shown[1]["item"]["value_base64"]) == ("/w==", "/g==")
    assert (shown[2]["key"], shown[2]["item"], shown[2]["version"]) == ("a", None, 3)


# docs/protocol.md F9
def test_change_names_its_transaction() -> None:
    change = kv_pb2.Change(key=b"k", sequence=4, time_ms=6)
    alone = to_builtins(change_of("p1", change, as_base64=False, keys_only=False))
    assert alone.keys().isdisjoint({"transaction", "transaction_keys"})
    change.transaction, change.transaction_keys = "p2/7/1", 3
    part = to_builtins(change_of("p1", change, as_base64=False, keys_only=False))
    assert (part["transaction"], part["transaction_keys"]) == ("p2/7/1", 3)


# docs/protocol.md F5
@pytest.mark.parametrize("after", range(6))
@pytest.mark.parametrize("by", ["Last-Event-ID", "after"])
async def test_reconnecting_client_continues_after_the_last_event(world: World, after: int, by: str) -> None:
    """Also within an entry: nothing is missed and nothing is repeated."""
    log = world.feeds.logs["p1"]
    async with watching(world) as events:
        log.put(*((b"k%d" % number, b"v") for number in range(3)))
        log.put(*((b"k%d" % number, b"w") for number in range(3)))
        await events.take(after)
        last_id = events.last_id
    query, headers = ("", {by: last_id}) if by == "Last-Event-ID" else (f"?after={last_id}", {})
    async with watching(world, query, **headers) as events:
        log.put((b"last", b"v"))
        shown = await events.take(7 - after)
    assert [each.data["version"] for each in shown] == list(range(after + 1, 8))
    assert shown[-1].id == "p1=7,p2=0"


async def test_last_event_id_takes_precedence_over_after(world: World) -> None:
    world.feeds.logs["p1"].put((b"a", b"1"), (b"b", b"2"))
    async with watching(world, "?after=p1=0,p2=0", Last_Event_ID="p1=1,p2=0") as events:
        assert [each.data["key"] for each in await events.take(1)] == ["b"]


@pytest.mark.parametrize("name", ["after", "Last-Event-ID"])
async def test_malformed_position_is_refused_by_the_name_that_the_client_used(world: World, name: str) -> None:
    query, headers = ("?after=p1", {}) if name == "after" else ("", {name: "p1"})
    answer = await world.ask("GET", f"/v1/watch{query}", **headers)
    assert (answer.status, answer.json["message"]) == (400, f"expected {name} as the server issued it, got 'p1'")


async def test_key_prefix_and_range_are_watched_separately(world: World) -> None:
    key = owned_by(world.feeds.ring, "p1")
    log = world.feeds.logs["p1"]
    for query, wanted in (
        (f"?key={key.decode()}", [key]),
        ("?prefix=k", [key]),
        (f"?start={key.decode()}&end={key.decode()}0", [key]),
        ("?prefix=z&keys_only=true&encoding=base64", [b"z"]),
    ):
        async with watching(world, query) as events:
            log.put((b"a", b"1"), (key, b"2"), (b"z", b"3"))
            (event,) = await events.take(1)
            assert event.data.get("key", event.data.get("key_base64")) in (wanted[0].decode(), "eg==")
            assert ("value" in event.data["item"]) == ("keys_only" not in query)


async def test_positions_are_sent_as_heartbeats(world: World) -> None:
    async with watching(world, "?heartbeat_ms=50&prefix=z") as events:
        world.feeds.logs["p2"].put((b"a", b"1"))
        for _ in range(100):
            event = await events.next_or_none()
            assert event is not None
            assert (event.name, event.data) == ("position", {})
            if event.id == "p1=0,p2=1":
                return
    raise AssertionError("what is of no interest moves the position too")


async def test_only_messages_have_ids_when_partitions_are_many(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "EXACT_MAX", 1)
    async with watching(world) as events:
        world.feeds.logs["p1"].put(*((b"k%d" % number, b"v") for number in range(3)))
        assert [each.id for each in await events.take(3)] == ["p1=0,p2=0", "p1=0,p2=0", "p1=3,p2=0"]


async def test_trimmed_position_is_refused_with_the_oldest_one(world: World) -> None:
    log = world.feeds.logs["p1"]
    for number in range(4):
        log.put((b"a", b"%d" % number))
        log.roll()
    log.trim(2)
    answer = await world.ask("GET", "/v1/watch?after=p1=1,p2=0")
    assert (answer.status, answer.json["reason"]) == (410, "POSITION_TRIMMED")
    assert (answer.json["partition"], answer.json["asked"], answer.json["oldest"] > 1) == ("p1", 1, True)


@pytest.mark.parametrize(
    "query",
    ["?after=p9=1", "?after=p1", "?after=p1=9,p2=0", "?key=a&prefix=b", "?key=", "?prefix=a&end=b", "?start=b&end=a",
     "?heartbeat_ms=1", "?level=stale"],
)  # fmt: skip
async def test_malformed_watch_is_refused(world: World, query: str) -> None:
    answer = await world.ask("GET", f"/v1/watch{query}")
    assert (answer.status, answer.json["reason"]) == (400, "INVALID_REQUEST")


async def test_changes_seen_by_the_client_are_not_sent_again(world: World) -> None:
    log = world.feeds.logs["p1"]
    log.shown = 0  # this server does not know that ring yet
    log.put((b"a", b"1"))
    async with watching(world, Kvstore_Token="=1,p1=1") as events:
        log.shown = None
        log.put((b"a", b"2"))
        assert [each.data["version"] for each in await events.take(1)] == [2]


async def test_closing_gateway_ends_watches_and_says_where_to_continue(world: World) -> None:
    async with watching(world) as events:
        world.gateway.close()
        event = await events.next_or_none()
        assert event is not None
        assert (event.name, event.data["reason"], event.id) == ("error", "UNAVAILABLE", "p1=0,p2=0")
        assert await events.next_or_none() is None
    await wait_until(lambda: watched(world, 0), what="the watch is over")


async def watched(world: World, count: int) -> bool:
    return bool(world.gateway.statistics()["http_watches"] == world.feeds.feeds.watches == count)


async def test_watch_of_a_disconnected_client_ends(world: World) -> None:
    async with watching(world, "?heartbeat_ms=50"):
        assert await watched(world, 1)
    await wait_until(lambda: watched(world, 0), what="the watch is over")


async def test_watch_of_a_client_that_reads_nothing_is_aborted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_watch, "SLOW_S", 0.1)
    monkeypatch.setattr(watches, "END_S", 0.1)
    has_ended, fail = asyncio.Event(), watches.EventStream.fail

    async def failed(stream: watches.EventStream, error: StoreError) -> None:
        await fail(stream, error)
        has_ended.set()

    monkeypatch.setattr(watches.EventStream, "fail", failed)
    host, _, port = world.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    writer.write(b"GET /v1/watch HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await wait_until(lambda: watched(world, 1), what="the watch is open")
    for number in range(32):
        world.feeds.logs["p1"].put((b"k%d" % number, b"v" * (1 << 20)))
    await wait_until(lambda: watched(world, 0), what="the watch is over")
    assert world.feeds.feeds.slow_total == 1
    assert world.feeds.feeds.changes_total < 32, "what it has not taken was not read for it"
    async with asyncio.timeout(PATIENCE_S):
        await has_ended.wait()
        taken = await reader.read()  # it ends: the connection is aborted
    assert b"event: change" in taken
    assert not taken.endswith(b"0\r\n\r\n"), "as if all had been sent"
    writer.transport.abort()


async def test_watches_above_the_limit_are_refused(tmp_path: Path) -> None:
    async with gateway_world(tmp_path, connections_max=4) as world, watching(world):
        answer = await world.ask("GET", "/v1/watch")
        assert (answer.status, answer.json["reason"], answer.headers["Retry-After"]) == (429, "OVERLOADED", "1")
        assert (await world.ask("GET", "/v1/cluster")).status == 200
        assert world.feeds.feeds.slots._occupants.count("ipv4:127.0.0.1") == 1
    async with gateway_world(tmp_path / "2") as world:
        world.feeds.feeds.slots.most = 0
        assert (await world.ask("GET", "/v1/watch")).status == 429


async def test_watches_of_one_network_leave_slots_for_another(tmp_path: Path) -> None:
    """The limit of HTTP watches may be lower than that of all watches, and used to be shared by nobody."""
    elsewhere = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
    async with (
        gateway_world(tmp_path, connections_max=8) as world,
        watching(world) as oldest,
        watching(world),
        aiohttp.ClientSession(connector=elsewhere) as session,
    ):
        async with session.get(f"{world.url}/v1/watch") as answer:
            assert answer.status == 200
            last = await oldest.next_or_none()
            assert last is not None
            assert (last.name, last.data["reason"]) == ("error", "OVERLOADED")
            assert await oldest.next_or_none() is None
        assert world.gateway.statistics()["http_overloaded_total"] == 1
