"""`kvstore partition intents`: transactions over several partitions that have not ended."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli.admin import ask_admin
from kvstore.cli.cluster import LOCAL, ClusterOptions, Json
from kvstore.cli.data import exact
from kvstore.cli.groups import group_of
from kvstore.cli.output import as_json, as_table, printable
from kvstore.errors import StoreError, Unavailable

if TYPE_CHECKING:
    from kvstore.proto.admin_pb2 import TransactionReplica


def register(app: typer.Typer) -> None:
    """Add `intents` to the commands about partitions."""
    group_of(app, "partition").command("intents")(intents)


def intents(
    partition: Annotated[str, typer.Argument(help="Id of the partition, for example p1; omit for all")] = "",
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """List the keys that transactions over several partitions hold, and the commits that are not delivered yet.

    Most last for milliseconds. The home of an old intent is the partition that must be served again: it alone knows
    whether the transaction is committed.
    """
    found = [each for each in standing_of(cluster) if partition in ("", each.partition)]
    rows = [row for replica in found for row in _rows(replica)]
    if json:
        print(as_json([_without_key(row) | exact("key", row["key"]) for row in rows]))
    elif rows:
        print(as_table([{**row, "key": printable(row["key"])} for row in rows]))
    else:
        print("no transaction is under way")


def standing_of(cluster: ClusterOptions) -> list[TransactionReplica]:
    """Return what is in each partition: as its leader has it, or the replica that is furthest if none leads. Warns
    of servers that do not answer. Raises StoreError if none answers."""
    from kvstore.proto.admin_pb2 import TransactionsRequest

    found: dict[str, TransactionReplica] = {}
    failure: StoreError | None = None
    for node, address in sorted(addresses_of(cluster).items()):
        try:
            if not address:
                raise Unavailable("it is not up")
            answer = ask_admin(
                ClusterOptions(server=address),
                lambda stub, within: stub.Transactions(TransactionsRequest(), timeout=within),
            )
        except StoreError as error:
            failure = error
            print(f"kvstore: {node} does not show its transactions: {error}", file=sys.stderr)
            continue
        for each in answer.replicas:
            known = found.get(each.partition)
            if known is None or (each.is_leader, each.sequence) > (known.is_leader, known.sequence):
                found[each.partition] = each
    if not found and failure is not None:
        raise failure
    return [each for _, each in sorted(found.items())]


def addresses_of(cluster: ClusterOptions) -> dict[str, str]:
    """Return the gRPC address of each server, by its id; empty for a server that is not up."""
    from kvstore.proto.admin_pb2 import StatusRequest

    status = ask_admin(cluster, lambda stub, within: stub.Status(StatusRequest(), timeout=within))
    return {each.id: each.grpc for each in status.nodes}


def _without_key(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "key"}


def _rows(replica: TransactionReplica) -> list[dict[str, Any]]:
    return [
        {
            "partition": replica.partition,
            "what": "exclusive intent" if each.is_exclusive else "shared intent",
            "key": each.key,
            "sequence": each.sequence,
            "attempt": each.attempt,
            "home": each.home,
            "age_s": round(each.age_s, 1),
            "leader": replica.is_leader,
        }
        for each in sorted(replica.intents, key=lambda each: -each.age_s)
    ] + [
        {
            "partition": replica.partition,
            "what": f"decision for {len(each.keys)} intents",
            "key": each.home_key,
            "sequence": each.sequence,
            "attempt": each.attempt,
            "home": replica.partition,
            "age_s": round(each.age_s, 1),
            "leader": replica.is_leader,
        }
        for each in sorted(replica.decisions, key=lambda each: -each.age_s)
    ]
