"""`kvstore partition move-replica`, and how commands wait until replicas have moved."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.admin import LOOK_S, Patience, ask_admin
from kvstore.cli.cluster import DataDir, Json, ZooKeeper
from kvstore.cli.endpoints import Server
from kvstore.cli.operation import OperationId, asked_once, said_if_interrupted
from kvstore.cli.output import as_json
from kvstore.cli.ring_changes import ring_status
from kvstore.cli.ring_views import status_document, status_text
from kvstore.cli.status.known import Where, cluster_report
from kvstore.errors import Unavailable

if TYPE_CHECKING:
    from kvstore.proto import admin_pb2


def register(app: typer.Typer) -> None:
    """Add `move-replica` to the commands about partitions."""
    groups = {group.name: group.typer_instance for group in app.registered_groups}
    partition = groups.get("partition")
    if partition is None:
        partition = typer.Typer(no_args_is_help=True, help="Partitions and their replicas.")
        app.add_typer(partition, name="partition")
    partition.command("move-replica")(move_replica)
    partition.command("even-replicas")(even_replicas)


def move_replica(
    partition: Annotated[str, typer.Argument(help="The partition's id.")],
    source: Annotated[str, typer.Argument(help="The server whose replica goes.")],
    target: Annotated[str, typer.Argument(help="The server that gets one.")],
    wait: Annotated[bool, typer.Option(help="Return when the new replica has taken the other's place.")] = True,
    timeout: Annotated[float, typer.Option(help="Seconds to wait; the move goes on after that.", min=0)] = 600,
    operation: OperationId = "",
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Move a replica to another server. The new one catches up from a snapshot and the log before the other goes."""
    from kvstore.proto.admin_pb2 import ChangeReplicasRequest

    request = ChangeReplicasRequest(partition=partition, newcomer=target, leaving=source, operation=operation)
    answer = change_replicas(request, data_dir, zookeeper, server)
    if wait:
        with said_if_interrupted("interrupted; the replica goes on moving: `kvstore ring status` shows how far it is"):
            answer, holders = wait_until_replaced(partition, target, data_dir, zookeeper, server, timeout_s=timeout)
        if target not in holders:
            raise Unavailable(
                f"{target} was given up before it had caught up; {source} keeps its replica of {partition}"
            )
    print(as_json(status_document(answer)) if json else status_text(answer))


def even_replicas(
    timeout: Annotated[float, typer.Option(help="Seconds to wait for one replica; its move goes on.", min=0)] = 600,
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Move replicas, one after the other, until no server that is up holds two more than another: after `kvstore node
    undrain`, or when a server has joined. No move brings replicas of a partition into a common zone. If it is
    interrupted, the move that it has begun ends by itself; call it again for the rest."""
    from kvstore.proto.admin_pb2 import ChangeReplicasRequest
    from kvstore.server.control.evening import Evening, held_by, next_evening

    where, moved = (data_dir, zookeeper, server), list[Evening]()
    with said_if_interrupted("interrupted; a replica goes on moving: `kvstore ring status` shows how far it is"):
        while (move := next_evening(report := cluster_report(where))) is not None:
            change_replicas(ChangeReplicasRequest(**move._asdict()), *where)
            _, holders = wait_until_replaced(move.partition, move.newcomer, *where, timeout_s=timeout)
            if move.newcomer not in holders:
                raise Unavailable(f"{move.newcomer} was given up before it had caught up with {move.partition}")
            moved.append(move)
            if not json:
                print(f"{move.partition}: {move.leaving} -> {move.newcomer}", flush=True)
            _wait_until_known(move.partition, move.leaving, where, timeout_s=timeout)
    held = held_by(report)
    if json:
        print(as_json({"moved": [each._asdict() for each in moved], "replicas": held}))
    else:
        print(f"{len(moved)} moved; replicas: {', '.join(f'{each} {count}' for each, count in sorted(held.items()))}")


def _wait_until_known(partition: str, leaving: str, where: Where, *, timeout_s: float) -> None:
    """Return when a survey of the cluster shows a partition without the replica that has left, and all others up.
    Raises Unavailable after `timeout_s`."""
    deadline, patience = time.monotonic() + timeout_s, Patience()
    while True:
        report = patience.look(lambda: cluster_report(where))
        for each in report.partitions if report is not None else ():
            holders = {replica.server for replica in each.replicas if replica.is_up}
            if each.id == partition and leaving not in holders and len(holders) == len(each.replicas):
                return
        if time.monotonic() > deadline:
            raise Unavailable(f"no server shows all replicas of {partition} without {leaving} within {timeout_s:g} s")
        time.sleep(LOOK_S)


def change_replicas(
    request: admin_pb2.ChangeReplicasRequest, data_dir: Path, zookeeper: str | None, server: str | None
) -> admin_pb2.RingStatusResponse:
    """Done once, however often it has to be asked for. Raises StoreError."""
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
    """The status in which the newcomer is on its way no more, and who holds the partition's replicas then. Raises
    Unavailable after `timeout_s`."""
    deadline, patience = time.monotonic() + timeout_s, Patience()

    def look() -> tuple[admin_pb2.RingStatusResponse, list[str]] | str:
        answer = ring_status(data_dir, zookeeper, server)
        if any((each.partition, each.newcomer) == (partition, newcomer) for each in answer.replacing):
            return f"the replica of {partition} on {newcomer} has not caught up"
        return answer, replicas_of(partition, data_dir, zookeeper, server)

    while True:
        found = patience.look(look) or f"no server says whether the replica of {partition} on {newcomer} has caught up"
        if not isinstance(found, str):
            return found
        if time.monotonic() > deadline:
            raise Unavailable(f"{found} within {timeout_s:g} s; it goes on")
        time.sleep(LOOK_S)


def replicas_of(partition: str, data_dir: Path, zookeeper: str | None, server: str | None) -> list[str]:
    """The servers that hold the partition's replicas, by the ring."""
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
                raise Unavailable(f"no server says whether {node} still has replicas after {timeout_s:g} s; it goes on")
            raise Unavailable(f"{node} still has replicas of {', '.join(left)} after {timeout_s:g} s; it goes on")
        time.sleep(LOOK_S)
