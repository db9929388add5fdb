"""The store is read at pinned positions while it is written to, and while the replica that is read dies. Real
processes."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import mmh3
import orjson
import pytest

from kvstore.client import Client
from kvstore.client.pinned.arrow import batch_of
from kvstore.client.pinned.pins import PinnedStore, PinStatus, Split, list_pins, pin_store, renew_pin, unpin
from kvstore.client.pinned.read import read_pinned
from kvstore.errors import InvalidRequest, NoSuchPin, Refused, StoreError
from tests.beside import beside
from tests.cluster.harness import Cluster, running_cluster
from tests.commands import kvstore

pytestmark = [pytest.mark.cluster]

VALUES = {b"key%05d" % number: b"%d" % number * 20 for number in range(6_000)} | {b"large": b"x" * (1 << 20)}
SPLIT_BYTES = 60_000
WRITER_PAUSE_S = 0.02
TTL_S = 600.0
"""TTL in seconds, longer than a test takes on a busy machine."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("pinned")) as started:
        with Client(started.url) as client:
            client.put_many(VALUES)
        yield started


@pytest.fixture
def pinned(cluster: Cluster) -> Iterator[PinnedStore]:
    store = pin_store(cluster.url, ttl_s=TTL_S, split_bytes=SPLIT_BYTES)
    yield store
    unpin(cluster.url, store.id)


@contextmanager
def writing(cluster: Cluster) -> Iterator[None]:
    """Overwrite, delete and create keys during the block. At its end everything is as before."""
    rounds = 0

    def write(over: threading.Event) -> None:
        nonlocal rounds
        with Client(cluster.url) as client:
            while not over.is_set():
                rounds += 1
                try:
                    client.put_many(dict.fromkeys(list(VALUES)[:300], b"overwritten %d" % rounds))
                    client.delete(b"key00400")
                    client.put(b"new%d" % rounds, b"new")
                except StoreError:
                    pass
                over.wait(WRITER_PAUSE_S)

    try:
        with beside(write):
            cluster.wait_until(lambda: rounds > 0, "something is written")
            yield
    finally:
        with Client(cluster.url) as client:
            client.put_many(VALUES)
            for number in range(1, rounds + 1):
                client.delete(b"new%d" % number)


def read(splits: list[Split]) -> dict[bytes, bytes]:
    """Return all records. Each must come once."""
    found: dict[bytes, bytes] = {}
    for split in splits:
        for page in read_pinned(pickle.loads(pickle.dumps(split))):
            for row in page.rows():
                assert row.key not in found
                found[row.key] = row.value
    return found


def only_from(split: Split, address: str) -> Split:
    return replace(split, replicas=(address,))


def digest(split: Split) -> bytes:
    """Return the digest of all bytes that come, whatever the pages."""
    joined = [(page.columns.keys, page.columns.rows) for page in read_pinned(split)]
    return mmh3.hash_bytes(b"".join(keys for keys, _ in joined) + b"".join(rows for _, rows in joined))


def is_gone(split: Split) -> bool:
    """Return True if no replica keeps the pin."""
    try:
        next(read_pinned(split))
    except NoSuchPin:
        return True
    return False


def test_pinned_read_is_unaffected_by_later_writes(cluster: Cluster, pinned: PinnedStore) -> None:
    assert len(pinned.splits()) > 6
    assert pinned.rows == len(VALUES)
    small = sum(len(key) + len(value) for key, value in VALUES.items() if key != b"large")
    assert small / 2 < pinned.bytes < 2 * small  # an estimate, that a single large value mostly escapes
    with writing(cluster):
        assert read(pinned.splits()) == VALUES
        assert read(pinned.splits()) == VALUES


def test_replicas_return_equal_bytes_for_a_pin_during_writes(cluster: Cluster, pinned: PinnedStore) -> None:
    with writing(cluster):
        for split in pinned.splits()[:4]:
            assert len(split.replicas) == 3
            assert len({digest(only_from(split, address)) for address in split.replicas}) == 1


def test_arrow_batches_contain_the_whole_store(pinned: PinnedStore) -> None:
    batches = [batch_of(page, split.partition) for split in pinned.splits() for page in read_pinned(split)]
    found = {
        key: value
        for batch in batches
        for key, value in zip(*batch.select(["key", "value"]).to_pydict().values(), strict=True)
    }
    assert found == VALUES


def test_bounds_prefixes_and_keys_only_are_pushed_down(pinned: PinnedStore) -> None:
    def keys(**options: object) -> list[bytes]:
        pages = (page for split in pinned.splits() for page in read_pinned(split, **options))  # type: ignore[arg-type]
        return sorted(row.key for page in pages for row in page.rows())

    assert keys(prefix=b"key0012") == [b"key0012%d" % number for number in range(10)]
    assert keys(start=b"key05990", end=b"key05995") == [b"key0599%d" % number for number in range(5)]
    assert keys(start=b"l") == [b"large"]
    rows = [row for page in read_pinned(pinned.splits()[0], keys_only=True) for row in page.rows()]
    assert {row.value for row in rows} == {b""}
    assert min(row.version for row in rows) > 0


def test_pinned_read_continues_after_a_page_at_another_replica(pinned: PinnedStore) -> None:
    split = pinned.splits()[0]
    first, other, _ = split.replicas
    pages = read_pinned(only_from(split, first), page_bytes=8_192)
    begun = [next(pages), next(pages)]
    rest = read_pinned(only_from(split, other), page_bytes=8_192, after=begun[-1].last)
    found = [row for page in (*begun, *rest) for row in page.rows()]
    assert found == [row for page in read_pinned(split) for row in page.rows()]


def test_pins_are_listed_renewed_and_released(cluster: Cluster) -> None:
    store = pin_store(cluster.url, ttl_s=TTL_S, id="nightly")
    assert store.id == "nightly"

    def listed() -> list[PinStatus]:
        return [pin for pin in list_pins(cluster.url) if pin.id == "nightly"]

    def is_kept_by_all() -> bool:  # a replica that is late for an answer is not listed
        pins[:] = listed()
        return [(pin.partition, len(pin.servers)) for pin in pins] == [("p1", 3), ("p2", 3), ("p3", 3)]

    def is_shown() -> bool:
        shown = _kvstore("partition", "pins", "--json", "--data-dir", str(cluster.directory / "data"))
        return [row["kept_by"] for row in shown if row["pin"] == "nightly"] == [["n1", "n2", "n3"]] * 3

    pins: list[PinStatus] = []
    cluster.wait_until(is_kept_by_all, "replicas have heard of it")
    assert all(pin.ledger is not None for pin in pins)
    assert {pin.partition: pin.position for pin in pins} == {p.partition: p.position for p in store.partitions}
    cluster.wait_until(is_shown, "a shell is told")
    assert renew_pin(cluster.url, "nightly", ttl_s=2 * TTL_S) > store.deadline_ms + 500_000
    assert read(store.splits()) == VALUES
    again = pin_store(cluster.url, ttl_s=TTL_S, id="nightly")
    cluster.wait_until(lambda: is_gone(store.splits()[0]), "replicas have heard of the new position")
    assert read(again.splits()) == VALUES
    released = unpin(cluster.url, "nightly")  # without the partitions whose leader is late for an answer
    assert released
    assert set(released) <= {"p1", "p2", "p3"}
    cluster.wait_until(lambda: "nightly" not in {pin.id for pin in list_pins(cluster.url)}, "replicas have heard of it")
    cluster.wait_until(lambda: is_gone(again.splits()[0]), "nor does one keep it that was late for an answer")
    with pytest.raises(NoSuchPin):
        read(again.splits())
    with pytest.raises(NoSuchPin):
        renew_pin(cluster.url, "nightly", ttl_s=60)


def test_pin_expires(cluster: Cluster) -> None:
    store = pin_store(cluster.url, ttl_s=1, id="short")
    cluster.wait_until(lambda: is_gone(store.splits()[0]), "the pin has ended")
    cluster.wait_until(lambda: "short" not in {pin.id for pin in list_pins(cluster.url)}, "its logs are held no more")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"id": "a/b"}, "expected a pin id"),
        ({"id": "x" * 65}, "expected a pin id"),
        ({"partitions": ["p9"]}, "no partition p9"),
        ({"ttl_s": 100_000}, "at most 86400000 ms"),
    ],
)
def test_invalid_pin_request_names_what_is_expected(cluster: Cluster, options: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        pin_store(cluster.url, **{"ttl_s": 60, **options})  # type: ignore[arg-type]


def test_pinned_read_switches_replicas_when_one_dies(cluster: Cluster, pinned: PinnedStore) -> None:
    """The replica that is read dies. Each node leads one partition and follows in the others."""
    split = max(pinned.splits(), key=lambda each: each.rows)
    pages = read_pinned(split, page_bytes=8_192)
    rows = [row for _, page in zip(range(2), pages, strict=False) for row in page.rows()]
    victim = next(node for node in cluster.ids if cluster.address(node, "grpc") == _address(split.replicas[0]))
    cluster.kill(victim)
    rows += [row for page in pages for row in page.rows()]
    assert rows == [row for page in read_pinned(split) for row in page.rows()]
    assert read(pinned.splits()) == VALUES
    cluster.wait_led(by_other_than=victim)
    with writing(cluster):
        assert read(pinned.splits()) == VALUES
    renew_pin(cluster.url, pinned.id, ttl_s=2 * TTL_S)
    cluster.start_node(victim)
    cluster.wait_ready(victim)
    with writing(cluster):
        assert read(pinned.splits()) == VALUES
    for address in split.replicas:
        try:
            assert digest(only_from(split, address)) == digest(split)
        except Refused:
            assert address == split.replicas[0], "only who was restarted may have lost it"


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def _kvstore(*arguments: str) -> list[dict[str, object]]:
    done = kvstore(*arguments)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, object]] = orjson.loads(done.stdout)
    return found
