"""A Spark session of its own for each command of `kvstore snapshot` that is worth one, quiet, and ended by an
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
from kvstore.cli.snapshot_tools import AUTO, HERE, NICENESS, NO_SPARK, SETTINGS, Bar, need_spark
from kvstore.errors import StoreError, Unavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kvstore.spark.snapshots.tables import Tables

T = TypeVar("T")
ATTEMPTS = 3
"""Of a task on this machine, where Spark makes one by itself; clusters have their own setting."""
LOOK_S = 0.2
END_S = 10.0
"""What was interrupted has so long to give back what it has pinned."""


def with_tables(
    job: Callable[[Tables[Any]], T],
    is_small: Callable[[], bool],
    master: str,
    conf: Sequence[SparkSetting] | None,
    progress: Bar,
    niceness: int,
    defaults: Mapping[str, str] = SETTINGS,
) -> T:
    """Run `job` on tables of this process if that is wanted or quicker, else on Spark's. Raises what `in_session`
    raises."""
    if is_for_here(master, conf, is_small):
        from kvstore.spark.snapshots.here import HereTables

        os.nice(niceness)
        return job(HereTables())

    def on_spark(session: SparkSession) -> T:
        from kvstore.spark.snapshots.on_spark import SparkTables

        return job(SparkTables(session))

    return in_session(on_spark, master, conf, progress, niceness, defaults)


def is_for_here(master: str, conf: Sequence[SparkSetting] | None, is_small: Callable[[], bool]) -> bool:
    """Whether this process does the work itself: it is told to, or may choose and has little to do."""
    return master == NO_SPARK or (master == AUTO and not conf and is_small())


def in_session(
    job: Callable[[SparkSession], T],
    master: str,
    conf: Sequence[SparkSetting] | None,
    progress: Bar,
    niceness: int = NICENESS,
    defaults: Mapping[str, str] = SETTINGS,
) -> T:
    """Run `job` in a Spark session of its own, which ends with it, and return its result; on this machine so nice.
    Raises ConfigError, and what `job` raises.

    It runs in a thread, since interrupts are raised in the main one: raised amid a call to the JVM, an interrupt leaves
    half an answer for which the next call waits for ever; raised where Python only forgets an object, it is lost.
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
        while not wait([done], LOOK_S).done:
            pass
    except KeyboardInterrupt:
        _end(done)
        if not done.done() or done.exception() is not None:
            raise
    return done.result()


def _end(job: Future[T]) -> None:
    """Its calls to the JVM fail as soon as there is none, also one that it begins only now."""
    from kvstore.spark.session import end_jvm

    over = time.monotonic() + END_S
    while time.monotonic() < over:
        end_jvm()
        if wait([job], LOOK_S).done:
            return


@contextmanager
def spark(
    master: str,
    conf: Sequence[SparkSetting] | None,
    progress: Bar,
    niceness: int = NICENESS,
    defaults: Mapping[str, str] = SETTINGS,
) -> Iterator[SparkSession]:
    """A Spark session of our own, ended with the block. Raises ConfigError."""
    need_spark("pyspark")
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    from kvstore.spark.session import open_session
    from kvstore.spark.snapshots.runners import failure_of

    settings = {**defaults, **dict(conf or ())}
    if one_attempt := re.fullmatch(r"local\[(\*|\d+)\]", master):
        master = f"local[{one_attempt[1]},{ATTEMPTS}]"
    niceness = niceness if master.startswith("local") else 0
    progress("starting Spark", 0, None)
    with aside() as said:
        try:
            session = open_session("kvstore snapshot", master=master, settings=settings, niceness=niceness)
        except StoreError:
            raise
        except Exception as error:  # whatever the launcher and the JVM raise
            raise Unavailable(f"Spark does not start at {master}: {error_line(said()) or error}") from error
    _quiet_py4j()
    try:
        session.sparkContext.setLogLevel("OFF")  # what a task raises is told in one line at the end
        yield session
    except (Py4JError, PySparkException, ConnectionError) as error:  # also while a table is only described
        raise failure_of(error) from error
    finally:
        # The JVM was killed, or interrupted as we were: the work has failed by that or is done.
        with suppress(Py4JError, ConnectionError), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            session.stop()


def _quiet_py4j() -> None:
    """It logs that the JVM has ended, with a stack; so does the server in this process to which the JVM counts."""
    setattr(socketserver.BaseServer, "handle_error", lambda *_: None)  # noqa: B010 - the types know no other method here
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(lambda record: record.module != "java_gateway")


@contextmanager
def aside() -> Iterator[Callable[[], str]]:
    """Send to a file what is written to standard error meanwhile, and for good what processes write that are started
    meanwhile: Spark's greetings, and pages of stack that end in the one line that we tell."""
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
    """The last line that names an error; empty without one."""
    lines = [line.strip() for line in text.splitlines()]
    return next((line for line in reversed(lines) if "Exception" in line or "rror" in line), "")
