"""`kvstore snapshot`: the whole store in Parquet, and back. The work itself is in kvstore/spark/snapshots."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli import snapshot_tools as tools
from kvstore.cli.cluster import LOCAL, ClusterOptions, Json
from kvstore.cli.output import as_json, as_table
from kvstore.cli.snapshot_options import (
    At,
    Compression,
    Conf,
    Examples,
    Master,
    Nice,
    Rate,
    SnapshotId,
    SparkSetting,
    To,
    Upto,
    Where,
)
from kvstore.cli.snapshot_spark import in_session, runs_in_process, with_tables
from kvstore.errors import Corrupted, InvalidRequest, StoreError

if TYPE_CHECKING:
    from kvstore.spark.snapshots.manifest import Manifest
    from kvstore.spark.snapshots.planning import SnapshotRequest
    from kvstore.spark.snapshots.runners import Runner
    from kvstore.spark.snapshots.store import SnapshotStore
    from kvstore.spark.snapshots.tables import Differences, Tables


CLOCKS_APART_H = 0.25
"""A snapshot that is further ahead of this machine's clock has no meaningful age."""


def register(app: typer.Typer) -> None:
    """Add the commands of this branch."""
    branch = typer.Typer(
        name="snapshot", help="Take, verify and restore snapshots of the whole store in Parquet", no_args_is_help=True
    )
    branch.command("create")(create)
    branch.command("list")(list_)
    branch.command("verify")(verify)
    branch.command("restore")(restore)
    branch.command("prune")(prune)
    branch.command("diff")(diff)
    branch.command("delta")(delta)
    app.add_typer(branch)


def create(
    to: To,
    incremental: Annotated[bool, typer.Option("--incremental", help="Store only changes since the parent")] = False,
    or_full: Annotated[
        bool,
        typer.Option("--or-full", help="With --incremental: take a full snapshot if there is nothing to continue"),
    ] = False,
    parent: Annotated[str | None, typer.Option(help="Id of the snapshot to continue; default: the newest")] = None,
    hold_hours: Annotated[
        float, typer.Option(min=0, max=168, help="Hours to retain the logs for an incremental snapshot after this one")
    ] = 0.0,
    compression: Annotated[Compression, typer.Option(help="Compression of the files")] = Compression.zstd,
    split_mib: Annotated[
        float, typer.Option(min=0.01, max=4096, help="Approximate uncompressed MiB in each file")
    ] = 32,
    pin_minutes: Annotated[
        int, typer.Option(min=1, max=1440, help="Minutes within which a killed job can be resumed")
    ] = 15,
    rate: Rate = 0.0,
    nice: Nice = tools.NICENESS,
    master: Master = tools.AUTO,
    conf: Conf = None,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Take a snapshot that is consistent within each partition, while the store is in use.

    The snapshot exists only once the command ends with exit code 0. To resume a killed job, run the same command again
    within --pin-minutes.
    """
    from kvstore.spark.snapshots.places import open_store

    store = open_store(to)
    store.check_writable()
    if or_full and (parent or not incremental):
        raise typer.BadParameter("expected together with --incremental, and without --parent", param_hint="--or-full")
    tools.need_spark("pyarrow")
    from kvstore.spark.snapshots import create as job
    from kvstore.spark.snapshots.planning import SnapshotRequest

    config, instance = tools.cluster_of(cluster)
    wanted = SnapshotRequest(
        cluster=config,
        instance=instance,
        parent=tools.base_or_none(store, parent, instance, or_full) if parent or incremental else None,
        compression=compression,
        split_bytes=int(split_mib * (1 << 20)),
        pin_ttl_s=pin_minutes * 60.0,
        bytes_per_s=rate * (1 << 20),
    )
    began = time.monotonic()
    with tools.reporting_errors(tools.how_to_continue(pin_minutes)), tools.Bar() as progress:
        hold = partial(tools.hold, config, store.root, hold_hours)
        take = partial(_take, store, progress, hold, master, conf, nice)
        manifest = job.or_full(take, wanted, tools.report_full_instead) if or_full else take(wanted)
    folder, seconds = store.folder(manifest.id), round(time.monotonic() - began, 1)
    tools.record(manifest, folder, cluster)
    document = {**tools.document(manifest), "path": str(folder), "seconds": seconds}
    print(as_json(document) if json else f"{folder}: {tools.sentence(manifest)}, {seconds} s")


def _take(
    store: SnapshotStore,
    progress: tools.Bar,
    published: Callable[[Manifest], None],
    master: str,
    conf: list[SparkSetting] | None,
    nice: int,
    wanted: SnapshotRequest,
) -> Manifest:
    """Take the snapshot with threads of this process if requested or faster, otherwise with Spark."""
    from kvstore.spark.snapshots import create as job
    from kvstore.spark.snapshots.runners import SparkRunner, is_small

    def by(runner: Runner) -> Manifest:
        return job.create(store, wanted, runner, progress, published)

    if runs_in_process(master, conf, partial(is_small, wanted)):
        return tools.run_in_threads(by, nice)
    settings = tools.SETTINGS | tools.QUICK_START
    return in_session(lambda session: by(SparkRunner(session)), master, conf, progress, nice, settings)


def list_(
    where: Where,
    max_age_hours: Annotated[
        float | None, typer.Option(min=0, help="Exit with 1 unless the newest usable snapshot is at most this old")
    ] = None,
    json: Json = False,
) -> None:
    """List the snapshots of a directory, oldest first, and if each is usable.

    A snapshot is usable if its files and those of the snapshots that it builds on exist with the right sizes. `verify`
    also reads them.
    """
    from kvstore.spark.snapshots.chains import complete_until_ms, in_order
    from kvstore.spark.snapshots.places import store_at
    from kvstore.spark.snapshots.usable import usable_chain

    store, _ = store_at(where)
    readable, problems = store.load_readable()
    rows: list[dict[str, Any]] = []
    for manifest in in_order(readable):
        try:
            usable_chain(store, readable, manifest.id, problems)
            state = "usable"
        except StoreError as error:
            state = str(error)
        rows.append({**tools.document(manifest), "state": state})
    rows += [{"id": name, "state": problem} for name, problem in sorted(problems.items())]
    remains = [each.name for each in store.remains()]
    if json:
        print(as_json({"snapshots": rows, "unfinished": remains}))
    else:
        columns = ("id", "kind", "parent", "taken", "rows", "bytes", "state")
        print(as_table(rows, columns) if rows else f"no snapshots in {where}")
        for name in remains:
            what = "once its driver has ended, continue it with `snapshot create` or remove it with `snapshot prune`"
            print(f"unfinished: {name}; {what}", file=sys.stderr)
    if max_age_hours is not None:
        newest = max((complete_until_ms(readable[row["id"]]) for row in rows if row["state"] == "usable"), default=0)
        age_h = (time.time() - newest / 1000) / 3600
        if age_h < -CLOCKS_APART_H:
            raise InvalidRequest(
                f"the newest usable snapshot in {where} is {-age_h:.1f} h ahead of this machine's clock"
            )
        if not newest or age_h > max_age_hours:
            state = f"is {age_h:.1f} h old" if newest else "does not exist"
            raise InvalidRequest(
                f"expected a usable snapshot in {where} of at most {max_age_hours:g} h; the newest {state}"
            )


def verify(
    where: Where,
    wanted: SnapshotId = None,
    against_store: Annotated[
        bool, typer.Option("--store", help="Also compare with the cluster: the original or a restored one")
    ] = False,
    at: At = None,
    position: Upto = None,
    show: Examples = 10,
    nice: Nice = tools.NICENESS,
    master: Master = tools.AUTO,
    conf: Conf = None,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Verify every file, page and row of a snapshot and of those that it builds on. Needs a cluster only with --store.

    Exit code 0: intact; 1: damaged or different; 2: wrong usage; 3: the check was not possible.
    """
    with tools.checking():
        tools.need_spark("pyarrow")
        from kvstore.spark.snapshots import chains, verify

        try:
            store, chain, cut = tools.chosen(where, wanted, at, position)
        except Corrupted as error:
            print(f"kvstore: damaged: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
        with tools.Bar() as progress:
            counted = tools.ProgressCounter(progress, "verifying", sum(each.rows for each in chain))
            problems = list(verify.problems_of(store, chain, counted))
        found = None
        if against_store and not problems:
            config, instance = tools.cluster_of(cluster)

            is_origin = instance == chain[-1].cluster and cut == chains.Cut()

            def compared(tables: Tables[Any]) -> Differences:
                from kvstore.spark.snapshots import compare

                progress("comparing with the store", 0, None)
                if is_origin:
                    return compare.against_origin(tables, store, chain, config, show)
                return compare.against_restored(tables, store, chain, cut, config, show)

            with tools.Bar() as progress:
                small = partial(tools.is_small, chain, (config, instance) if is_origin else None)
                found = with_tables(compared, small, master, conf, progress, nice)
    view = tools.verdict_document(chain, problems, found) if json else tools.verdict(chain, problems, found)
    print(as_json(view) if json else view)
    raise typer.Exit(1 if problems or (found is not None and found.count) else 0)


def restore(
    where: Where,
    wanted: SnapshotId = None,
    at: At = None,
    position: Upto = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Restore into a cluster that has keys: overwrite keys of the snapshot")
    ] = False,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Check the files' checksums first")] = True,
    nice: Nice = tools.NICENESS,
    master: Master = tools.AUTO,
    conf: Conf = None,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Load a snapshot into a cluster with any number of partitions. Keys get new versions and keep their expiry times.

    Keys that have expired are left out. Run an interrupted restore again with --merge.
    """
    tools.need_spark("pyarrow")
    from kvstore.spark.snapshots import restore, verify

    store, chain, cut = tools.chosen(where, wanted, at, position, of_one_cluster=True)
    config, _ = tools.cluster_of(cluster)
    began = time.monotonic()
    names = [each.id for each in chain]
    with tools.reporting_errors("run it again, with --merge"), store.reading(names), tools.Bar() as progress:
        if check:
            verify.check_files(
                store, chain, tools.ProgressCounter(progress, "checking", sum(len(each.files) for each in chain))
            )
        done = with_tables(
            lambda tables: restore.restore(tables, store, chain, cut, config, into_filled=merge, progress=progress),
            partial(tools.is_small, chain),
            master,
            conf,
            progress,
            nice,
            tools.SETTINGS | tools.ONE_ATTEMPT,
        )
    seconds = time.monotonic() - began
    if json:
        print(
            as_json(
                {"snapshots": names, "written": done.written, "expired": done.expired, "seconds": round(seconds, 1)}
            )
        )
    else:
        left = f", {done.expired} expired keys left out" if done.expired else ""
        print(f"{done.written} keys restored from {', '.join(names)}{left}, {seconds:.1f} s")


def prune(
    where: Where,
    keep: Annotated[int, typer.Option(min=0, help="Number of newest snapshots to keep")] = 0,
    daily: Annotated[int, typer.Option(min=0, help="Number of days of which to keep the newest snapshot")] = 0,
    weekly: Annotated[int, typer.Option(min=0, help="Number of weeks of which to keep the newest snapshot")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed")] = False,
    json: Json = False,
) -> None:
    """Remove snapshots outside of the retention. Snapshots that kept ones build on stay, and so does the newest.

    Unfinished work of killed jobs is also removed if nothing can continue it.
    """
    from kvstore.spark.snapshots.chains import SnapshotRetention, prunable
    from kvstore.spark.snapshots.places import store_at
    from kvstore.spark.snapshots.usable import usable_chain

    if not (keep or daily or weekly):
        raise typer.BadParameter(
            "expected at least one of these options with 1 or more", param_hint="--keep, --daily, --weekly"
        )
    store, _ = store_at(where)
    catalogue = store.load_all()
    going = prunable(catalogue, SnapshotRetention(newest=keep, days=daily, weeks=weekly))
    for name in sorted(catalogue.keys() - {each.id for each in going} if going else ()):
        usable_chain(store, catalogue, name)  # kept snapshots must be complete before anything is removed
    remains = store.stale_remains(time.time())
    removed: list[str] = []
    if not dry_run:
        with tools.reporting_errors("run it again"), tools.Bar() as progress:
            for number, manifest in enumerate(going):
                progress("removing", number, len(going))
                if store.remove(manifest.id):
                    removed.append(manifest.id)
                else:
                    print(
                        f"{manifest.id} is kept, because it is being restored or another snapshot continues it",
                        file=sys.stderr,
                    )
            remains = store.remove_remains(remains)
    names = [each.id for each in going] if dry_run else removed
    if json:
        print(as_json({"removed": names, "remains": [each.name for each in remains], "dry_run": dry_run}))
    else:
        verb = "would remove" if dry_run else "removed"
        print("\n".join([f"{verb} {name}" for name in [*names, *(each.name for each in remains)]] or ["nothing to do"]))


def diff(
    where: Where,
    old: Annotated[str, typer.Argument(help="Id of the earlier snapshot")],
    new: Annotated[str, typer.Argument(help="Id of the later snapshot")],
    show: Examples = 10,
    nice: Nice = tools.NICENESS,
    master: Master = tools.AUTO,
    conf: Conf = None,
    json: Json = False,
) -> None:
    """Show the keys in which two snapshots differ: added, removed, or with a changed value or expiry.

    Exit code 0: no difference; 1: differences; 2: wrong usage; 3: the comparison was not possible.
    """
    with tools.checking():
        store, _ = tools.one(where, old)
        tools.need_spark("pyarrow")
        from kvstore.spark.snapshots import chains

        sides = [chains.chain_of(store.load_chain(each), each) for each in (old, new)]

        def compared(tables: Tables[Any]) -> Differences:
            from kvstore.spark.snapshots.tables import CONTENT

            progress("comparing", 0, None)
            old_side, new_side = (tables.folded(store, chain, chains.Cut()) for chain in sides)
            return tables.differences(old_side, new_side, CONTENT, show)

        with tools.Bar() as progress:
            small = partial(tools.is_small, [*sides[0], *sides[1]])
            found = with_tables(compared, small, master, conf, progress, nice)
    print(as_json(tools.difference_document(found)) if json else tools.difference_text(found))
    raise typer.Exit(1 if found.count else 0)


def delta(
    where: Where,
    table: Annotated[str, typer.Argument(help="Path or URL of the table, which is created if missing")],
    wanted: SnapshotId = None,
    json: Json = False,
) -> None:
    """Update a Delta table to a snapshot: one row per key, and one table version per snapshot.

    Adds the changes since the snapshot that the table contains. Needs no cluster and no Spark, only the extra `delta`.
    """
    tools.need_spark("pyarrow")
    from kvstore.spark.snapshots import delta as tables

    store, chain, _ = tools.chosen(where, wanted, None, None, of_one_cluster=True)
    with tools.reporting_errors("run it again"), tools.Bar() as progress:
        counted = tools.ProgressCounter(progress, "adding", sum(each.rows for each in chain))
        added = tables.export(store, chain, table, counted)
    if json:
        print(as_json({"table": table, "snapshot": chain[-1].id, "added": added}))
    else:
        print(f"{table}: at {chain[-1].id}, {'added ' + ', '.join(added) if added else 'nothing to add'}")
