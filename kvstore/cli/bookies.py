"""`kvstore bookie` and `kvstore autorecovery`: bookies, their ledgers, and copies of lost bookies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from kvstore.cli import recovery
from kvstore.cli.cluster import (
    LOCAL,
    PATIENCE_S,
    ClusterOptions,
    Json,
    Tools,
    checked_address,
    cluster_id,
    confirm,
    metadata_tls,
    with_tools,
)
from kvstore.cli.output import as_json, as_table
from kvstore.cli.status.known import cluster_report, from_store_or_servers
from kvstore.errors import BookieError, ConfigError, InvalidRequest, NoSuchNode, StoreError
from kvstore.meta.bookies import BookieView
from kvstore.meta.cookie_store import CookieStore
from kvstore.meta.cookies import Cookie, encode_cookie
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.registration import RegisteredBookies, RegistrationClient
from kvstore.types import BookieId

if TYPE_CHECKING:
    from kvstore.autorecovery.rereplicate import ReplacementOutcome, Rereplicator
    from kvstore.proto.admin_pb2 import ClusterReport
    from kvstore.wal.bookies import BookieClients

T = TypeVar("T")
BookieName = Annotated[str, typer.Argument(help="Id of the bookie, for example n1-0123456789ab")]
BYTES_PER_S, BYTES_PER_S_MAX = float(32 << 20), float(1 << 40)
Pace = Annotated[float, typer.Option(help="Maximum bytes copied or read per second", min=1, max=BYTES_PER_S_MAX)]


def register(app: typer.Typer) -> None:
    """Add the commands of this branch."""
    bookie = typer.Typer(no_args_is_help=True, help="Manage bookies, the nodes that store ledgers")
    bookie.command("list")(list_bookies)
    bookie.command("cookie")(cookie)
    bookie.command("scrub")(scrub)
    bookie.command("decommission")(decommission)
    bookie.command("recover")(recover_copies)
    bookie.command("racks")(racks)
    app.add_typer(bookie, name="bookie")
    autorecovery = typer.Typer(
        no_args_is_help=True, help="Manage auto-recovery, which copies ledgers of lost bookies to others"
    )
    recovery.register(autorecovery)
    app.add_typer(autorecovery, name="autorecovery")


def list_bookies(cluster: ClusterOptions = LOCAL, json: Json = False) -> None:
    """List all bookies, absent ones too: address, zone, state, number of ledgers, free bytes, failed directories.

    Disk figures are shown for bookies that answer within some seconds. While the metadata store is unavailable, servers
    report their last known state, and standard error says how old it is.
    """
    from kvstore.wal.bookies import BookieClients

    async def work(tools: Tools) -> list[dict[str, Any]]:
        view = BookieView(tools.store)
        await view.refresh()
        known = {*await CookieStore(tools.store).bookies(), *view.current.all}
        named = await LedgerStore(tools.store).count_by_bookie()
        clients = BookieClients(tools.env, view.address, cluster=await cluster_id(tools.store))
        try:
            there = sorted(view.current.all)
            spaces = dict(
                zip(there, await asyncio.gather(*(_space_or_none(clients, each) for each in there)), strict=True)
            )
        finally:
            clients.close()
        return [
            {
                "id": bookie,
                "address": view.current.all.get(bookie),
                "zone": view.zone(bookie) or None,
                "state": _state(view, bookie),
                "ledgers": named[bookie],
                "free_bytes": spaces.get(bookie),
            }
            for bookie in sorted(known | set(named))
        ]

    rows = from_store_or_servers(cluster, work, _reported)
    if not any("failed_directories" in row for row in rows):
        failed = _failed_directories(cluster)
        rows = [{**row, "failed_directories": failed.get(row["id"])} for row in rows]
    print(as_json(rows) if json else as_table([_row(each) for each in rows]))


def _failed_directories(cluster: ClusterOptions) -> dict[str, list[str]]:
    """Return the failed directories of bookies whose nodes answer; empty while no server answers."""
    try:
        bookies = cluster_report(cluster).bookies
    except StoreError:
        return {}
    return {
        each.id: [directory.path for directory in each.directories if directory.failure]
        for each in bookies
        if each.directories
    }


def _reported(report: ClusterReport) -> list[dict[str, Any]]:
    """Return the bookies as servers report them. Servers do not know the number of ledgers."""
    return [
        {
            "id": each.id,
            "address": each.address or None,
            "zone": each.zone or None,
            "state": each.state,
            "ledgers": None,
            "free_bytes": each.disk.free_bytes if each.HasField("disk") else None,
            "failed_directories": [one.path for one in each.directories if one.failure] if each.directories else None,
            "age_s": round(report.ring.age_s, 1),
        }
        for each in report.bookies
    ]


def _row(found: dict[str, Any]) -> dict[str, Any]:
    failed = found["failed_directories"]
    row = {name: value for name, value in found.items() if name != "age_s"}
    return row | {"failed_directories": failed or ("none" if failed is not None else None)}


async def _space_or_none(clients: BookieClients, bookie: BookieId) -> int | None:
    try:
        return (await clients.space(bookie))[1]
    except BookieError:
        return None


def cookie(
    bookie: BookieName,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Show a bookie's cookie: the identity that its directories must carry, too"""

    async def work(tools: Tools) -> tuple[Cookie, int]:
        try:
            return await CookieStore(tools.store).read(BookieId(bookie))
        except NoSuchNode:
            raise InvalidRequest(
                f"no bookie {bookie!r} has a cookie; list bookies with `kvstore bookie list`"
            ) from None

    found, version = with_tools(cluster, work)
    print(
        as_json(asdict(found) | {"version": version}) if json else f"{encode_cookie(found).decode()}version: {version}"
    )


def racks(
    pulsar: Annotated[
        str,
        typer.Option(callback=checked_address, help="ZooKeeper of Pulsar: HOST:PORT,...[/CHROOT]"),
    ],
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Write the zone of every registered bookie as its rack for Apache Pulsar. Run this again after a disk was
    replaced, because the bookie then has a new id. Entries of other bookies stay."""
    from kvstore.meta.address import MetadataKind, parse
    from kvstore.meta.connect import connect
    from kvstore.meta.pulsar_racks import PulsarRacks, racks_of, shared_hosts

    if parse(pulsar).kind is not MetadataKind.ZOOKEEPER:
        raise ConfigError(f"--pulsar: expected a ZooKeeper, got {pulsar}; set racks by `pulsar-admin bookies` there")

    async def work(tools: Tools) -> tuple[RegisteredBookies, dict[str, str]]:
        bookies = await RegistrationClient(tools.store).bookies()
        # Without a login, so that the nodes it creates belong to Pulsar, too.
        store = await connect(pulsar, tls=metadata_tls(), timeout_s=PATIENCE_S)
        try:
            return bookies, dict(racks_of(await PulsarRacks(store).write_zones(bookies)))
        finally:
            await store.close()

    bookies, found = with_tools(cluster, work)
    rows = [{"bookie": each, "address": bookies.all.get(BookieId(each)), "rack": found[each]} for each in sorted(found)]
    print(as_json(rows) if json else as_table(rows) if rows else "no bookie has a zone")
    for host, there in shared_hosts(bookies).items():
        typer.echo(
            f"warning: {', '.join(there)} share the host {host}; Pulsar applies one rack to all of them", err=True
        )
    for bookie in sorted(bookies.all.keys() - bookies.zones.keys()):
        typer.echo(f"warning: {bookie} has no zone; Pulsar puts it into its default rack", err=True)


def scrub(
    bookie: BookieName,
    repair: Annotated[
        bool, typer.Option("--repair", help="Copy missing or damaged entries to the bookie again")
    ] = False,
    bytes_per_s: Pace = BYTES_PER_S,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Read and verify every entry that a bookie should have. Exit code 1 if a bad copy was not repaired.

    Bookies also scrub their own disks continuously and slowly: see kvstore_bookie_damaged_records_total.
    """

    async def work(recopier: Rereplicator) -> list[dict[str, Any]]:
        if not recopier.is_up(BookieId(bookie)):
            raise InvalidRequest(f"bookie {bookie!r} is not up; see `kvstore bookie list`")
        recopier.limit(int(bytes_per_s))
        found = await recopier.scrub(BookieId(bookie), repair=repair)
        return [{"ledger": ledger, "entry": entry, "fault": fault} for ledger, entry, fault in found]

    rows = _with_recopier(cluster, work)
    print(as_json(rows) if json else as_table(rows) if rows else f"every copy at {bookie} is good")
    if any(not row["fault"].endswith("copied there again") for row in rows):
        raise typer.Exit(1)


def decommission(
    bookie: BookieName,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation")] = False,
    bytes_per_s: Pace = BYTES_PER_S,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Remove a bookie that is down for good: copy its ledgers to other bookies, then forget its id.

    Run this again until nothing blocks it. Exit code 1, with the reasons, while something does.
    """

    async def check(recopier: Rereplicator) -> None:
        await _refuse_if_up_or_unknown(recopier, BookieId(bookie))

    async def work(recopier: Rereplicator) -> list[ReplacementOutcome]:
        await check(recopier)
        recopier.limit(int(bytes_per_s))
        moved = await recopier.replace(BookieId(bookie))
        if not any(each.blocked for each in moved):
            await recopier.forget(BookieId(bookie))
        return moved

    if not yes:
        _with_recopier(cluster, check)
        confirm(f"Remove {bookie} for good, so that the data on its disk is never used again")
    moved = _with_recopier(cluster, work)
    _show_moved(bookie, moved, "is decommissioned: its directories may be emptied", json=json)


def recover_copies(
    bookie: BookieName,
    bytes_per_s: Pace = BYTES_PER_S,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Copy the ledgers of a bookie that is down to other bookies. The bookie may return with empty directories.

    Exit code 1, with the reasons, while a ledger still needs it.
    """

    async def work(recopier: Rereplicator) -> list[ReplacementOutcome]:
        await _refuse_if_up_or_unknown(recopier, BookieId(bookie))
        recopier.limit(int(bytes_per_s))
        return await recopier.replace(BookieId(bookie))

    _show_moved(bookie, _with_recopier(cluster, work), "is needed by no ledger", json=json)


async def _refuse_if_up_or_unknown(recopier: Rereplicator, bookie: BookieId) -> None:
    if recopier.is_up(bookie):
        raise InvalidRequest(
            f"bookie {bookie} is up and accepts entries; stop its node for good on its machine (`systemctl disable "
            "--now kvstore-node`); a drain alone leaves it up"
        )
    if not await recopier.is_known(bookie):
        raise InvalidRequest(f"no bookie {bookie!r}; see `kvstore bookie list`")


def _show_moved(bookie: str, moved: list[ReplacementOutcome], done: str, *, json: bool) -> None:
    blocked = [each for each in moved if each.blocked]
    if json:
        print(as_json({"bookie": bookie, "ledgers": [asdict(each) for each in moved], "done": not blocked}))
    else:
        if moved:
            print(as_table([asdict(each) for each in moved]) + "\n")
        print(f"{bookie} {done}" if not blocked else f"{len(blocked)} of {len(moved)} ledgers still need {bookie}")
    raise typer.Exit(1 if blocked else 0)


def _with_recopier(cluster: ClusterOptions, work: Callable[[Rereplicator], Awaitable[T]]) -> T:
    """Run `work` with a progress bar on standard error, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    from kvstore.autorecovery.rereplicate import open_rereplicator

    terminal = Console(stderr=True)
    with Progress(console=terminal, transient=True, disable=not terminal.is_terminal) as bar:
        task = bar.add_task("metadata", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        async def main(tools: Tools) -> T:
            async with open_rereplicator(tools.env, tools.store, show) as recopier:
                return await work(recopier)

        return with_tools(cluster, main)


def _state(view: BookieView, bookie: BookieId) -> str:
    if bookie in view.current.writable:
        return "writable"
    return "readonly" if bookie in view.current.readonly else "away"
