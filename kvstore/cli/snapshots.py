"""`kvstore snapshot`: the whole store in Parquet, and back. What each command does is in kvstore/spark/snapshots."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli import snapshot_tools as tools
from kvstore.cli.cluster import DataDir, Json, Server, ZooKeeper
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
from kvstore.cli.snapshot_spark import in_session, is_for_here, with_tables
from kvstore.errors import Corrupted, InvalidRequest, StoreError

if TYPE_CHECKING:
    from kvstore.spark.snapshots.manifest import Manifest
    from kvstore.spark.snapshots.planning import SnapshotRequest
    from kvstore.spark.snapshots.runners import Runner
    from kvstore.spark.snapshots.store import SnapshotStore
    from kvstore.spark.snapshots.tables import Differences, Tables


CLOCKS_APART_H = 0.25
"""A snapshot from further ahead of this machine's clock says nothing about its age."""


def register(app: typer.Typer) -> None:
    """Add the commands of this branch."""
    branch = typer.Typer(name="snapshot", help="The whole store in Parquet, and back.", no_args_is_help=True)
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
    incremental: Annotated[bool, typer.Option("--incremental", help="Only what changed since the parent.")] = False,
    or_full: Annotated[
        bool, typer.Option("--or-full", help="With --incremental: a full one where there is nothing to continue.")
    ] = False,
    parent: Annotated[str | None, typer.Option(help="Which snapshot to continue; default: the newest.")] = None,
    hold_hours: Annotated[
        float, typer.Option(min=0, max=168, help="Keep the logs so long for an incremental to continue this one.")
    ] = 0.0,
    compression: Annotated[Compression, typer.Option(help="Of the files.")] = Compression.zstd,
    split_mib: Annotated[
        float, typer.Option(min=0.01, max=4096, help="About how much each file holds, unpacked.")
    ] = 32,
    pin_minutes: Annotated[int, typer.Option(min=1, max=1440, help="How long a killed job can be resumed.")] = 15,
    rate: Rate = 0.0,
    nice: Nice = tools.NICENESS,
    master: Master = tools.AUTO,
    conf: Conf = None,
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Take a snapshot, consistent in each partition, while the store is read and written.

    It is there when the command ends with exit code 0, and not before. A job that was killed is gone on with when the
    same command runs again within --pin-minutes.
    """
    from kvstore.spark.snapshots.places import open_store

    store = open_store(to)
    store.check_writable()
    if or_full and (parent or not incremental):
        raise typer.BadParameter("it goes with --incremental, and without --parent", param_hint="--or-full")
    tools.need_spark("pyarrow")
    from kvstore.spark.snapshots import create as job
    from kvstore.spark.snapshots.planning import SnapshotRequest

    cluster, instance = tools.cluster_of(data_dir, zookeeper, server)
    wanted = SnapshotRequest(
        cluster=cluster,
        instance=instance,
        parent=tools.base_or_none(store, parent, instance, or_full) if parent or incremental else None,
        compression=compression,
        split_bytes=int(split_mib * (1 << 20)),
        pin_ttl_s=pin_minutes * 60.0,
        bytes_per_s=rate * (1 << 20),
    )
    began = time.monotonic()
    with tools.told(tools.go_on(pin_minutes)), tools.Bar() as progress:
        hold = partial(tools.hold, cluster, store.root, hold_hours)
        take = partial(_take, store, progress, hold, master, conf, nice)
        manifest = job.or_full(take, wanted, tools.full_instead) if or_full else take(wanted)
    folder, seconds = store.folder(manifest.id), round(time.monotonic() - began, 1)
    tools.record(manifest, folder, data_dir, zookeeper, server)
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
    """Take it by threads of this process if that is wanted or quicker, else by Spark."""
    from kvstore.spark.snapshots import create as job
    from kvstore.spark.snapshots.runners import SparkRunner, is_small

    def by(runner: Runner) -> Manifest:
        return job.create(store, wanted, runner, progress, published)

    if is_for_here(master, conf, partial(is_small, wanted)):
        return tools.take_here(by, nice)
    settings = tools.SETTINGS | tools.QUICK_START
    return in_session(lambda session: by(SparkRunner(session)), master, conf, progress, nice, settings)


def list_(
    where: Where,
    max_age_hours: Annotated[
        float | None, typer.Option(min=0, help="Exit 1 unless the newest one that can be used is at most so old.")
    ] = None,
    json: Json = False,
) -> None:
    """List the snapshots of a directory, oldest first, and whether each can be used.

    A snapshot is usable if the files of it and of those that it stands on are there with their sizes; verify reads
    them.
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
            what = "once its driver has ended, `snapshot create` goes on with it and `snapshot prune` removes it"
            print(f"unfinished: {name}; {what}", file=sys.stderr)
    if max_age_hours is not None:
        newest = max((complete_until_ms(readable[row["id"]]) for row in rows if row["state"] == "usable"), default=0)
        age_h = (time.time() - newest / 1000) / 3600
        if age_h < -CLOCKS_APART_H:
            raise InvalidRequest(f"the newest usable snapshot in {where} is from {-age_h:.1f} h ahead of this clock")
        if not newest or age_h > max_age_hours:
            told = f"is {age_h:.1f} h old" if newest else "does not exist"
            raise InvalidRequest(f"the newest usable snapshot in {where} {told}, want at most {max_age_hours:g} h")


def verify(
    where: Where,
    wanted: SnapshotId = None,
    against_store: Annotated[
        bool, typer.Option("--store", help="Compare with the cluster too: the one it was taken of, or a restored one.")
    ] = False,
    at: At = None,
    position: Upto = None,
    show: Examples = 10,
    nice: Nice = tools.NICENESS,
    master: Master = tools.AUTO,
    conf: Conf = None,
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Prove a snapshot, and those that it stands on: every file, page and row. It needs no cluster, unless --store.

    Exit code 0: it is whole, 1: it is damaged or differs, 2: wrong usage, 3: it could not be checked.
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
            cluster, instance = tools.cluster_of(data_dir, zookeeper, server)

            is_origin = instance == chain[-1].cluster and cut == chains.Cut()

            def compared(tables: Tables[Any]) -> Differences:
                from kvstore.spark.snapshots import compare

                progress("comparing with the store", 0, None)
                if is_origin:
                    return compare.against_origin(tables, store, chain, cluster, show)
                return compare.against_restored(tables, store, chain, cut, cluster, show)

            with tools.Bar() as progress:
                small = partial(tools.is_small, chain, (cluster, instance) if is_origin else None)
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
        bool, typer.Option("--merge", help="Into a cluster that holds keys: overwrite what the snapshot has.")
    ] = False,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Check the files' checksums first.")] = True,
    nice: Nice = tools.NICENESS,
    master: Master = tools.AUTO,
    conf: Conf = None,
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Load a snapshot into a cluster, of whatever number of partitions. Keys get new versions; expiries stay.

    What has expired meanwhile is left out. A restore that was interrupted is run again, with --merge.
    """
    tools.need_spark("pyarrow")
    from kvstore.spark.snapshots import restore, verify

    store, chain, cut = tools.chosen(where, wanted, at, position, of_one_cluster=True)
    cluster, _ = tools.cluster_of(data_dir, zookeeper, server)
    began = time.monotonic()
    names = [each.id for each in chain]
    with tools.told("run it again, with --merge"), store.reading(names), tools.Bar() as progress:
        if check:
            verify.check_files(
                store, chain, tools.ProgressCounter(progress, "checking", sum(len(each.files) for each in chain))
            )
        done = with_tables(
            lambda tables: restore.restore(tables, store, chain, cut, cluster, into_filled=merge, progress=progress),
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
        left = f", {done.expired} that have expired left out" if done.expired else ""
        print(f"{done.written} keys restored from {', '.join(names)}{left}, {seconds:.1f} s")


def prune(
    where: Where,
    keep: Annotated[int, typer.Option(min=0, help="Keep the newest so many.")] = 0,
    daily: Annotated[int, typer.Option(min=0, help="Keep the newest of each of so many days.")] = 0,
    weekly: Annotated[int, typer.Option(min=0, help="Keep the newest of each of so many weeks.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would go.")] = False,
    json: Json = False,
) -> None:
    """Remove snapshots that the retention does not name. What a kept one stands on stays; so does the newest.

    Work that killed jobs have left goes too, if nobody can go on with it.
    """
    from kvstore.spark.snapshots.chains import SnapshotRetention, prunable
    from kvstore.spark.snapshots.places import store_at
    from kvstore.spark.snapshots.usable import usable_chain

    if not (keep or daily or weekly):
        raise typer.BadParameter("say what to keep: at least 1", param_hint="--keep, --daily, --weekly")
    store, _ = store_at(where)
    catalogue = store.load_all()
    going = prunable(catalogue, SnapshotRetention(newest=keep, days=daily, weeks=weekly))
    for name in sorted(catalogue.keys() - {each.id for each in going} if going else ()):
        usable_chain(store, catalogue, name)  # what stays must be whole before anything goes
    remains = store.stale_remains(time.time())
    removed: list[str] = []
    if not dry_run:
        with tools.told("run it again"), tools.Bar() as progress:
            for number, manifest in enumerate(going):
                progress("removing", number, len(going))
                if store.remove(manifest.id):
                    removed.append(manifest.id)
                else:
                    print(f"{manifest.id} stays: it is being restored, or another continues it", file=sys.stderr)
            remains = store.remove_remains(remains)
    names = [each.id for each in going] if dry_run else removed
    if json:
        print(as_json({"removed": names, "remains": [each.name for each in remains], "dry_run": dry_run}))
    else:
        verb = "would remove" if dry_run else "removed"
        print("\n".join([f"{verb} {name}" for name in [*names, *(each.name for each in remains)]] or ["nothing to do"]))


def diff(
    where: Where,
    old: Annotated[str, typer.Argument(help="The earlier snapshot.")],
    new: Annotated[str, typer.Argument(help="The later one.")],
    show: Examples = 10,
    nice: Nice = tools.NICENESS,
    master: Master = tools.AUTO,
    conf: Conf = None,
    json: Json = False,
) -> None:
    """Show the keys in which two snapshots differ: added, removed, or with another value or expiry.

    Exit code 0: none, 1: some, 2: wrong usage, 3: they could not be compared.
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
    table: Annotated[str, typer.Argument(help="A path or a URL, of a table that is to be made or was made so.")],
    wanted: SnapshotId = None,
    json: Json = False,
) -> None:
    """Bring a Delta table to a snapshot: one row for each key, one version of the table for each snapshot.

    Adds what came since the snapshot at which the table is. Needs no cluster and no Spark, but the extra `delta`.
    """
    tools.need_spark("pyarrow")
    from kvstore.spark.snapshots import delta as tables

    store, chain, _ = tools.chosen(where, wanted, None, None, of_one_cluster=True)
    with tools.told("run it again"), tools.Bar() as progress:
        counted = tools.ProgressCounter(progress, "adding", sum(each.rows for each in chain))
        added = tables.export(store, chain, table, counted)
    if json:
        print(as_json({"table": table, "snapshot": chain[-1].id, "added": added}))
    else:
        print(f"{table}: at {chain[-1].id}, {'added ' + ', '.join(added) if added else 'nothing to add'}")
