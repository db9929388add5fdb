"""`kvstore autorecovery`: the state and the switches of auto-recovery, for the whole cluster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from kvstore.cli.cluster import LOCAL, ClusterOptions, Json, Tools, with_tools
from kvstore.cli.output import as_json, as_table
from kvstore.cli.recovery.standalone import run
from kvstore.errors import Corrupted, NoSuchLedger
from kvstore.meta.auditor_votes import auditor_or_none
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.marks import DELAY_S_MAX
from kvstore.meta.recovery_settings import CheckKind, RecoverySettings
from kvstore.meta.registration import RegistrationClient
from kvstore.meta.store import MetadataStore
from kvstore.meta.underreplication import Underreplication
from kvstore.types import BookieId
from kvstore.wal.census import Census

SHOWN_MAX = 1_000
"""Default maximum number of marks that `list` prints."""


def register(group: typer.Typer) -> None:
    """Add the commands of this branch to `kvstore autorecovery`."""
    group.command("status")(status)
    group.command("list")(list_marks)
    group.command("enable")(enable)
    group.command("disable")(disable)
    group.command("lost-bookie-delay")(lost_bookie_delay)
    group.command("run")(run)


def status(cluster: ClusterOptions = LOCAL, json: Json = False) -> None:
    """Show the auditor, if auto-recovery is on, the number of marked ledgers, and missing bookies that ledgers name.

    Ledgers of all writers count. Exit code 1 if a ledger is under-replicated or its metadata cannot be read.
    """

    async def work(tools: Tools) -> dict[str, Any]:
        settings, marks = RecoverySettings(tools.store), Underreplication(tools.store)
        return {
            "auditor": await auditor_or_none(tools.store),
            "enabled": await settings.is_enabled(),
            "lost_bookie_delay_s": await settings.lost_bookie_delay_s(),
            "marked_ledgers": len([ledger async for ledger in marks.marked_ledgers()]),
            **{f"{kind.name.lower()}_checked_ms": await settings.checked_ms(kind) for kind in _SHOWN},
            **await _copies(tools.store),
        }

    found = with_tools(cluster, work)
    print(as_json(found) if json else _as_text(found))
    raise typer.Exit(1 if lacks_copies(found) else 0)


def list_marks(
    limit: Annotated[int, typer.Option(help="Maximum number of ledgers to list", min=1)] = SHOWN_MAX,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """List the marked ledgers, which are or may be under-replicated"""

    async def work(tools: Tools) -> tuple[list[dict[str, Any]], bool]:
        marks = Underreplication(tools.store)
        rows: list[dict[str, Any]] = []
        async for mark in marks.marked():
            if len(rows) == limit:
                return rows, True
            rows.append(
                {
                    "ledger": mark.ledger,
                    "missing_at": list(mark.replicas),
                    "marked_ms": mark.marked_ms,
                    "repaired_by": await marks.holder_or_none(mark.ledger),
                }
            )
        return rows, False

    rows, are_more = with_tools(cluster, work)
    if json:
        print(as_json(rows))
    elif rows:
        print(as_table([_as_text_row(row) for row in rows]))
    else:
        print("no ledger is marked")
    if are_more:
        typer.echo(f"there are more than {limit} ledgers; raise --limit", err=True)


def enable(cluster: ClusterOptions = LOCAL, json: Json = False) -> None:
    """Enable auto-recovery. Bookies that are away then have the whole delay to return."""
    _set(cluster, RecoverySettings.enable)
    print(as_json({"enabled": True}) if json else "auto-recovery is on")


def disable(cluster: ClusterOptions = LOCAL, json: Json = False) -> None:
    """Disable auto-recovery for maintenance: nothing is marked or repaired until it is enabled again"""
    _set(cluster, RecoverySettings.disable)
    print(
        as_json({"enabled": False}) if json else "auto-recovery is off; remember to run `kvstore autorecovery enable`"
    )


def lost_bookie_delay(
    seconds: Annotated[int | None, typer.Argument(help="New delay in seconds", min=0, max=DELAY_S_MAX)] = None,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Show or set how long a bookie may be away before its ledgers are copied to other bookies"""

    async def work(tools: Tools) -> int | None:
        settings = RecoverySettings(tools.store)
        if seconds is not None:
            await settings.set_lost_bookie_delay_s(seconds)
        return await settings.lost_bookie_delay_s()

    found = with_tools(cluster, work)
    if json:
        print(as_json({"lost_bookie_delay_s": found}))
    else:
        print(f"{found} s" if found is not None else "not set; the first auditor will set its configured value")


_SHOWN = (CheckKind.ENTRIES, CheckKind.PLACEMENT)


async def _copies(store: MetadataStore) -> dict[str, Any]:
    """Count the copies of every ledger of any writer, based on the bookies that are registered now. Raises
    MetadataError."""
    census, present = Census(), await RegistrationClient(store).names()
    ledgers = LedgerStore(store)
    async for page in ledgers.pages():
        for ledger in page:
            try:
                metadata, _ = await ledgers.read(ledger)
            except NoSuchLedger:
                continue
            except Corrupted:
                census.unreadable += 1
            else:
                census.add(metadata)
    return copies_document(census, present)


def copies_document(census: Census, present: Collection[BookieId]) -> dict[str, Any]:
    """Return the numbers of ledgers, and the bookies that ledgers name but that are not registered."""
    short = census.shortage(present)
    return {
        "ledgers": census.ledgers,
        "ledgers_of_other_clients": census.foreign,
        "ledgers_unreadable": census.unreadable,
        "ledgers_at_risk": short.at_risk,
        "away": [
            {"bookie": bookie, "closed_ledgers": short.closed[bookie], "others": short.open[bookie]}
            for bookie in short.away
        ],
    }


def lacks_copies(found: dict[str, Any]) -> bool:
    """Return True if a ledger is or may be under-replicated. The exit code is 1 then."""
    return bool(found["away"] or found["marked_ledgers"] or found["ledgers_unreadable"])


def _as_text(found: dict[str, Any]) -> str:
    shown = {name: value for name, value in found.items() if name != "away"}
    for name in [name for name in shown if name.endswith("_ms")]:
        shown[name.removesuffix("_ms")] = _moment(shown.pop(name))
    table = as_table([{"what": name.replace("_", " "), "is": value} for name, value in shown.items()])
    if not found["away"]:
        return f"{table}\n\nevery bookie that a ledger names is up"
    return (
        f"{table}\n\n{as_table(found['away'])}\n\n"
        "Their ledgers are copied after the delay. To copy them now, run: kvstore bookie recover BOOKIE"
    )


def _as_text_row(row: dict[str, Any]) -> dict[str, Any]:
    return {
        ("marked" if name == "marked_ms" else name): _moment(row[name]) if name == "marked_ms" else row[name]
        for name in row
    }


def _moment(at_ms: int | None) -> str | None:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="seconds") if at_ms else None


def _set(
    cluster: ClusterOptions,
    change: Callable[[RecoverySettings], Awaitable[None]],
) -> None:
    async def work(tools: Tools) -> None:
        await change(RecoverySettings(tools.store))

    with_tools(cluster, work)
