"""A Spark session and a real cluster for each test file that uses them: a JVM takes seconds to start, and a context
some more, so a worker process has one of each for all of its files. Files that use only their own keys also share a
cluster, as far as one worker runs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from kvstore.cli.snapshot_tools import QUICK_START
from kvstore.spark.session import open_session
from tests.cluster.harness import Cluster, running_cluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS = QUICK_START | {
    "spark.sql.shuffle.partitions": "2",
    # Events in the middle of a task happen between two batches.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "100",
    "spark.driver.memory": "512m",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    # Address of Spark Connect, which tests/spark/end_to_end/test_connect.py starts in the same JVM.
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.connect.grpc.binding.port": "0",
}


@pytest.fixture(scope="session")
def context() -> Iterator[None]:
    """The remains of Spark end with the worker process."""
    yield
    stop_spark()


@pytest.fixture(scope="module")
def spark(context: None) -> SparkSession:
    """Two cores, and three attempts per task: plain `local[2]` allows one. Its settings and views belong to the file;
    the context with its Python processes is that of the previous file, if that left one."""
    session = open_session("tests", master="local[2,3]", settings=SETTINGS)
    session.sparkContext.setLogLevel("OFF")  # the error shows the damage that a test makes
    return session.newSession()


def stop_spark() -> None:
    """For tests that need their own context: a process has one at a time."""
    from pyspark.sql import SparkSession

    if SparkSession._instantiatedSession is not None:
        SparkSession._instantiatedSession.stop()


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """For tests that leave all nodes running and read only their own keys."""
    with running_cluster(tmp_path_factory.mktemp("shared")) as running:
        yield running


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = ("partition.memory_bytes=67108864",)  # so that the pins of a restore are visible on the server
    with running_cluster(tmp_path_factory.mktemp("cluster"), settings=settings) as running:
        yield running
