"""Takes one snapshot for a command of `kvstore snapshot`: with threads of this process or with Spark, recorded in the
cluster, and with the logs retained for the next one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvstore.cli import snapshot_tools as tools
from kvstore.cli.cluster import ClusterOptions
from kvstore.cli.snapshot_options import Compression, Conf, HoldHours, Master, Nice, PinMinutes, Rate
from kvstore.cli.snapshot_spark import in_session, runs_in_process
from kvstore.errors import StoreError

if TYPE_CHECKING:
    from kvstore.client.core.config import ClientConfig
    from kvstore.spark.snapshots.manifest import Manifest
    from kvstore.spark.snapshots.planning import SnapshotRequest
    from kvstore.spark.snapshots.runners import Runner
    from kvstore.spark.snapshots.store import SnapshotStore


@dataclass(frozen=True, slots=True)
class TakingOptions:
    """The options of every command that takes snapshots."""

    pin_minutes: PinMinutes = 15
    hold_hours: HoldHours = 0.0
    rate: Rate = 0.0
    nice: Nice = tools.NICENESS
    master: Master = tools.AUTO
    conf: Conf = None


ONE = TakingOptions()
NIGHTLY = TakingOptions(pin_minutes=60, hold_hours=48.0)


@dataclass(frozen=True, slots=True)
class Taker:
    """How to take snapshots of one cluster in one store of snapshots."""

    store: SnapshotStore
    cluster: ClusterOptions
    config: ClientConfig
    instance: str
    """Id of the cluster."""
    options: TakingOptions
    report: Callable[[str], None] = tools.report
    """Receives what does not change the result, for example that the snapshot could not be recorded."""
    compression: Compression = Compression.zstd
    split_mib: float = tools.SPLIT_MIB
    """Approximate uncompressed MiB in each file."""

    def take(
        self, *, incremental: bool, parent: str | None = None, full_instead: Callable[[StoreError], None] | None = None
    ) -> Manifest:
        """Take a snapshot. With `incremental` or a `parent`, it continues that snapshot, by default the newest one of
        this cluster. With `full_instead`, a snapshot that cannot continue is a full one, and the function receives the
        reason. Raises StoreError; a call with the same arguments continues the work of a killed one."""
        tools.need_spark("pyarrow")
        from kvstore.spark.snapshots import create as job
        from kvstore.spark.snapshots.planning import SnapshotRequest

        continues = incremental or parent is not None
        wanted = SnapshotRequest(
            cluster=self.config,
            instance=self.instance,
            parent=tools.base_or_none(self.store, parent, self.instance, full_instead) if continues else None,
            compression=self.compression,
            split_bytes=int(self.split_mib * (1 << 20)),
            pin_ttl_s=self.options.pin_minutes * 60.0,
            bytes_per_s=self.options.rate * (1 << 20),
        )
        with tools.reporting_errors(tools.how_to_continue(self.options.pin_minutes)), tools.Bar() as progress:
            take = partial(self._run, progress)
            manifest = job.or_full(take, wanted, full_instead) if full_instead else take(wanted)
        tools.record(manifest, self.store.folder(manifest.id), self.cluster, self.report)
        return manifest

    def _run(self, progress: tools.Bar, wanted: SnapshotRequest) -> Manifest:
        """Take the snapshot with threads of this process if requested or faster, otherwise with Spark."""
        from kvstore.spark.snapshots import create as job
        from kvstore.spark.snapshots.runners import SparkRunner, is_small

        options = self.options
        hold = partial(tools.hold, self.config, self.store.root, options.hold_hours, self.report)

        def by(runner: Runner) -> Manifest:
            return job.create(self.store, wanted, runner, progress, hold)

        if runs_in_process(options.master, options.conf, partial(is_small, wanted)):
            return tools.run_in_threads(by, options.nice)
        settings = tools.SETTINGS | tools.QUICK_START
        return in_session(
            lambda session: by(SparkRunner(session)), options.master, options.conf, progress, options.nice, settings
        )
