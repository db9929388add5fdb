"""The HTTP port of a node: health, metrics and status, the dashboard, and the gateway below /v1/.

The listener is bounded: it has few connections, and its own pages read no bodies and answer from memory. So many
clients on another endpoint do not keep it from reporting that the process is healthy. Many clients at the gateway do
not either: idle connections give way first, and the gateway may use only a part of the connections.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Protocol

import orjson
from prometheus_client import ProcessCollector
from prometheus_client.core import Metric

from kvstore.env import Listener, Transport
from kvstore.env.beat import Beat
from kvstore.env.networks import KnownNetworks, network_of
from kvstore.errors import PermissionDenied, StoreError, Unavailable
from kvstore.rpc.http.connection import HttpServer
from kvstore.rpc.http.messages import HttpRequest, HttpResponse, path_and_query, text_response
from kvstore.server.access.http_authenticator import HttpAuthenticator
from kvstore.server.gateway.answers import COMMON, error_reply
from kvstore.server.gateway.gateway import Gateway
from kvstore.server.gateway.routes import PREFIX, TEMPLATES
from kvstore.server.http.bookkeeper_pages import PROBES, BookkeeperPages, ShownBookie
from kvstore.server.http.exposition import exposition
from kvstore.server.http.metrics import Statistics, metrics_of
from kvstore.server.http.own_names import check_name
from kvstore.server.ui.dashboard import Dashboard
from kvstore.server.ui.node import node_page_of
from kvstore.server.ui.pages import DETAILS, FILES, HEADERS, KEYS, Pages

CONNECTIONS_MAX = 4096
"""Maximum number of connections. For one more, an idle connection is closed: the one that has been idle longest, of
the network with the most idle connections."""
CLUSTER = "/clusterz"
ACCEPTED_NAMES_MAX = 1_000
"""Maximum number of host names that are remembered as names of this node."""
NO_GATEWAY = "the gateway is not available: the node is starting or stopping, or is not a server"
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

    async def answer(self, request: HttpRequest, answer: Callable[[HttpRequest], Awaitable[None]]) -> None:
        """Trace the call of `answer`."""
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
        note_refused: Callable[[HttpRequest, StoreError], None] = lambda request, error: None,
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
        self._pages: dict[str, Callable[[HttpRequest], HttpResponse]] = {
            "/": self._status,
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/metrics": self._metrics,
            "/ui/": _to_dashboard,
            "/ui/node": self._ui_node,
            **dict.fromkeys((f"/ui/{name}" for name in FILES), self._ui_file),
        }
        self._parts_of_ui: dict[str, Callable[[Dashboard, HttpRequest], Awaitable[HttpResponse | None]]] = {
            "/ui": self._ui,
            **dict.fromkeys((f"/ui/{name}" for name in DETAILS), self._ui_detail),
            **dict.fromkeys((f"/ui/{name}" for name in KEYS), self._ui_keys),
            "/ui/live": self._ui_live,
            "/ui/series": self._ui_series,
        }
        self._accepted_names: set[tuple[str | None, str]] = set()
        """Host names, each with the address of its client, that were checked."""
        self._server: HttpServer | None = None
        self._listener: Listener | None = None

    async def open(self, address: str) -> None:
        """Start accepting connections. Raises OSError."""
        self._server = HttpServer(self._answer, self._connections_max, self._known)
        self._listener = await self._transport.listen(address, self._server, is_vital=True, is_lenient=True)
        self._lag.start()

    async def close(self) -> None:
        self._lag.stop()
        if self._listener is not None:
            self._listener.close()
        if self._server is not None:
            await self._server.close()

    def paths(self) -> set[str]:
        """Return every path that the listener serves."""
        return {*self._pages, CLUSTER, *self._parts_of_ui, *self._bookkeeper.paths(), *TEMPLATES}

    async def _answer(self, request: HttpRequest) -> None:
        if self.traced is None:
            await self._respond(request)
        else:
            await self.traced.answer(request, self._respond)

    async def _respond(self, request: HttpRequest) -> None:
        # The target as received: a key that contains `..` is not the page that its normalised path names.
        path = path_and_query(request.target)[0]
        is_below = path.startswith(PREFIX)
        if (refusal := self._refusal_of_name(request, path)) is not None or (
            is_below and (refusal := self._refusal_without_certificate(request)) is not None
        ):
            await request.respond(refusal)
        elif is_below and self.gateway is not None:
            await self.gateway.answer(request)
        elif is_below:
            await request.respond(_error_response(Unavailable(NO_GATEWAY)))
        elif (response := await self._page(request)) is not None:
            await request.respond(response)

    def _refusal_of_name(self, request: HttpRequest, path: str) -> HttpResponse | None:
        """Return the response that refuses a request for another host's name, while access control is off."""
        if path in HEALTH or (self.authenticator is not None and self.authenticator.is_on):
            return None
        named = request.headers.get("host"), request.remote
        if named in self._accepted_names:
            return None
        try:
            check_name(*named, self.own_names())
        except PermissionDenied as error:
            self._note_refused(request, error)
            return _error_response(error)
        if len(self._accepted_names) >= ACCEPTED_NAMES_MAX:
            self._accepted_names.clear()
        self._accepted_names.add(named)
        return None

    async def _page(self, request: HttpRequest) -> HttpResponse | None:
        """Return the page that a request asks for. The updates of the dashboard are streamed here; then the result is
        None."""
        page, part_of_ui = self._pages.get(request.path), self._parts_of_ui.get(request.path)
        is_bookkeepers = request.path in self._bookkeeper.paths()
        if page is None and part_of_ui is None and request.path != CLUSTER and not is_bookkeepers:
            return text_response("404: Not Found", 404)
        if request.method not in ("GET", "HEAD"):
            return text_response("405: Method Not Allowed", 405, {"Allow": "GET,HEAD"})
        if request.path not in HEALTH and (without := self._refusal_without_certificate(request)) is not None:
            return without
        if (
            self.authenticator is not None
            and (refusal := await self.authenticator.refusal_or_none(request)) is not None
        ):
            # A user who may not see the cluster may still read keys.
            if refusal.status == 403 and request.path in ("/", "/ui") and _shows_html(request):
                return HttpResponse(303, b"", {**HEADERS, "Location": "/ui/keys"})
            return refusal
        if request.path == "/ui/node" and self.dashboard is not None and (id_ := request.parameter("id")):
            return await self.dashboard.details.node(id_)
        if page is not None:
            return page(request)
        if request.path == CLUSTER:
            return await self._clusterz()
        if is_bookkeepers:
            return await self._bookkeeper.answer(request.path)
        if part_of_ui is None or self.dashboard is None:
            if request.path == "/ui":
                return self._ui_node(request, status=503)
            return text_response("503: the dashboard is not available: the node is starting, or is not a server\n", 503)
        return await part_of_ui(self.dashboard, request)

    def _refusal_without_certificate(self, request: HttpRequest) -> HttpResponse | None:
        if not self._wants_certificate or request.connection.certificate:
            return None
        error = PermissionDenied(
            "expected a client certificate, got none; without one only the health pages are available"
        )
        self._note_refused(request, error)
        return text_response(f"403: {error}\n", 403)

    async def _ui(self, dashboard: Dashboard, request: HttpRequest) -> HttpResponse:
        return await dashboard.page(request)

    async def _ui_series(self, dashboard: Dashboard, request: HttpRequest) -> HttpResponse:
        return dashboard.series(request)

    async def _ui_detail(self, dashboard: Dashboard, request: HttpRequest) -> HttpResponse:
        return await dashboard.details.page(request.path.rpartition("/")[2], request)

    async def _ui_keys(self, dashboard: Dashboard, request: HttpRequest) -> HttpResponse:
        return await dashboard.keys.page(request.path.rpartition("/")[2], request)

    def _ui_file(self, request: HttpRequest) -> HttpResponse:
        return self.pages.file(request.path.rpartition("/")[2])

    def _ui_node(self, _: HttpRequest, *, status: int = 200) -> HttpResponse:
        context = node_page_of(self._shown.status(), has_dashboard=self.dashboard is not None)
        return self.pages.html("node.html", context, status=status)

    async def _ui_live(self, dashboard: Dashboard, request: HttpRequest) -> HttpResponse | None:
        """Stream the updates of the dashboard. The user's permissions are checked before each update, because they
        may be revoked while the page is open."""

        async def may_continue() -> bool:
            return self.authenticator is None or await self.authenticator.refusal_or_none(request) is None

        known = self.authenticator
        owner = network_of(request.remote) if known is None else await known.owner_of(request)
        return await dashboard.live(request, may_continue, owner)

    def _status(self, request: HttpRequest) -> HttpResponse:
        """Redirect clients that accept HTML, as browsers do, to the dashboard. All other clients get JSON."""
        if _shows_html(request):
            return _to_dashboard(request)
        body = orjson.dumps(self._shown.status(), default=str, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS)
        return HttpResponse(200, body, content_type="application/json")

    def _healthz(self, _: HttpRequest) -> HttpResponse:
        """Report to supervisors whether the process is alive. A process that fails this check must be restarted."""
        return _ok_unless(self._shown.not_live())

    def _readyz(self, _: HttpRequest) -> HttpResponse:
        """Report to load balancers whether this server itself is ready."""
        return _ok_unless(self._shown.not_ready())

    async def _clusterz(self) -> HttpResponse:
        """Report whether the whole cluster serves. If this node already knows a problem, it does not ask other
        nodes."""
        leaderless = [f"partition {each} has no leader" for each in self._shown.leaderless()]
        own = [*self._shown.not_ready(), *leaderless]
        return _ok_unless(own or await self._shown.unserved())

    def _metrics(self, _: HttpRequest) -> HttpResponse:
        return HttpResponse(200, self._measured.take())


def _shows_html(request: HttpRequest) -> bool:
    """Return True if the client accepts HTML, as browsers do."""
    return "text/html" in (request.headers.get("accept") or "")


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


def _error_response(error: StoreError) -> HttpResponse:
    reply = error_reply(error)
    return reply._replace(headers={**COMMON, **reply.headers})


def _to_dashboard(_: HttpRequest) -> HttpResponse:
    return HttpResponse(303, b"", {**HEADERS, "Location": "/ui"})


def _ok_unless(faults: Sequence[str]) -> HttpResponse:
    return text_response("\n".join(faults or ["ok"]) + "\n", 503 if faults else 200)


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
