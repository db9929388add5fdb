"""The HTTP door: health, metrics and a status page. Bounded: it reads no bodies and answers from memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Protocol

import orjson
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvstore.env.transport import split_address

HEADER_BYTES_MAX = 8190
SHUTDOWN_S = 2.0
PREFIX = "kvstore"

Statistics = Mapping[str, Any]


class Shown(Protocol):
    """What the door shows: a node, starting or running."""

    def status(self) -> Statistics:
        """For the status page."""
        ...

    def not_ready(self) -> list[str]:
        """Why requests should not be sent here; empty if they may be."""
        ...

    def statistics(self) -> Mapping[str, Statistics]:
        """Numbers by part; a part whose values are tables again is labelled by their names (for example partitions)."""
        ...


class HttpDoor:
    """Listens from `open` to `close`."""

    def __init__(self, shown: Shown) -> None:
        self._shown = shown
        self._registry = CollectorRegistry()
        self._registry.register(Collected(shown))
        self._runner: web.AppRunner | None = None

    async def open(self, address: str) -> None:
        """Raises OSError."""
        app = web.Application(client_max_size=1)
        app.add_routes(
            [
                web.get("/", _page(self._status)),
                web.get("/healthz", _page(self._healthz)),
                web.get("/readyz", _page(self._readyz)),
                web.get("/metrics", _page(self._metrics)),
            ]
        )
        self._runner = web.AppRunner(
            app,
            access_log=None,
            max_line_size=HEADER_BYTES_MAX,
            max_field_size=HEADER_BYTES_MAX,
            shutdown_timeout=SHUTDOWN_S,
        )
        await self._runner.setup()
        host, port = split_address(address)
        await web.TCPSite(self._runner, host, port).start()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def _status(self) -> web.Response:
        body = orjson.dumps(self._shown.status(), default=str, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS)
        return web.Response(body=body, content_type="application/json")

    def _healthz(self) -> web.Response:
        """The event loop runs, or this would not answer."""
        return web.Response(text="ok\n")

    def _readyz(self) -> web.Response:
        faults = self._shown.not_ready()
        return web.Response(text="\n".join(faults or ["ok"]) + "\n", status=503 if faults else 200)

    def _metrics(self) -> web.Response:
        return web.Response(body=generate_latest(self._registry), content_type="text/plain", charset="utf-8")


def _page(make: Callable[[], web.Response]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(_: web.Request) -> web.Response:
        return make()

    return handle


class Collected:
    """A prometheus_client collector over `statistics()`: nothing is counted twice, nothing is kept here."""

    def __init__(self, shown: Shown) -> None:
        self._shown = shown

    def collect(self) -> Iterator[Metric]:
        for part, values in self._shown.statistics().items():
            yield from metrics_of(part, values)


def metrics_of(part: str, values: Statistics) -> Iterator[Metric]:
    """The numbers of one part as metrics. Names that end in _total are counters; a table of tables gets a label named
    after the part in the singular, with their names as its values."""
    tables = {name: value for name, value in values.items() if isinstance(value, Mapping)}
    if tables and len(tables) == len(values):
        label = part.removesuffix("s")
        rows = {name: dict(_numbers("", table)) for name, table in tables.items()}
        for number in sorted({number for row in rows.values() for number in row}):
            metric = _metric(f"{PREFIX}_{label}_{number}", label)
            for name, row in rows.items():
                if number in row:
                    metric.add_metric([name], row[number])
            yield metric
        return
    for name, value in _numbers("", values):
        metric = _metric(f"{PREFIX}_{part}_{name}" if part else f"{PREFIX}_{name}")
        metric.add_metric([], value)
        yield metric


def _metric(name: str, *labels: str) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    return kind(name, name.replace("_", " "), labels=labels)


def _numbers(prefix: str, values: Statistics) -> Iterator[tuple[str, float]]:
    """(name, number) of everything that is a number, tables inside by their path; text and lists are left out."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(f"{prefix}{name}_", value)
        elif isinstance(value, bool | int | float):
            yield f"{prefix}{name}", float(value)
