"""Real processes: a snapshot of a cluster with one key hash is restored into a cluster with the other one, and back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.client import Client
from kvstore.client.pinned.pins import pin_store, unpin
from kvstore.client.pinned.read import read_pinned
from kvstore.errors import NoSuchPin, NotCaughtUp
from kvstore.ring import MURMUR3, SLOTS_HASH, KeyHash
from kvstore.ring.hashing import KeyHashName
from kvstore.spark.snapshots import chains, compare, verify
from kvstore.spark.snapshots.chains import Cut
from kvstore.spark.snapshots.directory import DirectoryStore
from kvstore.spark.snapshots.local_tables import LocalTables
from kvstore.spark.snapshots.manifest import NAME, Manifest
from kvstore.spark.snapshots.restore import restore
from tests.cluster.harness import Cluster, running_cluster
from tests.commands import Done, kvstore
from tests.spark.snapshots.taken import config, take

pytestmark = [pytest.mark.spark, pytest.mark.cluster, pytest.mark.slow]

KEYS = 400


@pytest.fixture(scope="module")
def of_murmur3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("murmur3")
    with running_cluster(directory, partitions=2, key_hash=KeyHashName.MURMUR3) as running:
        yield running


@pytest.fixture(scope="module")
def of_slots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("slots")
    with running_cluster(directory, partitions=4, key_hash=KeyHashName.SLOTS) as running:
        yield running


def command(cluster: Cluster, *words: str) -> Done:
    return kvstore(*words, "--data-dir", str(cluster.local.data_dir))


def chain_of(store: DirectoryStore, last: Manifest) -> list[Manifest]:
    chain = chains.chain_of(store.load_all(), last.id)
    assert list(verify.problems_of(store, chain)) == []
    return chain


def restored(store: DirectoryStore, last: Manifest, cluster: Cluster) -> int:
    """Restore a snapshot into an empty cluster, and return the number of records."""
    chain, target = chain_of(store, last), config(cluster)
    done = restore(LocalTables(), store, chain, Cut(), target, into_filled=False, progress=lambda *_: None)
    assert compare.against_restored(LocalTables(), store, chain, Cut(), target, 5).count == 0
    return done.written


def check(cluster: Cluster, hash: KeyHash, expected: dict[bytes, bytes]) -> None:
    """Check that each key is in the partition that the ring gives its token to, and that clients of every kind read
    it there."""
    pinned = pin_store(cluster.url, ttl_s=60)
    found: dict[bytes, bytes] = {}
    try:
        assert pinned.hash is hash
        for split in pinned.splits():
            for row in (row for page in read_pinned(split) for row in page.rows()):
                assert split.first <= hash.token_of(row.key) <= split.last
                found[row.key] = row.value
    finally:
        unpin(cluster.url, pinned.id)
    assert found == expected
    before = forwarded(cluster)
    with Client(cluster.url) as client:
        read = {key: item.value for key in expected if (item := client.get(key)) is not None}
    assert (read, forwarded(cluster) - before) == (expected, 0), "each read went to the leader of its key"
    names = list(expected)
    assert cluster.redis("n1").mget(names) == [expected[name] for name in names]


def forwarded(cluster: Cluster) -> int:
    return sum(cluster.status(node)["server"]["forwarded_total"] for node in cluster.ids)


def test_snapshot_is_restored_across_key_hashes_and_back(
    of_murmur3: Cluster, of_slots: Cluster, tmp_path: Path
) -> None:
    store = DirectoryStore(tmp_path / "snapshots")
    expected = {b"key%d" % number: b"value %d" % number for number in range(KEYS)}
    expected |= {b"{tag%d}%d" % (number % 7, number): b"tagged" for number in range(KEYS // 4)}
    with Client(of_murmur3.url) as client:
        client.put_many(expected)
        first = take(None, of_murmur3, store)
        added = command(of_murmur3, "ring", "add", "--count", "1", "--wait")
        assert added.returncode == 0, added.stderr
        for number in range(0, KEYS, 3):
            client.delete(b"key%d" % number)
            del expected[b"key%d" % number]
        expected[b"key1"] = b"changed"
        client.put(b"key1", b"changed")
    second = take(None, of_murmur3, store, first)
    assert (first.hash, second.hash) == ("murmur3", "murmur3")
    check(of_murmur3, MURMUR3, expected)

    assert restored(store, second, of_slots) == len(expected)
    check(of_slots, SLOTS_HASH, expected)

    create = ("snapshot", "create", "--to", str(store.root), "--master", "none")
    refused = command(of_slots, *create, "--parent", second.id)
    assert refused.returncode == 1
    assert "another cluster" in refused.stderr
    refused = command(of_slots, *create, "--incremental")
    assert refused.returncode == 1, "there is none of this cluster to continue"
    third = take(None, of_slots, store)
    expected[b"key2"] = b"changed in slots"
    with Client(of_slots.url) as client:
        client.put(b"key2", b"changed in slots")
    fourth = take(None, of_slots, store, third)
    assert [json.loads((store.folder(each.id) / NAME).read_text())["format"] for each in (second, fourth)] == [1, 2]
    assert [each.id for each in chain_of(store, fourth)] == [third.id, fourth.id]

    with Client(of_murmur3.url) as client:
        for prefix in (b"key", b"{"):
            client.delete_prefix(prefix)
    assert restored(store, fourth, of_murmur3) == len(expected)
    check(of_murmur3, MURMUR3, expected)


def test_pin_of_one_cluster_reads_nothing_from_the_other(of_murmur3: Cluster, of_slots: Cluster) -> None:
    """Partitions of both clusters have the same names. A reader with a wrong address must not read other ranges."""
    for ours, theirs in ((of_murmur3, of_slots), (of_slots, of_murmur3)):
        pinned = pin_store(ours.url, ttl_s=60)
        try:
            servers = tuple(node.grpc for node in theirs.file.nodes)
            for split in pinned.splits():
                with pytest.raises((NoSuchPin, NotCaughtUp)):  # or the pinned position lies ahead of the log there
                    list(read_pinned(replace(split, replicas=servers), patience_s=1.0))
        finally:
            unpin(ours.url, pinned.id)
