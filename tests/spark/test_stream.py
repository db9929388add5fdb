"""`spark.readStream.format("kvstore")` with a real Spark and a real cluster: every change once, as it was logged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from examples.analytics import PREFIX_BYTES_MAX, hottest, sizes, value_sizes
from kvstore.client import Client
from kvstore.client.feed import FeedReader
from kvstore.client.pinned.pins import list_pins, unpin
from kvstore.config import Setting
from kvstore.devcluster.settings import with_settings
from tests.cluster.harness import Cluster
from tests.spark.jobs import command, fill, leader_of
from tests.waiting import wait_until_blocking

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import DataStreamWriter, StreamingQuery

pytestmark = [pytest.mark.spark, pytest.mark.cluster]
SMALL_LEDGERS = [
    Setting("partition.retention_ms", 1),
    Setting("partition.trim_s", 0.2),
    Setting("partition.flush_s", 0.2),
    Setting("log.roll_entries", 5),
    Setting("log.check_every_s", 0.1),
]
QUERY_S = 120
"""A run takes seconds. An unanswered call to the JVM blocks others."""
WORKER_LATE, ATTEMPTS = "Python worker failed to connect back", 5
"""Spark's error if a Python worker takes more than 10 s to start, and how often a query is started. No setting changes
this limit, which a machine with more ready processes than processors exceeds now and then."""
Change = tuple[str, bytes, bytes | None, int]
"""Partition, key, value, version."""


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.url + "?timeout=20s") as connected:
        yield connected


class Query:
    """Runs of one streaming query; each ends when it has read the changes that existed when it began."""

    def __init__(self, spark: SparkSession, cluster: Cluster, directory: Path, **options: Any) -> None:
        self._spark, self._checkpoint = spark, str(directory / "checkpoint")
        self._options = {"dataDir": str(cluster.local.data_dir), "columns": "partition,key,value,version", **options}
        self.batches: list[list[Change]] = []
        self.end: dict[str, Any] = {}
        """The offset of the last run."""

    def run(self) -> list[Change]:
        """The changes of this run."""
        known = len(self.batches)
        stream = self._spark.readStream.format("kvstore").options(**self._options).load()
        writer = stream.writeStream.foreachBatch(self._take).option("checkpointLocation", self._checkpoint)
        query = self._ended(writer.trigger(availableNow=True))
        progress = [each for each in query.recentProgress if each["sources"][0]["endOffset"]]
        if progress:
            end = progress[-1]["sources"][0]["endOffset"]
            self.end = json.loads(end) if isinstance(end, str) else end
        return [change for batch in self.batches[known:] for change in batch]

    def _ended(self, writer: DataStreamWriter) -> StreamingQuery:
        """Run the query, again if a Python worker was too late for Spark: nothing was read then."""
        for attempt in range(ATTEMPTS):
            query = writer.start()
            try:
                if query.awaitTermination(QUERY_S):
                    return query
            except Exception as error:
                if WORKER_LATE not in str(error) or attempt == ATTEMPTS - 1:
                    raise
            else:
                query.stop()
                break
        pytest.fail("the query has not come to its end")

    def _take(self, frame: DataFrame, number: int) -> None:
        rows = frame.select("partition", "key", "value", "version").collect()
        self.batches.append(
            [(row[0], bytes(row[1]), None if row[2] is None else bytes(row[2]), row[3]) for row in rows]
        )


def logged(cluster: Cluster, after: dict[str, int]) -> list[Change]:
    """The contents of the logs of all partitions, read without Spark."""
    found: list[Change] = []
    with FeedReader(cluster.url) as feed:
        for each in feed.positions():
            at = after.get(each.partition, 0)
            while at < each.latest:
                page = feed.changes(each.partition, at, until=each.latest)
                values = [
                    None if kind in (3, 4) else value for kind, value in zip(page.kinds, page.values, strict=True)
                ]
                found += zip([each.partition] * len(page.keys), page.keys, values, page.sequences, strict=True)
                at = page.next
    return sorted(found, key=lambda change: (change[0], change[3]))


def in_order(changes: list[Change]) -> list[Change]:
    return sorted(changes, key=lambda change: (change[0], change[3]))


@pytest.fixture(scope="module")
def query(spark: SparkSession, cluster: Cluster, client: Client, tmp_path_factory: pytest.TempPathFactory) -> Query:
    """It begins with the changes that the first test finds in the logs."""
    fill(client, "q-", 500)
    client.delete(b"q-7")
    client.put(b"q-8", b"again")
    return Query(spark, cluster, tmp_path_factory.mktemp("query"), startingPosition="earliest", maxRowsPerTrigger="200")


def test_every_change_comes_once_and_in_portions(query: Query, cluster: Cluster) -> None:
    changes = query.run()
    assert in_order(changes) == logged(cluster, {})
    assert len(query.batches) > 2
    assert max(map(len, query.batches)) <= 200


def test_query_continues_where_it_stopped(query: Query, client: Client) -> None:
    version = client.put(b"later", b"1")
    gone = client.delete(b"later")
    assert in_order(query.run()) == [
        (client.cluster.partition_of(b"later"), b"later", b"1", version),
        (client.cluster.partition_of(b"later"), b"later", None, gone),
    ]
    assert query.run() == []


def test_changes_come_once_while_a_partition_joins_and_a_leader_dies(
    query: Query, cluster: Cluster, client: Client
) -> None:
    before = {name: end["ended"] if isinstance(end, dict) else end for name, end in query.end.items()}
    fill(client, "q-", 300, b"moved")
    command(cluster, "ring", "add", "p9", "--wait")()
    fill(client, "q-", 300, b"after")
    changes = query.run()
    victim = leader_of(cluster, "p1")
    cluster.kill(victim)
    fill(client, "q-", 300, b"led")
    changes += query.run()
    cluster.start_node(victim)
    assert in_order(changes) == logged(cluster, before)
    assert [value for _, key, value, _ in sorted(changes, key=lambda each: each[3]) if key == b"q-17"] == [
        b"moved17",
        b"after17",
        b"led17",
    ]
    assert "p9" in query.end
    cluster.wait_ready(victim)


def test_stream_may_begin_at_now_or_at_an_offset(
    spark: SparkSession, cluster: Cluster, client: Client, tmp_path: Path
) -> None:
    with FeedReader(cluster.url) as feed:
        now = {each.partition: each.latest for each in feed.positions()}
    latest = Query(spark, cluster, tmp_path / "latest")
    assert latest.run() == []
    version = client.put(b"n", b"1")
    expected = [(client.cluster.partition_of(b"n"), b"n", b"1", version)]
    given = Query(spark, cluster, tmp_path / "given", startingPosition=json.dumps(now), prefix="n")
    assert latest.run() == given.run() == expected


def test_example_counts_the_stored_rows(spark: SparkSession, cluster: Cluster, client: Client) -> None:
    for number in range(4):
        client.put(b"tree/a/%d" % number, bytes(100))
        client.put(b"tree/b", bytes(number))
    client.delete(b"tree/a/0")
    where = {"dataDir": str(cluster.local.data_dir), "prefix": "tree/"}
    rows = spark.read.format("kvstore").options(**where, columns="key,value").load()
    assert sizes(rows, 2) == [
        {"prefix": "tree/a", "keys": 3, "bytes": 3 * 108},
        {"prefix": "tree/b", "keys": 1, "bytes": 9},
    ]
    assert value_sizes(rows) == [{"up_to_bytes": 4, "values": 1}, {"up_to_bytes": 128, "values": 3}]
    prefixes = [
        {"prefix": "tree/a", "changes": 5, "deletes": 1},
        {"prefix": "tree/b", "changes": 4, "deletes": 0},
    ]
    assert hottest(spark, where, 2) == (prefixes, 9)
    for key in (b"bin/\xff/1", b"bin/\xfe/1", b"bin/" + bytes(1000)):
        client.put(key, b"v")
    rows = spark.read.format("kvstore").options(**{**where, "prefix": "bin/"}, columns="key,value").load()
    assert {row["prefix"]: row["keys"] for row in sizes(rows, 2)} == {
        "bin/\\xff": 1,
        "bin/\\xfe": 1,
        "bin/" + "\\x00" * (PREFIX_BYTES_MAX - 4): 1,
    }, "bytes stay apart, and what has no parts is cut"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"bogus": "1"}, "ConfigError: unknown option 'bogus' for reading"),
        ({"pinTtl": "60s"}, "ConfigError: unknown option 'pinTtl' for reading a stream"),
        ({"maxRowsPerTrigger": "x"}, "ConfigError: maxRowsPerTrigger: expected"),
    ],
)
def test_error_is_reported_in_one_line(
    spark: SparkSession, cluster: Cluster, tmp_path: Path, options: dict[str, str], reason: str
) -> None:
    """One error for each place that may refuse; all wrong options are in test_options.py."""
    with pytest.raises(Exception, match="PYTHON_") as raised:
        Query(spark, cluster, tmp_path, **options).run()
    assert reason in [line for line in str(raised.value).splitlines() if "Error: " in line][-1]


def keep_little(cluster: Cluster) -> None:
    """From now on no query holds logs, and they are kept no longer than needed, in ledgers of a few entries."""
    with FeedReader(cluster.url) as feed:
        at = {each.partition: each.latest for each in feed.positions()}
        for each in {pin.id for pin in list_pins(cluster.url)}:
            if each.startswith("feed-"):
                feed.hold(each.removeprefix("feed-").rpartition("@")[0], at, 0)
            else:
                unpin(cluster.url, each)  # another test's query; it would hold the log, too
    for node in cluster.file.nodes:
        config = Path(node.config)
        text = config.read_text()
        wanted = with_settings(text, SMALL_LEDGERS, what=node.config)
        if wanted == text:
            continue
        cluster.kill(node.id)
        config.write_text(wanted)
        cluster.start_node(node.id)
        cluster.wait_ready(node.id)


def test_trimmed_offset_is_an_error_with_a_remedy(
    spark: SparkSession, cluster: Cluster, client: Client, tmp_path: Path
) -> None:
    """Ledgers of a few entries, kept no longer than needed, and no query that holds them."""
    query = Query(spark, cluster, tmp_path, startingPosition="latest")
    client.put(b"before", b"1")
    query.run()
    partition = client.cluster.partition_of(b"before")
    keep_little(cluster)
    with FeedReader(cluster.url) as feed:
        at = {each.partition: each.latest for each in feed.positions()}

        def is_trimmed() -> bool:
            client.put(b"before", b"again")
            return next(each.oldest for each in feed.positions() if each.partition == partition) > at[partition]

        wait_until_blocking(is_trimmed, timeout_s=60, what="the log is trimmed")
    with pytest.raises(
        Exception, match=rf"partition {partition}: changes after \d+ were .* another checkpointLocation"
    ):
        query.run()


def test_partition_that_joins_and_leaves_during_downtime_is_included(
    spark: SparkSession, cluster: Cluster, client: Client, tmp_path: Path
) -> None:
    """Only the name of its log remains; a query that begins after that has missed nothing."""
    query = Query(spark, cluster, tmp_path / "down", startingPosition="latest")
    client.put(b"before", b"1")
    query.run()
    keep_little(cluster)
    command(cluster, "ring", "add", "p77", "--wait")()
    fill(client, "j-", 100)
    assert "p77" in {client.cluster.partition_of(b"j-%d" % number) for number in range(100)}
    command(cluster, "ring", "remove", "p77", "--wait")()
    with FeedReader(cluster.url) as feed:
        wait_until_blocking(
            lambda: [each.partition for each in feed.positions() if each.gone] == ["p77"],
            timeout_s=90,
            what="it is gone",
        )
    with pytest.raises(Exception, match=r"partition p77: changes after 0 were trimmed; its log is gone"):
        query.run()
    later = Query(spark, cluster, tmp_path / "later", startingPosition="latest")
    later.run()
    client.put(b"after", b"2")
    assert [change[1:3] for change in later.run()] == [(b"after", b"2")]
    assert later.end["p77"] == {"ended": 0}
