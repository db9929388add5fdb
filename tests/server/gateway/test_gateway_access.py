"""Permissions at the gateway: every route, by users of every kind. A way around the guard is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest

from kvstore.access import RevokeRight, RevokeRole, Right
from kvstore.partition.state.commands import Code
from kvstore.server.access import http_authenticator
from kvstore.server.gateway import routes
from tests.server.access.tables import table
from tests.server.gateway.world import ResponseKind, World, gateway_world, login_of
from tests.waiting import PATIENCE_S, wait_until

MINE, OTHERS = "t/a", "x"


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with gateway_world(tmp_path, table()) as made:
        yield made


async def each_route(world: World, user: str, key: str) -> dict[str, int]:
    """Return the status of every route on a key, for a user."""
    found: dict[str, int] = {}
    for route in routes.ROUTES:
        target = route.template.replace("{key}", key)
        more = {
            "expire": "?ttl_ms=1000",
            "scan": f"?prefix={key}",
            "count": f"?prefix={key}",
            "delete_range": f"?prefix={key}",
            "watch": f"?key={key}",
        }.get(route.name, "")
        if route.name in ("batch", "transaction"):
            answer = await world.batch({"operation": "get", "key": key}, user=user, path=route.template)
        elif route.name == "watch":
            answer = await head_of(world, f"{target}{more}", user)
        else:
            data = b"1" if route.body is not routes.Body.NONE else None
            answer = await world.ask(route.method, f"{target}{more}", data, user=user)
        found[route.name] = answer.status
    return found


async def head_of(world: World, target: str, user: str) -> ResponseKind:
    """Read the head of a response without an end."""
    headers = {"Authorization": login_of(user)} if user else {}
    async with asyncio.timeout(PATIENCE_S), world.http.get(f"{world.url}{target}", headers=headers) as answer:
        return ResponseKind(answer.status, b"", answer.headers)


ALL = {each.name for each in routes.ROUTES}
OPEN_TO_USERS = {"cluster", "openapi"}
READS = {"get", "meta", "scan", "count", "batch", "transaction"}
WRITES = {"put", "delete", "append", "expire"}


@pytest.mark.parametrize(
    ("user", "key", "allowed"),
    [
        ("tenant", MINE, ALL),
        ("tenant", OTHERS, OPEN_TO_USERS),
        ("reader", MINE, OPEN_TO_USERS | READS | {"watch"}),
        ("nothing", MINE, OPEN_TO_USERS),
        ("root", MINE, OPEN_TO_USERS),
        ("", MINE, set()),
    ],
)
async def test_every_route_checks_its_rights(world: World, user: str, key: str, allowed: set[str]) -> None:
    world.feeds.logs["p1"].put((b"x", b"1"))
    found = await each_route(world, user, key)
    refused = 403 if user else 401
    assert {name for name, status in found.items() if status == refused} == ALL - allowed
    assert {found[name] for name in allowed} <= {200, 404}
    assert WRITES <= ALL


async def test_batch_with_an_operation_beyond_the_prefix_is_refused_whole(world: World) -> None:
    mine, others = ({"operation": "put", "key": f"{{same}}{key}", "value": "v"} for key in (MINE, OTHERS))
    answer = await world.batch({**mine, "key": "t/{same}"}, others, user="tenant")
    assert (answer.status, answer.json["reason"]) == (403, "PERMISSION_DENIED")
    assert "user tenant lacks the right write" in answer.json["message"]
    assert world.backend.submitted == []


async def test_transaction_with_a_key_beyond_the_prefix_is_refused_whole(world: World) -> None:
    for name in ("put", "get"):
        value = {"value": "v"} if name == "put" else {}
        parts = [{"operation": name, "key": key, **value} for key in ("t/a", "t/b", OTHERS)]
        answer = await world.batch(*parts, user="tenant", path="/v1/transaction")
        assert (answer.status, answer.json["reason"]) == (403, "PERMISSION_DENIED")
    assert not any(op.code == Code.TRANSACT for op in world.backend.submitted)
    assert (await world.ask("GET", "/v1/keys/t/a", user="tenant")).status == 404


async def test_return_old_needs_the_right_to_read(world: World) -> None:
    for target in ("/v1/keys/x?return_old=true", "/v1/keys/t/a?return_old=true"):
        answer = await world.ask("PUT", target, b"v", user="tenant")
        assert answer.status == (403 if "x" in target.partition("?")[0] else 200)


async def test_range_deletion_needs_the_right_to_read(world: World) -> None:
    world.access.take(table(RevokeRight("owns", Right.READ, b"t/")))
    assert (await world.ask("PUT", "/v1/keys/t/a", b"v", user="tenant")).status == 200
    answer = await world.ask("DELETE", "/v1/keys?prefix=t/", user="tenant")
    assert (answer.status, "lacks the right read" in answer.json["message"]) == (403, True)
    world.access.take(table())
    assert (await world.ask("GET", "/v1/keys/t/a", user="tenant")).status == 200


@pytest.mark.parametrize("query", ["", "?prefix=u", "?start=t/&end=t1", "?start=s&end=t0"])
async def test_scan_and_watch_beyond_the_prefix_are_refused(world: World, query: str) -> None:
    assert (await world.ask("GET", f"/v1/keys{query}", user="tenant")).status == 403
    assert (await world.ask("GET", f"/v1/watch{query}", user="tenant")).status == 403
    assert world.backend.submitted == []


async def test_unauthenticated_request_gets_401_and_its_body_is_not_read(world: World) -> None:
    answer = await world.ask("PUT", "/v1/keys/k", b"v")
    assert (answer.status, answer.json["reason"]) == (401, "NOT_AUTHENTICATED")
    assert answer.headers["WWW-Authenticate"].startswith("Basic ")
    for header in ("Basic !", "Digest x", "Bearer kvt_1"):
        assert (await world.ask("GET", "/v1/keys/k", Authorization=header)).status == 401
    assert (await world.ask("GET", "/v1/nothing")).status == 404


async def test_refusals_are_counted_and_audited(world: World) -> None:
    before = world.access.denied
    await world.ask("PUT", "/v1/keys/x", b"a value", user="tenant")
    await world.ask("PUT", "/v1/keys/x", b"a value")
    await world.ask("GET", "/v1/watch", user="tenant")
    await world.ask("GET", "/v1/watch")
    await world.ask("PUT", "/v1/keys/x", b"a value", Origin="https://evil.example")
    assert world.access.denied == before + 5
    assert [(line["who"], line["call"], line["outcome"]) for line in world.audit.documents()] == [
        ("tenant", "put", "PERMISSION_DENIED"),
        ("-", "HTTP PUT /v1/keys/{key}", "NOT_AUTHENTICATED"),
        ("tenant", "HTTP GET /v1/watch", "PERMISSION_DENIED"),
        ("-", "HTTP GET /v1/watch", "NOT_AUTHENTICATED"),
        ("-", "HTTP PUT /v1/keys/{key}", "PERMISSION_DENIED"),
    ]
    assert "a value" not in "".join(world.audit.lines)


async def test_http_watch_ends_when_its_right_is_revoked(world: World) -> None:
    async with (
        asyncio.timeout(PATIENCE_S),
        world.http.get(f"{world.url}/v1/watch?prefix=t/", headers={"Authorization": login_of("tenant")}) as answer,
    ):
        assert b"event: position" in await answer.content.readuntil(b"{}\n\n")
        world.access.take(table(RevokeRole("tenant", "owns")))
        rest = await answer.read()
    assert b"event: error\n" in rest
    assert orjson.loads(rest.rpartition(b"data: ")[2])["reason"] == "PERMISSION_DENIED"
    assert world.access.denied == 1


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1"])
async def test_request_from_a_page_of_another_site_is_refused(world: World, origin: str) -> None:
    """A browser sends the login that it has stored, whoever wrote the page."""
    answer = await world.ask("POST", "/v1/increment/t/a", user="tenant", Origin=origin, Content_Type="text/plain")
    assert (answer.status, answer.json["reason"]) == (403, "PERMISSION_DENIED")
    assert world.backend.submitted == []
    own = await world.ask("POST", "/v1/increment/t/a", user="tenant", Origin=world.url)
    assert own.status == 200


@pytest.mark.parametrize(
    ("site", "status"), [("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)]
)
async def test_page_of_another_site_is_refused_without_an_origin(world: World, site: str, status: int) -> None:
    """A site is a registered domain: a page of another host or port of it is `same-site`."""
    answer = await world.ask("POST", "/v1/increment/t/a", user="tenant", Sec_Fetch_Site=site, Content_Type="text/plain")
    assert answer.status == status
    assert len(world.backend.submitted) == (status == 200)


@pytest.mark.parametrize(
    ("host", "status"),
    [("evil.example", 403), ("evil.example:8401", 403), ("[", 403), ("", 403), ("localhost:8401", 200),
     ("LOCALHOST", 200), ("127.0.0.1", 200), ("[::1]:8401", 200), ("10.0.0.9:8401", 200)],
)  # fmt: skip
async def test_rebound_host_name_is_refused(tmp_path: Path, host: str, status: int) -> None:
    """A page of that name would count as one of this server, and access control is off."""
    async with gateway_world(tmp_path) as world:
        answer = await world.ask("PUT", "/v1/keys/k", b"v", Host=host)
        assert answer.status == status
        assert len(world.backend.submitted) == (status == 200)


async def test_any_host_name_is_accepted_when_access_control_is_on(world: World) -> None:
    assert (await world.ask("GET", "/v1/cluster", user="tenant", Host="kv.example")).status == 200


async def test_gateway_without_a_guard_would_be_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above exercise the guard: without it, the tenant reads and writes everywhere."""
    monkeypatch.setattr(http_authenticator, "Guard", lambda access, identity, backend, address: backend)
    found = await each_route(world, "tenant", OTHERS)
    assert {name for name in READS | WRITES if found[name] == 403} == set()


async def test_every_request_is_allowed_when_access_control_is_off(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        assert (await world.ask("PUT", "/v1/keys/x", b"v")).status == 200
        await wait_until(lambda: _is_empty(world), what="nothing is under way")


async def _is_empty(world: World) -> bool:
    numbers = world.gateway.statistics()
    return numbers["http_requests"] == numbers["http_watches"] == 0
