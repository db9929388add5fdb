"""A Spark cluster of processes: a master, and two workers of one core that count as two machines.

Spark starts no copy of a task on its own host, so executors of one host show no speculation.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import psutil
import pyspark

from kvstore.spark.session import environment
from tests.waiting import wait_until_blocking

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HOSTS = ("127.0.0.2", "127.0.0.3")
START_S = 120
JAVA_OPTIONS = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"


@contextmanager
def spark_cluster(directory: Path) -> Iterator[str]:
    """Yield the master's address when both workers have joined."""
    with ExitStack() as running:
        said = running.enter_context(_daemon(directory, "master.Master", "127.0.0.1", "--port", "0"))
        master = _awaited(said, r"Starting Spark master at (spark://\S+)")
        each = ("--cores", "1", "--memory", "1g", "--work-dir", str(directory))
        workers = [running.enter_context(_daemon(directory, "worker.Worker", host, *each, master)) for host in HOSTS]
        for worker in workers:
            _awaited(worker, "Successfully registered with master")
        yield master


@contextmanager
def _daemon(directory: Path, kind: str, host: str, *more: str) -> Iterator[Path]:
    """The output in its log."""
    program = Path(pyspark.__file__).parent / "bin" / "spark-class"
    line = [program, f"org.apache.spark.deploy.{kind}", "--host", host, "--webui-port", "0", *more]
    environ = {**os.environ, **environment(os.environ), "SPARK_DAEMON_MEMORY": "256m"}
    log = directory / f"{kind}-{host}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            line, env={**environ, "SPARK_DAEMON_JAVA_OPTS": JAVA_OPTIONS}, stdout=output, stderr=output
        )
    try:
        yield log
    finally:
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for each in family:
            with suppress(psutil.NoSuchProcess):  # executors also end by themselves
                each.kill()
        process.wait(20)
        psutil.wait_procs(family, 20)


def _awaited(log: Path, pattern: str) -> str:
    """Return the match of the pattern's group, or of all of it, in the log."""
    wait_until_blocking(lambda: re.search(pattern, log.read_text()), timeout_s=START_S, what=f"{pattern} in {log}")
    found = re.search(pattern, log.read_text())
    assert found is not None
    return found[found.lastindex or 0]


# ── Spark's information about its tasks ──


def tasks(spark: SparkSession) -> list[dict[str, Any]]:
    """Return all attempts of all tasks so far. The session must have a page (spark.ui.enabled)."""
    stages = _asked(spark, "stages")
    return [
        {**task, "stage": stage["stageId"]}
        for stage in stages
        for task in _asked(spark, f"stages/{stage['stageId']}/{stage['attemptId']}/taskList?length=10000")
    ]


def _asked(spark: SparkSession, path: str) -> Any:
    context = spark.sparkContext
    with urlopen(f"{context.uiWebUrl}/api/v1/applications/{context.applicationId}/{path}", timeout=30) as answer:
        return json.load(answer)


def won_by_copies(spark: SparkSession) -> set[tuple[int, int]]:
    """Return stage and number of the tasks whose speculative copy was used instead of the first attempt."""
    return {
        (each["stage"], each["index"]) for each in tasks(spark) if each["speculative"] and each["status"] == "SUCCESS"
    }
