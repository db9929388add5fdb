"""A snapshot is restored into a cluster with other partitions: all of it, or its state at a time. By Spark, and by
this process alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kvstore.client import Client
from kvstore.client.core.config import ClientConfig, parse_url
from kvstore.errors import InvalidRequest
from kvstore.spark.snapshots import chains, compare
from kvstore.spark.snapshots.chains import Cut
from kvstore.spark.snapshots.directory import DirectoryStore
from kvstore.spark.snapshots.local_tables import LocalTables
from kvstore.spark.snapshots.manifest import Manifest
from kvstore.spark.snapshots.restore import Restored, _write, restore
from kvstore.spark.snapshots.tables import Tables
from tests.cluster.harness import Cluster, running_cluster
from tests.spark.jobs import leader_of
from tests.spark.snapshots.made import EPOCH_MS, Change, full, incremental
from tests.spark.snapshots.taken import kill, running, tables_of
from tests.waiting import wait_until_blocking

pytestmark = [pytest.mark.spark, pytest.mark.cluster]

NOW_MS = time.time_ns() // 1_000_000
BEFORE_MS = NOW_MS - 3_600_000
BIG = b"\x05" * (1 << 20)
BEFORE = [Change(b"key%04d" % n, b"value %d" % n, n + 1, BEFORE_MS + n) for n in range(2000)]
RESTORED = 100_000
HALF = f"""
import asyncio
from itertools import islice
from kvstore.client.bulk import Loader

add, left = Loader.add, {RESTORED // 2}

async def add_half(loader, rows):
    global left
    some = list(islice(rows, left))
    left -= len(some)
    await add(loader, some)
    if not left:
        await asyncio.Event().wait()  # for ever: there is time to kill this process

Loader.add = add_half
"""
"""The code that a driver runs first, to write only half of it."""
MIDDLE_MS = BEFORE_MS + 100_000
LATER = [
    Change(b"key0001", b"changed", 3001, MIDDLE_MS),
    Change(b"key0002", None, 3002, MIDDLE_MS),
    Change(b"big", BIG, 3003, MIDDLE_MS + 1),
    Change(b"empty", b"", 3004, MIDDLE_MS + 2),
    Change(b"lives", b"x", 3005, MIDDLE_MS + 3, expires_ms=NOW_MS + 7_200_000),
    Change(b"lived", b"x", 3006, MIDDLE_MS + 4, expires_ms=NOW_MS - 1000),
    Change(b"key0003", None, 3007, MIDDLE_MS + 50_000),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Five partitions, where the snapshots have two."""
    with running_cluster(tmp_path_factory.mktemp("cluster"), partitions=5) as running:
        yield running


@pytest.fixture(scope="module")
def config(cluster: Cluster) -> ClientConfig:
    return parse_url(cluster.url + "?timeout=30s")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> DirectoryStore:
    store = DirectoryStore(tmp_path_factory.mktemp("snapshots"))
    incremental(store, "b", full(store, "a", BEFORE), BEFORE + LATER)
    return store


def restored(
    tables: Tables[Any], store: DirectoryStore, chain: list[Manifest], cut: Cut, config: ClientConfig, *, filled: bool
) -> Restored:
    return restore(tables, store, chain, cut, config, into_filled=filled, progress=lambda *_: None)


@pytest.mark.parametrize("by", ["here", "spark"])
def test_chain_is_restored_completely_and_each_difference_is_found(
    request: pytest.FixtureRequest, by: str, store: DirectoryStore, config: ClientConfig
) -> None:
    tables = tables_of(request.getfixturevalue("spark") if by == "spark" else None)
    chain = chains.chain_of(store.load_all(), "b")
    with Client(config) as client:
        emptied(client)
        assert restored(tables, store, chain, Cut(), config, filled=False) == Restored(2001, 1)
        found = {key: item.value for key, item in client.scan()}
        last = {change.key: change.value for change in BEFORE + LATER}
        del last[b"lived"]
        assert found == {key: value for key, value in last.items() if value is not None}
        lives = client.get(b"lives")
        assert lives is not None
        assert lives.expires_ms == NOW_MS + 7_200_000
        client.put(b"key0500", b"by somebody else")
        client.delete(b"key0501")
        client.put(b"new", b"")
        different = compare.against_restored(tables, store, chain, Cut(), config, 5)
        assert different.same == 1999
        assert different.examples == ((b"key0500", "changed"), (b"key0501", "removed"), (b"new", "added"))


def emptied(client: Client) -> None:
    for first in {key[:1] for key, _ in client.scan(keys_only=True)}:
        client.delete_prefix(first)


def test_wrong_date_of_the_machine_that_restores_leaves_nothing_out(
    store: DirectoryStore, config: ClientConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: (NOW_MS + 365 * 86_400_000) * 1_000_000)
    chain = chains.chain_of(store.load_all(), "b")
    assert restored(LocalTables(), store, chain, Cut(), config, filled=True) == Restored(2001, 1)


def test_cluster_that_holds_keys_is_overwritten_only_on_request(store: DirectoryStore, config: ClientConfig) -> None:
    chain = chains.covering(store.load_all(), "b", Cut(time_ms=MIDDLE_MS))
    with Client(config) as client:
        client.put(b"new", b"stays")
        client.put(b"key0500", b"by somebody else")
        with pytest.raises(
            InvalidRequest, match=r"got one with [\d,]+ keys; restore into an empty cluster, or pass --merge"
        ):
            restored(LocalTables(), store, chain, Cut(time_ms=MIDDLE_MS), config, filled=False)
        assert restored(LocalTables(), store, chain, Cut(time_ms=MIDDLE_MS), config, filled=True).written == 1999
        values = client.get_many([b"new", b"key0500", b"key0001", b"key0003"])
        assert [values[key].value for key in (b"new", b"key0500", b"key0001", b"key0003")] == [
            b"stays",
            b"value 500",
            b"changed",
            b"value 3",
        ]


def test_abandoned_attempt_overwrites_nothing_after_the_restore(config: ClientConfig) -> None:
    """Its machine was stalled: another attempt wrote its part, the job ended, and the application began."""
    schema = pa.schema([("key", pa.binary()), ("value", pa.binary()), ("expires_at", pa.timestamp("us", "UTC"))])
    batches = [
        pa.RecordBatch.from_pydict({"key": [key], "value": [b"restored"], "expires_at": [None]}, schema=schema)
        for key in (b"first", b"second")
    ]
    with Client(config) as client:
        emptied(client)

        def meanwhile() -> dict[str, int]:
            found = _write(config, NOW_MS, iter(batches), is_new=True)
            client.put(b"second", b"by the application")
            return found

        def stopped() -> Iterator[Any]:
            yield batches[0]
            with ThreadPoolExecutor(1) as thread:  # this one runs a loop
                assert thread.submit(meanwhile).result() == {"written": 2, "expired": 0}
            yield batches[1]

        assert _write(config, NOW_MS, stopped(), is_new=True) == {"written": 2, "expired": 0}
        found = client.get_many([b"first", b"second"])
        assert {key: item.value for key, item in found.items()} == {
            b"first": b"restored",
            b"second": b"by the application",
        }


def test_moment_comes_back_as_it_was(store: DirectoryStore, config: ClientConfig) -> None:
    cut = Cut(time_ms=MIDDLE_MS + 4)
    chain = chains.covering(store.load_all(), None, cut)
    with Client(config) as client:
        emptied(client)
        restored(LocalTables(), store, chain, cut, config, filled=False)
        assert client.get(b"key0003") is not None
        assert client.get(b"key0002") is None
        assert compare.against_restored(LocalTables(), store, chain, cut, config, 5).count == 0
        assert compare.against_restored(LocalTables(), store, chain, Cut(), config, 5).examples == (
            (b"key0003", "added"),
        )


@pytest.mark.slow
def test_restore_resumes_after_a_killed_driver_and_survives_leader_loss(
    cluster: Cluster, config: ClientConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path / "snapshots")
    log = [Change(b"key-%d" % number, b"v" * 50, number + 1, EPOCH_MS) for number in range(RESTORED)]
    whole = full(store, "20260101T000000Z-full-0000", log)
    chain = chains.chain_of(store.load_all(), whole.id)
    with Client(config) as client:
        emptied(client)
        with running(cluster, tmp_path / "log", "restore", str(store.root), master="none", first=HALF) as driver:
            wait_until_blocking(client.count, timeout_s=200, what="a first key")
            kill(driver)
        assert 0 < client.count() < RESTORED, "what was on its way may still come"
        with pytest.raises(InvalidRequest, match=r"got one with [\d,]+ keys; .*--merge"):
            restored(LocalTables(), store, chain, Cut(), config, filled=False)
        victim = leader_of(cluster, "p1")
        killed: list[str] = []

        def kill_once(what: str, done: int, total: int | None) -> None:
            if not killed:
                killed.append(victim)
                cluster.kill(victim)

        monkeypatch.setattr("kvstore.spark.snapshots.restore.POLL_S", 0.01)  # it takes a second or two
        done = restore(LocalTables(), store, chain, Cut(), config, into_filled=True, progress=kill_once)
        assert (killed, done.written) == ([victim], RESTORED)
        assert client.count() == RESTORED
    found = compare.against_restored(LocalTables(), store, chain, Cut(), config, 5)
    assert (found.count, found.same) == (0, RESTORED)
