"""Runs the parts of a snapshot, with Spark's tasks or with threads of this process.

Starting a JVM takes seconds, while a small snapshot takes one second of work. Both runners call `write_piece`, so they
write equal files.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from kvstore import errors
from kvstore.client.blocking.client import Client
from kvstore.client.feed import FeedReader
from kvstore.errors import NoSuchPin, PermissionDenied, PositionTrimmed, Retryable, StoreError, Unavailable
from kvstore.spark.snapshots.manifest import DataFile
from kvstore.spark.snapshots.planning import NotContinuable, SnapshotRequest, behind
from kvstore.spark.snapshots.tasks import JobContext, load_libraries, write_piece
from kvstore.spark.snapshots.work import SnapshotPart

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)
LOST = ("Py4JError", "Py4JNetworkError")
"""Errors of Spark's calls to a JVM that has ended."""
SMALL_ROWS = 200_000
"""Number of rows that threads of this process write in about the time that Spark takes to start."""
THREADS = 2
STARVED_S, POLL_S, JOIN_S = 600.0, 1.0, 5.0
"""Seconds without a running task after which a job is abandoned, seconds between checks, and maximum seconds that a
check may take."""
ATTEMPTS = 3
"""Attempts per part, the same as in Spark."""
_RAISED = re.compile(r"kvstore\.errors\.(\w+): (.*)")


class Runner(Protocol):
    """Runs the parts of one snapshot."""

    @property
    def parallelism(self) -> int:
        """Number of parts that run at the same time."""

    def wake(self) -> None:
        """Start the workers. Called before the store is pinned, so that the servers need not keep the pinned state
        while workers start. Raises StoreError."""

    def run(self, job: JobContext, pieces: Sequence[SnapshotPart], group: str) -> dict[str, DataFile]:
        """Write all parts, and return the file of each part's successful attempt by the part's name. `group`
        identifies the run for `cancel`. Raises StoreError."""

    def cancel(self, group: str) -> None:
        """Make the `run` of this group end soon with an error. May be called from another thread."""


class SparkRunner:
    """Runs the parts of a snapshot as tasks of a Spark session."""

    def __init__(self, session: SparkSession) -> None:
        self._session = session

    @property
    def parallelism(self) -> int:
        return self._session.sparkContext.defaultParallelism

    def wake(self) -> None:
        """Start workers and load the libraries of tasks, which costs a second of processor time per worker."""
        workers = self.parallelism
        with self._with_executors("kvstore snapshot"):
            self._session.sparkContext.parallelize(range(workers), workers).foreach(load_libraries)

    def run(self, job: JobContext, pieces: Sequence[SnapshotPart], group: str) -> dict[str, DataFile]:
        """Run one task per part."""
        context = self._session.sparkContext
        with self._with_executors(group):
            found = context.parallelize(pieces, len(pieces)).map(lambda piece: (piece.name, write_piece(job, piece)))
            return dict(found.collect())

    @contextmanager
    def _with_executors(self, group: str) -> Iterator[None]:
        """Run the job of the block, and cancel it if Spark gives it no executor for STARVED_S seconds. Without this,
        Spark would wait forever, and the servers would keep the pinned state forever. Raises StoreError."""
        self._session.sparkContext.setJobGroup(group, group, interruptOnCancel=True)
        ended, starved = threading.Event(), threading.Event()

        def watch() -> None:
            fed_at = time.monotonic()
            while not ended.wait(POLL_S):
                try:
                    if self._has_tasks():
                        fed_at = time.monotonic()
                    elif time.monotonic() - fed_at > STARVED_S:
                        starved.set()
                        self.cancel(group)
                        return
                except Exception as error:  # noqa: BLE001  # any error of a JVM that ends; the job fails for the same reason
                    log.info("group=%s cannot check if tasks run: %s", group, error)
                    return

        watcher = threading.Thread(target=watch, name="executors", daemon=True)
        watcher.start()
        try:
            yield
        except Exception as error:  # any error of Spark or its JVM
            if starved.is_set():
                raise Unavailable(
                    f"Spark gave the job no executor for {STARVED_S / 60:g} minutes; check that its workers are alive "
                    "and "
                    "have free cores and memory"
                ) from None
            raise failure_of(error) from error
        finally:
            ended.set()
            watcher.join(JOIN_S)

    def _has_tasks(self) -> bool:
        tracker = self._session.sparkContext.statusTracker()
        stages = map(tracker.getStageInfo, tracker.getActiveStageIds())
        return any(stage is not None and stage.numActiveTasks for stage in stages)

    def cancel(self, group: str) -> None:
        self._session.sparkContext.cancelJobGroup(group)


class ThreadRunner:
    """Runs the parts of a snapshot in threads of this process. Needs only pyarrow."""

    parallelism = THREADS

    def __init__(self) -> None:
        self._cancelled = threading.Event()

    def wake(self) -> None:
        load_libraries(None)

    def run(self, job: JobContext, pieces: Sequence[SnapshotPart], group: str) -> dict[str, DataFile]:
        found: dict[str, DataFile] = {}
        with ThreadPoolExecutor(self.parallelism, "piece") as threads:
            running = {threads.submit(self._piece, job, piece): piece for piece in pieces}
            try:
                for each in as_completed(running):
                    found[running[each].name] = each.result()
            except BaseException:  # also an interrupt: parts in progress stop at their next batch
                self._cancelled.set()
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        return found

    def _piece(self, job: JobContext, piece: SnapshotPart) -> DataFile:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return write_piece(job, piece, self._check)
            except PositionTrimmed as error:
                raise NotContinuable(str(error)) from None
            except NoSuchPin:
                raise
            except Retryable as error:
                if attempt == ATTEMPTS or self._cancelled.is_set():
                    raise
                log.warning("piece=%s attempt=%d failed, retrying: %s", piece.name, attempt, error)
        raise AssertionError("the last attempt returns or raises")

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise Unavailable("the snapshot was cancelled")

    def cancel(self, group: str) -> None:
        self._cancelled.set()


def is_small(wanted: SnapshotRequest) -> bool:
    """Return True if the snapshot has so few rows, by the servers' current figures, that a JVM would not pay off.
    Raises StoreError."""
    try:
        with FeedReader(wanted.cluster, wanted.instance) as feed:
            feeds = feed.positions()
    except PermissionDenied:
        return True  # the snapshot will be refused; report it without starting a JVM
    if wanted.parent is not None:
        starts = behind(wanted.parent, feeds)
        since = (max(0, each.latest - starts[each.partition]) for each in feeds if each.partition in starts)
        return sum(since) <= SMALL_ROWS
    if sum(each.latest for each in feeds) <= SMALL_ROWS:
        return True  # there are no more keys than changes
    try:
        with Client(wanted.cluster) as client:
            return client.count() <= SMALL_ROWS
    except PermissionDenied:  # a user who takes snapshots may lack the right to read
        return False


def failure_of(error: Exception) -> StoreError:
    """Return the error that a task raised, extracted from Spark's stack traces."""
    if isinstance(error, ConnectionError) or type(error).__name__ in LOST:
        return errors.Unavailable(
            "the Spark job failed: its JVM was killed, perhaps because it was out of memory; run it again"
        )
    text = str(error)
    found = _RAISED.findall(text)
    if found:
        name, message = found[-1]
        kind = getattr(errors, name, None)
        message = message.strip()
        if isinstance(kind, type) and issubclass(kind, StoreError) and kind.__init__ is StoreError.__init__:
            return kind(message)
        return NotContinuable(message) if kind is PositionTrimmed else errors.OutcomeUnknown(f"{name}: {message}")
    lines = [line.strip().removeprefix(": ") for line in text.splitlines() if line.strip()]
    exceptions = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)][-1:]
    rest = [line for line in lines if not line.startswith("at ")]
    return errors.Unavailable(f"the Spark job failed: {(exceptions or rest or [type(error).__name__])[0][:500]}")
