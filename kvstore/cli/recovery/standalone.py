"""`kvstore autorecovery run`: a worker and an auditor candidate in their own process."""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli.cluster import LOCAL, ClusterOptions, Json, Tools, cluster_id, with_tools
from kvstore.cli.output import as_json
from kvstore.env.log_config import LogFormat, LogLevel, LogOutput
from kvstore.errors import MetadataUnavailable, MetadataUnknown

if TYPE_CHECKING:
    from kvstore.autorecovery.config import AutorecoveryConfig

PRINT_S = 60.0
"""Seconds between two lines of progress."""
BYTES_PER_S, BYTES_PER_S_MAX = float(16 << 20), float(1 << 40)
OPEN_LEDGER_GRACE_S = 30.0
START_TRIES, START_AGAIN_S = 6, 1.0
"""Number of attempts to start while the metadata store is slow or its connection breaks, and the seconds between two
attempts. A worker that runs reconnects by itself."""


def run(
    auditor: Annotated[bool, typer.Option(help="Be a candidate for auditor, too")] = True,
    bytes_per_s: Annotated[
        float, typer.Option(help="Maximum bytes copied per second", min=1, max=BYTES_PER_S_MAX)
    ] = BYTES_PER_S,
    open_ledger_grace: Annotated[
        float, typer.Option(help="Seconds without new entries before an open ledger is recovered", min=1)
    ] = OPEN_LEDGER_GRACE_S,
    log_format: Annotated[LogFormat, typer.Option(help="Format of the log on standard error")] = LogFormat.TEXT,
    log_level: Annotated[LogLevel, typer.Option(help="Minimum level that is logged")] = LogLevel.WARNING,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Repair marked ledgers until stopped. Nodes with a bookie do so, too; use this on other machines.

    Prints a line per minute while there is work. Exit code 70 if a part of it fails, as for a node; restart it then.
    """
    from kvstore.autorecovery.config import AutorecoveryConfig
    from kvstore.env.log_output import open_log
    from kvstore.env.real import EXIT_FATAL

    open_log(LogOutput(format=log_format, level=log_level), process="autorecovery")
    settings = AutorecoveryConfig(
        auditor=auditor, bytes_per_s=int(bytes_per_s), open_ledger_grace_s=float(open_ledger_grace)
    )
    for tries_left in reversed(range(START_TRIES)):
        try:
            has_failed = with_tools(cluster, lambda tools: _repair(tools, settings, json=json))
        except (MetadataUnavailable, MetadataUnknown) as error:
            if not tries_left:
                raise
            typer.echo(f"kvstore: the metadata store does not answer, trying again: {error}", err=True)
            time.sleep(START_AGAIN_S)
            continue
        if has_failed:
            raise typer.Exit(EXIT_FATAL)
        return


async def _repair(tools: Tools, settings: AutorecoveryConfig, *, json: bool) -> bool:
    """Repair until the process is asked to stop, or a part fails. Return True if a part failed."""
    from kvstore.autorecovery.auditor import Auditor
    from kvstore.autorecovery.worker import Worker
    from kvstore.env.nursery import TaskNursery
    from kvstore.meta.bookies import BookieView
    from kvstore.meta.ledgers import LedgerStore
    from kvstore.wal.bookies import BookieClients
    from kvstore.wal.choice import BookieChoice
    from kvstore.wal.copies.pace import CopyPace
    from kvstore.wal.handle import LedgerPorts

    stop, failed = asyncio.Event(), False

    def end(task: str, error: BaseException) -> None:
        """Stop. Otherwise the session would live on, and with it the auditor role for the whole cluster."""
        nonlocal failed
        failed = True
        typer.echo(f"kvstore: task {task} failed, stopping: {error!r}", err=True)
        stop.set()

    env = replace(tools.env, nursery=TaskNursery("autorecovery", on_error=end))
    store, name = tools.store, f"autorecovery-{secrets.token_hex(6)}"
    view = BookieView(store)
    await view.start(env.nursery)
    bookies = BookieClients(env, view.address, cluster=await cluster_id(store))
    choice = BookieChoice(view, store, clock=env.clock, random=env.random)
    ports = LedgerPorts(env.clock, bookies, LedgerStore(store), choice)
    parts: list[Any] = [
        Worker(env, store, ports, settings, CopyPace(env.clock, settings.bytes_per_s), name=name),
        *([Auditor(env, store, settings, name, bookies=bookies, choice=choice)] if settings.auditor else []),
    ]
    for which in (signal.SIGTERM, signal.SIGINT):  # before anybody can know that it runs
        asyncio.get_running_loop().add_signal_handler(which, stop.set)
    for part in parts:
        part.start()
    typer.echo(as_json({"worker": name}) if json else f"{name} repairs ledgers", err=not json)
    await _until_stopped(stop, parts[0], json=json)
    for part in reversed(parts):
        await part.close()
    bookies.close()
    await env.nursery.close()
    return failed


async def _until_stopped(stop: asyncio.Event, worker: Any, *, json: bool) -> None:
    """Return when the process is asked to stop; report progress until then."""
    printed: dict[str, int] = {}
    while True:
        try:
            async with asyncio.timeout(PRINT_S):
                await stop.wait()
            return
        except TimeoutError:
            if (now := worker.statistics()) != printed:
                printed = now
                line = as_json(printed) if json else ", ".join(f"{name} {value}" for name, value in printed.items())
                typer.echo(line, err=not json)
