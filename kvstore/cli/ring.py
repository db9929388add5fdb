"""`kvstore ring`: the partitions and the owners of keys. Read from the metadata store, so it works while no node is up;
reported by nodes while the store is unavailable."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli.cluster import LOCAL, ClusterOptions, Json, Tools
from kvstore.cli.output import as_json, as_table
from kvstore.cli.ring_changes import read_loads, register_changes
from kvstore.cli.ring_views import loads_document
from kvstore.cli.status.known import by_servers_or_store, from_store_or_servers
from kvstore.errors import ConfigError, NoSuchNode, StoreError
from kvstore.meta import paths
from kvstore.partition.election.leader_znode import Claims
from kvstore.ring import Ring, decode, hash_named
from kvstore.types import PartitionId, ServerId

if TYPE_CHECKING:
    from kvstore.proto.admin_pb2 import ClusterReport
    from kvstore.proto.admin_pb2_grpc import AdminStub

HOT_SHOWN = 3
LOADS_S = 2.0
"""Seconds to wait for the loads. Without an answer, the ring is shown without the columns about load."""
KEY_SHOWN = 40


def register(app: typer.Typer) -> None:
    """Add the commands of this branch."""
    ring = typer.Typer(no_args_is_help=True, help="Show and change the consistent-hash ring")
    ring.command()(show)
    ring.command()(locate)
    register_changes(ring)
    app.add_typer(ring, name="ring")


def show(cluster: ClusterOptions = LOCAL, json: Json = False) -> None:
    """Show the partitions: state, leader, replicas, share of the hash space, operations per second, hottest keys.

    While the metadata store is unavailable, servers report their last known state, and standard error says how old it
    is.
    """

    async def read(tools: Tools) -> dict[str, Any]:
        ring = await read_ring(tools)
        shares = ring.shares()
        partitions = [
            {
                "id": member.id,
                "state": member.state.value,
                "leader": await _leader(tools, member.id),
                "replicas": list(member.replicas),
                "share": round(shares[member.id], 6),
            }
            for member in (ring.partitions[partition] for partition in sorted(ring.partitions))
        ]
        return {"version": ring.version, "key_hash": ring.hash.name, "partitions": partitions}

    document = from_store_or_servers(cluster, read, _reported)
    loads = _loads(cluster)
    for row in document["partitions"]:
        load = loads.get(row["id"])
        row["ops_per_s"] = round(load["ops_per_s"], 1) if load else None
        row["hot_keys"] = load["hot_keys"] if load else []
    if json:
        print(as_json(document))
        return
    shown = [
        {**row, "hot_keys": [f"{as_text(hot['key'])} {hot['share']:.0%}" for hot in row["hot_keys"][:HOT_SHOWN]]}
        for row in document["partitions"]
    ]
    print(f"ring version {document['version']}, key hash {document['key_hash']}\n\n{as_table(shown)}")


def _reported(report: ClusterReport) -> dict[str, Any]:
    """Return the same from a server's report."""
    partitions = [
        {
            "id": each.id,
            "state": each.state,
            "leader": each.leader or None,
            "replicas": [replica.server for replica in each.replicas],
            "share": round(each.share, 6),
        }
        for each in report.partitions
    ]
    ring = report.ring
    key_hash = hash_named(ring.hash).name
    return {"version": ring.version, "key_hash": key_hash, "age_s": round(ring.age_s, 1), "partitions": partitions}


def as_text(key: bytes) -> str:
    """Return a key for a table: other bytes than text are escaped, and long keys are cut."""
    text = key.decode("utf-8", "backslashreplace")
    return text if len(text) <= KEY_SHOWN else f"{text[:KEY_SHOWN]}…"


def _loads(cluster: ClusterOptions) -> dict[str, dict[str, Any]]:
    """Return the loads that leaders report; empty while no server is up."""
    try:
        return {each["id"]: each for each in loads_document(read_loads(cluster, LOADS_S))["loads"]}
    except StoreError:
        return {}


def locate(
    key: Annotated[str, typer.Argument(help="The key, as UTF-8")],
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Show the token, the partition and the leader of a key"""
    from kvstore.client.core.operations import check

    name, _ = check(key.encode("utf-8", "surrogateescape"))

    def ask(stub: AdminStub, timeout_s: float) -> dict[str, Any]:
        from kvstore.proto.admin_pb2 import RingRequest

        ring = stub.Ring(RingRequest(), timeout=timeout_s)
        token = hash_named(ring.hash).token_of(name)
        # After the last token the ring begins again.
        owner = ring.partitions[ring.owners[bisect_left(ring.tokens, token) % len(ring.owners)]]
        return {"token": token, "partition": owner.id, "leader": owner.leader or None}

    async def read(tools: Tools) -> dict[str, Any]:
        ring = await read_ring(tools)
        partition = ring.partition_of(name)
        return {"token": ring.hash.token_of(name), "partition": partition, "leader": await _leader(tools, partition)}

    found = by_servers_or_store(cluster, ask, read)
    print(as_json(found) if json else as_table([found]))


async def read_ring(tools: Tools) -> Ring:
    """Return the ring. Raises ConfigError if there is none, Corrupted if it cannot be read."""
    try:
        data, _ = await tools.store.get(paths.RING)
    except NoSuchNode:
        raise ConfigError(
            "this cluster has no ring, because no node was ever started with its metadata store"
        ) from None
    return decode(data)


async def _leader(tools: Tools, partition: PartitionId) -> ServerId | None:
    record = await Claims(tools.store, partition, ServerId("tool")).leader()
    return record.server if record else None
