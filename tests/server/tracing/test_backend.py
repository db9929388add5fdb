"""The sampling of operations between an endpoint and the backend, and their order."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from kvstore.env.real import real_env
from kvstore.env.traces import COUNTS, Traces
from kvstore.errors import ConfigError, Unavailable
from kvstore.partition.leading.traced import TracedSink
from kvstore.partition.state.commands import NOT_NOW, Op, Put, Sink
from kvstore.server.routing.backend import Backend
from kvstore.server.tracing.backend import ByRatio, TracedBackend
from kvstore.server.tracing.open import open_traces, traced_backend, traced_calls, traced_pages
from kvstore.server.tracing_config import TracingConfig
from tests.server.backends import Collector, OneServer, one_server
from tests.server.tracing.kept import Kept, traces


@pytest.fixture
async def behind(tmp_path: Path) -> AsyncIterator[OneServer]:
    async with one_server(tmp_path, 1) as (_, found):
        yield found


class Noted:
    """A backend that does nothing but record its calls."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[Op, int, bool]]] = []
        """Operation, token, whether it is traced."""

    def progress(self, partition: str) -> tuple[int, int]:
        return 0, 0

    def submit(
        self, ops: Sequence[Op], sink: Sink, tokens: Sequence[int], ring_version: int = 0, partition: object = None
    ) -> None:
        is_traced = isinstance(sink, TracedSink)
        self.calls.append([(op, token, is_traced) for op, token in zip(ops, tokens, strict=True)])


class Every:
    """Samples one in `every` operations."""

    def __init__(self, gap: int, of: ByRatio) -> None:
        self._gap, self._left, self._of = gap, gap, of

    def next_among(self, count: int) -> int:
        return min(self._left, count)

    def pass_over(self, count: int) -> None:
        self._left -= count

    def begin(self, op: Op) -> Any:
        self._left = self._gap
        return self._of.begin(op)


@pytest.mark.parametrize("gap", [0, 1, 2, 3, 10])
def test_sampled_puts_keep_their_order(gap: int) -> None:
    noted, found = Noted(), traces(Kept())
    backend = TracedBackend(cast("Backend", noted), Every(gap, ByRatio(found, "redis")))
    ops = [Put(b"k", b"%d" % number) for number in range(7)]
    backend.submit(ops[:5], Collector(), range(10, 15))
    backend.submit(ops[5:], Collector(), [15, 16])
    went = [each for call in noted.calls for each in call]
    assert [(op, token) for op, token, _ in went] == list(zip(ops, range(10, 17), strict=True))
    assert [is_traced for _, _, is_traced in went] == [number % (gap + 1) == gap for number in range(7)]
    found.close()


async def test_sampled_write_has_spans_and_a_result(behind: OneServer) -> None:
    kept, sink = Kept(), Collector()
    found = traces(kept)
    for each in behind.partitions.values():
        each.leader._traces = found
    backend = TracedBackend(behind, ByRatio(found, "redis"))
    backend.submit((Put(b"k", b"v"),), sink, (1,))
    backend.submit([Put(b"k", b"w"), Put(b"l", b"w")], sink, [2, 3])
    assert [type(each) for each in await sink.wait(1, 2, 3)] == [int] * 3
    assert backend.read_now([b"k"]) is NOT_NOW  # it is sampled, and so submitted
    assert backend.read_now([b"l", b"k"]) is NOT_NOW
    found.close()
    assert [kept.path(each) for each in kept.named("log append")] == [["redis PUT", "leader", "log append"]] * 3


async def test_unsampled_read_is_answered_at_once(behind: OneServer) -> None:
    found, sink = traces(Kept(), 0.0), Collector()
    backend = TracedBackend(behind, ByRatio(found, "redis"))
    backend.submit((Put(b"k", b"v"),), sink, (1,))
    await sink.wait(1)
    assert backend.read_now([b"k"]) not in ([None], NOT_NOW)
    assert backend.read_now([b"k", b"absent"]) == [*behind.read_now([b"k"]), None]
    assert found.sampled == 0
    found.close()


async def test_span_names_a_refusal_by_class_because_its_text_may_have_keys(behind: OneServer) -> None:
    kept, sink = Kept(), Collector()
    found = traces(kept)
    behind.failure = Unavailable("the key customers/4711 waits")
    TracedBackend(behind, ByRatio(found, "redis")).submit((Put(b"customers/4711", b"v"),), sink, (1,))
    assert await sink.wait(1) == [behind.failure]
    found.close()
    (span,) = kept.spans
    assert span.status.description == "Unavailable"
    assert "customers" not in span.to_json()
    assert found.live == 0


def test_backend_is_not_wrapped_when_tracing_is_off(tmp_path: Path) -> None:
    off, noted = Traces(), cast("Backend", Noted())
    assert open_traces(TracingConfig(), "n1", "0", real_env(tmp_path)) is None
    assert traced_backend(off, noted, "redis") is noted
    interceptors, of_call = traced_calls(off)
    assert (interceptors, of_call(noted), traced_pages(off)) == ([], noted, None)
    assert (off.live, off.serve("peer PUT", f"00-{'a' * 32}-{'b' * 16}-01")) == (0, None)
    assert off.statistics() == dict.fromkeys(COUNTS, 0)


def test_node_without_tracing_does_not_import_its_packages() -> None:
    code = "import sys, kvstore.server.node; sys.exit(any(each.startswith('opentelemetry') for each in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_endpoint_without_the_extra_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"tracing\.endpoint: .*: run `"):
        open_traces(TracingConfig(endpoint="http://127.0.0.1:4317"), "n1", "0", real_env(tmp_path))


def test_unreadable_certificate_is_refused(tmp_path: Path) -> None:
    settings = TracingConfig(endpoint="https://127.0.0.1:4317", ca=tmp_path / "none.pem")
    with pytest.raises(ConfigError, match=r"tracing\.ca: .*none\.pem cannot be read"):
        open_traces(settings, "n1", "0", real_env(tmp_path))


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"endpoint": "collector:4317"}, "endpoint: expected http://host:port"),
        ({"endpoint": "http://collector"}, "endpoint: expected http://host:port"),
        ({"endpoint": "http://collector:99999"}, "endpoint: expected http://host:port"),
        ({"endpoint": "http://collector:4317/v1/traces"}, "endpoint: expected http://host:port"),
        ({"sample_ratio": 1.5}, "sample_ratio: expected 0 to 1, got 1.5"),
        ({"sample_ratio": float("nan")}, "sample_ratio: expected 0 to 1, got nan"),
        ({"endpoint": "http://collector:4317", "ca": Path("ca.pem")}, "ca: expected an endpoint with https://"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        TracingConfig(**settings)
