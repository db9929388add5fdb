"""The HTTP port of a node: health, metrics and status, the dashboard, and the gateway below /v1/.

The listener is bounded: it has few connections, and its own pages read no bodies and answer from memory. So many
clients on another endpoint do not keep it from reporting that the process is healthy. Many clients at the gateway do
not either: idle connections give way first, and the gateway may use only a part of the connections.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import ProcessCollector
from prometheus_client.core import Metric

from kvstore.env import Listener, Transport
from kvstore.env.beat import Beat
from kvstore.env.networks import KnownNetworks, network_of
from kvstore.env.shares import Shares
from kvstore.errors import PermissionDenied, StoreError, Unavailable
from kvstore.server.access.http_authenticator import HttpAuthenticator
from kvstore.server.gateway.answers import COMMON, error_reply
from kvstore.server.gateway.gateway import Gateway
from kvstore.server.gateway.requests import path_and_query
from kvstore.server.gateway.routes import PREFIX, TEMPLATES
from kvstore.server.http.bookkeeper_pages import PROBES, BookkeeperPages, ShownBookie
from kvstore.server.http.exposition import exposition
from kvstore.server.http.metrics import Statistics, metrics_of
from kvstore.server.http.own_names import check_name
from kvstore.server.ui.dashboard import Dashboard
from kvstore.server.ui.node import node_page_of
from kvstore.server.ui.pages import HEADERS, Pages

HEADER_BYTES_MAX = 16_380
"""Maximum size in bytes of the request line, which may hold a key with every byte percent-encoded, and of each
header."""
HEADERS_BYTES_MAX = 64 << 10
"""Maximum size in bytes of all headers of a request, because they are read in one turn of the event loop."""
CONNECTIONS_MAX = 512
"""Maximum number of connections. For one more, an idle connection is closed: the one that has been idle longest, of
the network with the most idle connections."""
SERVER_NAME = "kvstore"
SILENT_S = 75.0
"""Seconds after which a connection without a complete request is closed."""
SHUTDOWN_S = 2.0
CLUSTER = "/clusterz"
HEALTH = frozenset(("/healthz", "/readyz", CLUSTER)) | PROBES
"""Pages for probes and load balancers, which have no certificate."""
PAUSE_FACTOR, PAUSE_MIN_S = 9, 1.0
"""A costly page is reused for this many times as long as it took to make, and for at least this many seconds."""
LAG_CHECK_S = 0.25
"""Interval in seconds at which the event loop's delay is measured."""


class Shown(ShownBookie, Protocol):
    """A starting or running node, as the listener uses it."""

    def status(self) -> Statistics:
        """Return the content of the status page."""
        ...

    def not_ready(self) -> list[str]:
        """Return the reasons why this node should not receive requests, or nothing if it is ready."""
        ...

    def leaderless(self) -> Sequence[str]:
        """Return the partitions that have no leader as far as this node knows."""
        ...

    async def unserved(self) -> Sequence[str]:
        """Return what the cluster does not serve, as `kvstore status` reports it, or nothing if everything is
        served."""
        ...

    def statistics(self) -> Mapping[str, Statistics]:
        """Return the numbers of each part of the node. If the values of a part are tables, the tables' names become
        labels (for example, the partition)."""
        ...


class RequestTracer(Protocol):
    """Traces requests that name a parent span. Implemented by kvstore.server.tracing.calls.TracedPages."""

    async def answer(
        self, request: web.BaseRequest, answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Trace the call of `answer`, and return its response."""
        ...


class HttpListener:
    """The HTTP port of one node. It accepts connections from `open` to `close`."""

    def __init__(
        self,
        shown: Shown,
        transport: Transport,
        beat: Beat,
        *,
        wants_certificate: bool = False,
        connections_max: int = CONNECTIONS_MAX,
        note_refused: Callable[[web.BaseRequest, StoreError], None] = lambda request, error: None,
        known: KnownNetworks | None = None,
    ) -> None:
        """With `wants_certificate`, all pages except health pages require a client certificate. `note_refused` is
        called for each request that the listener itself refuses. A connection from one of the `known` networks is
        only closed in favor of a connection from another known network."""
        self._known = KnownNetworks() if known is None else known
        self._shown, self._transport, self._wants_certificate = shown, transport, wants_certificate
        self._connections_max, self._note_refused = connections_max, note_refused
        self.gateway: Gateway | None = None
        """None while the node starts or stops, and on nodes that are not servers."""
        self.authenticator: HttpAuthenticator | None = None
        """None while the node starts: then no client is authenticated, and the only pages are health and the state
        of the start."""
        self.own_names: Callable[[], Collection[str]] = tuple
        """Returns the host names by which the node is known, in lower case. IP addresses and localhost may be
        missing."""
        self.pages = Pages()
        self.dashboard: Dashboard | None = None
        """None while the node starts or stops, and on nodes that are not servers."""
        self.traced: RequestTracer | None = None
        """None if tracing is off, and while the node starts."""
        self._lag = LoopLag(beat)
        collected, process = Collected(shown, self._lag), ProcessCollector(namespace="", registry=None)
        self._measured = ThrottledPage(lambda: exposition(chain(collected.collect(), process.collect())), _loop_time)
        self._bookkeeper = BookkeeperPages(shown, _loop_time)
        self._pages: dict[str, Callable[[web.BaseRequest], web.Response]] = {
            "/": self._status,
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/metrics": self._metrics,
            "/ui/node": self._ui_node,
            "/ui/ui.css": self._ui_file,
            "/ui/ui.js": self._ui_file,
        }
        self._parts_of_ui: dict[str, Callable[[Dashboard, web.BaseRequest], Awaitable[web.StreamResponse]]] = {
            "/ui": self._ui,
            "/ui/ledgers": self._ui_ledgers,
            "/ui/live": self._ui_live,
        }
        self._runner: web.ServerRunner | None = None
        self._listener: Listener | None = None

    async def open(self, address: str) -> None:
        """Start accepting connections. Raises OSError."""
        connections = Connections(self._answer, self._connections_max, self._known)
        self._runner = web.ServerRunner(connections, shutdown_timeout=SHUTDOWN_S)
        await self._runner.setup()
        self._listener = await self._transport.listen(address, connections, is_vital=True, is_lenient=True)
        self._lag.start()

    async def close(self) -> None:
        self._lag.stop()
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def paths(self) -> set[str]:
        """Return every path that the listener serves."""
        return {*self._pages, CLUSTER, *self._parts_of_ui, *self._bookkeeper.paths(), *TEMPLATES}

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.traced is None:
            return await self._page(request)
        return await self.traced.answer(request, self._page)

    async def _page(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path not in HEALTH and (self.authenticator is None or not self.authenticator.is_on):
            try:
                check_name(request.headers.get("Host"), request.remote or "", self.own_names())
            except PermissionDenied as error:
                self._note_refused(request, error)
                return _error_response(error)
        # The raw path: a key that contains `..` is not the page that its normalised path names.
        if path_and_query(request.raw_path)[0].startswith(PREFIX):
            return await self._through_gateway(request)
        page, part_of_ui = self._pages.get(request.path), self._parts_of_ui.get(request.path)
        is_bookkeepers = request.path in self._bookkeeper.paths()
        if page is None and part_of_ui is None and request.path != CLUSTER and not is_bookkeepers:
            return web.Response(text="404: Not Found", status=404)
        if request.method not in ("GET", "HEAD"):
            return web.Response(text="405: Method Not Allowed", status=405, headers={"Allow": "GET,HEAD"})
        if request.path not in HEALTH and (without := self._refusal_without_certificate(request)) is not None:
            return without
        if (
            self.authenticator is not None
            and (refusal := await self.authenticator.refusal_or_none(request)) is not None
        ):
            return refusal
        if page is not None:
            return page(request)
        if request.path == CLUSTER:
            return await self._clusterz()
        if is_bookkeepers:
            return await self._bookkeeper.answer(request.path)
        if part_of_ui is None or self.dashboard is None:
            if request.path == "/ui":
                return self._ui_node(request, status=503)
            return web.Response(
                text="503: the dashboard is not available: the node is starting, or is not a server\n", status=503
            )
        return await part_of_ui(self.dashboard, request)

    async def _through_gateway(self, request: web.BaseRequest) -> web.StreamResponse:
        if (refusal := self._refusal_without_certificate(request)) is not None:
            return refusal
        if self.gateway is None:
            return _error_response(
                Unavailable("the gateway is not available: the node is starting or stopping, or is not a server")
            )
        return await self.gateway.answer(request)

    def _refusal_without_certificate(self, request: web.BaseRequest) -> web.Response | None:
        if not self._wants_certificate or _shows_certificate(request):
            return None
        error = PermissionDenied(
            "expected a client certificate, got none; without one only the health pages are available"
        )
        self._note_refused(request, error)
        return web.Response(text=f"403: {error}\n", status=403)

    async def _ui(self, dashboard: Dashboard, _: web.BaseRequest) -> web.Response:
        return await dashboard.page()

    async def _ui_ledgers(self, dashboard: Dashboard, request: web.BaseRequest) -> web.Response:
        partition = request.query.get("partition", "")
        if not partition:
            return web.Response(text="400: expected ?partition=ID, for example p1, got none\n", status=400)
        return await dashboard.ledgers(partition)

    def _ui_file(self, request: web.BaseRequest) -> web.Response:
        return self.pages.file(request.path.rpartition("/")[2])

    def _ui_node(self, _: web.BaseRequest, *, status: int = 200) -> web.Response:
        context = node_page_of(self._shown.status(), has_dashboard=self.dashboard is not None)
        return self.pages.html("node.html", context, status=status)

    async def _ui_live(self, dashboard: Dashboard, request: web.BaseRequest) -> web.StreamResponse:
        """Stream the updates of the dashboard. The user's permissions are checked before each update, because they
        may be revoked while the page is open."""

        async def may_go_on() -> bool:
            return self.authenticator is None or await self.authenticator.refusal_or_none(request) is None

        return await dashboard.live(request, may_go_on)

    def _status(self, request: web.BaseRequest) -> web.Response:
        """Redirect clients that accept HTML, as browsers do, to the dashboard. All other clients get JSON."""
        if "text/html" in request.headers.get("Accept", ""):
            return web.Response(status=303, headers={**HEADERS, "Location": "/ui"})
        body = orjson.dumps(self._shown.status(), default=str, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS)
        return web.Response(body=body, content_type="application/json")

    def _healthz(self, _: web.BaseRequest) -> web.Response:
        """Report to supervisors whether the process is alive. A process that fails this check must be restarted."""
        return _ok_unless(self._shown.not_live())

    def _readyz(self, _: web.BaseRequest) -> web.Response:
        """Report to load balancers whether this server itself is ready."""
        return _ok_unless(self._shown.not_ready())

    async def _clusterz(self) -> web.Response:
        """Report whether the whole cluster serves. If this node already knows a problem, it does not ask other
        nodes."""
        leaderless = [f"partition {each} has no leader" for each in self._shown.leaderless()]
        own = [*self._shown.not_ready(), *leaderless]
        return _ok_unless(own or await self._shown.unserved())

    def _metrics(self, _: web.BaseRequest) -> web.Response:
        return web.Response(body=self._measured.take(), content_type="text/plain", charset="utf-8")


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


def _error_response(error: StoreError) -> web.Response:
    reply = error_reply(error)
    headers = {**COMMON, **reply.headers}
    return web.Response(status=reply.status, body=reply.body, headers=headers, content_type=reply.content_type)


def _ok_unless(faults: Sequence[str]) -> web.Response:
    return web.Response(text="\n".join(faults or ["ok"]) + "\n", status=503 if faults else 200)


def _shows_certificate(request: web.BaseRequest) -> bool:
    """Return True if the client has presented a certificate, which the handshake has verified."""
    return request.transport is not None and bool(request.transport.get_extra_info("peercert"))


class NodeRequest(web.BaseRequest):
    """A request whose responses name the program, and not the versions of its libraries."""

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        response.headers["Server"] = SERVER_NAME


class Connections(web.Server):
    """The HTTP connections of the port. Their number is limited."""

    def __init__(
        self,
        answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        connections_max: int,
        known: KnownNetworks,
    ) -> None:
        super().__init__(
            self._handle,
            request_factory=_request,
            access_log=None,
            logger=_own_faults(),
            max_line_size=HEADER_BYTES_MAX,
            max_field_size=HEADER_BYTES_MAX,
            keepalive_timeout=SILENT_S,
            auto_decompress=False,  # a few compressed bytes may become very many
        )
        self._answer, self._connections_max = answer, connections_max
        self._idle: Shares[asyncio.Transport] = Shares(known)
        """Connections without a request in flight."""
        self._busy: Shares[asyncio.Transport] = Shares(known)
        """Connections with a request in flight."""

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._idle.add(transport, _network(transport))
        if len(self._idle) + len(self._busy) > self._connections_max:
            gone = self._idle.first_to_go()
            if gone is transport:  # every other connection is busy
                gone = self._busy.displaced_by(_network(transport)) or transport
            assert gone is not None, "the new connection is idle"
            self._forget(gone)
            gone.abort()

    def _forget(self, transport: asyncio.Transport) -> None:
        self._idle.discard(transport)
        self._busy.discard(transport)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        if handler.transport is not None:
            self._forget(handler.transport)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        size = sum(len(name) + len(value) for name, value in request.raw_headers)
        if size > HEADERS_BYTES_MAX:
            text = f"431: expected at most {HEADERS_BYTES_MAX} bytes of headers, got {size}\n"
            refusal = web.Response(text=text, status=431)
            refusal.force_close()
            return refusal
        transport = request.transport
        if transport is None or not self._idle.discard(transport):
            return await self._answer(request)
        self._busy.add(transport, _network(transport))
        try:
            return await self._answer(request)
        finally:
            if self._busy.discard(transport):
                self._idle.add(transport, _network(transport))


def _request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> NodeRequest:
    return NodeRequest(message, payload, protocol, writer, task, asyncio.get_running_loop())


def _network(transport: asyncio.Transport) -> str:
    return network_of(str((transport.get_extra_info("peername") or ("?", 0))[0]))


class _OwnFault(logging.Filter):
    """Passes errors of this program to the log. Malformed requests are answered to the client; a traceback for each
    would fill the log."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def _own_faults() -> logging.Logger:
    logger = logging.getLogger(f"{__name__}.requests")
    logger.addFilter(_OWN_FAULT)
    return logger


_OWN_FAULT = _OwnFault()


class ThrottledPage:
    """A page that is expensive to make. It is made at most once a second and takes at most a tenth of the event loop's
    time, even if many clients request it. Everything else in the process waits while it is made, including lease
    renewals."""

    def __init__(self, make: Callable[[], bytes], now: Callable[[], float]) -> None:
        self._make, self._now = make, now
        self._made = b""
        self._until = -math.inf

    def take(self) -> bytes:
        """Return the page. It may be some seconds old."""
        began = self._now()
        if began >= self._until:
            self._made = self._make()
            ended = self._now()
            self._until = ended + max(PAUSE_MIN_S, PAUSE_FACTOR * (ended - began))
        return self._made


class Collected:
    """A prometheus_client collector that reads `statistics()` at each scrape. It stores nothing itself."""

    def __init__(self, shown: Shown, lag: LoopLag) -> None:
        self._shown, self._lag = shown, lag

    def collect(self) -> Iterator[Metric]:
        for part, values in self._shown.statistics().items():
            yield from metrics_of(part, {**values, "loop_lag_max_s": self._lag.take()} if part == "process" else values)


class LoopLag:
    """Measures the longest delay of the event loop since the last scrape. Everything in the process was delayed by
    that time."""

    def __init__(self, beat: Beat) -> None:
        self._beat = beat
        self._longest_s = 0.0
        self._due = 0.0
        self._loop: asyncio.AbstractEventLoop
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._measure_after(self._loop.time())

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def take(self) -> float:
        longest, self._longest_s = self._longest_s, 0.0
        return longest

    def _measure(self) -> None:
        now = self._loop.time()
        self._longest_s = max(self._longest_s, now - self._due)
        self._measure_after(now)

    def _measure_after(self, now: float) -> None:
        delay_s = self._beat.delay_s(LAG_CHECK_S)
        self._due = now + delay_s
        self._timer = self._loop.call_later(delay_s, self._measure)
