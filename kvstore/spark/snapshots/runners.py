"""Runners of the work of a snapshot, piece by piece: Spark's tasks, or threads of this process.

A JVM takes seconds to start, and a small snapshot is a second of work. The files are the same: both call `write_piece`.
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
"""What Spark's calls to a JVM raise that is there no more."""
SMALL_ROWS = 200_000
"""Rows that threads of this process write about as soon as Spark has started."""
THREADS = 2
STARVED_S, LOOK_S, JOIN_S = 600.0, 1.0, 5.0
"""A job of which no task runs for so long is given up; how often that is looked at; a look may hang for so long."""
ATTEMPTS = 3
"""Of a piece, as Spark makes them."""
_RAISED = re.compile(r"kvstore\.errors\.(\w+): (.*)")


class Runner(Protocol):
    """Runs the pieces of one snapshot."""

    @property
    def parallelism(self) -> int:
        """Pieces at a time."""

    def wake(self) -> None:
        """Get ready, before servers keep a position. Raises StoreError."""

    def run(self, job: JobContext, pieces: Sequence[SnapshotPart], group: str) -> dict[str, DataFile]:
        """By the names of the pieces, the file of the attempt that counts. Raises StoreError."""

    def cancel(self, group: str) -> None:
        """Have `run` end soon, with an error. Called from another thread."""


class SparkRunner:
    """Tasks of a Spark session."""

    def __init__(self, session: SparkSession) -> None:
        self._session = session

    @property
    def parallelism(self) -> int:
        return self._session.sparkContext.defaultParallelism

    def wake(self) -> None:
        """Have workers started, with the libraries of tasks loaded: a second of a processor for each."""
        workers = self.parallelism
        with self._fed("kvstore snapshot"):
            self._session.sparkContext.parallelize(range(workers), workers).foreach(load_libraries)

    def run(self, job: JobContext, pieces: Sequence[SnapshotPart], group: str) -> dict[str, DataFile]:
        """One task for each piece."""
        context = self._session.sparkContext
        with self._fed(group):
            found = context.parallelize(pieces, len(pieces)).map(lambda piece: (piece.name, write_piece(job, piece)))
            return dict(found.collect())

    @contextmanager
    def _fed(self, group: str) -> Iterator[None]:
        """Run the block's job; end it when Spark has given it no executor for STARVED_S. Spark itself would wait for
        ever, and the servers would keep for ever what the job reads. Raises StoreError."""
        self._session.sparkContext.setJobGroup(group, group, interruptOnCancel=True)
        ended, starved = threading.Event(), threading.Event()

        def watch() -> None:
            fed_at = time.monotonic()
            while not ended.wait(LOOK_S):
                try:
                    if self._has_tasks():
                        fed_at = time.monotonic()
                    elif time.monotonic() - fed_at > STARVED_S:
                        starved.set()
                        self.cancel(group)
                        return
                except Exception as error:  # noqa: BLE001  # whatever a JVM that ends raises; the job fails by that, too
                    log.info("group=%s Spark does not tell whether tasks run: %s", group, error)
                    return

        watcher = threading.Thread(target=watch, name="executors", daemon=True)
        watcher.start()
        try:
            yield
        except Exception as error:  # whatever Spark and its JVM raise
            if starved.is_set():
                raise Unavailable(
                    f"Spark has given the job no executor for {STARVED_S / 60:g} minutes: see whether its workers live "
                    "and have room"
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
    """Threads of this process; needs pyarrow only."""

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
            except BaseException:  # also an interrupt: what is under way stops at its next batch
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
                log.warning("piece=%s attempt=%d failed, is made again: %s", piece.name, attempt, error)
        raise AssertionError("the last attempt returns or raises")

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise Unavailable("the snapshot was given up")

    def cancel(self, group: str) -> None:
        self._cancelled.set()


def is_small(wanted: SnapshotRequest) -> bool:
    """Whether the snapshot is not worth a JVM, by what the servers say now. Raises StoreError."""
    try:
        with FeedReader(wanted.cluster, wanted.instance) as feed:
            feeds = feed.positions()
    except PermissionDenied:
        return True  # it will be refused, and need not wait for a JVM to be told by which right
    if wanted.parent is not None:
        starts = behind(wanted.parent, feeds)
        since = (max(0, each.latest - starts[each.partition]) for each in feeds if each.partition in starts)
        return sum(since) <= SMALL_ROWS
    if sum(each.latest for each in feeds) <= SMALL_ROWS:
        return True  # there are no more keys than changes
    try:
        with Client(wanted.cluster) as client:
            return client.count() <= SMALL_ROWS
    except PermissionDenied:  # who takes snapshots need not be one who reads
        return False


def failure_of(error: Exception) -> StoreError:
    """Find the error that a task has raised in Spark's pages of two stacks."""
    if isinstance(error, ConnectionError) or type(error).__name__ in LOST:
        return errors.Unavailable("the Spark job failed: its JVM was killed, perhaps for want of memory: run it again")
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
    told = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)][-1:]
    rest = [line for line in lines if not line.startswith("at ")]
    return errors.Unavailable(f"the Spark job failed: {(told or rest or [type(error).__name__])[0][:500]}")
