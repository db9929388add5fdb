"""`kvstore fsck`: check a live cluster."""

from __future__ import annotations

from pathlib import Path

import typer

from kvstore.cli.cluster import DataDir, Json, Tools, ZooKeeper, with_tools
from kvstore.cli.output import as_json


def register(app: typer.Typer) -> None:
    """Add the commands of this branch."""
    app.command()(fsck)


def fsck(data_dir: DataDir = Path("data"), zookeeper: ZooKeeper = None, json: Json = False) -> None:
    """Check every invariant that can be read from outside: lists, ledgers, all copies of all entries, sequences.

    Exits 1 if there is an error. A copy too few is a warning while enough are left, an error otherwise.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from kvstore.server.findings import Report
    from kvstore.server.fsck import Fsck

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task("metadata", total=None)

    def show(what: str, done: int, total: int) -> None:
        bar.update(task, description=what, completed=done, total=total)

    async def check(tools: Tools) -> Report:
        return await Fsck(tools.env, tools.store, show).run()

    with bar:
        report = with_tools(data_dir, zookeeper, check)
    if json:
        print(as_json(report.document()))
    else:
        for finding in report.findings:
            print(f"{finding.severity.value}: {finding.subject}: {finding.message}")
        print(
            f"{report.errors} errors, {report.warnings} warnings; {report.partitions} partitions, "
            f"{report.ledgers} ledgers, {report.entries} entries, {report.copies} copies"
        )
    raise typer.Exit(1 if report.errors else 0)
