"""`kvstore autorecovery`: its state and its switches, for the whole cluster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.cli.cluster import DataDir, Json, Server, Tools, ZooKeeper, with_tools
from kvstore.cli.output import as_json, as_table
from kvstore.cli.recovery.standing import run
from kvstore.errors import Corrupted, NoSuchLedger
from kvstore.meta.auditor_votes import auditor_or_none
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.marks import DELAY_S_MAX
from kvstore.meta.recovery_settings import CheckKind, RecoverySettings
from kvstore.meta.registration import RegistrationClient
from kvstore.meta.store import MetadataStore
from kvstore.meta.underreplication import Underreplication
from kvstore.types import BookieId

SHOWN_MAX = 1_000
"""Marks that `list` prints unless told otherwise."""


def register(group: typer.Typer) -> None:
    """Add the commands of this branch to `kvstore autorecovery`."""
    group.command("status")(status)
    group.command("list")(list_marks)
    group.command("enable")(enable)
    group.command("disable")(disable)
    group.command("lost-bookie-delay")(lost_bookie_delay)
    group.command("run")(run)


def status(
    data_dir: DataDir = Path("data"), zookeeper: ZooKeeper = None, server: Server = None, json: Json = False
) -> None:
    """Show who is auditor, whether auto-recovery is on, how many ledgers are marked, and which bookies are away that
    ledgers name. Exit code 1 if a ledger lacks a copy."""

    async def work(tools: Tools) -> dict[str, Any]:
        settings, marks = RecoverySettings(tools.store), Underreplication(tools.store)
        return {
            "auditor": await auditor_or_none(tools.store),
            "enabled": await settings.is_enabled(),
            "lost_bookie_delay_s": await settings.lost_bookie_delay_s(),
            "marked_ledgers": len([ledger async for ledger in marks.marked_ledgers()]),
            **{f"{kind.name.lower()}_checked_ms": await settings.checked_ms(kind) for kind in _SHOWN},
            "away": await _away(tools.store),
        }

    found = with_tools(data_dir, zookeeper, work, server)
    print(as_json(found) if json else _for_people(found))
    raise typer.Exit(1 if found["away"] or found["marked_ledgers"] else 0)


def list_marks(
    limit: Annotated[int, typer.Option(help="So many at most.", min=1)] = SHOWN_MAX,
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """List the ledgers that are marked: they lack copies, or may."""

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

    rows, are_more = with_tools(data_dir, zookeeper, work, server)
    if json:
        print(as_json(rows))
    elif rows:
        print(as_table([_row_for_people(row) for row in rows]))
    else:
        print("no ledger is marked")
    if are_more:
        typer.echo(f"there are more than these {limit}: see --limit", err=True)


def enable(
    data_dir: DataDir = Path("data"), zookeeper: ZooKeeper = None, server: Server = None, json: Json = False
) -> None:
    """Switch auto-recovery on again. Bookies that are away then have the whole delay to come back."""
    _set(data_dir, zookeeper, server, RecoverySettings.enable)
    print(as_json({"enabled": True}) if json else "auto-recovery is on")


def disable(
    data_dir: DataDir = Path("data"), zookeeper: ZooKeeper = None, server: Server = None, json: Json = False
) -> None:
    """Switch auto-recovery off, for maintenance: nothing is marked and nothing repaired until it is on again."""
    _set(data_dir, zookeeper, server, RecoverySettings.disable)
    print(as_json({"enabled": False}) if json else "auto-recovery is off: do not forget `kvstore autorecovery enable`")


def lost_bookie_delay(
    seconds: Annotated[int | None, typer.Argument(help="The new delay in seconds.", min=0, max=DELAY_S_MAX)] = None,
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Show or set how long a bookie may be away before its copies are made again elsewhere."""

    async def work(tools: Tools) -> int | None:
        settings = RecoverySettings(tools.store)
        if seconds is not None:
            await settings.set_lost_bookie_delay_s(seconds)
        return await settings.lost_bookie_delay_s()

    found = with_tools(data_dir, zookeeper, work, server)
    if json:
        print(as_json({"lost_bookie_delay_s": found}))
    else:
        print(f"{found} s" if found is not None else "not set: the first auditor will set what is configured there")


_SHOWN = (CheckKind.ENTRIES, CheckKind.PLACEMENT)


async def _away(store: MetadataStore) -> list[dict[str, Any]]:
    """The bookies that are not registered, and how many ledgers lack their copies."""
    present = await RegistrationClient(store).names()
    ledgers = LedgerStore(store)
    lacking: dict[BookieId, list[str]] = {}
    async for page in ledgers.pages():
        for ledger in page:
            try:
                metadata, _ = await ledgers.read(ledger)
            except (NoSuchLedger, Corrupted):
                continue
            for bookie in {each for fragment in metadata.fragments for each in fragment.ensemble} - present:
                lacking.setdefault(bookie, []).append(metadata.state.name)
    return [
        {"bookie": bookie, "closed_ledgers": states.count("CLOSED"), "others": len(states) - states.count("CLOSED")}
        for bookie, states in sorted(lacking.items())
    ]


def _for_people(found: dict[str, Any]) -> str:
    shown = {name: value for name, value in found.items() if name != "away"}
    for name in [name for name in shown if name.endswith("_ms")]:
        shown[name.removesuffix("_ms")] = _moment(shown.pop(name))
    table = as_table([{"what": name.replace("_", " "), "is": value} for name, value in shown.items()])
    if not found["away"]:
        return f"{table}\n\nevery bookie that a ledger names is up"
    return (
        f"{table}\n\n{as_table(found['away'])}\n\n"
        "Their copies are made again once they are away for the delay; at once by: kvstore bookie recover BOOKIE"
    )


def _row_for_people(row: dict[str, Any]) -> dict[str, Any]:
    return {
        ("marked" if name == "marked_ms" else name): _moment(row[name]) if name == "marked_ms" else row[name]
        for name in row
    }


def _moment(at_ms: int | None) -> str | None:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="seconds") if at_ms else None


def _set(
    data_dir: Path,
    zookeeper: str | None,
    server: str | None,
    change: Callable[[RecoverySettings], Awaitable[None]],
) -> None:
    async def work(tools: Tools) -> None:
        await change(RecoverySettings(tools.store))

    with_tools(data_dir, zookeeper, work, server)
