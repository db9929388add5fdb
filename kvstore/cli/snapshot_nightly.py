"""`kvstore snapshot nightly`: the whole nightly job in one command, for a timer or a scheduler."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli import snapshot_tools as tools
from kvstore.cli.cluster import LOCAL, ClusterOptions, Json
from kvstore.cli.output import as_json
from kvstore.cli.run_event import event_of, send_or_fault, url_fault
from kvstore.cli.snapshot_options import Daily, MetricsFile, Monthly, To, Weekly
from kvstore.cli.snapshot_taking import NIGHTLY, Taker, TakingOptions
from kvstore.errors import Corrupted, MetadataUnavailable, OutcomeUnknown, Retryable, StoreError

if TYPE_CHECKING:
    from kvstore.spark.snapshots.chains import SnapshotRetention
    from kvstore.spark.snapshots.manifest import Manifest
    from kvstore.spark.snapshots.prune import PruneResult
    from kvstore.spark.snapshots.store import SnapshotStore
    from kvstore.spark.snapshots.verify import Problem

OUTCOMES = {"done": 0, "failed": 1, "unavailable": 3, "damaged": 4, "interrupted": 130}
"""Outcomes with their exit codes. 2 is wrong usage."""
DAY_MS = 86_400_000


def checked_url(url: str | None) -> str | None:
    """Check the address of the receiver. Raises BadParameter."""
    if url is not None and (fault := url_fault(url)):
        raise typer.BadParameter(fault)
    return url


def nightly(
    to: To,
    full_days: Annotated[
        int, typer.Option(min=1, help="Also take a full snapshot once the last one is this many days old")
    ] = 7,
    keep: Annotated[int, typer.Option(min=1, help="Number of newest snapshots to keep")] = 2,
    daily: Daily = 8,
    weekly: Weekly = 5,
    monthly: Monthly = 12,
    notify: Annotated[
        str | None,
        typer.Option(
            callback=checked_url,
            envvar="KVSTORE_SNAPSHOT_NOTIFY",
            show_envvar=False,
            help="URL that gets the result as an OpenLineage run event; also KVSTORE_SNAPSHOT_NOTIFY",
        ),
    ] = None,
    metrics_file: MetricsFile = None,
    taking: TakingOptions = NIGHTLY,
    cluster: ClusterOptions = LOCAL,
    json: Json = False,
) -> None:
    """Take tonight's snapshot, verify it, remove old snapshots, and report the result.

    The snapshot is incremental if it can be; a full one follows if the last full one is --full-days old, or damaged.
    Nothing is removed if anything is damaged. Exit code 0: done; 1: refused or failed; 2: wrong usage; 3: the
    cluster or the directory did not answer, so run it again, which continues; 4: taken, but files are damaged.
    """
    from kvstore.spark.snapshots.chains import SnapshotRetention
    from kvstore.spark.snapshots.places import open_store

    retention = SnapshotRetention(newest=keep, days=daily, weeks=weekly, months=monthly)
    night = Night()
    try:
        store = open_store(to)
        store.check_writable()
        night.taker = Taker(store, cluster, *tools.cluster_of(cluster), taking, night.warn)
        night.take(night.taker, full_days)
        night.verify(night.taker)
        night.prune(store, retention)
    except (StoreError, OSError) as error:
        night.fail(error)
    except KeyboardInterrupt:
        night.outcome, night.error = "interrupted", f"interrupted; {tools.how_to_continue(taking.pin_minutes)}"
    if metrics_file is not None:
        night.write_metrics(to, metrics_file)
    if notify is not None:
        night.notify(notify)
    print(as_json(night.document()) if json else night.text())
    if night.error:
        tools.report(night.error)
    raise typer.Exit(OUTCOMES[night.outcome])


@dataclass(slots=True)
class Night:
    """The steps of one night, and their result as far as it has come."""

    taker: Taker | None = None
    """None until the directory and the cluster have answered."""
    outcome: str = "done"
    error: str | None = None
    taken: list[Manifest] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    pruned: PruneResult | None = None
    warnings: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def take(self, taker: Taker, full_days: int) -> None:
        """Take the incremental snapshot, and a full one if the last full one is `full_days` old. The incremental comes
        first, so that the day before can be restored to the moment. Raises StoreError."""
        from kvstore.spark.snapshots.chains import complete_until_ms

        newest = taker.take(incremental=True, full_instead=lambda why: tools.full_instead(why, self.warn))
        self.taken.append(newest)
        days = (complete_until_ms(newest) - complete_until_ms(_chain(taker.store, newest)[0])) / DAY_MS
        if round(days) >= full_days:  # timers are never on time, so a night is a day give or take half a day
            self.taken.append(taker.take(incremental=False))

    def verify(self, taker: Taker) -> None:
        """Verify the new snapshots with all that they build on. If an incremental one is of no use because something
        that it builds on is damaged, take a full one. Raises Corrupted if anything is damaged, StoreError."""
        chains = {each.id: each for new in self.taken for each in _chain(taker.store, new)}
        self.problems = tools.problems_of(taker.store, list(chains.values()))
        if not self.problems:
            return
        found = f"{len(self.problems)} files are damaged or missing; nothing was removed"
        if self.taken[-1].parent is not None:
            self.taken.append(taker.take(incremental=False))
            self.problems += tools.problems_of(taker.store, self.taken[-1:])
            found = f"{found}, and a full snapshot was taken: {self.taken[-1].id}"
        raise Corrupted(found)

    def prune(self, store: SnapshotStore, retention: SnapshotRetention) -> None:
        """Remove the snapshots that the retention does not keep. Raises StoreError, OSError."""
        from kvstore.spark.snapshots.prune import prune

        with tools.Bar() as progress:
            self.pruned = prune(store, retention, progress)
        tools.report_busy(self.pruned.busy)

    def warn(self, text: str) -> None:
        """Note and report something that does not change the outcome."""
        self.warnings.append(text)
        tools.report(text)

    def fail(self, error: StoreError | OSError) -> None:
        """Note the error that ended the night."""
        passes = isinstance(error, Retryable | OutcomeUnknown | MetadataUnavailable)
        is_damage = isinstance(error, Corrupted) and bool(self.taken)
        self.outcome = "damaged" if is_damage else "unavailable" if passes else "failed"
        self.error = str(error) or type(error).__name__

    def write_metrics(self, to: str, path: Path) -> None:
        """Write the state of the directory, whatever the outcome. An error does not change the outcome."""
        from kvstore.cli.snapshot_metrics import write_metrics
        from kvstore.spark.snapshots.inventory import inventory_of
        from kvstore.spark.snapshots.places import store_at

        try:
            write_metrics(path, inventory_of(store_at(to)[0]))
        except (StoreError, OSError) as error:
            self.warn(f"{path} could not be written: {error}")

    def notify(self, url: str) -> None:
        """Send the result. An error does not change the outcome."""
        event = event_of(self.document(), self.taker.instance if self.taker else "")
        if fault := send_or_fault(url, event):
            self.warn(f"the run event could not be sent: {fault}")

    def document(self) -> dict[str, Any]:
        """Return the result for `--json` and for the run event."""
        path_of = self.taker.store.folder if self.taker else None
        return {
            "outcome": self.outcome,
            "exit_code": OUTCOMES[self.outcome],
            "error": self.error,
            "snapshots": [{**tools.document(each), "path": str(path_of(each.id))} for each in self.taken if path_of],
            "problems": tools.problem_rows(self.problems),
            "pruned": tools.pruned_document(self.pruned) if self.pruned else None,
            "warnings": self.warnings,
            "seconds": round(time.monotonic() - self.began, 1),
        }

    def text(self) -> str:
        """Return the result in lines."""
        lines = [f"{each.id}: {tools.sentence(each)}" for each in self.taken]
        lines += tools.problem_lines(self.problems)
        lines += tools.pruned_lines(self.pruned) if self.pruned is not None else []
        return "\n".join([*lines, f"{self.outcome}, {self.document()['seconds']} s"])


def _chain(store: SnapshotStore, newest: Manifest) -> Sequence[Manifest]:
    from kvstore.spark.snapshots.chains import chain_of

    return chain_of(store.load_chain(newest.id), newest.id)
