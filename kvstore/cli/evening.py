"""`kvstore partition even-replicas`: balances the number of replicas between servers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli.admin import LOOK_S, Patience
from kvstore.cli.cluster import DataDir, Json, ZooKeeper
from kvstore.cli.endpoints import Server
from kvstore.cli.groups import group_of
from kvstore.cli.operation import said_if_interrupted
from kvstore.cli.output import as_json
from kvstore.cli.replicas import change_replicas, wait_until_replaced
from kvstore.cli.status.known import Where, cluster_report
from kvstore.errors import Unavailable


def register(app: typer.Typer) -> None:
    """Add `even-replicas` to the commands about partitions."""
    group_of(app, "partition").command("even-replicas")(even_replicas)


def even_replicas(
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait for one replica; its move continues after that", min=0)
    ] = 600,
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Move replicas one by one until no server holds two more than another.

    Use this after `kvstore node undrain`, or after adding a server. No move puts two replicas of a partition into one
    zone. If the command is interrupted, the current move still ends; run the command again for the rest.
    """
    from kvstore.proto.admin_pb2 import ChangeReplicasRequest
    from kvstore.server.placement.balancing import BalancingMove, held_by, next_balancing_move

    where, moved = (data_dir, zookeeper, server), list[BalancingMove]()
    with said_if_interrupted("interrupted; a replica is still moving: see `kvstore ring status`"):
        while (move := next_balancing_move(report := cluster_report(where))) is not None:
            change_replicas(ChangeReplicasRequest(**move._asdict()), *where)
            _, holders = wait_until_replaced(move.partition, move.newcomer, *where, timeout_s=timeout)
            if move.newcomer not in holders:
                raise Unavailable(
                    f"the new replica of {move.partition} on {move.newcomer} was abandoned before it had caught up"
                )
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
    """Return once the cluster status shows the partition without the replica that left, and all its replicas up. Raises
    Unavailable after `timeout_s`."""
    deadline, patience = time.monotonic() + timeout_s, Patience()
    while True:
        report = patience.look(lambda: cluster_report(where))
        for each in report.partitions if report is not None else ():
            holders = {replica.server for replica in each.replicas if replica.is_up}
            if each.id == partition and leaving not in holders and len(holders) == len(each.replicas):
                return
        if time.monotonic() > deadline:
            raise Unavailable(
                f"no server reported all replicas of {partition} up without {leaving} within {timeout_s:g} s"
            )
        time.sleep(LOOK_S)
