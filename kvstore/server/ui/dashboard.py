"""The dashboard of the cluster: its page, the page of a partition's ledgers, and the stream that updates an open
page."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import orjson

from kvstore.env.events import wait_within
from kvstore.env.ports import Nursery
from kvstore.errors import InvalidRequest, StoreError
from kvstore.rpc.http.messages import HttpRequest, HttpResponse, text_response
from kvstore.server.status.ledger_survey import LedgerSurvey
from kvstore.server.status.surveyor import Surveyor
from kvstore.server.ui.history import SAMPLE_S, LoadHistory
from kvstore.server.ui.ledgers import NEWEST, ledgers_page_of
from kvstore.server.ui.pages import HEADERS, Pages
from kvstore.server.ui.view import live_of, page_of

LIVE_S = 2.0
"""Interval in seconds at which an open page is updated."""
READER_S = 60.0
"""Seconds after which a page that reads nothing is disconnected, so that another page can use its slot."""
STREAMS_MAX = 16
"""Maximum number of open pages with updates. A further page is asked to retry and keeps showing what it loaded."""

MayGoOn = Callable[[], Awaitable[bool]]


EVENTS = "text/event-stream"


class Dashboard:
    """Serves the dashboard of one node, from `start` to `close`."""

    def __init__(self, nursery: Nursery, surveyor: Surveyor, ledgers: LedgerSurvey, pages: Pages) -> None:
        self._pages = pages
        self._surveyor, self._ledgers = surveyor, ledgers
        self._turn = asyncio.Lock()
        self._nursery = nursery.child("dashboard")
        self._closing = asyncio.Event()
        self._streams = 0
        self._history = LoadHistory()

    def start(self) -> None:
        self._nursery.spawn(self._sample(), name="sample")

    async def close(self) -> None:
        self._closing.set()
        await self._nursery.close()

    async def page(self) -> HttpResponse:
        """Return the page of the cluster. It takes as long as a survey, which is one second if a node does not
        answer."""
        return self._pages.html("page.html", page_of(await self._surveyor.take(), self._history))

    async def ledgers(self, partition: str) -> HttpResponse:
        """Return the page with the ledgers of a partition's log. Only one such page is made at a time, for any
        number of clients, because it reads the metadata of each ledger from the metadata store."""
        try:
            async with self._turn:
                found = await self._ledgers.ledgers(partition, newest=NEWEST)
        except InvalidRequest as error:
            return text_response(f"404: {error}\n", 404, HEADERS)
        except StoreError as error:
            return text_response(f"503: {error}\n", 503, HEADERS)
        return self._pages.html("ledgers.html", ledgers_page_of(found, partition, self._surveyor.own().id))

    async def live(self, request: HttpRequest, may_go_on: MayGoOn) -> HttpResponse | None:
        """Stream server-sent events until the page is closed, the node stops or the user loses the permission. A
        HEAD request receives only the headers, because a stream would never end."""
        if self._streams >= STREAMS_MAX:
            text = f"503: expected at most {STREAMS_MAX} open pages with updates, got one more\n"
            return text_response(text, 503, {"Retry-After": "30"})
        if request.method == "HEAD":
            return HttpResponse(200, b"", HEADERS, EVENTS)
        self._streams += 1
        try:
            await request.stream({**HEADERS, "Content-Type": EVENTS})
            while not self._closing.is_set() and await may_go_on():
                body = orjson.dumps(live_of(await self._surveyor.take()))
                await _send(request, b"event: live\nretry: 2000\ndata: " + body + b"\n\n")
                await wait_within(self._closing, LIVE_S)
        except ConnectionError:
            pass  # the page was closed
        finally:
            self._streams -= 1
        return None

    async def _sample(self) -> None:
        while not self._closing.is_set():
            self._history.take(self._surveyor.own())
            await wait_within(self._closing, SAMPLE_S)


async def _send(request: HttpRequest, event: bytes) -> None:
    """Send an event. Raises ConnectionError if the page is closed or reads nothing for READER_S seconds."""
    try:
        async with asyncio.timeout(READER_S):
            await request.connection.send(event)
    except TimeoutError:
        request.connection.abort()
        raise ConnectionAbortedError(f"the page has read nothing for {READER_S:g} s") from None
