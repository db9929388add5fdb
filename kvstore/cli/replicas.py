"""`kvstore partition move-replica`, and how commands wait for replicas to move."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.admin import LOOK_S, Patience, ask_admin
from kvstore.cli.cluster import DataDir, Json, ZooKeeper
from kvstore.cli.endpoints import Server
from kvstore.cli.groups import group_of
from kvstore.cli.operation import OperationId, asked_once, said_if_interrupted
from kvstore.cli.output import as_json
from kvstore.cli.ring_changes import ring_status
from kvstore.cli.ring_views import status_document, status_text
from kvstore.errors import Unavailable

if TYPE_CHECKING:
    from kvstore.proto import admin_pb2


def register(app: typer.Typer) -> None:
    """Add `move-replica` to the commands about partitions."""
    group_of(app, "partition").command("move-replica")(move_replica)


def move_replica(
    partition: Annotated[str, typer.Argument(help="Id of the partition")],
    source: Annotated[str, typer.Argument(help="Server that loses its replica")],
    target: Annotated[str, typer.Argument(help="Server that gets a replica")],
    wait: Annotated[bool, typer.Option(help="Wait until the new replica has replaced the old one")] = True,
    timeout: Annotated[float, typer.Option(help="Seconds to wait; the move continues after that", min=0)] = 600,
    operation: OperationId = "",
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Move a replica to another server. The new replica catches up from a snapshot and the log before it takes over."""
    from kvstore.proto.admin_pb2 import ChangeReplicasRequest

    request = ChangeReplicasRequest(partition=partition, newcomer=target, leaving=source, operation=operation)
    answer = change_replicas(request, data_dir, zookeeper, server)
    if wait:
        with said_if_interrupted("interrupted; the replica is still moving: see `kvstore ring status`"):
            answer, holders = wait_until_replaced(partition, target, data_dir, zookeeper, server, timeout_s=timeout)
        if target not in holders:
            raise Unavailable(
                f"the new replica on {target} was abandoned before it had caught up; "
                f"{source} keeps its replica of {partition}"
            )
    print(as_json(status_document(answer)) if json else status_text(answer))


def change_replicas(
    request: admin_pb2.ChangeReplicasRequest, data_dir: Path, zookeeper: str | None, server: str | None
) -> admin_pb2.RingStatusResponse:
    """Request the change. It is applied once, however often it is sent. Raises StoreError."""
    with asked_once(request, has_option=bool(request.newcomer)):
        answer: admin_pb2.RingStatusResponse = ask_admin(
            data_dir,
            zookeeper,
            server,
            lambda stub, timeout_s: stub.ChangeReplicas(request, timeout=timeout_s),
            again=True,
        )
    return answer


def wait_until_replaced(
    partition: str, newcomer: str, data_dir: Path, zookeeper: str | None, server: str | None, *, timeout_s: float
) -> tuple[admin_pb2.RingStatusResponse, list[str]]:
    """Wait until the newcomer is no longer catching up. Return the ring's status and the holders of the partition's
    replicas. Raises Unavailable after `timeout_s`."""
    deadline, patience = time.monotonic() + timeout_s, Patience()

    def look() -> tuple[admin_pb2.RingStatusResponse, list[str]] | str:
        answer = ring_status(data_dir, zookeeper, server)
        if any((each.partition, each.newcomer) == (partition, newcomer) for each in answer.replacing):
            return f"the replica of {partition} on {newcomer} has not caught up"
        return answer, replicas_of(partition, data_dir, zookeeper, server)

    while True:
        found = (
            patience.look(look) or f"no server reports whether the replica of {partition} on {newcomer} has caught up"
        )
        if not isinstance(found, str):
            return found
        if time.monotonic() > deadline:
            raise Unavailable(f"{found} within {timeout_s:g} s; the move continues")
        time.sleep(LOOK_S)


def replicas_of(partition: str, data_dir: Path, zookeeper: str | None, server: str | None) -> list[str]:
    """Return the servers that hold the partition's replicas according to the ring."""
    found = _ring(data_dir, zookeeper, server).partitions
    return [replica for each in found if each.id == partition for replica in each.replicas]


def _ring(data_dir: Path, zookeeper: str | None, server: str | None) -> admin_pb2.RingResponse:
    from kvstore.proto.admin_pb2 import RingRequest

    answer: admin_pb2.RingResponse = ask_admin(
        data_dir, zookeeper, server, lambda stub, seconds: stub.Ring(RingRequest(), timeout=seconds)
    )
    return answer


def wait_until_empty(node: str, data_dir: Path, zookeeper: str | None, server: str | None, *, timeout_s: float) -> None:
    """Return when the ring places no replica on the node. Raises Unavailable after `timeout_s`."""
    deadline, patience = time.monotonic() + timeout_s, Patience()
    while True:
        found = patience.look(lambda: _ring(data_dir, zookeeper, server))
        left = None if found is None else [each.id for each in found.partitions if node in each.replicas]
        if left is not None and not left:
            return
        if time.monotonic() > deadline:
            if left is None:
                raise Unavailable(
                    f"no server reports whether {node} still has replicas after {timeout_s:g} s; the drain continues"
                )
            raise Unavailable(
                f"{node} still has replicas of {', '.join(left)} after {timeout_s:g} s; the drain continues"
            )
        time.sleep(LOOK_S)
