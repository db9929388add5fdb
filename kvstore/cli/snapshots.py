"""`kvstore snapshot`: the whole store in Parquet, and back. The work itself is in kvstore/spark/snapshots."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli import snapshot_tools as tools
from kvstore.cli.cluster import LOCAL, ClusterOptions, Json, checked_path
from kvstore.cli.output import as_json
from kvstore.cli.snapshot_nightly import nightly
from kvstore.cli.snapshot_options import (
    At,
    Compression,
    Conf,
    Daily,
    Examples,
    Master,
    MetricsFile,
    Monthly,
    Nice,
    SnapshotId,
    To,
    Upto,
    Weekly,
    Where,
)
from kvstore.cli.snapshot_spark import with_tables
from kvstore.cli.snapshot_taking import ONE, Taker, TakingOptions
from kvstore.errors import ConfigError, Corrupted, InvalidRequest
from kvstore.server.status.sizes import count

if TYPE_CHECKING:
    from kvstore.spark.snapshots.manifest import Manifest
    from kvstore.spark.snapshots.tables import Differences, Tables


CLOCKS_APART_H = 0.25
"""A snapshot that is further ahead of this machine's clock has no meaningful age."""


def register(app: typer.Typer) -> None:
    """Add the commands of this branch."""
    branch = typer.Typer(
        name="snapshot", help="Take, verify and restore snapshots of the whole store in Parquet", no_args_is_help=True
    )
    branch.command("create")(create)
    branch.command("nightly")(nightly)
    branch.command("list")(list_)
    branch.command("verify")(verify)
    branch.command("restore")(restore)
    branch.command("prune")(prune)
    branch.command("legal-hold")(legal_hold)
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
    compression: Annotated[Compression, typer.Option(help="Compression of the files")] = Compression.zstd,
    split_mib: Annotated[
        float, typer.Option(min=0.01, max=4096, help="Approximate uncompressed MiB in each file")
    ] = tools.SPLIT_MIB,
    taking: TakingOptions = ONE,
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
    taker = Taker(store, cluster, *tools.cluster_of(cluster), taking, compression=compression, split_mib=split_mib)
    began = time.monotonic()
    manifest = taker.take(incremental=incremental, parent=parent, full_instead=tools.full_instead if or_full else None)
    folder, seconds = store.folder(manifest.id), round(time.monotonic() - began, 1)
    document = {**tools.document(manifest), "path": str(folder), "seconds": seconds}
    print(as_json(document) if json else f"{folder}: {tools.sentence(manifest)}, {seconds} s")


def list_(
    where: Where,
    max_age_hours: Annotated[
        float | None,
        typer.Option(min=0, help="Exit with 1 unless each cluster's newest usable snapshot is at most this old"),
    ] = None,
    metrics_file: MetricsFile = None,
    json: Json = False,
) -> None:
    """List the snapshots of a directory, oldest first, and if each is usable.

    A snapshot is usable if its files and those of the snapshots that it builds on exist with the right sizes. `verify`
    also reads them.
    """
    from kvstore.spark.snapshots.inventory import inventory_of
    from kvstore.spark.snapshots.places import store_at

    store, _ = store_at(where)
    found = inventory_of(store)
    if json:
        print(as_json(tools.inventory_document(found)))
    else:
        print(tools.inventory_text(found, where))
        for name in found.unfinished:
            what = "once its driver has ended, continue it with `snapshot create` or remove it with `snapshot prune`"
            print(f"unfinished: {name}; {what}", file=sys.stderr)
    if metrics_file is not None:
        from kvstore.cli.snapshot_metrics import write_metrics

        with tools.reporting_errors():
            write_metrics(metrics_file, found)
    if max_age_hours is not None:
        if not found.newest_by_cluster:
            raise InvalidRequest(f"expected a usable snapshot in {where} of at most {max_age_hours:g} h, got none")
        for cluster, newest in found.newest_by_cluster.items():
            _check_age(newest, max_age_hours, f"in {where} of cluster {cluster}")


def _check_age(newest: Manifest | None, max_age_hours: float, where: str) -> None:
    """Raise InvalidRequest unless the newest usable snapshot of a cluster is at most this old."""
    from kvstore.spark.snapshots.chains import complete_until_ms

    age_h = 0.0 if newest is None else (time.time() - complete_until_ms(newest) / 1000) / 3600
    if age_h < -CLOCKS_APART_H:
        raise InvalidRequest(f"the newest usable snapshot {where} is {-age_h:.1f} h ahead of this machine's clock")
    if newest is None or age_h > max_age_hours:
        state = "does not exist" if newest is None else f"is {age_h:.1f} h old"
        raise InvalidRequest(
            f"expected a usable snapshot {where}, at most {max_age_hours:g} h old; the newest {state}. If this cluster "
            "no longer exists, move its snapshots to another directory"
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
        from kvstore.spark.snapshots import chains

        try:
            store, chain, cut = tools.chosen(where, wanted, at, position)
        except Corrupted as error:
            tools.report(f"damaged: {error}")
            raise typer.Exit(1) from None
        problems = tools.problems_of(store, chain)
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
        if not merge:
            restore.require_empty(config)  # before all files are read and Spark is started
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
        left = f", {count(done.expired, 'expired key')} left out" if done.expired else ""
        print(f"{count(done.written, 'key')} restored from {', '.join(names)}{left}, {seconds:.1f} s")


def prune(
    where: Where,
    keep: Annotated[int, typer.Option(min=0, help="Number of newest snapshots to keep")] = 0,
    daily: Daily = 0,
    weekly: Weekly = 0,
    monthly: Monthly = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed")] = False,
    json: Json = False,
) -> None:
    """Remove snapshots outside of the retention. Snapshots that kept ones build on stay, and so does the newest.

    Snapshots under a legal hold stay, too. Unfinished work of killed jobs is removed if nothing can continue it.
    """
    from kvstore.spark.snapshots import prune as job
    from kvstore.spark.snapshots.chains import SnapshotRetention
    from kvstore.spark.snapshots.places import store_at

    try:
        retention = SnapshotRetention(newest=keep, days=daily, weeks=weekly, months=monthly)
    except InvalidRequest as error:
        raise typer.BadParameter(str(error)) from None
    store, _ = store_at(where)
    with tools.reporting_errors("run it again"), tools.Bar() as progress:
        done = job.prune(store, retention, progress, dry_run=dry_run)
    tools.report_busy(done.busy)
    if json:
        print(as_json({**tools.pruned_document(done), "dry_run": dry_run}))
    else:
        print("\n".join(tools.pruned_lines(done, "would remove" if dry_run else "removed") or ["nothing to do"]))
        if dry_run:
            print("\n".join(f"would keep {name}: {', '.join(tags)}" for name, tags in sorted(done.kept.items())))


def legal_hold(
    where: Where,
    wanted: Annotated[str, typer.Argument(metavar="ID", help="Id of the snapshot")],
    reason: Annotated[str | None, typer.Option(help="Why it must stay, for example the number of a case")] = None,
    release: Annotated[bool, typer.Option("--release", help="End the hold")] = False,
    json: Json = False,
) -> None:
    """Keep a snapshot, and those that it builds on, whatever the retention of prune says, until the hold is released"""
    from kvstore.spark.snapshots.chains import chain_of
    from kvstore.spark.snapshots.legal_holds import REASON_MAX, LegalHold
    from kvstore.spark.snapshots.places import store_at

    if release == (reason is not None):
        raise typer.BadParameter("expected --reason or --release, and not both", param_hint="--reason, --release")
    if reason is not None and not 1 <= len(reason) <= REASON_MAX:
        raise typer.BadParameter(f"expected 1 to {REASON_MAX} characters, got {len(reason)}", param_hint="--reason")
    store, _ = store_at(where)
    with tools.reporting_errors("run it again"):
        if reason is None:
            if not store.release_hold(wanted):
                raise InvalidRequest(f"snapshot {wanted} in {store.root} is not under a legal hold")
            stays = []
        else:
            store.hold(wanted, LegalHold(reason=reason, placed_ms=time.time_ns() // 1_000_000))
            stays = [each.id for each in chain_of(store.load_chain(wanted), wanted)]
    if json:
        print(as_json({"id": wanted, "legal_hold": reason, "kept": stays}))
    elif reason is None:
        print(f"{wanted}: released from its legal hold")
    else:
        print(f"{wanted}: under a legal hold ({reason}); prune keeps {', '.join(stays)}")


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
    key_type: Annotated[str, typer.Option(help="Type of the column key: binary or string")] = "binary",
    value_type: Annotated[
        str,
        typer.Option(help="Type of the column value: binary, string, long, double, json, msgpack, avro or protobuf"),
    ] = "binary",
    value_schema: Annotated[
        str, typer.Option(help="Fields of values in json or msgpack, for example: id BIGINT, name STRING")
    ] = "",
    value_schema_file: Annotated[
        Path | None,
        typer.Option(callback=checked_path, help="Schema of values: an .avsc file, or a FileDescriptorSet of Protobuf"),
    ] = None,
    value_message: Annotated[str, typer.Option(help="Full name of the Protobuf message")] = "",
    value_prefix: Annotated[
        str, typer.Option(help="Bytes before each value that are no part of it, in hexadecimal digits")
    ] = "",
    json: Json = False,
) -> None:
    """Update a Delta table to a snapshot: one row per key, and one table version per snapshot.

    Adds the changes since the snapshot that the table contains. Needs no cluster and no Spark, only the extra `delta`.
    """
    tools.need_spark("pyarrow")
    from kvstore.spark.options import types_of
    from kvstore.spark.snapshots import delta as tables

    try:
        types = types_of(
            {
                "keyType": key_type,
                "valueType": value_type,
                "valueSchema": value_schema,
                "valueSchemaFile": str(value_schema_file or ""),
                "valueMessage": value_message,
                "valuePrefix": value_prefix,
            }
        )
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="--key-type, --value-…") from None
    store, chain, _ = tools.chosen(where, wanted, None, None, of_one_cluster=True)
    with tools.reporting_errors("run it again"), tools.Bar() as progress:
        counted = tools.ProgressCounter(progress, "adding", sum(each.rows for each in chain))
        added = tables.export(store, chain, table, counted, types)
    if json:
        print(as_json({"table": table, "snapshot": chain[-1].id, "added": added}))
    else:
        print(f"{table}: at {chain[-1].id}, {'added ' + ', '.join(added) if added else 'nothing to add'}")
