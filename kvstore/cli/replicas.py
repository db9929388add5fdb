"""`kvstore partition move-replica` and `move-lead`, and how commands wait for replicas to move."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.admin import ask_admin, wait_until
from kvstore.cli.cluster import LOCAL, TIMEOUT_S_MAX, ClusterOptions, Json
from kvstore.cli.groups import group_of
from kvstore.cli.operation import OperationId, asked_once, reporting_interrupt
from kvstore.cli.output import as_json
from kvstore.cli.ring_changes import ring_status
from kvstore.cli.ring_views import status_document, status_text
from kvstore.errors import Unavailable

if TYPE_CHECKING:
    from kvstore.proto import admin_pb2


def register(app: typer.Typer) -> None:
    """Add these commands to the commands about partitions."""
    group_of(app, "partition").command("move-replica")(move_replica)
    group_of(app, "partition").command("move-lead")(move_lead)


def move_replica(
    partition: Annotated[str, typer.Argument(help="Id of the partition")],
    source: Annotated[str, typer.Argument(help="Server that loses its replica")],
    target: Annotated[str, typer.Argument(help="Server that gets a replica")],
    wait: Annotated[bool, typer.Option(help="Wait until the new replica has replaced the old one")] = True,
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait; the move continues after that", min=0, max=TIMEOUT_S_MAX)
    ] = 600,
    operation: OperationId = "",
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Move a replica to another server. The new replica catches up from a snapshot and the log before it takes over."""
    from kvstore.proto.admin_pb2 import ChangeReplicasRequest

    request = ChangeReplicasRequest(partition=partition, newcomer=target, leaving=source, operation=operation)
    answer = change_replicas(request, cluster)
    if wait:
        with reporting_interrupt("interrupted; the replica is still moving: see `kvstore ring status`"):
            answer, holders = wait_until_replaced(partition, target, cluster, timeout_s=timeout)
        if target not in holders:
            raise Unavailable(
                f"the new replica on {target} was abandoned before it had caught up; "
                f"{source} keeps its replica of {partition}"
            )
    print(as_json(status_document(answer)) if json else status_text(answer))


def move_lead(
    partition: Annotated[str, typer.Argument(help="Id of the partition")],
    target: Annotated[str, typer.Argument(help="Server that should lead it, on which it has a replica")],
    operation: OperationId = "",
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Make a server the preferred leader of a partition. The present leader hands over to it, in about ten seconds."""
    from kvstore.proto.admin_pb2 import ChangeReplicasRequest

    request = ChangeReplicasRequest(partition=partition, lead=target, operation=operation)
    answer = change_replicas(request, cluster)
    print(
        as_json({"partition": partition, "preferred_leader": target, "version": answer.version})
        if json
        else f"{target} is the preferred leader of {partition} as of ring version {answer.version}"
    )


def change_replicas(request: admin_pb2.ChangeReplicasRequest, cluster: ClusterOptions) -> admin_pb2.RingStatusResponse:
    """Request the change. It is applied once, however often it is sent. Raises StoreError."""
    with asked_once(request, has_option=bool(request.newcomer or request.lead)):
        return ask_admin(
            cluster,
            lambda stub, timeout_s: stub.ChangeReplicas(request, timeout=timeout_s),
            again=True,
        )


def wait_until_replaced(
    partition: str, newcomer: str, cluster: ClusterOptions, *, timeout_s: float
) -> tuple[admin_pb2.RingStatusResponse, list[str]]:
    """Wait until the newcomer is no longer catching up. Return the ring's status and the holders of the partition's
    replicas. Raises Unavailable after `timeout_s`."""

    def ask() -> tuple[admin_pb2.RingStatusResponse, list[str]] | str:
        answer = ring_status(cluster)
        if any((each.partition, each.newcomer) == (partition, newcomer) for each in answer.replacing):
            return f"the move continues: the replica of {partition} on {newcomer} has not caught up"
        return answer, replicas_of(partition, cluster)

    unknown = f"the move continues: no server reports whether the replica of {partition} on {newcomer} has caught up"
    return wait_until(ask, unknown, timeout_s=timeout_s)


def replicas_of(partition: str, cluster: ClusterOptions) -> list[str]:
    """Return the servers that hold the partition's replicas according to the ring."""
    found = _ring(cluster).partitions
    return [replica for each in found if each.id == partition for replica in each.replicas]


def _ring(cluster: ClusterOptions) -> admin_pb2.RingResponse:
    from kvstore.proto.admin_pb2 import RingRequest

    return ask_admin(cluster, lambda stub, seconds: stub.Ring(RingRequest(), timeout=seconds))


def wait_until_empty(node: str, cluster: ClusterOptions, *, timeout_s: float) -> None:
    """Return when the ring places no replica on the node. Raises Unavailable after `timeout_s`."""

    def ask() -> bool | str:
        left = [each.id for each in _ring(cluster).partitions if node in each.replicas]
        return f"the drain continues: {node} did not lose its replicas of {', '.join(left)}" if left else True

    wait_until(ask, f"the drain continues: no server reports whether {node} lost its replicas", timeout_s=timeout_s)
