"""Runs `kvstore snapshot` jobs in their own Spark session, without Spark's output, and ends the session after an
interrupt."""

from __future__ import annotations

import logging
import os
import re
import socketserver
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.cli.snapshot_options import SparkSetting
from kvstore.cli.snapshot_tools import AUTO, HERE, NICENESS, NO_SPARK, SETTINGS, Bar, give_way, need_spark
from kvstore.errors import StoreError, Unavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kvstore.spark.snapshots.tables import Tables

T = TypeVar("T")
ATTEMPTS = 3
"""Attempts per task on this machine, where Spark makes only one by default. Clusters have their own setting."""
POLL_S = 0.2
END_S = 10.0
"""Seconds for an interrupted job to release its pins."""


def with_tables(
    job: Callable[[Tables[Any]], T],
    is_small: Callable[[], bool],
    master: str,
    conf: Sequence[SparkSetting] | None,
    progress: Bar,
    niceness: int,
    defaults: Mapping[str, str] = SETTINGS,
) -> T:
    """Run `job` on tables of this process if requested or faster, otherwise on Spark's. Raises what `in_session`
    raises."""
    if runs_in_process(master, conf, is_small):
        from kvstore.spark.snapshots.local_tables import LocalTables

        give_way(niceness)
        return job(LocalTables())

    def on_spark(session: SparkSession) -> T:
        from kvstore.spark.snapshots.spark_tables import SparkTables

        return job(SparkTables(session))

    return in_session(on_spark, master, conf, progress, niceness, defaults)


def runs_in_process(master: str, conf: Sequence[SparkSetting] | None, is_small: Callable[[], bool]) -> bool:
    """Return True if this process does the work itself: as requested, or by choice because the work is small."""
    return master == NO_SPARK or (master == AUTO and not conf and is_small())


def in_session(
    job: Callable[[SparkSession], T],
    master: str,
    conf: Sequence[SparkSetting] | None,
    progress: Bar,
    niceness: int = NICENESS,
    defaults: Mapping[str, str] = SETTINGS,
) -> T:
    """Run `job` in its own Spark session, end the session and return the result. Local processes get `niceness`.
    Raises ConfigError, and what `job` raises.

    The job runs in a thread, because Python raises interrupts in the main thread. An interrupt during a call to the JVM
    would leave half a reply, for which the next call would wait forever; one during garbage collection would be lost.
    """
    master = HERE if master == AUTO else master
    done: Future[T] = Future()

    def run() -> None:
        try:
            with spark(master, conf, progress, niceness, defaults) as session:
                found = job(session)
        except BaseException as error:  # noqa: BLE001 - raised in the main thread
            done.set_exception(error)
        else:
            done.set_result(found)

    try:
        threading.Thread(target=run, name="job", daemon=True).start()
        while not wait([done], POLL_S).done:
            pass
    except KeyboardInterrupt:
        _end(done)
        if not done.done() or done.exception() is not None:
            raise
    return done.result()


def _end(job: Future[T]) -> None:
    """End the JVM repeatedly, so that the job's calls to it fail, including calls that it starts later."""
    from kvstore.spark.session import end_jvm

    over = time.monotonic() + END_S
    while time.monotonic() < over:
        end_jvm()
        if wait([job], POLL_S).done:
            return


@contextmanager
def spark(
    master: str,
    conf: Sequence[SparkSetting] | None,
    progress: Bar,
    niceness: int = NICENESS,
    defaults: Mapping[str, str] = SETTINGS,
) -> Iterator[SparkSession]:
    """Yield a Spark session of our own and stop it after the block. Raises ConfigError."""
    need_spark("pyspark")
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    from kvstore.spark.session import open_session
    from kvstore.spark.snapshots.runners import failure_of

    settings = {**defaults, **dict(conf or ())}
    if one_attempt := re.fullmatch(r"local\[(\*|\d+)\]", master):
        master = f"local[{one_attempt[1]},{ATTEMPTS}]"
    niceness = niceness if master.startswith("local") else 0
    os.environ["PYTHONSAFEPATH"] = "1"  # otherwise Spark's workers import modules of the current directory
    progress("starting Spark", 0, None)
    with aside() as output:
        try:
            session = open_session("kvstore snapshot", master=master, settings=settings, niceness=niceness)
        except StoreError:
            raise
        except Exception as error:  # whatever the launcher and the JVM raise
            raise Unavailable(f"Spark does not start at {master}: {error_line(output()) or error}") from error
    _quiet_py4j()
    try:
        session.sparkContext.setLogLevel("OFF")  # errors of tasks are reported in one line at the end
        yield session
    except (Py4JError, PySparkException, ConnectionError) as error:  # also while a table is only being defined
        raise failure_of(error) from error
    finally:
        # The JVM was killed, or interrupted as we were. The job has failed because of that, or is done.
        with suppress(Py4JError, ConnectionError), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            session.stop()


def _quiet_py4j() -> None:
    """Suppress py4j's logs and stacks about the end of the JVM, also those of the accumulator server in this
    process."""
    setattr(socketserver.BaseServer, "handle_error", lambda *_: None)  # noqa: B010 - mypy accepts no other assignment
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(lambda record: record.module != "java_gateway")


@contextmanager
def aside() -> Iterator[Callable[[], str]]:
    """Redirect standard error to a file, for the block and for good for processes that are started in it. This hides
    Spark's greetings, and stacks whose last line we report ourselves."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: os.pread(file.fileno(), 1 << 16, max(0, os.fstat(file.fileno()).st_size - (1 << 16))).decode(
                errors="replace"
            )
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)


def error_line(text: str) -> str:
    """Return the last line that names an error; empty if there is none."""
    lines = [line.strip() for line in text.splitlines()]
    return next((line for line in reversed(lines) if "Exception" in line or "rror" in line), "")
