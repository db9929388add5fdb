"""The permissions that each RPC and each HTTP route requires if access control is on: one table. Decides only.

partition/state/traits.py has the permissions of operations on keys, server/redis/commands/ those of Redis commands. A
method or route without a row requires an administrator, and a test names it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.access import Right
from kvstore.access.permissions import shown_range
from kvstore.proto import admin_pb2
from kvstore.server.access.identities import UserIdentity

Check = Callable[[UserIdentity, Any], None]
"""A check of permissions. Raises NotAuthenticated or PermissionDenied. The request is None on HTTP and if the client
streams."""


def nothing(identity: UserIdentity, request: Any) -> None:
    """Allow everybody, such as load balancers that check health."""


def login(identity: UserIdentity, request: Any) -> None:
    """Require a login of any user. If the call contains operations, a Guard checks each of them."""
    identity.check_known()


def admin(identity: UserIdentity, request: Any) -> None:
    """Require an administrator."""
    identity.check_some((Right.ADMIN,), "the cluster")


def _backup(identity: UserIdentity, request: Any) -> None:
    identity.check_some((Right.BACKUP,), "pins")


def _feed(identity: UserIdentity, request: Any) -> None:
    identity.check_some((Right.WATCH, Right.BACKUP), "the change feed")


def _watch(identity: UserIdentity, request: Any) -> None:
    identity.check(Right.WATCH, request.start, request.end, "a watch")


def _changes(identity: UserIdentity, request: Any) -> None:
    """Require the watch right or the backup right on the whole range. A combination of both is not enough."""
    identity.check_known()
    if not identity.permissions.may_all(Right.BACKUP, request.start, request.end):
        identity.check(Right.WATCH, request.start, request.end, "changes")


def _read_pinned(identity: UserIdentity, request: Any) -> None:
    identity.check_known()
    if not identity.permissions.may_all(Right.BACKUP, request.start, request.end):
        raise identity.permissions.refused(Right.BACKUP, f"a pinned read of {shown_range(request.start, request.end)}")


RPC_NEEDS: dict[str, Check] = {
    **dict.fromkeys(
        (
            f"/kvstore.v1.KV/{name}"
            for name in ("Get", "Put", "Delete", "Batch", "Transact", "Execute", "Session", "Scan", "Page", "Topology")
        ),
        login,
    ),
    "/kvstore.v1.KV/Watch": _watch,
    "/kvstore.v1.Feed/Positions": _feed,
    "/kvstore.v1.Feed/Changes": _changes,
    "/kvstore.v1.Feed/Hold": _feed,
    **dict.fromkeys((f"/kvstore.v1.Data/{name}" for name in ("Pin", "Renew", "Unpin", "Pins")), _backup),
    "/kvstore.v1.Data/ReadPinned": _read_pinned,
    **{f"/kvstore.v1.Admin/{each.name}": admin for each in admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods},
    "/grpc.health.v1.Health/Check": nothing,
    "/grpc.health.v1.Health/Watch": nothing,
    **dict.fromkeys(
        (f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo" for version in ("v1", "v1alpha")), login
    ),
}

HTTP_NEEDS: dict[str, Check] = {
    "/": admin,
    "/ui": admin,
    "/ui/": login,
    **dict.fromkeys(
        (
            f"/ui/{name}"
            for name in ("ledgers", "partition", "bookie", "clients", "transactions", "snapshots", "slow", "users")
        ),
        admin,
    ),
    "/ui/live": admin,
    "/ui/node": admin,
    "/ui/series": admin,
    **dict.fromkeys((f"/ui/{name}" for name in ("keys", "key", "sessions", "ui.css", "tables.js")), login),
    "/ui/ui.js": admin,
    "/ui/uplot.css": admin,
    "/ui/uplot.js": admin,
    "/healthz": nothing,
    "/readyz": nothing,
    "/clusterz": nothing,
    "/metrics": login,
    "/heartbeat": nothing,
    **dict.fromkeys((f"/api/v1/bookie/{name}" for name in ("is_ready", "state", "state/readonly")), nothing),
    **dict.fromkeys((f"/api/v1/bookie/{name}" for name in ("info", "cluster_info")), login),
    **dict.fromkeys(
        (
            *(f"/v1/{name}/{{key}}" for name in ("keys", "increment", "append", "expire")),
            *(f"/v1/{name}" for name in ("keys", "count", "batch", "transaction", "cluster", "openapi.json")),
        ),
        login,
    ),
    "/v1/watch": _watch,
}
"""`/metrics` is for a scraper, which is a user without a role. The pages of keys show what their viewer may read. Below
`/v1/` a row is a route of the gateway (kvstore/server/gateway/routes.py). A Guard checks each operation of both."""
