"""Spark Connect: a program without a JVM, whose server has the data source, reads and writes a real cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Client
from kvstore.spark.pins import hold
from tests.cluster.harness import Cluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.cluster]

PROGRAM = """
import json, sys
from pyspark.sql import SparkSession

spark = SparkSession.builder.remote(sys.argv[1]).getOrCreate()
where, held = json.loads(sys.argv[2]), json.loads(sys.argv[3])
report = lambda **more: print(json.dumps(more), flush=True)
spark.conf.set("spark.connect.session.planCache.enabled", "false")  # so that what holds the moment is the pin

frame = spark.read.format("kvstore").options(**held, prefix="c-", keyType="string", valueType="long").load()
frame.createOrReplaceTempView("counts")
report(count=frame.count(), sum=spark.sql("select sum(value) from counts where key < 'c-2'").first()[0])
sys.stdin.readline()  # something else is written meanwhile
some = frame.where("value >= 290").select("key").join(frame, "key")
report(joined=sorted(map(list, some.select("key", "value").collect())))
one = spark.read.format("kvstore").options(**where, keys='["c-3"]', valueType="long").load()
report(keys=[row.value for row in one.collect()])
rows = spark.createDataFrame([(b"w-1", b"a"), (b"w-2", None)], "key binary, value binary")
rows.write.format("kvstore").options(**where, onNull="delete").mode("append").save()
try:
    spark.read.format("kvstore").options(**where, bogus="1").load().count()
except Exception as error:
    report(error=str(error))
report(session=type(spark).__module__, kvstore="kvstore" in sys.modules)
"""


@pytest.fixture(scope="module")
def cluster(shared_cluster: Cluster) -> Cluster:
    return shared_cluster


@pytest.fixture
def remote(spark: SparkSession) -> Iterator[str]:
    """The URL of Connect's server in the JVM that the other tests share."""
    spark_context: Any = spark.sparkContext
    package = spark_context._jvm.org.apache.spark.sql.connect.service
    package.SparkConnectService.start(spark_context._jsc.sc())
    try:
        yield f"sc://127.0.0.1:{getattr(getattr(package, 'SparkConnectService$'), 'MODULE$').localPort()}"
    finally:
        nothing = spark_context._jvm.scala.Option.empty()
        package.SparkConnectService.stop(nothing, nothing)


def test_program_that_connects_reads_and_writes_the_store(remote: str, cluster: Cluster, tmp_path: Path) -> None:
    where = {"dataDir": str(cluster.local.data_dir)}
    with Client(cluster.url + "?timeout=20s") as client:
        stored = {b"c-%d" % number: b"%d" % number for number in range(300)}
        client.put_many(stored)
        client.put(b"w-2", b"goes")
        with hold(where) as pin:
            words = [remote, json.dumps(where), json.dumps(pin.options)]
            command = [sys.executable, "-c", PROGRAM, *words]
            with (tmp_path / "errors").open("w") as errors:
                program = subprocess.Popen(command, text=True, stdin=PIPE, stdout=PIPE, stderr=errors, cwd=tmp_path)
            try:
                assert program.stdin is not None
                assert program.stdout is not None
                first = program.stdout.readline()
                client.put_many({b"c-295": b"0", b"c-300": b"300"})
                out, _ = program.communicate("go on\n", timeout=300)
            finally:
                program.kill()
                program.wait()
        assert program.returncode == 0, (tmp_path / "errors").read_text()[-3000:]
        found = {name: each for line in (first + out).splitlines() for name, each in json.loads(line).items()}
        assert (found["session"], found["kvstore"]) == ("pyspark.sql.connect.session", False)
        assert found["count"] == 300
        assert found["sum"] == sum(int(value) for key, value in stored.items() if key < b"c-2")
        assert found["joined"] == [[f"c-{number}", number] for number in range(290, 300)], "of the moment that is held"
        assert found["keys"] == [3]
        assert "kvstore.errors.ConfigError: unknown option 'bogus' for reading" in found["error"]
        assert [(key, item.value) for key, item in client.scan(prefix=b"w-")] == [(b"w-1", b"a")]
