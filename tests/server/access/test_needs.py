"""Every RPC and every HTTP route has its row; without one it requires an administrator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstore.access import Right
from kvstore.env.beat import Beat
from kvstore.errors import NotAuthenticated, PermissionDenied
from kvstore.partition.state.commands import TYPES, Code
from kvstore.partition.state.traits import INTERNAL, NEEDS
from kvstore.proto import (
    admin_pb2,
    data_pb2,
    feed_pb2,
    kv_pb2,
)
from kvstore.server.access.identities import Access, UserIdentity
from kvstore.server.access.needs import HTTP_NEEDS, RPC_NEEDS, nothing
from kvstore.server.http.listener import HEALTH, HttpListener
from tests.server.access.tables import table


def methods() -> list[str]:
    modules = (admin_pb2, data_pb2, feed_pb2, kv_pb2)
    services = [service for module in modules for service in module.DESCRIPTOR.services_by_name.values()]
    return sorted(f"/{service.full_name}/{method.name}" for service in services for method in service.methods)


def test_every_rpc_has_a_row_and_every_row_an_rpc() -> None:
    others = {each for each in RPC_NEEDS if each.startswith("/grpc.")}
    assert methods() == sorted(RPC_NEEDS.keys() - others)


def test_every_http_route_has_a_row_and_every_row_a_route() -> None:
    nothing_: Any = None
    assert HttpListener(nothing_, nothing_, Beat()).paths() == HTTP_NEEDS.keys()


def test_every_operation_has_a_row() -> None:
    assert NEEDS.keys() == {int(code) for code in Code}
    consist_of_others = {code for code, kind in TYPES.items() if "ops" in kind.__struct_fields__}
    assert {code for code, needs in NEEDS.items() if not needs} <= consist_of_others | INTERNAL


def test_every_operation_needs_read_or_write() -> None:
    assert {right for needs in NEEDS.values() for right in needs} == {Right.READ, Right.WRITE}


def identity_of(name: str) -> UserIdentity:
    access = Access(table())
    return access.identity_or_none(name) or access.nobody


REQUESTS: dict[str, Callable[[], Any]] = {
    "/kvstore.v1.KV/Watch": lambda: kv_pb2.WatchRequest(start=b"t/", end=b"t0"),
    "/kvstore.v1.Feed/Changes": lambda: feed_pb2.ChangesRequest(start=b"t/", end=b"t0"),
    "/kvstore.v1.Data/ReadPinned": data_pb2.ReadPinnedRequest,
}


def allowed(name: str) -> set[str]:
    """Return the methods, without the service's package, that a user of `table` may call."""
    found = set()
    for method, need in RPC_NEEDS.items():
        try:
            need(identity_of(name), REQUESTS.get(method, lambda: None)())
        except (NotAuthenticated, PermissionDenied):
            continue
        found.add(method.removeprefix("/kvstore.v1."))
    return found


OPEN = {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"}
KV = {
    f"KV/{name}"
    for name in ("Get", "Put", "Delete", "Batch", "Transact", "Execute", "Session", "Scan", "Page", "Topology")
}
REFLECTION = {f"/grpc.reflection.{each}.ServerReflection/ServerReflectionInfo" for each in ("v1", "v1alpha")}
LOGGED_IN = OPEN | KV | REFLECTION


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("nothing", set()),
        ("tenant", {"KV/Watch", "Feed/Positions", "Feed/Changes", "Feed/Hold"}),
        (
            "backup",
            {"Feed/Positions", "Feed/Changes", "Feed/Hold"}
            | {m.removeprefix("/kvstore.v1.") for m in methods() if "Data" in m},
        ),
        ("root", {m.removeprefix("/kvstore.v1.") for m in methods() if "Admin" in m}),
    ],
)
def test_users_may_call_exactly_what_their_rights_allow(name: str, more: set[str]) -> None:
    assert allowed(name) == LOGGED_IN | more


def test_unauthenticated_caller_may_only_check_health() -> None:
    assert allowed("stranger") == OPEN
    probes = {"/heartbeat", *(f"/api/v1/bookie/{name}" for name in ("is_ready", "state", "state/readonly"))}
    of_http = {path for path, need in HTTP_NEEDS.items() if need is nothing}
    assert of_http == HEALTH == {"/healthz", "/readyz", "/clusterz"} | probes


def test_watch_and_changes_beyond_the_prefix_are_refused() -> None:
    tenant = identity_of("tenant")
    for method, request in (
        ("/kvstore.v1.KV/Watch", kv_pb2.WatchRequest()),
        ("/kvstore.v1.KV/Watch", kv_pb2.WatchRequest(start=b"t/", end=b"u")),
        ("/kvstore.v1.Feed/Changes", feed_pb2.ChangesRequest(start=b"t/")),
    ):
        with pytest.raises(PermissionDenied, match=r"user tenant lacks the right watch for .* of keys from"):
            RPC_NEEDS[method](tenant, request)
