"""The sizes of entries. An entry that no bookie takes would stop its partition, and every next leader after it."""

from __future__ import annotations

import pytest

from kvstore.errors import InvalidRequest
from kvstore.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from kvstore.partition.config import PartitionConfig
from kvstore.partition.leading import expired_reads, queries
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Append, Batch, DeleteRange, Expire, Flag, Get, Op, Put, RequestId
from kvstore.proto.bookkeeper import PACKET_MAX
from kvstore.proto.digest import HEADER
from tests.partition.one_partition import TIME_MS, Partition

PAYLOAD_MAX = PACKET_MAX - HEADER.size - 64
LARGE = b"x" * VALUE_BYTES_MAX


@pytest.fixture
def p() -> Partition:
    return Partition(PartitionConfig(expiry_sweep_s=0, queue_bytes_max=64 << 20)).start()


def fill(p: Partition, count: int) -> list[bytes]:
    keys = [b"k%d" % number for number in range(count)]
    for key in keys:
        p.do(Put(key, LARGE[:-10]))
    return keys


def sizes(p: Partition) -> list[int]:
    return [len(logged.payload) for logged in p.log.acknowledged]


def ask(number: int) -> RequestId:
    return RequestId(b"c" * 16, number, 1, TIME_MS)


@pytest.mark.parametrize(
    "change",
    [
        lambda key, number: Expire(key, 60_000, Flag.RELATIVE_TTL),
        lambda key, number: Append(key, b"!"),
        lambda key, number: Put(key, b"small", flags=Flag.RETURN_OLD, request=ask(number)),
        lambda key, number: Batch(key, (Append(key, b"!"), Get(key))),
    ],
    ids=["expire", "append", "return old", "batch"],
)
def test_small_operations_on_large_values_take_several_entries(p: Partition, change: object) -> None:
    keys = fill(p, 12)
    results = p.do(*(change(key, number) for number, key in enumerate(keys, 1)))  # type: ignore[operator]
    assert not [each for each in results if isinstance(each, Exception)]
    assert max(sizes(p)) <= PAYLOAD_MAX


def test_operations_that_do_not_fit_go_into_the_next_entry_in_order(p: Partition) -> None:
    keys = fill(p, 8)
    ops: list[Op] = [Append(key, b"%d" % number) for number in range(5) for key in keys]
    p.do(*ops, *(Append(keys[0], b"a") for _ in range(4)), Put(b"last", b"v"))
    assert p.state.get(keys[0]).value.endswith(b"01234aaaa")  # type: ignore[union-attr]
    assert all(p.state.get(key).value.endswith(b"01234") for key in keys[1:])  # type: ignore[union-attr]
    assert p.leader.statistics()["queued_bytes"] == 0


@pytest.mark.parametrize("flags", [0, Flag.INDEPENDENT])
def test_batch_with_too_many_effects_is_refused_as_a_whole(p: Partition, flags: int) -> None:
    keys = fill(p, 8)
    before = p.state.seq
    refused = p.do(Batch(keys[0], tuple(Append(key, b"!") for key in keys), flags))
    assert isinstance(refused, InvalidRequest)
    assert p.state.seq == before
    assert p.do(Batch(keys[0], (Append(keys[0], b"!"), Append(keys[1], b"!")), flags))
    assert max(sizes(p)) <= PAYLOAD_MAX


def test_remembered_results_of_a_batch_fit_into_an_entry(p: Partition) -> None:
    keys = fill(p, 20)
    reads = tuple(Get(key) for key in keys)
    assert isinstance(p.do(Batch(keys[0], reads[:8], request=ask(1))), InvalidRequest)
    assert len(p.do(Batch(keys[0], reads[:2], request=ask(2)))) == 2
    assert len(p.do(Batch(keys[0], reads[:8]))) == 8
    assert isinstance(p.do(Batch(keys[0], reads)), InvalidRequest), "nor is the answer without bounds"
    assert max(sizes(p)) <= PAYLOAD_MAX


def test_range_of_long_keys_is_deleted_entry_by_entry(p: Partition) -> None:
    keys = [b"%04d" % number + b"k" * (KEY_BYTES_MAX - 4) for number in range(1500)]
    for begin in range(0, len(keys), 50):
        p.do(*(Put(key, b"") for key in keys[begin : begin + 50]))
    assert p.do(DeleteRange(b"0", b""), DeleteRange(b"0", b"")) == [1500, 0]
    assert max(sizes(p)) <= PAYLOAD_MAX


@pytest.mark.parametrize(
    ("read", "after"), [(commands.ScanTokens(0, 1000), None), (commands.Scan(b"", b"", 1000), None)]
)
def test_read_requests_no_more_deletes_than_fit_into_an_entry(
    p: Partition, monkeypatch: pytest.MonkeyPatch, read: Op, after: object
) -> None:
    """The deletes are in an entry of the current time, so the keys left out are expired at that time too."""
    monkeypatch.setattr(queries, "EXPIRED_MAX", 10)
    monkeypatch.setattr(expired_reads, "EXPIRED_MAX", 10)
    p.do(*(Put(b"k%03d" % number, b"v", 100, Flag.RELATIVE_TTL) for number in range(95)), Put(b"z", b"v"))
    p.wait(0.2)
    items, following = p.do(read)
    assert [key for key, _ in items] == [b"z"]
    assert following is after
    assert p.state.key_count == 86


def test_entry_size_cannot_exceed_what_bookies_accept() -> None:
    with pytest.raises(ValueError, match="entry_bytes_max"):
        PartitionConfig(entry_bytes_max=8 << 20)


def test_range_delete_over_entries_in_flight_takes_several_entries(p: Partition) -> None:
    keys = iter([(b"%08d" % number).ljust(KEY_BYTES_MAX, b"x") for number in range(1400)])

    def some() -> Op:
        here = [next(keys) for _ in range(255)]
        return Batch(here[0], tuple(Put(key, b"") for key in here))

    p.do(some())
    for _ in range(3):
        p.submit(*(Put(next(keys), b"") for _ in range(62)), some())
    p.submit(*(Put(next(keys), b"") for _ in range(62)), DeleteRange(b"", b""))
    while p.log.in_flight:
        p.acknowledge(len(p.log.in_flight))
    assert max(sizes(p)) <= PAYLOAD_MAX
    assert p.state.key_count == 0
