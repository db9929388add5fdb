"""Calls with a parent span, and the operations that they submit in their own tasks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvstore.env.beat import Beat
from kvstore.env.traces import Traces
from kvstore.env.transport import TcpTransport
from kvstore.partition.state.commands import Put
from kvstore.rpc.http.messages import HttpRequest
from kvstore.server.http.listener import HttpListener
from kvstore.server.routing.ask import ask
from kvstore.server.tracing import calls
from kvstore.server.tracing.calls import PAGES, TracedPages
from kvstore.server.tracing.open import backend_of_calls
from tests.server.backends import one_server
from tests.server.http.requests import request_of
from tests.server.http.test_listener import Shown
from tests.server.tracing.kept import Kept, traces

PARENT = f"00-{'a' * 32}-{'b' * 16}-"


async def asked(tmp_path: Path, ratio: float, *flags: str) -> Kept:
    """Request a page once for each of these flags of a parent ("" for none), concurrently. Each request puts a key."""
    kept = Kept()
    found = traces(kept, ratio)
    async with one_server(tmp_path, 1) as (_, behind):
        backend, pages = backend_of_calls(found, behind, "http"), TracedPages(found)

        async def page(request: HttpRequest) -> None:
            await asyncio.sleep(0)
            await ask(backend, Put(b"k", (request.headers.get("traceparent") or "").encode()))
            request.status = 200

        async def one(flag: str) -> None:
            headers = {"Traceparent": PARENT + flag} if flag else {}
            await pages.answer(request_of("PUT", "/v1/kv/customers%2F4711", headers), page)

        async with asyncio.TaskGroup() as group:
            for flag in flags:
                group.create_task(one(flag))
    found.close()
    return kept


async def test_operations_of_a_call_are_sampled_like_its_parent(tmp_path: Path) -> None:
    kept = await asked(tmp_path, 0.0, "01", "", "00", "")
    assert sorted(each.name for each in kept.spans) == ["PUT", "PUT /v1"]
    (operation,) = kept.named("PUT")
    assert kept.path(operation) == ["PUT /v1", "PUT"]
    assert f"{operation.context.trace_id:032x}" == "a" * 32
    assert "customers" not in "".join(each.to_json() for each in kept.spans)


async def test_call_without_a_parent_is_sampled_by_ratio(tmp_path: Path) -> None:
    kept = await asked(tmp_path, 1.0, "00", "", "00", "")
    assert [kept.path(each) for each in kept.spans] == [["http PUT"]] * 2


async def test_spans_of_a_call_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "OPERATIONS_MAX", 0)
    kept = await asked(tmp_path, 1.0, "01")
    assert [each.name for each in kept.spans] == ["PUT /v1"]


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [
        ("GET", "/v1/kv/k", "GET /v1"),
        ("GET", "/", "GET /"),
        ("GET", "/metrics", "GET /metrics"),
        ("GET", "/" + "x" * 9_000, "GET (other)"),
        ("X" * 9_000, "/v1", "(other) /v1"),
        ("OPTIONS", "*", "OPTIONS (other)"),
    ],
)
async def test_span_name_has_no_words_of_an_unauthenticated_caller(method: str, path: str, name: str) -> None:
    """The caller has not been authenticated."""
    kept = Kept()
    found = traces(kept, 0.0)

    async def page(request: HttpRequest) -> None:
        request.status = 200

    await TracedPages(found).answer(request_of(method, path, {"Traceparent": f"{PARENT}01"}), page)
    found.close()
    assert [each.name for each in kept.spans] == [name]


def test_every_page_of_the_http_port_has_a_span_name() -> None:
    listener = HttpListener(Shown(), TcpTransport(), Beat())
    assert {path.strip("/").split("/")[0] for path in listener.paths()} == set(PAGES)


async def test_backend_of_calls_is_not_wrapped_when_tracing_is_off(tmp_path: Path) -> None:
    async with one_server(tmp_path, 1) as (_, behind):
        assert backend_of_calls(Traces(), behind, "http") is behind
