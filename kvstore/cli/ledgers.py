"""`kvstore ledger`: the ledgers of the logs. Servers list them; details come from metadata and bookies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli.cluster import LOCAL, ClusterOptions, Json, Tools, cluster_id, confirm, with_tools
from kvstore.cli.output import as_json, as_table
from kvstore.cli.status.known import by_servers_or_store
from kvstore.errors import Corrupted, InvalidRequest, NoSuchLedger
from kvstore.meta.bookies import BookieView
from kvstore.meta.ledgers import LedgerStore
from kvstore.types import BookieId, EntryId, LedgerId, LedgerMetadata, LedgerState
from kvstore.wal.bookies import BookieClients
from kvstore.wal.creator import owner_of
from kvstore.wal.repair import bookies_of

if TYPE_CHECKING:
    from kvstore.autorecovery.abandon import Loss
    from kvstore.autorecovery.repairer import LedgerRepairer, RepairOutcome
    from kvstore.proto.admin_pb2 import LedgerStatus
    from kvstore.proto.admin_pb2_grpc import AdminStub

ENTRIES_MAX = 1000
Ledger = Annotated[int, typer.Argument(help="Id of the ledger", min=0)]


def register(app: typer.Typer) -> None:
    """Add the commands of this branch."""
    ledger = typer.Typer(no_args_is_help=True, help="Manage ledgers, the segments of the partitions' logs")
    ledger.command("list")(list_ledgers)
    ledger.command("show")(show)
    ledger.command("read")(read)
    ledger.command("recover")(recover)
    ledger.command("delete")(delete)
    ledger.command("give-up")(give_up)
    app.add_typer(ledger, name="ledger")


def list_ledgers(cluster: ClusterOptions = LOCAL, json: Json = False) -> None:
    """List all ledgers: the log that they belong to, their state, and every bookie that holds entries of them.

    A server reads them from the metadata store. While the store is unavailable, the partitions' leaders report the
    ledgers of their logs, and standard error says so.
    """

    async def work(tools: Tools) -> list[dict[str, Any]]:
        ledgers = LedgerStore(tools.store)
        rows = []
        for ledger in await ledgers.list_ids():
            try:
                metadata, _ = await ledgers.read(ledger)
            except NoSuchLedger:
                continue  # deleted meanwhile
            except Corrupted as error:
                rows.append({"id": ledger, "state": f"unreadable: {error}"})
                continue
            rows.append(_summary(metadata))
        return rows

    rows = by_servers_or_store(cluster, _ask_all, work)
    print(as_json(rows) if json else as_table(rows, list(_SUMMARY)))


def _ask_all(stub: AdminStub, timeout_s: float) -> list[dict[str, Any]]:
    from kvstore.proto.admin_pb2 import LedgersRequest

    rows: list[dict[str, Any]] = []
    first: int | None = 0
    while first is not None:
        page = stub.Ledgers(LedgersRequest(all=True, first=first), timeout=timeout_s)
        rows += map(_reported_summary, page.ledgers)
        first = page.next if page.HasField("next") else None
    if page.from_leaders:
        lacking = f"; the leaders of {', '.join(page.unknown)} do not answer" if page.unknown else ""
        _print_from_leaders(f"the ledgers that the partitions' leaders know of{lacking}")
    return rows


def show(
    ledger: Ledger,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Show a ledger's metadata"""

    async def work(tools: Tools) -> dict[str, Any]:
        metadata, version = await LedgerStore(tools.store).read(LedgerId(ledger))
        fragments = [{"first": f.first, "bookies": list(f.ensemble)} for f in metadata.fragments]
        details = {
            "version": version,
            "length": metadata.length,
            "digest": metadata.digest.name,
            "fragments": fragments,
        }
        return _summary(metadata) | details

    def ask(stub: AdminStub, timeout_s: float) -> dict[str, Any]:
        from kvstore.proto.admin_pb2 import LedgerRequest

        answer = stub.Ledger(LedgerRequest(ledger=ledger), timeout=timeout_s)
        if answer.from_leaders:
            _print_from_leaders("the metadata that the leader of its log knows")
        reported = answer.ledger
        details: dict[str, Any] = {
            "version": None if answer.from_leaders else reported.version,
            "length": reported.length if reported.state else None,
            "digest": reported.digest or None,
            "fragments": [{"first": f.first_entry, "bookies": list(f.bookies)} for f in reported.fragments],
        }
        return _reported_summary(reported) | details

    found = by_servers_or_store(cluster, ask, work)
    print(as_json(found) if json else as_table([{"what": name, "value": value} for name, value in found.items()]))


def _print_from_leaders(what: str) -> None:
    typer.echo(f"kvstore: servers cannot reach the metadata store; showing {what}", err=True)


def read(
    ledger: Ledger,
    first: Annotated[int, typer.Option(help="First entry", min=0)] = 0,
    last: Annotated[int | None, typer.Option(help="Last entry; default: the last confirmed entry", min=0)] = None,
    bookie: Annotated[str | None, typer.Option(help="Read only this bookie's copies")] = None,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Read entries without fencing: show their content, and which bookies have a good copy"""
    from kvstore.server.fsck.check import LedgerCopies

    async def work(tools: Tools) -> list[dict[str, Any]]:
        metadata, _ = await LedgerStore(tools.store).read(LedgerId(ledger))
        view = BookieView(tools.store)
        await view.refresh()
        bookies = BookieClients(tools.env, view.address, cluster=await cluster_id(tools.store))
        copies = LedgerCopies(bookies, metadata)
        end = await copies.last_entry() if last is None else EntryId(last)
        if end - first >= ENTRIES_MAX:
            raise InvalidRequest(
                f"expected at most {ENTRIES_MAX} entries at once, got {first} to {end}; set --first and --last"
            )
        rows = []
        for number in range(first, end + 1):
            entry = EntryId(number)
            named = metadata.write_set(entry) if bookie is None else (BookieId(bookie),)
            rows.append(_entry_row(entry, {name: await copies.read(name, entry) for name in named}))
        return rows

    rows = with_tools(cluster, work)
    print(as_json(rows) if json else as_table(rows, ("entry", "bytes", "epoch", "first_seq", "mutations", "copies")))


def recover(
    ledger: Ledger,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Fence a ledger, find its end, and close it. A live writer loses the leadership of its partition.

    A ledger of a partition's log is closed once the former leader's lease has expired, by default within a second.
    """

    async def work(tools: Tools) -> dict[str, Any]:
        repairer = await _repairer(tools, BookieView(tools.store))
        return _summary(await repairer.recover(LedgerId(ledger)))

    found = with_tools(cluster, work)
    print(as_json(found) if json else as_table([found], list(_SUMMARY)))


def delete(
    ledger: Ledger,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation")] = False,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Delete a ledger that belongs to no log of a current or retired partition, and that no pin holds"""
    from kvstore.cli.ring import read_ring
    from kvstore.server.placement.ledger_deletion import LedgerDeletion

    async def work(tools: Tools) -> None:
        metadata, version = await LedgerStore(tools.store).read_latest(LedgerId(ledger))
        deletion = LedgerDeletion(tools.store, LedgerId(ledger), (await read_ring(tools)).partitions)
        await deletion.check()
        if not yes:
            confirm(f"Delete ledger {ledger} ({metadata.state.name}, of {owner_of(metadata) or 'nobody'})")
        await deletion.commit(version)

    with_tools(cluster, work)
    reported = f"ledger {ledger} is deleted; its bookies will free the space soon"
    print(as_json({"ledger": ledger, "deleted": True}) if json else reported)


def give_up(
    ledger: Ledger,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation")] = False,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Mark the entries of a ledger that no bookie has a good copy of as lost; re-replicate the rest.

    The command first shows what is lost and asks for confirmation. Before, start every bookie that can be started, and
    make sure that the ledger's writer is gone. Exit code 1 if not all is copied yet; workers continue then.
    """
    from kvstore.autorecovery.abandon import LedgerAbandonment
    from kvstore.meta.underreplication import Underreplication

    async def work(tools: Tools) -> tuple[Loss, RepairOutcome | None]:
        view = BookieView(tools.store)
        abandonment = LedgerAbandonment(
            await _repairer(tools, view), Underreplication(tools.store), worker="kvstore ledger"
        )
        loss = await abandonment.find_loss(LedgerId(ledger))
        if loss.state is LedgerState.CLOSED and not loss.lost:
            return loss, None
        if not yes:
            typer.echo(_what_is_lost(loss), err=True)
            confirm(f"Mark these entries of ledger {ledger} as lost")
            await view.refresh()
        return await abandonment.abandon(LedgerId(ledger), tools.env.clock.date_ms(), loss)

    loss, result = with_tools(cluster, work)
    if json:
        given_up = {"given_up": result is not None, "is_complete": result is None or result.is_complete}
        print(
            as_json(
                {
                    "ledger": ledger,
                    "last_entry": loss.last,
                    "lost": loss.text,
                    "away": loss.away,
                    "unsure": loss.unsure,
                    **given_up,
                }
            )
        )
    else:
        print("every entry has a good copy; nothing is lost" if result is None else _what_is_lost(loss))
    if result is not None and not result.is_complete:
        typer.echo(f"not all entries are copied yet: it {result.reason}", err=True)
        raise typer.Exit(1)


async def _repairer(tools: Tools, view: BookieView) -> LedgerRepairer:
    """Return a repairer of ledgers in this process. Its view of bookies stays current, because bookies may return while
    it reads and while the operator decides."""
    from kvstore.autorecovery.repairer import LedgerRepairer
    from kvstore.wal.choice import BookieChoice
    from kvstore.wal.copies.pace import CopyPace
    from kvstore.wal.handle import LedgerPorts

    env, store = tools.env, tools.store
    await view.start(env.nursery)
    choice = BookieChoice(view, store, clock=env.clock, random=env.random)
    bookies = BookieClients(env, view.address, cluster=await cluster_id(store))
    ports = LedgerPorts(env.clock, bookies, LedgerStore(store), choice)
    return LedgerRepairer(ports, store, env.nursery, CopyPace(env.clock, GIVE_UP_BYTES_PER_S))


def _what_is_lost(loss: Loss) -> str:
    lines = [f"ledger {loss.ledger}, {loss.state.name}, last entry {loss.last}: {len(loss.lost)} entries are lost"]
    if loss.lost:
        lines.append(f"lost: {loss.text}")
    if loss.away:
        lines.append(f"away, not asked: {', '.join(loss.away)}")
    if loss.unsure:
        lines.append(
            f"cannot tell what they have: {', '.join(loss.unsure)}; where a directory failed (`kvstore bookie list`), "
            "a restart may bring it back: restart these bookies first"
        )
    if loss.state is not LedgerState.CLOSED and loss.away:
        lines.append(
            "the ledger is not closed: entries after the last one may have been acknowledged, and are lost, too"
        )
    return "\n".join(lines)


GIVE_UP_BYTES_PER_S = 32 << 20
_SUMMARY = ("id", "partition", "state", "last_entry", "quorum", "bookies")


def _summary(metadata: LedgerMetadata) -> dict[str, Any]:
    quorum = metadata.quorum
    return {
        "id": metadata.ledger,
        "partition": owner_of(metadata),
        "state": metadata.state.name,
        "last_entry": metadata.last_entry if metadata.state is LedgerState.CLOSED else None,
        "quorum": f"{quorum.ensemble}/{quorum.write}/{quorum.ack}",
        "bookies": bookies_of(metadata),
    }


def _reported_summary(reported: LedgerStatus) -> dict[str, Any]:
    """Return the same fields from a server's report. Values that leaders do not know are None."""
    is_known = bool(reported.fragments)
    return {
        "id": reported.id,
        "partition": reported.partition or None,
        "state": reported.state or None,
        "last_entry": reported.last_entry if reported.HasField("last_entry") else None,
        "quorum": f"{reported.ensemble_size}/{reported.write_quorum}/{reported.ack_quorum}" if is_known else None,
        "bookies": sorted({each for fragment in reported.fragments for each in fragment.bookies}) if is_known else None,
    }


def _entry_row(entry: EntryId, copies: dict[BookieId, bytes | None]) -> dict[str, Any]:
    from kvstore.partition.state import entry as entries

    row: dict[str, Any] = {"entry": entry, "copies": [name for name, payload in copies.items() if payload is not None]}
    payload = next((payload for payload in copies.values() if payload is not None), None)
    if payload is None:
        return row
    row["bytes"] = len(payload)
    try:
        decoded = entries.decode(payload)
    except Corrupted:
        return row
    return row | {"epoch": decoded.epoch, "first_seq": decoded.first_seq, "mutations": len(decoded.keys)}
