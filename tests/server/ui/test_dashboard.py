"""The dashboard over HTTP, with made-up reports."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import orjson
import pytest
from google.protobuf.message import Message

from kvstore.devcluster.zookeeper import free_port
from kvstore.env.beat import Beat
from kvstore.env.clock import SystemClock
from kvstore.env.shared_slots import SharedSlots
from kvstore.env.transport import TcpTransport
from kvstore.errors import InvalidRequest
from kvstore.proto.admin_pb2 import ClusterReport, LedgersResponse
from kvstore.rpc.http.messages import HttpRequest, HttpResponse
from kvstore.server.http.listener import HttpListener
from kvstore.server.ui import dashboard as module
from kvstore.server.ui.dashboard import Dashboard
from kvstore.server.ui.details import DetailPages
from kvstore.server.ui.ledgers import NEWEST, ledgers_page_of
from kvstore.server.ui.pages import FILES, POLICY
from kvstore.server.ui.subjects import LEDGERS_SHOWN
from tests.server.http.test_listener import Shown
from tests.server.ui.made import audited, clients, made_details, slow, transactions
from tests.server.ui.test_view import Elements, judged, loaded
from tests.waiting import PATIENCE_S, wait_until


def log_of(ledgers: int, *, from_leaders: bool = False) -> LedgersResponse:
    """Return a log as read, or as its leader reports it. Its last ledger is open."""
    response = LedgersResponse(from_leaders=from_leaders)
    for number in range(1, ledgers + 1):
        ledger = response.ledgers.add(id=number, partition="p1", first_sequence=1000 * number, epoch=4)
        is_open = number == ledgers
        if is_open or not from_leaders:
            ledger.state = "OPEN" if is_open else "CLOSED"
            ledger.ensemble_size, ledger.write_quorum, ledger.ack_quorum = 3, 3, 2
            ledger.fragments.add(first_entry=0, bookies=["n1-ab", "n2-ab", "n3-ab"])
            ledger.fragments.add(first_entry=57, bookies=["n1-ab", "n2-ab", "<b>n4"])
        if ledger.state == "CLOSED":
            ledger.last_entry, ledger.length = 199, 3 << 20
    return response


class Made:
    """A survey with a given result."""

    server = "n1"

    def __init__(self) -> None:
        self.report = judged(loaded())
        self.logs = {"p1": log_of(3)}

        self.watcher: Callable[[ClusterReport], None] | None = None
        self.details = made_details()

    async def page(self, first: int) -> LedgersResponse:
        response = LedgersResponse(ledgers=self.logs["p1"].ledgers)
        if first == 0:
            response.next = 2_001
        return response

    async def take(self) -> ClusterReport:
        return self.report

    async def details_of_all(self, method: str, kind: type[Message]) -> tuple[dict[str, Message], dict[str, str]]:
        made: dict[str, Message] = {
            "clients": clients(),
            "transactions": transactions(),
            "slow": slow(),
            "audit": audited("BEGUN", "OK"),
        }
        assert type(made[method]) is kind
        return {"n1": made[method]}, {"n3": "refuses connections"}

    async def ledgers(self, partition: str = "", *, newest: int = 0) -> LedgersResponse:
        assert newest in (NEWEST, LEDGERS_SHOWN)
        if partition not in self.logs:
            raise InvalidRequest(f"no partition {partition}; want one of p1")
        return self.logs[partition]


class Turned:
    """An authenticator that lets a limited number of requests pass."""

    is_on = True

    def __init__(self, passes: int) -> None:
        self.passes = passes

    async def refusal_or_none(self, request: HttpRequest) -> HttpResponse | None:
        self.passes -= 1
        return None if self.passes >= 0 else HttpResponse(403, b"")

    async def owner_of(self, request: HttpRequest) -> str:
        return request.headers.get("Authorization") or "n"


class Opened:
    def __init__(self, listener: HttpListener, made: Made, url: str, slots: SharedSlots) -> None:
        self.listener, self.made, self.url, self.slots = listener, made, url, slots


@pytest.fixture
async def opened() -> AsyncIterator[Opened]:
    address = f"127.0.0.1:{free_port()}"
    listener, made = HttpListener(Shown(), TcpTransport(), Beat()), Made()
    details = DetailPages(made, made, made.details, listener.pages)
    listener.dashboard = Dashboard(SystemClock(), made, listener.pages, details, None)
    listener.dashboard.start()
    await listener.open(address)
    yield Opened(listener, made, f"http://{address}", listener.dashboard.slots)
    listener.dashboard.close()
    await listener.close()


async def fetch(url: str, method: str = "GET") -> tuple[aiohttp.ClientResponse, str]:
    async with aiohttp.ClientSession() as session, session.request(method, url) as answer:
        return answer, await answer.text()


async def test_page_loads_nothing_from_other_hosts_and_runs_only_its_own_code(opened: Opened) -> None:
    answer, page = await fetch(f"{opened.url}/ui")
    assert answer.status == 200
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    elements = Elements(page)
    named = [each.get("href") or each.get("src") or "" for _, each in elements.found if {"href", "src"} & each.keys()]
    assert named
    assert all(each.startswith(("/", "#")) and not each.startswith("//") for each in named)
    assert not [name for _, each in elements.found for name in each if name == "style" or name.startswith("on")]
    assert {str(each["src"]) for each in elements.of("script")} == {"/ui/tables.js", "/ui/ui.js", "/ui/uplot.js"}
    for name in FILES:
        assert (await fetch(f"{opened.url}/ui/{name}"))[0].status == 200


async def test_page_has_what_a_screen_reader_needs(opened: Opened) -> None:
    elements = Elements((await fetch(f"{opened.url}/ui"))[1])
    assert [len(elements.of(name)) for name in ("main", "header", "footer", "nav", "h1")] == [1] * 5
    assert all(each.get("scope") in ("col", "row") for each in elements.of("th"))
    headings = {each.get("id") for each in elements.of("h2")}
    assert all(each.get("aria-labelledby") in headings for each in elements.of("section"))
    ids = {each["id"] for _, each in elements.found if "id" in each}
    assert {str(each["href"])[1:] for each in elements.of("a") if str(each["href"]).startswith("#")} <= ids
    assert all(each.get("aria-label") or each.get("aria-hidden") for each in elements.of("svg"))
    spoken = [
        each["id"] for _, each in elements.found if "aria-live" in each or each.get("role") in ("status", "alert")
    ]
    assert spoken == ["link", "health"], "numbers that change every 2 s are not read out"
    assert next(each for _, each in elements.found if each.get("id") == "health")["aria-live"] == "polite"
    assert len(elements.of("caption")) == len(elements.of("table")) >= 3
    names = [name for name, _ in elements.found]
    assert all(names[place + 1] == "caption" for place, name in enumerate(names) if name == "table")
    wide = [each for each in elements.of("section") if each["aria-labelledby"] not in ("findings", "load", "ring")]
    assert all(each.get("tabindex") == "0" for each in wide), "what scrolls is scrolled by keys, too"
    focused = [each for name, each in elements.found if name == "a" or "tabindex" in each]
    assert focused[0]["href"] == "#main", "the first stop skips the others"
    assert all(each.get("tabindex", "0") == "0" for each in focused), "the order is that of the page"


async def test_commands_are_shown_as_code(opened: Opened) -> None:
    report = opened.made.report
    report.ring.paused = True
    report.ring.moves.add(id=7, source="p1", target="p2", state="planned", stuck="do `x 7`")
    judged(report)
    _, page = await fetch(f"{opened.url}/ui")
    assert "`" not in page
    assert page.count("<code>x 7</code>") == 2, "in its finding, and beside the moves"
    assert page.count("<code>kvstore ring resume</code>") == 2


async def test_texts_of_others_are_escaped(opened: Opened) -> None:
    opened.made.report.partitions[0].lead.hot_keys.add(key=b"<script>alert(1)</script>", share=0.5)
    opened.made.report.nodes[0].no_answer = '"><img src=x>'
    page = (await fetch(f"{opened.url}/ui"))[1]
    assert "<script>alert" not in page
    assert "<img" not in page
    assert "&lt;script&gt;alert(1)" in page


async def test_open_page_receives_updates(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIVE_S", 0.01)
    async with aiohttp.ClientSession() as session, session.get(f"{opened.url}/ui/live") as stream:
        assert stream.content_type == "text/event-stream"
        first = await event_of(stream)
        opened.made.report.partitions[0].lead.ops_per_s = 900
        while (last := await event_of(stream)) == first:
            pass
    assert (first["cells"]["load p1"], last["cells"]["load p1"]) == ("300/s", "900/s")


async def test_charts_show_every_regular_survey(opened: Opened) -> None:
    assert opened.made.watcher is not None
    opened.made.watcher(opened.made.report)
    answer, text = await fetch(f"{opened.url}/ui/series?period=1h")
    assert (answer.status, answer.content_type) == (200, "application/json")
    assert orjson.loads(text)["series"]["operations"] == [400.0]
    opened.made.watcher(opened.made.report)
    assert len(orjson.loads((await fetch(f"{opened.url}/ui/series?period=1h"))[1])["times"]) == 2
    assert "all: now 400/s, highest 400/s" in (await fetch(f"{opened.url}/ui?period=6h"))[1]
    refused = [await fetch(f"{opened.url}{path}") for path in ("/ui/series", "/ui/series?period=2h", "/ui?period=<b>")]
    assert {answer.status for answer, _ in refused} == {400}
    assert "expected ?period=1h or 6h or 24h, got 2h" in refused[1][1].replace("'", "")


async def event_of(stream: aiohttp.ClientResponse) -> dict[str, dict[str, str]]:
    async with asyncio.timeout(PATIENCE_S):
        block = await stream.content.readuntil(b"\n\n")
    lines = dict(line.split(": ", 1) for line in block.decode().strip().split("\n"))
    assert lines["event"] == "live"
    found: dict[str, dict[str, str]] = orjson.loads(lines["data"])
    return found


async def test_stream_ends_when_its_user_loses_the_permission(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIVE_S", 0.01)
    opened.listener.authenticator = Turned(3)
    async with asyncio.timeout(PATIENCE_S):
        answer, text = await fetch(f"{opened.url}/ui/live")
        assert (answer.status, text.count("event: live")) == (200, 2)
        assert (await fetch(f"{opened.url}/ui"))[0].status == 403


async def test_streams_are_bounded(opened: Opened) -> None:
    opened.slots.most = 1
    async with aiohttp.ClientSession() as session, session.get(f"{opened.url}/ui/live") as stream:
        await event_of(stream)
        answer, text = await fetch(f"{opened.url}/ui/live")
        assert (answer.status, answer.headers["Retry-After"]) == (503, "30")
        assert text.startswith("503: expected at most 1 open pages with updates at this server, got one more")


async def test_pages_of_one_user_leave_updates_for_another(opened: Opened) -> None:
    opened.slots.most = 3
    opened.listener.authenticator = Turned(1_000)
    async with AsyncExitStack() as closing:
        session = await closing.enter_async_context(aiohttp.ClientSession())

        async def page_of(user: str) -> aiohttp.ClientResponse:
            asked = session.get(f"{opened.url}/ui/live", headers={"Authorization": user})
            stream = await closing.enter_async_context(asked)
            if stream.status == 200:
                await event_of(stream)
            return stream

        oldest, *others = [await page_of("many") for _ in range(3)]
        few = await page_of("few")
        assert few.status == 200
        async with asyncio.timeout(PATIENCE_S):
            await oldest.read()  # it ends
        assert (await page_of("many")).status == 503
        for each in (few, *others):
            await event_of(each)


async def test_page_that_reads_nothing_gives_up_its_slot(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    opened.slots.most = 1
    monkeypatch.setattr(module, "LIVE_S", 0.0)
    monkeypatch.setattr(module, "READER_S", 0.5)
    has_place, tell = asyncio.Event(), module._send

    async def told(*given: Any) -> None:
        has_place.set()
        await tell(*given)

    monkeypatch.setattr(module, "_send", told)
    host, _, port = opened.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port))) as asks:
        asks.sendall(b"GET /ui/live HTTP/1.1\r\nHost: localhost\r\n\r\n")

        async def is_free() -> bool:
            return (await fetch(f"{opened.url}/ui/live", method="HEAD"))[0].status != 503

        async with asyncio.timeout(PATIENCE_S):
            await has_place.wait()
        await wait_until(is_free)
    async with aiohttp.ClientSession() as session, session.get(f"{opened.url}/ui/live") as stream:
        await event_of(stream)


async def test_head_request_gets_no_stream(opened: Opened) -> None:
    opened.slots.most = 1
    host, _, port = opened.url.removeprefix("http://").rpartition(":")
    for _ in range(2):  # none of them takes the slot of an open page
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"HEAD /ui/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert (head.startswith(b"HTTP/1.1 200"), b"text/event-stream" in head, body) == (True, True, b"")


async def test_dashboard_address_shows_the_node_when_there_is_no_dashboard(opened: Opened) -> None:
    held, opened.listener.dashboard = opened.listener.dashboard, None
    try:
        answer, text = await fetch(f"{opened.url}/ui")
        assert (answer.status, answer.content_type) == (503, "text/html")
        assert "this node is starting or stopping, or is not a server" in text
        assert "node n1, as it reports itself" in text
        assert (await fetch(f"{opened.url}/ui/ui.css"))[0].status == 200
        assert [(await fetch(f"{opened.url}/ui/{page}"))[0].status for page in ("live", "ledgers")] == [503, 503]
    finally:
        opened.listener.dashboard = held


async def test_node_page_is_linked_and_has_what_a_screen_reader_needs(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "/ui/node" in [each["href"] for each in Elements((await fetch(f"{opened.url}/ui"))[1]).of("a")]
    monkeypatch.setattr(Shown, "status", lambda _: {"id": "n1", "server": {"commands": 1}, "bookie": {"adds": 2}})
    answer, page = await fetch(f"{opened.url}/ui/node")
    assert (answer.status, answer.headers["Content-Security-Policy"]) == (200, POLICY)
    elements = Elements(page)
    assert [len(elements.of(name)) for name in ("main", "header", "footer", "nav", "h1")] == [1] * 5
    assert len(elements.of("caption")) == len(elements.of("table")) == 2
    assert all(each.get("scope") in ("col", "row") for each in elements.of("th"))
    assert elements.of("script") == []


def ledger_rows(response: LedgersResponse) -> dict[str, list[str]]:
    rows = ledgers_page_of(response, "p1", "n1")["tables"][0]["rows"]
    return {row[0].text: [cell.text for cell in row[1:]] for row in rows}


async def test_ledgers_page_shows_the_newest_first(opened: Opened) -> None:
    answer, page = await fetch(f"{opened.url}/ui/ledgers?partition=p1")
    assert (answer.status, answer.headers["Content-Security-Policy"]) == (200, POLICY)
    rows = ledger_rows(opened.made.logs["p1"])
    assert list(rows) == ["3", "2", "1"]
    assert rows["2"][:6] == ["CLOSED", "2,000", "4", "199", "3.0 MiB", "3, 3, 2"]
    assert rows["2"][6] == "0: n1-ab, n2-ab, n3-ab · 57: n1-ab, n2-ab, <b>n4"
    assert rows["3"][:5] == ["OPEN", "3,000", "4", "open", "?"]
    assert "&lt;b&gt;n4" in page
    assert "<b>n4" not in page
    elements = Elements(page)
    assert [len(elements.of(name)) for name in ("main", "header", "footer", "nav", "h1", "caption")] == [1] * 6
    linked = [each["href"] for each in Elements((await fetch(f"{opened.url}/ui"))[1]).of("a")]
    assert "/ui/ledgers?partition=p1" in linked


async def test_ledgers_page_names_its_source_when_the_metadata_store_is_away(
    opened: Opened,
) -> None:
    opened.made.logs["p1"] = log_of(2, from_leaders=True)
    _, page = await fetch(f"{opened.url}/ui/ledgers?partition=p1")
    assert "The metadata store is unavailable: this is the leader&#39;s present view of its log. 2 ledgers" in page
    rows = ledger_rows(opened.made.logs["p1"])
    assert rows["1"] == ["closed or closing", "1,000", "4", *["?"] * 5]
    assert rows["2"][0] == "OPEN"


async def test_ledgers_page_needs_a_known_partition(opened: Opened) -> None:
    found = [(await fetch(f"{opened.url}/ui/ledgers{query}")) for query in ("", "?partition=p9")]
    assert [(answer.status, text) for answer, text in found] == [
        (400, "400: expected ?partition=ID, for example p1, or ?bookie=ID, got none\n"),
        (404, "404: no partition p9; want one of p1\n"),
    ]


def test_page_of_a_long_log_says_that_it_is_incomplete() -> None:
    assert "only the last 500 are shown" in ledgers_page_of(log_of(NEWEST), "p1", "n1")["tables"][0]["note"]
