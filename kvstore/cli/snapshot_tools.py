"""Shared parts of the commands of `kvstore snapshot`: the cluster, progress, and text output."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from kvstore.cli.cluster import ClusterOptions, Tools, with_tools
from kvstore.cli.output import as_table, printable
from kvstore.cli.snapshot_options import UpTo
from kvstore.errors import ConfigError, Corrupted, InvalidRequest, StoreError, Unavailable
from kvstore.extras import install_hint
from kvstore.server.status.sizes import count, size

if TYPE_CHECKING:
    from kvstore.client.core.config import ClientConfig
    from kvstore.spark.snapshots.chains import Cut
    from kvstore.spark.snapshots.inventory import Inventory
    from kvstore.spark.snapshots.manifest import Manifest
    from kvstore.spark.snapshots.prune import PruneResult
    from kvstore.spark.snapshots.remote import Location
    from kvstore.spark.snapshots.runners import Runner
    from kvstore.spark.snapshots.store import SnapshotStore
    from kvstore.spark.snapshots.tables import Differences
    from kvstore.spark.snapshots.verify import Problem

T = TypeVar("T")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
AUTO, HERE, NO_SPARK = "auto", "local[*]", "none"
"""Values of --master: local Spark if the work is large enough; local Spark; no Spark."""
NICENESS = 10
"""Niceness of all processes that we start on this machine, so that servers on it come first."""
TIMEOUT_S = 60.0
"""Seconds that a job survives an outage of the cluster."""
FIND_S = 10.0
SPLIT_MIB = 32
NOT_CHECKED = 3
EXIT = "-XX:+ExitOnOutOfMemoryError"
"""A driver with a thread that ended because it was out of memory would wait for that thread forever."""
SETTINGS = {
    "spark.driver.extraJavaOptions": EXIT,
    "spark.sql.execution.arrow.maxBytesPerBatch": str(8 << 20),  # values may be large, so batches are limited by bytes
    # Memory that Arrow releases briefly would return as pages that the kernel must clear: a tenth of a task's time.
    "spark.executorEnv.MIMALLOC_PURGE_DELAY": "-1",
}

ONE_ATTEMPT = {"spark.speculation": "false"}
"""For tasks that write to the cluster: a speculative second attempt could write after the job has ended."""
QUICK_START = {"spark.driver.extraJavaOptions": f"{EXIT} -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
"""For jobs whose rows never reach the JVM. The JVM lives for seconds, and would spend most of them compiling."""


def need_spark(*modules: str) -> None:
    """Raise ConfigError if a module that the work needs is not installed."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            without = "" if name == "pyarrow" else "; or pass --master none, which is slower and does not need it"
            raise ConfigError(f"{name} is not installed: {install_hint('node', 'spark')}{without}")


def cluster_of(cluster: ClusterOptions) -> tuple[ClientConfig, str]:
    """Return the client configuration and the instance id of the cluster, as a server reports it. So the user needs no
    right for it, and this machine need not reach the metadata store. Raises ConfigError, Unavailable."""
    from kvstore.cli.endpoints import config_of
    from kvstore.client import Client
    from kvstore.meta import paths

    async def stored(tools: Tools) -> str:  # by servers that do not report the id
        return (await tools.store.get(paths.INSTANCE_ID))[0].decode()

    config = config_of(cluster, TIMEOUT_S)
    try:
        with Client(replace(config, timeout_s=FIND_S)) as client:
            instance = client.cluster.id()
    except StoreError as error:
        raise Unavailable(
            f"no server of the cluster answers at {', '.join(config.endpoints)} ({error}); check `kvstore status`"
        ) from None
    return config, instance or with_tools(cluster, stored)


def base_or_none(
    store: SnapshotStore, parent: str | None, instance: str, full_instead: Callable[[StoreError], None] | None
) -> Manifest | None:
    """Return the snapshot that an incremental one of this cluster continues. Raises StoreError, including when that
    snapshot is incomplete, because an incremental snapshot on top of it could never be restored. With `full_instead`,
    returns None if there is nothing to continue, and passes the reason to it."""
    from kvstore.spark.snapshots.store import newest_of
    from kvstore.spark.snapshots.usable import usable_chain

    try:
        name = parent or newest_of(store, instance).id
        base = usable_chain(store, store.load_chain(name), name)[-1]
    except (InvalidRequest, Corrupted) as error:
        if full_instead is None:
            raise
        full_instead(error)
        return None
    if base.cluster != instance:
        raise InvalidRequest(
            f"snapshot {base.id} belongs to another cluster ({base.cluster}, this one is {instance}); "
            "take a full snapshot"
        )
    return base


def how_to_continue(pin_minutes: int) -> str:
    """Return the advice after an interrupt."""
    return f"run the same command within {pin_minutes} minutes to continue"


def report(text: str) -> None:
    """Print a line on standard error."""
    print(f"kvstore: {text}", file=sys.stderr)


def full_instead(why: StoreError, report: Callable[[str], None] = report) -> None:
    """Report that a full snapshot is taken instead."""
    report(f"taking a full snapshot instead: {why}")


def record(manifest: Manifest, folder: Location, cluster: ClusterOptions, report: Callable[[str], None]) -> None:
    """Record the snapshot in the metadata store, for the servers' snapshot age. An error does not affect the
    snapshot."""
    from kvstore.meta.snapshots import SnapshotRecord, record_snapshot

    recorded = SnapshotRecord(
        kind=manifest.kind,
        parent=manifest.parent,
        started_ms=manifest.started_ms,
        ended_ms=manifest.ended_ms,
        rows=manifest.rows,
        size_bytes=manifest.size_bytes,
        where=str(folder),
    )

    async def tell(tools: Tools) -> None:
        await record_snapshot(tools.store, manifest.id, recorded)

    try:
        with_tools(cluster, tell)
    except StoreError as error:
        report(
            f"{folder} is complete, but could not be recorded in the cluster, so "
            f"kvstore_process_snapshot_age_seconds does not include it: {error}"
        )


def hold(
    cluster: ClientConfig, root: Location, hours: float, report: Callable[[str], None], manifest: Manifest
) -> None:
    """Retain the logs for the next incremental snapshot, unless `hours` is 0. An error does not affect the snapshot."""
    from kvstore.spark.snapshots.create import hold_for_next

    if not hours:
        return
    try:
        hold_for_next(cluster, root, manifest, hours)
    except StoreError as error:
        report(
            f"snapshot {manifest.id} is complete, but its logs are not retained, so the next snapshot may "
            f"have to be a full one: {error}"
        )


class Bar:
    """A progress bar on standard error; nothing if that is not a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        terminal = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=terminal,
            transient=True,
            disable=not terminal.is_terminal,
        )
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, what: str, done: int, total: int | None) -> None:
        self._progress.update(self._task, description=what, completed=done, total=total)


class ProgressCounter:
    """Adds up the progress of several threads."""

    def __init__(self, progress: Bar, what: str, total: int) -> None:
        self._progress, self._what, self._total = progress, what, total
        self._done = 0
        self._lock = threading.Lock()

    def __call__(self, more: int) -> None:
        with self._lock:
            self._done += more
            self._progress(self._what, self._done, self._total)


def run_in_threads(job: Callable[[Runner], T], nice: int) -> T:
    """Run `job` with threads of this process, at niceness `nice`."""
    from kvstore.spark.snapshots.runners import ThreadRunner

    give_way(nice)
    return job(ThreadRunner())


def give_way(nice: int) -> None:
    """Give this process the niceness `nice`, unless it has a higher one. Idempotent."""
    os.nice(max(0, nice - os.nice(0)))


def is_small(chain: Sequence[Manifest], origin: tuple[ClientConfig, str] | None = None) -> bool:
    """Return True if these snapshots, and the changes of the cluster since, are too small for a JVM. Raises
    StoreError."""
    from kvstore.spark.snapshots import local_tables, runners
    from kvstore.spark.snapshots.planning import SnapshotRequest

    if not local_tables.is_small(chain):
        return False
    if origin is None:
        return True
    cluster, instance = origin
    return runners.is_small(SnapshotRequest(cluster=cluster, instance=instance, parent=chain[-1]))


@contextmanager
def checking() -> Iterator[None]:
    """Exit with NOT_CHECKED if a check is not possible, because the result is then neither good nor bad."""
    try:
        yield
    except (StoreError, OSError) as error:
        report(f"not checked: {error or type(error).__name__}")
        raise typer.Exit(NOT_CHECKED) from None


@contextmanager
def reporting_errors(interrupted: str = "") -> Iterator[None]:
    """Report file system errors in one line, like our own errors, and an interrupt with advice on how to continue."""
    try:
        yield
    except OSError as error:
        raise ConfigError(str(error)) from None
    except KeyboardInterrupt:
        report(f"interrupted{interrupted and ': '}{interrupted}")
        raise


def one(where: str, wanted: str | None) -> tuple[SnapshotStore, Manifest]:
    """Return the store of snapshots and the wanted snapshot, by default the newest. Raises StoreError."""
    from kvstore.spark.snapshots.places import store_at

    store, here = store_at(where)
    if here is not None and wanted is not None and here != wanted:
        raise InvalidRequest(f"expected snapshot {wanted}, got the folder of snapshot {here}: {where}")
    name = wanted or here
    return store, store.load(name) if name else store.newest()


def chosen(
    where: str,
    wanted: str | None,
    at: datetime | None,
    upto: Sequence[UpTo] | None,
    *,
    of_one_cluster: bool = False,
) -> tuple[SnapshotStore, Sequence[Manifest], Cut]:
    """Return the snapshots that are needed, the full one first: up to the named one, those that cover the cut, or by
    default those up to the newest. `of_one_cluster` requires that all belong to one cluster. Raises StoreError."""
    from kvstore.spark.snapshots import chains
    from kvstore.spark.snapshots.places import store_at

    cut = cut_of(at, upto)
    store, here = store_at(where)
    if wanted is None and here is None:
        catalogue = store.load_all()
        if of_one_cluster:
            chains.check_one_cluster(catalogue)
        if cut != chains.Cut():
            return store, chains.covering(catalogue, None, cut), cut
    store, manifest = one(where, wanted)
    return store, chains.covering(store.load_chain(manifest.id), manifest.id, cut), cut


def cut_of(at: datetime | None, upto: Sequence[UpTo] | None) -> Cut:
    """Return the end of each log that is wanted."""
    from kvstore.spark.snapshots.chains import Cut

    return Cut((at - EPOCH) // timedelta(milliseconds=1) if at else None, dict(upto) if upto else None)


# ── text output ──


def document(manifest: Manifest) -> dict[str, Any]:
    """Return the row of a snapshot in a list."""
    return {
        "id": manifest.id,
        "kind": str(manifest.kind),
        "parent": manifest.parent,
        "taken": datetime.fromtimestamp(manifest.started_ms / 1000, UTC).isoformat(timespec="seconds"),
        "rows": manifest.rows,
        "bytes": manifest.size_bytes,
        "files": len(manifest.files),
        "ring_version": manifest.ring_version,
        "positions": {each.partition: each.sequence for each in manifest.partitions},
    }


def inventory_document(found: Inventory) -> dict[str, Any]:
    """Return the document of `list`."""
    rows = [
        {**(document(each.manifest) if each.manifest else {"id": each.id}), "state": each.state}
        | {"legal_hold": each.legal_hold}
        for each in found.snapshots
    ]
    return {"snapshots": rows, "unfinished": list(found.unfinished)}


def inventory_text(found: Inventory, where: str) -> str:
    """Return the table of `list`."""
    rows = [
        {**row, "legal_hold": row["legal_hold"] and printable(row["legal_hold"].encode())}
        for row in inventory_document(found)["snapshots"]
    ]
    held = ("legal_hold",) if any(each.legal_hold for each in found.snapshots) else ()
    columns = ("id", "kind", "parent", "taken", "rows", "bytes", *held, "state")
    return as_table(rows, columns) if rows else f"no snapshots in {where}"


def pruned_document(done: PruneResult) -> dict[str, Any]:
    """Return the document of `prune`."""
    return {
        "removed": list(done.removed),
        "remains": list(done.remains),
        "busy": list(done.busy),
        "kept": {name: list(tags) for name, tags in sorted(done.kept.items())},
    }


def pruned_lines(done: PruneResult, verb: str = "removed") -> list[str]:
    """Return a line for each snapshot and folder that `prune` removed."""
    return [f"{verb} {name}" for name in (*done.removed, *done.remains)]


def report_busy(names: Sequence[str]) -> None:
    """Report the snapshots that `prune` could not remove this time."""
    for name in names:
        print(
            f"{name} is kept, because it is being restored, is under a legal hold, or another snapshot continues it",
            file=sys.stderr,
        )


def sentence(manifest: Manifest) -> str:
    """Describe a snapshot in one line."""
    what = f"{manifest.kind} snapshot" + (f" after {manifest.parent}" if manifest.parent else "")
    return f"{what}, {count(manifest.rows, 'row')} in {count(len(manifest.files), 'file')}, {size(manifest.size_bytes)}"


def problems_of(store: SnapshotStore, chain: Sequence[Manifest]) -> list[Problem]:
    """Read these snapshots and return their damage, with a progress bar. Raises StoreError, OSError."""
    from kvstore.spark.snapshots import verify

    with Bar() as progress:
        counted = ProgressCounter(progress, "verifying", sum(each.rows for each in chain))
        return list(verify.problems_of(store, chain, counted))


def problem_rows(problems: Sequence[Problem]) -> list[dict[str, str]]:
    """Return the rows of a document about damage."""
    return [{"snapshot": each.snapshot, "path": each.path, "what": each.what} for each in problems]


def problem_lines(problems: Sequence[Problem]) -> list[str]:
    """Return a line for each damaged file."""
    return [f"{each.snapshot}/{each.path} {each.what}" for each in problems]


def verdict_document(
    chain: Sequence[Manifest], problems: Sequence[Problem], found: Differences | None
) -> dict[str, Any]:
    """Return the document of the findings of `verify`."""
    return {
        "snapshots": [each.id for each in chain],
        "rows": sum(each.rows for each in chain),
        "problems": problem_rows(problems),
        "store": difference_document(found) if found is not None else None,
    }


def verdict(chain: Sequence[Manifest], problems: Sequence[Problem], found: Differences | None) -> str:
    """Return the findings of `verify` as text."""
    lines = problem_lines(problems)
    if problems:
        lines.append("Restore the files from a copy, or take a new full snapshot.")
    rows = sum(each.rows for each in chain)
    names = ", ".join(each.id for each in chain)
    lines.append(f"{'damaged' if problems else 'intact'}: {names}; {count(rows, 'row')}")
    if found is not None:
        lines.append(f"{'the store differs' if found.count else 'the store is identical'}: {difference_text(found)}")
    return "\n".join(lines)


def difference_document(found: Differences) -> dict[str, Any]:
    return {
        "same": found.same,
        "added": found.added,
        "removed": found.removed,
        "changed": found.changed,
        "old_bytes": found.old_bytes,
        "new_bytes": found.new_bytes,
        "examples": [{"key": key, "what": what} for key, what in found.examples],
    }


def difference_text(found: Differences) -> str:
    counts = (
        f"{count(found.added, 'key')} added, {found.removed} removed, {found.changed} changed, {found.same} unchanged; "
        f"{found.old_bytes} bytes before, {found.new_bytes} after"
    )
    examples = [{"key": key, "what": what} for key, what in found.examples]
    return "\n".join([counts, *([as_table(examples)] if examples else [])])
