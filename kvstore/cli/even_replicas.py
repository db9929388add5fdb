"""`kvstore partition even-replicas`: balances the number of replicas between servers."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.admin import POLL_S, wait_until
from kvstore.cli.cluster import LOCAL, TIMEOUT_S_MAX, ClusterOptions, Json
from kvstore.cli.groups import group_of
from kvstore.cli.operation import reporting_interrupt
from kvstore.cli.output import as_json
from kvstore.cli.replicas import change_replicas, wait_until_replaced
from kvstore.cli.status.known import cluster_report
from kvstore.errors import Unavailable

if TYPE_CHECKING:
    from kvstore.proto.admin_pb2 import ClusterReport
    from kvstore.server.placement.balancing import BalancingMove

COMPLETE_S = 15.0
"""Seconds for which the command waits for servers that do not answer or are not ready, before it says that nothing is
left to move."""


def register(app: typer.Typer) -> None:
    """Add `even-replicas` to the commands about partitions."""
    group_of(app, "partition").command("even-replicas")(even_replicas)


def even_replicas(
    timeout: Annotated[
        float,
        typer.Option(help="Seconds to wait for one replica; its move continues after that", min=0, max=TIMEOUT_S_MAX),
    ] = 600,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Move replicas one by one until no server holds two more than another.

    Use this after `kvstore node undrain`, or after adding a server. No move puts two replicas of a partition into one
    zone. If the command is interrupted, the current move still ends; run the command again for the rest.
    """
    from kvstore.proto.admin_pb2 import ChangeReplicasRequest
    from kvstore.server.placement.balancing import held_by, not_considered

    moved: list[BalancingMove] = []
    with reporting_interrupt("interrupted; a replica is still moving: see `kvstore ring status`"):
        while True:
            move, report = _next_move(cluster)
            if move is None:
                break
            change_replicas(ChangeReplicasRequest(**move._asdict()), cluster)
            _, holders = wait_until_replaced(move.partition, move.newcomer, cluster, timeout_s=timeout)
            if move.newcomer not in holders:
                raise Unavailable(
                    f"the new replica of {move.partition} on {move.newcomer} was abandoned before it had caught up"
                )
            moved.append(move)
            if not json:
                print(f"{move.partition}: {move.leaving} -> {move.newcomer}", flush=True)
            _wait_until_known(move.partition, move.leaving, cluster, timeout_s=timeout)
    held, others = held_by(report), not_considered(report)
    if others:
        why = "they do not answer or are not ready"
        print(f"kvstore: not considered, because {why}: {', '.join(others)}", file=sys.stderr)
    if json:
        print(as_json({"moved": [each._asdict() for each in moved], "replicas": held}))
    else:
        print(f"{len(moved)} moved; replicas: {', '.join(f'{each} {count}' for each, count in sorted(held.items()))}")


def _next_move(cluster: ClusterOptions) -> tuple[BalancingMove | None, ClusterReport]:
    """Return the next move and the report that shows it. None counts only by a report that considers every server and
    the newest ring; after COMPLETE_S seconds without one, it counts without the servers that do not answer."""
    from kvstore.server.placement.balancing import is_complete, next_balancing_move

    deadline = time.monotonic() + COMPLETE_S
    while True:
        report = cluster_report(cluster)
        move = next_balancing_move(report)
        if move is not None or is_complete(report) or time.monotonic() >= deadline:
            return move, report
        time.sleep(POLL_S)


def _wait_until_known(partition: str, leaving: str, cluster: ClusterOptions, *, timeout_s: float) -> None:
    """Return once the cluster status shows the partition without the replica that left, and all its replicas up. Raises
    Unavailable after `timeout_s`."""

    def ask() -> bool | str:
        for each in cluster_report(cluster).partitions:
            holders = {replica.server for replica in each.replicas if replica.is_up}
            if each.id == partition and leaving not in holders and len(holders) == len(each.replicas):
                return True
        return unknown

    unknown = f"no server reported all replicas of {partition} up without {leaving}"
    wait_until(ask, unknown, timeout_s=timeout_s)
