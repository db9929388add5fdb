"""The servers' knowledge, for commands that read the metadata store, for while the store is unavailable."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from kvstore.cli.admin import ask_admin
from kvstore.cli.cluster import ClusterOptions, Tools, with_tools
from kvstore.errors import MetadataError, StoreError, Unavailable

if TYPE_CHECKING:
    from kvstore.proto.admin_pb2 import ClusterReport
    from kvstore.proto.admin_pb2_grpc import AdminStub

T = TypeVar("T")
ASK_S = 4.0
"""Timeout in seconds for one server."""
LEDGERS_S = 20.0
"""Timeout in seconds for a page of ledgers, each of which the server reads."""


def cluster_report(cluster: ClusterOptions) -> ClusterReport:
    """Return the cluster as the first server that answers sees it. Raises StoreError."""
    from kvstore.proto.admin_pb2 import ClusterStatusRequest

    return ask_admin(cluster, lambda stub, seconds: stub.ClusterStatus(ClusterStatusRequest(), timeout=seconds), ASK_S)


def from_store_or_servers(
    cluster: ClusterOptions, work: Callable[[Tools], Awaitable[T]], from_report: Callable[[ClusterReport], T]
) -> T:
    """Return what `work` finds in the metadata store, or what servers know while the store is unreachable. In that case
    report the age of that knowledge on standard error. Raises StoreError."""
    if cluster.metadata is not None:
        return with_tools(cluster, work)  # the store's address does not lead to servers
    if _is_store_there(cluster):
        try:
            return with_tools(cluster, work)
        except (MetadataError, Unavailable) as error:
            why = str(error)
    else:
        why = "no server that answers can reach it"
    try:
        report = cluster_report(cluster)
    except StoreError as error:
        raise Unavailable(f"neither the metadata store ({why}) nor a server can be reached: {error}") from error
    print(
        f"kvstore: the metadata store cannot be reached ({why}); showing what {report.server} read from it "
        f"{report.ring.age_s:.0f} s ago, and what servers report now",
        file=sys.stderr,
    )
    return from_report(report)


def by_servers_or_store(
    cluster: ClusterOptions, ask: Callable[[AdminStub, float], T], work: Callable[[Tools], Awaitable[T]]
) -> T:
    """Return what the first server that answers reports, so that this machine need not reach the metadata store or a
    bookie. If no server answers, or the metadata store is named, return what `work` finds there. Raises StoreError."""
    if cluster.metadata is not None:
        return with_tools(cluster, work)  # the store's address does not lead to servers
    try:
        return ask_admin(cluster, ask, LEDGERS_S)
    except (Unavailable, MetadataError) as error:
        if cluster.server is not None:
            raise  # nothing else names the metadata store
        print(f"kvstore: no server answers ({error}); reading the metadata store", file=sys.stderr)
        return with_tools(cluster, work)


def _is_store_there(cluster: ClusterOptions) -> bool:
    """Return False if a server answers that its session with the metadata store is broken."""
    from kvstore.proto.admin_pb2 import NodeStatusRequest

    try:
        own = ask_admin(cluster, lambda stub, seconds: stub.NodeStatus(NodeStatusRequest(), timeout=seconds), ASK_S)
    except StoreError:
        return True  # no server answers
    return bool(own.metadata.state == "connected")
