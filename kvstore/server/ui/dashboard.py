"""The dashboard of the cluster: its pages, the values of its charts, and the stream that updates an open page."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import orjson

from kvstore.env.events import wait_within
from kvstore.env.ports import Clock
from kvstore.env.shared_slots import SharedSlots
from kvstore.errors import Overloaded
from kvstore.proto.admin_pb2 import ClusterReport
from kvstore.rpc.http.messages import HttpRequest, HttpResponse, text_response
from kvstore.server.status.surveyor import Surveyor
from kvstore.server.ui.charts import PERIODS, charts_of, period_note, series_body
from kvstore.server.ui.details import DetailPages
from kvstore.server.ui.history import ClusterHistory
from kvstore.server.ui.key_pages import KeyPages
from kvstore.server.ui.pages import HEADERS, Pages
from kvstore.server.ui.view import live_of, page_of

LIVE_S = 2.0
"""Interval in seconds at which an open page is updated."""
READER_S = 60.0
"""Seconds after which a page that reads nothing is disconnected, so that another page can use its slot."""
STREAMS_MAX = 16
"""Maximum number of open pages with updates. A further page takes the slot of the oldest page of the user or network
with the most pages, or gets no updates if no other has more than its own. A page without updates keeps showing what it
loaded."""

EVENTS = "text/event-stream"
MayGoOn = Callable[[], Awaitable[bool]]


class ShownPeriod(NamedTuple):
    """The charts of one period, and the number of samples that they were made of."""

    taken: int
    charts: list[dict[str, Any]]
    body: bytes
    """The values as JSON."""


class Dashboard:
    """Serves the dashboard of one node, from `start` to `close`."""

    def __init__(self, clock: Clock, surveyor: Surveyor, pages: Pages, details: DetailPages, keys: KeyPages) -> None:
        self._clock, self._surveyor, self._pages = clock, surveyor, pages
        self.details, self.keys = details, keys
        self._closing = asyncio.Event()
        self.slots = SharedSlots(STREAMS_MAX, "open pages with updates")
        self._history = ClusterHistory()
        self._made: dict[str, ShownPeriod] = {}

    def start(self) -> None:
        self._surveyor.watcher = self._keep

    def close(self) -> None:
        self._surveyor.watcher = None
        self._closing.set()

    def _keep(self, report: ClusterReport) -> None:
        self._history.take(report, self._clock.now())

    async def page(self, request: HttpRequest) -> HttpResponse:
        """Return the page of the cluster. It takes as long as a survey, which is one second if a node does not
        answer."""
        period = request.parameter("period") or next(iter(PERIODS))
        if period not in PERIODS:
            return _unknown_period(period)
        report, now = await self._surveyor.take(), self._clock.now()
        charts = self._shown(period).charts
        note = period_note(self._history, report.server, now)
        return self._pages.html("page.html", {"page": "ui", **page_of(report, charts, period=period, note=note)})

    def series(self, request: HttpRequest) -> HttpResponse:
        """Return the values of the charts in a period."""
        period = request.parameter("period")
        if period not in PERIODS:
            return _unknown_period(period)
        return HttpResponse(200, self._shown(period).body, HEADERS, "application/json")

    def _shown(self, period: str) -> ShownPeriod:
        """Return the charts of a period. They are made once for each sample, for any number of pages."""
        made = self._made.get(period)
        if made is None or made.taken != self._history.taken:
            samples = self._history.last(PERIODS[period], self._clock.now())
            body = series_body(samples, period, self._clock.date_ms() / 1000)
            made = self._made[period] = ShownPeriod(self._history.taken, charts_of(samples), body)
        return made

    async def live(self, request: HttpRequest, may_continue: MayGoOn, owner: str) -> HttpResponse | None:
        """Stream server-sent events until the page is closed, the node stops, the user loses the permission or the
        slot goes to a page of another `owner`, a user or network. A HEAD request receives only the headers, because a
        stream would never end."""
        if request.method == "HEAD" and not self.slots.is_full_for(owner):
            return HttpResponse(200, b"", HEADERS, EVENTS)
        try:
            async with self.slots.place(owner):
                await request.stream({**HEADERS, "Content-Type": EVENTS})
                while not self._closing.is_set() and await may_continue():
                    body = orjson.dumps(live_of(await self._surveyor.take()))
                    await _send(request, b"event: live\nretry: 2000\ndata: " + body + b"\n\n")
                    await wait_within(self._closing, LIVE_S)
        except ConnectionError:
            pass  # the page was closed
        except Overloaded as error:
            if not request.status:
                return text_response(f"503: {error}\n", 503, {"Retry-After": "30"})
        return None


def _unknown_period(period: str) -> HttpResponse:
    return text_response(f"400: expected ?period={' or '.join(PERIODS)}, got {period[:20]!r}\n", 400, HEADERS)


async def _send(request: HttpRequest, event: bytes) -> None:
    """Send an event. Raises ConnectionError if the page is closed or reads nothing for READER_S seconds."""
    try:
        async with asyncio.timeout(READER_S):
            await request.connection.send(event)
    except TimeoutError:
        request.connection.abort()
        raise ConnectionAbortedError(f"the page has read nothing for {READER_S:g} s") from None
