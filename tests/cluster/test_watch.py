"""Watches and pages of the feed on real processes show each write once and in order, while leaders are killed and
partitions join and leave."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest

from kvstore.client import AsyncClient, Client, FeedReader, Watch
from kvstore.client.core.watching import Change
from kvstore.errors import OutcomeUnknown, StoreError
from tests.beside import beside
from tests.cluster.harness import TIMEOUT_S, Cluster, running_cluster
from tests.commands import Done, kvstore
from tests.waiting import wait_until_blocking

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

KEYS = [b"w%02d" % number for number in range(40)]
ONE = KEYS[7]
WRITER_PAUSE_S, PAGES_REST_S = 0.01, 0.1
"""Pause of writers in seconds. Without it they would use the processors that a takeover needs."""


class Writer:
    """Puts and deletes keys, and records the replies."""

    def __init__(self, url: str) -> None:
        self.done: dict[tuple[bytes, int], bytes | None] = {}
        """(key, version) → value, None for a delete."""
        self._url = url

    def run(self, over: threading.Event) -> None:
        number = 0
        with Client(self._url) as client:
            while not over.is_set():
                number += 1
                key, value = KEYS[number % len(KEYS)], b"%d" % number
                try:
                    if number % 7 == 0:
                        version = client.delete(key)
                        self.done |= {(key, version): None} if version else {}
                    else:
                        self.done[key, client.put(key, value)] = value
                    over.wait(WRITER_PAUSE_S)
                except OutcomeUnknown:
                    continue
                except StoreError:
                    over.wait(0.05)


class Reader:
    """Keeps the changes that a watch shows, until it is closed."""

    def __init__(self, watch: Watch) -> None:
        self.shown: list[Change] = []
        self._watch = watch

    def run(self, _: threading.Event) -> None:
        for change in self._watch:
            self.shown.append(change)

    def expect(self, wanted: dict[tuple[bytes, int], bytes | None]) -> None:
        """Wait until all of these changes are shown, in order."""
        wait_until_blocking(lambda: wanted.keys() <= self._values().keys(), timeout_s=TIMEOUT_S, what="all is shown")
        assert in_order([(each.key, each.version) for each in self.shown]), f"{self._watch.connections} connections"
        values = self._values()
        assert {each: values[each] for each in wanted} == wanted

    def _values(self) -> dict[tuple[bytes, int], bytes | None]:
        return {(each.key, each.version): each.item.value if each.item else None for each in list(self.shown)}


@contextmanager
def reading(url: str, key: bytes | None) -> Iterator[Reader]:
    """Watch a key, or all keys, from now on until the end of the block."""
    with Client(url) as client, client.watch(key, prefix=b"" if key else b"w", heartbeat_s=1.0) as watch:
        reader = Reader(watch)
        with beside(reader.run), closing(watch):
            yield reader


class Pages:
    """Reads all feeds in pages, as a streaming source does: positions, then pages up to them."""

    def __init__(self, feed: FeedReader) -> None:
        self.shown: list[tuple[bytes, int, bytes | None]] = []
        self.handovers = 0
        self._feed = feed
        self._at = {each.partition: each.latest for each in self._feed.positions(timeout_s=TIMEOUT_S)}
        self._ended: set[str] = set()

    def run(self, over: threading.Event) -> None:
        while not over.wait(PAGES_REST_S):
            self.read_once()

    def read_once(self) -> None:
        """Read everything up to the positions."""
        for feed in self._feed.positions(timeout_s=TIMEOUT_S):
            at = self._at.setdefault(feed.partition, 0)
            while at < feed.latest and feed.partition not in self._ended:
                page = self._feed.changes(
                    feed.partition, at, servers=feed.servers, until=feed.latest, rows_max=50, timeout_s=TIMEOUT_S
                )
                for key, value, kind, version in zip(page.keys, page.values, page.kinds, page.sequences, strict=True):
                    self.shown.append((key, version, value if kind <= 2 else None))
                self.handovers += len(page.handovers)
                at = self._at[feed.partition] = page.next
            if feed.ended:
                self._ended.add(feed.partition)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("watch"), partitions=2) as started:
        yield started


def command(cluster: Cluster, *arguments: str) -> Done:
    return kvstore(*arguments, "--data-dir", str(cluster.local.data_dir))


def wait_led(cluster: Cluster, *partitions: str) -> dict[str, str]:
    """Wait until these partitions are led. Return the leader of each."""
    cluster.wait_until(lambda: set(partitions) <= set(cluster.leaders()), f"{partitions} are led")
    return cluster.leaders()


def change_ring(cluster: Cluster, *arguments: str) -> None:
    """Change the ring, and wait until all moves are done."""
    done = command(cluster, "ring", *arguments, "--wait")
    assert done.returncode == 0, done.stderr


def in_order(shown: list[tuple[bytes, int]]) -> bool:
    latest: dict[bytes, int] = {}
    for key, version in shown:
        if version <= latest.get(key, 0):
            return False
        latest[key] = version
    return True


def test_watch_shows_writes_once_while_leaders_die_and_partitions_change(cluster: Cluster) -> None:
    writer = Writer(cluster.url)
    with (
        FeedReader(cluster.url) as feed,
        reading(cluster.url, None) as everything,
        reading(cluster.url, ONE) as one,
    ):
        pages = Pages(feed)
        with beside(writer.run, pages.run):
            victim = wait_led(cluster, "p1")["p1"]
            cluster.kill(victim)
            wait_until_blocking(lambda: len(writer.done) > 100, what="writes go on")
            cluster.start_node(victim)
            cluster.wait_ready()
            change_ring(cluster, "add", "p3", "p4")
            victim = wait_led(cluster, "p3")["p3"]
            cluster.kill(victim)
            cluster.start_node(victim)
            cluster.wait_ready()
            change_ring(cluster, "remove", "p1")
            wait_until_blocking(lambda: len(writer.done) > 200, what="more is written")
        pages.read_once()
        wanted = {**writer.done}
        wanted_one = {each: value for each, value in wanted.items() if each[0] == ONE}
        everything.expect(wanted)
        one.expect(wanted_one)
    often = Counter((key, version) for key, version, _ in pages.shown)
    assert [each for each, count in often.items() if count > 1] == [], "nothing is shown twice"
    assert wanted == {(key, version): value for key, version, value in pages.shown if (key, version) in wanted}
    assert pages.handovers > 0
    cluster.wait_succeeds("fsck")  # the log of a partition that has left is kept, and there is no garbage


ENDS = {b"w-end%02d" % number for number in range(30)}
"""Keys that are written last, one in every partition. Nothing follows them in any feed."""


async def with_state(url: str, shown: list[Change]) -> None:
    """Watch with the asyncio client until nothing more comes."""
    async with (
        asyncio.timeout(TIMEOUT_S),
        AsyncClient(url) as client,
        client.watch(prefix=b"w", with_state=True, heartbeat_s=1.0) as changes,
    ):
        left = set(ENDS)
        async for change in changes:
            shown.append(change)
            left.discard(change.key)
            if not left:
                return


# docs/protocol.md F8
def test_watch_shows_the_state_then_each_change_once(cluster: Cluster) -> None:
    writer, shown, others = Writer(cluster.url), list[Change](), list[Change]()
    with Client(cluster.url) as client, ThreadPoolExecutor(1) as threads, beside(writer.run) as end_writes:
        client.put_many({b"w-%04d" % number: b"there" for number in range(3000)})
        wait_until_blocking(lambda: len(writer.done) > 100, what="something is written")
        other = threads.submit(asyncio.run, with_state(cluster.url, others))
        with client.watch(prefix=b"w", with_state=True, heartbeat_s=1.0) as changes:
            assert (changes.has_state, changes.position) == (False, {})
            for change in changes:
                shown.append(change)
                if changes.has_state:
                    break
            assert changes.position
            assert [each.key for each in shown] == sorted(each.key for each in shown)
            wait_until_blocking(lambda: others, what="the other watch has begun")
            end_writes()
            client.put_many(dict.fromkeys(sorted(ENDS), b""))
            left = set(ENDS)
            while left:
                shown.append(next(changes))
                left.discard(shown[-1].key)
        other.result()
        there = {key: item.version for key, item in client.scan(prefix=b"w", keys_only=True)}
        assert client.delete_prefix(b"w-") == 3000 + len(ENDS)
        client.put(KEYS[1], b"there")  # the writer's last word about it may have been a delete
    for seen in (shown, others):
        copy: dict[bytes, int] = {}
        for change in seen:
            copy.pop(change.key, None)
            copy |= {change.key: change.version} if change.item is not None else {}
        assert copy == there
        assert in_order([(each.key, each.version) for each in seen])
        assert max(Counter((each.key, each.version) for each in seen).values()) == 1
    told = command(cluster, "watch", "--prefix", KEYS[1].decode(), "--state", "--limit", "1", "--json")
    assert json.loads(told.stdout)["key"] == KEYS[1].decode()
    assert command(cluster, "watch", "--state", "--from", "oldest").returncode == 2


def test_watch_command_starts_at_a_position_and_stops_at_its_limit(cluster: Cluster) -> None:
    with Client(cluster.url) as client, client.watch(prefix=b"shell") as watch:
        position = json.dumps(watch.position)
        versions = [client.put(b"shell", b"1"), client.put(b"shell", b"2"), client.delete(b"shell")]
    found = command(cluster, "watch", "shell", "--from", position, "--limit", "3", "--json")
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert [line["version"] for line in lines] == versions
    assert [line.get("value") for line in lines] == ["1", "2", None]
    further = found.stderr.split("--from ")[1].strip().strip("'")
    assert json.loads(further)[lines[0]["partition"]] == versions[-1]
    refused = command(cluster, "watch", "shell", "--from", '{"nobody": 1}')
    assert refused.returncode != 0
    assert "nobody" in refused.stderr
