"""Takes a snapshot. Tasks write one file each (runners.py), and the driver writes the manifest last.

Until the manifest is written, nothing in the store of snapshots counts as a snapshot. If a driver is killed, the next
driver continues the work while the servers still keep the pinned positions.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from kvstore.client.core.config import ClientConfig
from kvstore.client.feed import FeedReader
from kvstore.client.pinned.pins import renew_pin
from kvstore.errors import InvalidRequest, NoSuchPin, PositionTrimmed, StoreError
from kvstore.spark.cluster import time_of
from kvstore.spark.snapshots.directory import explaining_full_disk
from kvstore.spark.snapshots.manifest import Manifest, SnapshotKind
from kvstore.spark.snapshots.planning import (
    NotContinuable,
    SnapshotRequest,
    behind,
    pin_name,
    plan_snapshot,
    release_pin,
)
from kvstore.spark.snapshots.remote import Location, RemotePath
from kvstore.spark.snapshots.runners import Runner
from kvstore.spark.snapshots.store import WORK, SnapshotStore
from kvstore.spark.snapshots.tasks import JobContext
from kvstore.spark.snapshots.work import SnapshotPlan, Work

log = logging.getLogger(__name__)


class ProgressCallback(Protocol):
    """Receives the progress of a job: the current step, the amount done and the total. May be called from any
    thread."""

    def __call__(self, what: str, done: int, total: int | None) -> None: ...


def create(
    store: SnapshotStore,
    wanted: SnapshotRequest,
    runner: Runner,
    progress: ProgressCallback,
    published: Callable[[Manifest], None] = lambda _: None,
) -> Manifest:
    """Take a snapshot in `store` and return its manifest.

    Calls `published` with the manifest while the snapshot's pin still retains the logs, so that the callback can retain
    them for the next snapshot. Raises StoreError or OSError; then there is no new snapshot, and the next call with the
    same request may continue the work.
    """
    with explaining_full_disk(store.root):
        store.begin()
        progress("starting workers", 0, None)
        runner.wake()
        progress("looking for work of a killed job", 0, None)
        work, plan = resumed_or_none(store, wanted) or _begun(store, wanted, progress)
        manifest = _finished(store, work, plan, wanted, runner, progress)
        try:
            published(manifest)
        finally:
            _release_pin(wanted.cluster, plan)
        return manifest


def or_full(
    take: Callable[[SnapshotRequest], Manifest], wanted: SnapshotRequest, report: Callable[[StoreError], None]
) -> Manifest:
    """Take a snapshot with `take`. If the request is incremental and its parent cannot be continued, pass the reason
    to `report` and take a full snapshot instead."""
    try:
        return take(wanted)
    except NotContinuable as error:
        report(error)
        return take(replace(wanted, parent=None))


def _finished(
    store: SnapshotStore,
    work: Work,
    plan: SnapshotPlan,
    wanted: SnapshotRequest,
    runner: Runner,
    progress: ProgressCallback,
) -> Manifest:
    try:
        return _make(store, work, plan, wanted, runner, progress)
    except (NoSuchPin, PositionTrimmed, InvalidRequest):
        work.remove()  # nobody can continue it
        _release_pin(wanted.cluster, plan)
        raise
    except BaseException:
        work.release()
        raise


def _begun(store: SnapshotStore, wanted: SnapshotRequest, progress: ProgressCallback) -> tuple[Work, SnapshotPlan]:
    progress("pinning the store", 0, None)
    plan = plan_snapshot(wanted, time_of(wanted.cluster))
    try:
        work = Work.begin(store, plan)
        if plan.parent is not None and not store.may_continue(plan.parent):
            work.remove()
            raise NotContinuable(f"snapshot {plan.parent} is being removed; take a full snapshot")
        return work, plan
    except BaseException:
        _release_pin(wanted.cluster, plan)
        raise


def resumed_or_none(store: SnapshotStore, wanted: SnapshotRequest) -> tuple[Work, SnapshotPlan] | None:
    """Return the work that an ended driver left for the same request, if its pin is alive; otherwise None. Removes
    work that can no longer be continued."""
    for folder in store.remains():
        work = Work.abandoned_or_none(store, folder) if folder.name.startswith(WORK) else None
        if work is None:
            continue
        plan = work.plan_or_none()
        if plan is None or plan.id in store.ids():
            work.remove()  # killed before it started, or after it was published
        elif store.keys and wanted.fits(plan):
            work.remove()  # plans and notes are unsigned: this driver must not sign data that others may have written
        elif wanted.fits(plan) and not _renewed(plan, wanted):
            work.remove()
        elif wanted.fits(plan):
            log.warning("snapshot=%s continues the work of a killed driver", plan.id)
            return work, plan
        else:
            work.release()
    return None


def _renewed(plan: SnapshotPlan, wanted: SnapshotRequest) -> bool:
    try:
        _keep_once(wanted, plan)
    except (NoSuchPin, PositionTrimmed):
        log.warning("snapshot=%s its pinned state has expired: starting a new snapshot", plan.id)
        return False
    return True


def _make(
    store: SnapshotStore,
    work: Work,
    plan: SnapshotPlan,
    wanted: SnapshotRequest,
    runner: Runner,
    progress: ProgressCallback,
) -> Manifest:
    winners = work.finished()
    missing = [piece for piece in plan.pieces if piece.name not in winners]
    job = JobContext(
        attempts=work.attempts,
        kind=plan.kind,
        pin=plan.pin,
        positions={each.partition: each.position for each in plan.partitions},
        compression=plan.compression,
        cluster=wanted.cluster,
        instance=wanted.instance,
        bytes_per_s=wanted.bytes_per_s / runner.parallelism,
    )

    def check() -> None:
        done = {note.name.partition(".")[0] for note in work.notes()} | winners.keys()
        progress("writing", sum(piece.rows for piece in plan.pieces if piece.name in done), plan.rows)

    if missing:
        with kept(wanted, plan, runner, check, store.check_s):
            winners |= runner.run(job, missing, f"kvstore snapshot {plan.id}")
    progress("writing", plan.rows, plan.rows)
    ended_ms = _ended_ms(wanted, plan)
    with store.coming_and_going():
        if plan.parent is not None and plan.parent not in store.ids():
            raise NotContinuable(
                f"snapshot {plan.parent} was removed meanwhile, but {plan.id} continues it; take a full snapshot"
            )
        return work.publish(plan, winners, ended_ms)


def _ended_ms(wanted: SnapshotRequest, plan: SnapshotPlan) -> int:
    """Return the end time of the snapshot in milliseconds. It is only shown to people, so a failure to read the time
    does not fail the snapshot."""
    try:
        return max(plan.started_ms, time_of(wanted.cluster))
    except StoreError:
        return plan.started_ms


@contextmanager
def kept(
    wanted: SnapshotRequest, plan: SnapshotPlan, runner: Runner, check: Callable[[], None], check_s: float
) -> Iterator[None]:
    """Renew the pin and report progress while the block's job runs, with a check every `check_s` seconds. A lost pin
    cancels the job with NoSuchPin."""
    ended = threading.Event()
    lost: list[StoreError] = []

    def keep() -> None:
        due = time.monotonic() + wanted.pin_ttl_s / 4
        while not ended.wait(check_s):
            try:
                check()
            except (OSError, StoreError) as error:  # an error of the target only affects the progress display
                log.info("snapshot=%s finished files cannot be listed at the moment: %s", plan.id, error)
            if time.monotonic() < due:
                continue
            due = time.monotonic() + wanted.pin_ttl_s / 4
            try:
                _keep_once(wanted, plan)
            except NoSuchPin as error:
                lost.append(error)
                runner.cancel(f"kvstore snapshot {plan.id}")
                return
            except (OSError, StoreError) as error:
                log.warning("snapshot=%s its pin could not be renewed, retrying: %s", plan.id, error)

    keeper = threading.Thread(target=keep, name="pin", daemon=True)
    keeper.start()
    try:
        yield
    except StoreError:
        if lost:
            raise lost[0] from None
        raise
    finally:
        ended.set()
        keeper.join()


def _keep_once(wanted: SnapshotRequest, plan: SnapshotPlan) -> None:
    read = [each.partition for each in plan.partitions if each.ranges]
    renew_pin(wanted.cluster, plan.pin, ttl_s=wanted.pin_ttl_s, partitions=read, identity=wanted.instance)
    if wanted.parent is not None:
        starts = wanted.parent.starts(each.partition for each in plan.partitions if not each.has_left)
        with FeedReader(wanted.cluster, wanted.instance) as feed:
            feed.hold(pin_name(plan.id), starts, wanted.pin_ttl_s)


def _release_pin(cluster: ClientConfig, plan: SnapshotPlan) -> None:
    held = [each.partition for each in plan.partitions] if plan.kind is SnapshotKind.INCREMENTAL else []
    release_pin(cluster, plan.id, held)


def hold_for_next(cluster: ClientConfig, root: Location, manifest: Manifest, hours: float) -> None:
    """Retain the logs after the newest snapshot of a directory for `hours`, so that an incremental snapshot can
    continue it. Raises StoreError."""
    # Each directory has its own hold: another directory's snapshot must not move it.
    place = str(root) if isinstance(root, RemotePath) else str(root.resolve())
    name = f"snapshot-next-{hashlib.sha256(os.fsencode(place)).hexdigest()[:12]}"
    with FeedReader(cluster, manifest.cluster) as feed:
        feed.hold(name, behind(manifest, feed.positions()), hours * 3600)
