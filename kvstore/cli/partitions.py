"""`kvstore partition`: partitions with their replicas, as published by them, and pins."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli.admin import TIMEOUT_S
from kvstore.cli.cluster import LOCAL, ClusterOptions, Json, Tools, confirm, with_tools
from kvstore.cli.endpoints import config_of
from kvstore.cli.output import as_json, as_table
from kvstore.cli.ring import read_ring
from kvstore.cli.status.known import from_store_or_servers
from kvstore.env.clock import SystemClock
from kvstore.errors import Corrupted, InvalidRequest, NoSuchNode
from kvstore.meta import paths
from kvstore.partition.election.jury import Trusted
from kvstore.partition.election.leader_znode import Claims
from kvstore.partition.election.ranking import LeaderRecord
from kvstore.ring import Member, PartitionState
from kvstore.types import PartitionId, ServerId
from kvstore.wal.lists import LedgerLists

if TYPE_CHECKING:
    from kvstore.proto.admin_pb2 import ClusterReport


def register(app: typer.Typer) -> None:
    """Add the commands of this branch."""
    partition = typer.Typer(no_args_is_help=True, help="Manage partitions and their replicas")
    partition.command("list")(list_partitions)
    partition.command("show")(show)
    partition.command("pins")(pins)
    partition.command("unpin")(unpin)
    partition.command("trust")(trust)
    app.add_typer(partition, name="partition")


def list_partitions(cluster: ClusterOptions = LOCAL, json: Json = False) -> None:
    """List all partitions: leader, epoch, replicas that are up, lag of the slowest replica, ledgers.

    While the metadata store is unavailable, servers report their last known state, and standard error says how old it
    is.
    """

    async def work(tools: Tools) -> list[dict[str, Any]]:
        ring = await read_ring(tools)
        return [await _details(tools, member) for _, member in sorted(ring.partitions.items())]

    found = from_store_or_servers(cluster, work, _reported)
    print(as_json(found) if json else as_table([_row(each) for each in found]))


def show(
    partition: Annotated[str, typer.Argument(help="Id of the partition, for example p1")],
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Show a partition's replicas, each with its published sequence number, and its ledgers.

    Replicas publish about once a second, so an up-to-date replica may appear some writes behind.
    """

    async def work(tools: Tools) -> dict[str, Any]:
        ring = await read_ring(tools)
        member = ring.partitions.get(PartitionId(partition))
        if member is None:
            raise InvalidRequest(f"no partition {partition!r}; expected one of {', '.join(sorted(ring.partitions))}")
        return await _details(tools, member)

    def reported(report: ClusterReport) -> dict[str, Any]:
        found = {each["id"]: each for each in _reported(report)}
        if partition not in found:
            raise InvalidRequest(f"no partition {partition!r}; expected one of {', '.join(sorted(found))}")
        return found[partition]

    found = from_store_or_servers(cluster, work, reported)
    if json:
        print(as_json(found))
        return
    print(as_table([_row(found)]))
    print("\n" + as_table(found["replicas"]))
    if found["ledgers"] is None:
        print("\nthe ledgers are unknown while the metadata store is unavailable")
    else:
        print("\n" + (as_table(found["ledgers"]) if found["ledgers"] else "no ledgers yet"))


def pins(cluster: ClusterOptions = LOCAL, json: Json = False) -> None:
    """List all pins: what prevents logs from being trimmed, until when, and which servers keep state for pinned reads.

    Pins of jobs end at their deadline. Pins without a deadline end with the session that made them. A retired partition
    is removed once it has no pins left.
    """
    from kvstore.client.pinned.pins import PinStatus, list_pins

    def row(pin: PinStatus) -> dict[str, Any]:
        left_s = max(0, round(pin.deadline_ms / 1000 - SystemClock().wall_ms() / 1000)) if pin.deadline_ms else None
        return {
            "partition": pin.partition,
            "state": "retired" if pin.is_retired else "serving",
            "pin": pin.id,
            "holds_log_from_ledger": pin.ledger,
            "ends_in_s": left_s,
            "position": f"{pin.position.ledger}:{pin.position.entry}" if pin.position else None,
            "kept_by": list(pin.servers) if json else " ".join(pin.servers),
        }

    found = list(map(row, list_pins(config_of(cluster, TIMEOUT_S))))
    print(as_json(found) if json else as_table(found) if found else "no pins")


def unpin(
    pin: Annotated[str, typer.Argument(help="Id of the pin, as shown by `kvstore partition pins`")],
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Release a pin that a job has left behind. A job that still reads with it fails."""
    from kvstore.client.pinned import pins as pinned_pins

    done = pinned_pins.unpin(config_of(cluster, TIMEOUT_S), pin)
    print(as_json({"pin": pin, "partitions": done}) if json else f"{pin} is released in {', '.join(done) or 'none'}")


def trust(
    partition: Annotated[str, typer.Argument(help="Id of the partition, for example p1")],
    replica: Annotated[str, typer.Option(help="Server whose copy is right")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation")] = False,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Declare the copy of one replica right, if replicas differ and no majority agrees.

    Other copies are set aside and rebuilt: readers lose the data that only these have. Asks for confirmation.
    """

    def claims_by(tools: Tools) -> Claims:
        return Claims(tools.store, PartitionId(partition), ServerId("tool"))

    async def require_doubted(tools: Tools) -> None:
        await _doubted(claims_by(tools), partition, replica)

    async def work(tools: Tools) -> dict[str, Any]:
        claims = claims_by(tools)
        found = await _doubted(claims, partition, replica)
        await claims.trust(found)
        return {"partition": partition, "replica": replica, "seq": found.seq, "crc": found.crc}

    if not yes:
        with_tools(cluster, require_doubted)
        confirm(f"Trust {replica}'s copy of {partition}, and lose the data that only the other copies have")
    done = with_tools(cluster, work)
    said = f"{replica}'s copy of {partition} is right as of {done['seq']}; copies that differ are rebuilt"
    print(as_json(done) if json else said)


async def _doubted(claims: Claims, partition: str, replica: str) -> Trusted:
    """Return the state of a replica that waits because replicas differ. Raises InvalidRequest for any other replica."""
    try:
        published = await claims.published()
    except NoSuchNode:
        raise InvalidRequest(f"no replica of partition {partition!r} is up") from None
    differing = sorted(each for each, said in published.items() if said.doubt is not None)
    said = published.get(ServerId(replica))
    if said is None or said.doubt is None:
        raise InvalidRequest(
            f"expected a replica of {partition} that waits because replicas differ: "
            f"{', '.join(differing) or 'none does'}; got {replica!r}"
        )
    _, seq, crc = said.doubt
    return Trusted(ServerId(replica), seq, crc)


async def _details(tools: Tools, member: Member) -> dict[str, Any]:
    """Return the details of a partition. A retired one has no replicas, whatever the ring lists."""
    partition, replicas = member.id, () if member.state is PartitionState.RETIRED else member.replicas
    claims, store = Claims(tools.store, partition, ServerId("tool")), tools.store
    try:
        published = await claims.published()
    except NoSuchNode:
        published = {}
    leader: LeaderRecord | None = None
    with suppress(NoSuchNode, Corrupted):
        leader = LeaderRecord.decode((await store.get(paths.partition_leader(partition)))[0])
    listed, _ = await LedgerLists(store).read(partition)
    last = max((each.seq for each in published.values()), default=0)
    return {
        "id": partition,
        "state": member.state.value,
        "leader": leader.server if leader else None,
        "epoch": max((each.epoch for each in published.values()), default=None),
        "trimmed_below_seq": listed.trimmed_seq,
        "replicas": [
            {
                "server": server,
                "is_up": server in published,
                "seq": published[server].seq if server in published else None,
                "behind": last - published[server].seq if server in published else None,
            }
            for server in replicas
        ],
        "ledgers": [
            {"id": each.id, "first_seq": each.first_seq, "is_exact": each.exact, "epoch": each.epoch}
            for each in listed.ledgers
        ],
    }


def _reported(report: ClusterReport) -> list[dict[str, Any]]:
    """Return the same from a server's report, which has the number of ledgers but not their ids."""
    return [
        {
            "id": each.id,
            "state": each.state,
            "leader": each.leader or None,
            "epoch": each.epoch,
            "trimmed_below_seq": each.lead.trimmed_sequence if each.HasField("lead") else None,
            "replicas": [
                {
                    "server": replica.server,
                    "is_up": replica.is_up,
                    "seq": replica.sequence if replica.role else None,
                    "behind": replica.behind if replica.HasField("behind") else None,
                }
                for replica in (each.replicas if each.state != PartitionState.RETIRED.value else ())
            ],
            "ledgers": None,
            "ledger_count": each.lead.ledgers if each.HasField("lead") else None,
            "age_s": round(report.ring.age_s, 1),
        }
        for each in report.partitions
    ]


def _row(found: dict[str, Any]) -> dict[str, Any]:
    replicas, ledgers = found["replicas"], found["ledgers"]
    return {
        "id": found["id"],
        "state": found["state"],
        "leader": found["leader"],
        "epoch": found["epoch"],
        "up": f"{sum(each['is_up'] for each in replicas)} of {len(replicas)}",
        "most_behind": max((each["behind"] or 0 for each in replicas), default=0),
        "ledgers": len(ledgers) if ledgers is not None else found["ledger_count"],
        "trimmed_below_seq": found["trimmed_below_seq"],
    }
