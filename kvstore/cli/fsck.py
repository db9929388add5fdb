"""`kvstore fsck`: checks a live cluster."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.cluster import LOCAL, ClusterOptions, Json, Tools, with_tools
from kvstore.cli.output import as_json
from kvstore.cli.status.known import cluster_report
from kvstore.errors import StoreError
from kvstore.server.status.sizes import count

if TYPE_CHECKING:
    from kvstore.server.fsck.findings import FsckReport


def register(app: typer.Typer) -> None:
    """Add the commands of this branch."""
    app.command()(fsck)


UNCHECKED = 3
AGAIN_S, AGAIN_MAX = 1.0, 5
"""Seconds between polls, and number of polls, while something is not served."""


def fsck(
    cluster: ClusterOptions = LOCAL,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for warnings, too")] = False,
    notes: Annotated[bool, typer.Option("--notes", help="Show notes, too, about checks that found no problem")] = False,
    json: Json = False,
) -> None:
    """Check all invariants of a live cluster: lists, ledgers, and every copy of every entry. Changes nothing.

    The command reads the entries of the partitions' logs. For all other ledgers in the metadata store, it only asks
    bookies which entries they hold. It also shows the findings of `kvstore status`. A missing copy is a warning while
    enough copies are left, otherwise an error. Exit code 0: no errors; 1: errors; 2: wrong usage; 3: the check was not
    possible, for example because ZooKeeper does not answer.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from kvstore.server.fsck.check import Fsck

    terminal = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=terminal,
        transient=True,
        disable=not terminal.is_terminal,
    )
    task = bar.add_task("metadata", total=None)

    def show(what: str, done: int, total: int) -> None:
        bar.update(task, description=what, completed=done, total=total)

    async def check(tools: Tools) -> FsckReport:
        return await Fsck(tools.env, tools.store, show).run()

    try:
        with bar:
            report = with_tools(cluster, check)
            add_health(report, cluster)
    except StoreError as error:
        print(f"kvstore: not checked: {error or type(error).__name__}", file=sys.stderr)
        raise typer.Exit(UNCHECKED) from None
    print(as_json(report.document()) if json else as_text(report, notes=notes))
    raise typer.Exit(1 if report.errors or (strict and report.warnings) else 0)


def add_health(report: FsckReport, cluster: ClusterOptions) -> None:
    """Add the findings of the servers, or the reason why they did not answer. A change of leader takes about a second,
    so servers are asked again before anything is reported as not served."""
    from kvstore.proto.admin_pb2 import DOWN

    try:
        found = cluster_report(cluster)
        for _ in range(AGAIN_MAX):
            if found.health.grade < DOWN:
                break
            time.sleep(AGAIN_S)
            found = cluster_report(cluster)
        report.add_health(found.findings)
    except StoreError as error:
        report.not_asked = str(error) or type(error).__name__


def as_text(report: FsckReport, *, notes: bool) -> str:
    """Return the report as text: findings, advice, and the verdict last."""
    from kvstore.server.fsck.findings import Severity

    shown = [finding for finding in report.findings if notes or finding.severity is not Severity.NOTE]
    lines = [f"{finding.severity.value:8} {finding.where}: {finding.message}" for finding in shown]
    advice = report.advice()
    if advice:
        lines += ["", "What to do:", *(f"  - {each}" for each in advice)]
    entries, copies = count(report.entries, "entry", "entries"), count(report.copies, "copy", "copies")
    checked = f"{count(report.partitions, 'partition')}, {count(report.ledgers, 'ledger')}, {entries} in {copies}"
    if report.others:
        checked += f"; {count(report.others, 'ledger')} outside of the partitions' logs, whose entries were not read"
    hidden = report.count(Severity.NOTE)
    more = f", {count(hidden, 'note')} (--notes shows them)" if hidden and not notes else ""
    counts = f"{count(report.errors, 'error')}, {count(report.warnings, 'warning')}{more}; checked {checked}"
    return "\n".join([*lines, *([""] if lines else []), f"{report.verdict}. {counts}"])
