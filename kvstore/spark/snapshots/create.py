"""Takes a snapshot: tasks that write one file each (runners.py), and a driver that names them last.

Until that last step there is nothing that looks like a snapshot. A driver that is killed leaves its work, and the next
one goes on with it while the servers still keep the pinned positions.
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
from kvstore.spark.snapshots.directory import room_at
from kvstore.spark.snapshots.manifest import Manifest, SnapshotKind
from kvstore.spark.snapshots.planning import NotContinuable, SnapshotRequest, behind, give_back, pin_name, plan_snapshot
from kvstore.spark.snapshots.remote import Location, RemotePath
from kvstore.spark.snapshots.runners import Runner
from kvstore.spark.snapshots.store import WORK, SnapshotStore
from kvstore.spark.snapshots.tasks import JobContext
from kvstore.spark.snapshots.work import SnapshotPlan, Work

log = logging.getLogger(__name__)


class ProgressCallback(Protocol):
    """Told of progress: what is being done, how much of how much is done. Called from any thread."""

    def __call__(self, what: str, done: int, total: int | None) -> None: ...


def create(
    store: SnapshotStore,
    wanted: SnapshotRequest,
    runner: Runner,
    progress: ProgressCallback,
    published: Callable[[Manifest], None] = lambda _: None,
) -> Manifest:
    """A new snapshot in `store`; `published` is told of it while its pin still holds the logs. Raises StoreError,
    OSError: then there is none, and what was done may be gone on with by the next call that wants the same."""
    with room_at(store.root):
        store.begin()
        progress("starting workers", 0, None)
        runner.wake()
        progress("looking for what a killed job has left", 0, None)
        work, plan = resumed_or_none(store, wanted) or _begun(store, wanted, progress)
        manifest = _finished(store, work, plan, wanted, runner, progress)
        try:
            published(manifest)
        finally:
            _give_back(wanted.cluster, plan)
        return manifest


def or_full(
    take: Callable[[SnapshotRequest], Manifest], wanted: SnapshotRequest, told: Callable[[StoreError], None]
) -> Manifest:
    """Take a snapshot by `take`, or a full one where what is to be continued cannot be: `told` hears why."""
    try:
        return take(wanted)
    except NotContinuable as error:
        told(error)
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
        work.remove()  # nobody can go on with it
        _give_back(wanted.cluster, plan)
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
            raise NotContinuable(f"snapshot {plan.parent} is being removed: take a full one")
        return work, plan
    except BaseException:
        _give_back(wanted.cluster, plan)
        raise


def resumed_or_none(store: SnapshotStore, wanted: SnapshotRequest) -> tuple[Work, SnapshotPlan] | None:
    """Work of a driver that has ended, if it was after the same thing and its pin lives; what cannot be resumed any
    more is removed."""
    for folder in store.remains():
        work = Work.of_the_dead_or_none(store, folder) if folder.name.startswith(WORK) else None
        if work is None:
            continue
        plan = work.plan_or_none()
        if plan is None or plan.id in store.ids():
            work.remove()  # killed before it had begun, or behind what made it a snapshot
        elif store.keys and wanted.fits(plan):
            work.remove()  # plans and notes are not signed: this driver must not sign what others may have put there
        elif wanted.fits(plan) and not _renewed(plan, wanted):
            work.remove()
        elif wanted.fits(plan):
            log.warning("snapshot=%s goes on with what a driver that was killed has left", plan.id)
            return work, plan
        else:
            work.release()
    return None


def _renewed(plan: SnapshotPlan, wanted: SnapshotRequest) -> bool:
    try:
        _keep_once(wanted, plan)
    except (NoSuchPin, PositionTrimmed):
        log.warning("snapshot=%s what it reads is not kept any more: a new one is begun", plan.id)
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

    def look() -> None:
        done = {note.name.partition(".")[0] for note in work.notes()} | winners.keys()
        progress("writing", sum(piece.rows for piece in plan.pieces if piece.name in done), plan.rows)

    if missing:
        with kept(wanted, plan, runner, look, store.look_s):
            winners |= runner.run(job, missing, f"kvstore snapshot {plan.id}")
    progress("writing", plan.rows, plan.rows)
    ended_ms = _ended_ms(wanted, plan)
    with store.coming_and_going():
        if plan.parent is not None and plan.parent not in store.ids():
            raise NotContinuable(
                f"snapshot {plan.parent} was removed meanwhile, and {plan.id} continues it: take a full one"
            )
        return work.publish(plan, winners, ended_ms)


def _ended_ms(wanted: SnapshotRequest, plan: SnapshotPlan) -> int:
    """For people; not worth a snapshot."""
    try:
        return max(plan.started_ms, time_of(wanted.cluster))
    except StoreError:
        return plan.started_ms


@contextmanager
def kept(
    wanted: SnapshotRequest, plan: SnapshotPlan, runner: Runner, look: Callable[[], None], look_s: float
) -> Iterator[None]:
    """Renews the pin, and looks at progress, while the job runs. A pin that is lost ends the job: NoSuchPin."""
    ended = threading.Event()
    lost: list[StoreError] = []

    def keep() -> None:
        due = time.monotonic() + wanted.pin_ttl_s / 4
        while not ended.wait(look_s):
            try:
                look()
            except (OSError, StoreError) as error:  # of where it is written: only progress is not told
                log.info("snapshot=%s what is finished cannot be listed just now: %s", plan.id, error)
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
                log.warning("snapshot=%s its pin could not be renewed, will be tried again: %s", plan.id, error)

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


def _give_back(cluster: ClientConfig, plan: SnapshotPlan) -> None:
    held = [each.partition for each in plan.partitions] if plan.kind is SnapshotKind.INCREMENTAL else []
    give_back(cluster, plan.id, held)


def hold_for_next(cluster: ClientConfig, root: Location, manifest: Manifest, hours: float) -> None:
    """Keep the logs behind the newest snapshot of a directory, so that an incremental can continue it. Raises
    StoreError."""
    # Each directory has a hold of its own: another's snapshot must not move it on.
    place = str(root) if isinstance(root, RemotePath) else str(root.resolve())
    name = f"snapshot-next-{hashlib.sha256(os.fsencode(place)).hexdigest()[:12]}"
    with FeedReader(cluster, manifest.cluster) as feed:
        feed.hold(name, behind(manifest, feed.positions()), hours * 3600)
