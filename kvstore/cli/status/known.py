"""The knowledge of servers, for commands that read the metadata store: while that is away, it has to do."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.cli.admin import ask_admin
from kvstore.cli.cluster import Tools, with_tools
from kvstore.errors import MetadataError, StoreError, Unavailable

if TYPE_CHECKING:
    from kvstore.proto.admin_pb2 import ClusterReport

T = TypeVar("T")
ASK_S = 4.0
"""For one server."""
LEDGERS_S = 20.0
"""For a page of ledgers, each of which the server reads."""
Where = tuple[Path, str | None, str | None]
"""--data-dir, --metadata, --server."""


def cluster_report(where: Where) -> ClusterReport:
    """The cluster as the first server finds it that answers. Raises StoreError."""
    from kvstore.proto.admin_pb2 import ClusterStatusRequest

    found: ClusterReport = ask_admin(
        *where, lambda stub, seconds: stub.ClusterStatus(ClusterStatusRequest(), timeout=seconds), ASK_S
    )
    return found


def from_store_or_servers(where: Where, work: Callable[[Tools], Awaitable[T]], told: Callable[[ClusterReport], T]) -> T:
    """Return what `work` finds in the metadata store; or, while that cannot be reached, what servers know, and say on
    stderr how old that is. Raises StoreError."""
    data_dir, metadata, server = where
    if metadata is not None:
        return with_tools(data_dir, metadata, work)  # by its address, which only it can be asked at
    if _is_store_there(where):
        try:
            return with_tools(data_dir, None, work, server)
        except (MetadataError, Unavailable) as error:
            why = str(error)
    else:
        why = "no server that answers reaches it"
    try:
        report = cluster_report(where)
    except StoreError as error:
        raise Unavailable(f"the metadata store cannot be reached ({why}), nor can servers: {error}") from error
    print(
        f"kvstore: the metadata store cannot be reached ({why}): shown is what {report.server} read of it "
        f"{report.ring.age_s:.0f} s ago, and what servers say now",
        file=sys.stderr,
    )
    return told(report)


def by_servers_or_store(where: Where, ask: Callable[[Any, float], T], work: Callable[[Tools], Awaitable[T]]) -> T:
    """Return what the first server that answers tells by its Admin service, so that neither the metadata store nor a
    bookie need be reached from here; where none answers, or the metadata store is named, what `work` finds there.
    Raises StoreError."""
    data_dir, metadata, server = where
    if metadata is not None:
        return with_tools(data_dir, metadata, work)  # by its address, which only it can be asked at
    try:
        return ask_admin(*where, ask, LEDGERS_S)
    except (Unavailable, MetadataError) as error:
        if server is not None:
            raise  # nobody else says where the metadata store is
        print(f"kvstore: no server tells ({error}): the metadata store is read", file=sys.stderr)
        return with_tools(data_dir, None, work)


def _is_store_there(where: Where) -> bool:
    """Whether it is worth asking: no server that answers says that its session is broken."""
    from kvstore.proto.admin_pb2 import NodeStatusRequest

    try:
        own = ask_admin(*where, lambda stub, seconds: stub.NodeStatus(NodeStatusRequest(), timeout=seconds), ASK_S)
    except StoreError:
        return True  # nobody says anything
    return bool(own.metadata.state == "connected")
