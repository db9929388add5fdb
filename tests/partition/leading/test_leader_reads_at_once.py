"""Reads that do not wait for their turn: as fresh as the others, and only if a lookup is enough."""

from __future__ import annotations

import pytest

from kvstore.errors import NotLeader
from kvstore.partition.config import PartitionConfig
from kvstore.partition.leading.leader_reads import NOW_BYTES
from kvstore.partition.state.commands import NOT_NOW, Get, Put
from kvstore.partition.state.move_records import Founded, Freeze, Release
from kvstore.partition.state.rows import record_of
from kvstore.partition.state.tokens import TokenSpan
from kvstore.ring.hashing import TOKENS
from kvstore.types import EntryId, LedgerId, PartitionId, Position
from tests.partition.one_partition import TIME_MS, Partition
from tests.partition.state.engine_memory import MemoryEngine
from tests.sim.moving.moves import keys_in

LEASE_MS = 500


@pytest.fixture
def p() -> Partition:
    p = Partition(PartitionConfig(expiry_sweep_s=0, lease_ms=LEASE_MS)).start()
    p.do(Put(b"k", b"v"))
    return p


def test_read_now_returns_acknowledged_values(p: Partition) -> None:
    assert p.read_now(b"k") == p.do(Get(b"k"))
    assert p.read_now(b"absent") is None


def test_read_now_ignores_unacknowledged_values(p: Partition) -> None:
    p.submit(Put(b"k", b"new"))
    found = p.read_now(b"k")
    assert found is not None
    assert found is not NOT_NOW
    assert found[0] == b"v"


def test_read_now_needs_a_fresh_lease(p: Partition) -> None:
    p.wait(LEASE_MS / 1000 * 0.6)
    assert p.read_now(b"k") is NOT_NOW, "the submitted read renews it instead"
    p.wait(LEASE_MS / 1000)
    assert p.read_now(b"k") is NOT_NOW


def test_read_now_uses_the_lease_while_a_renewal_is_in_flight(p: Partition) -> None:
    p.wait(LEASE_MS / 1000 * 0.6)
    p.submit(Get(b"k"))
    assert len(p.log.in_flight) == 1
    assert p.read_now(b"k") is not NOT_NOW
    p.wait(LEASE_MS / 1000 * 0.5)
    assert p.read_now(b"k") is NOT_NOW


def test_read_now_returns_nothing_after_the_lead(p: Partition) -> None:
    p.leader.stop(NotLeader(PartitionId("p1")))
    assert p.read_now(b"k") is NOT_NOW


def test_read_now_leaves_expiries_and_large_values_to_the_turn(p: Partition) -> None:
    p.do(Put(b"short", b"v", expires_ms=TIME_MS + 100), Put(b"large", b"x" * NOW_BYTES))
    assert p.read_now(b"short") is NOT_NOW
    assert p.read_now(b"large") is NOT_NOW
    assert p.read_now(b"k") is not NOT_NOW


def test_read_now_reads_all_or_none(p: Partition) -> None:
    p.do(Put(b"short", b"v", expires_ms=TIME_MS + 100), Put(b"large", b"x" * NOW_BYTES), Put(b"l", b"w"))
    found = p.read_all_now(b"k", b"absent", b"l", b"k")
    assert isinstance(found, list)
    assert [None if row is None else record_of(row) for row in found] == p.do(*map(Get, (b"k", b"absent", b"l", b"k")))
    assert p.read_all_now(b"absent", b"none") == [None, None]
    assert p.read_all_now(b"k", b"short") is NOT_NOW
    assert p.read_all_now(b"large", b"absent", b"k") is NOT_NOW


def test_read_now_of_many_does_not_overtake_an_arrived_read(p: Partition) -> None:
    """It may see only the current state, and they would see no older one."""
    p.leader.submit((Get(b"k"),), p.caller, (90,))
    assert p.read_all_now(b"absent", b"k") is NOT_NOW
    p.settle()
    assert isinstance(p.read_all_now(b"absent", b"k"), list)


def test_read_now_of_many_does_not_overtake_a_queued_large_read(p: Partition) -> None:
    reads = p.leader.reads
    reads.lines.add([(Get(b"k"), p.caller, 91)])
    assert p.read_all_now(b"absent", b"k") is NOT_NOW
    reads.turn()
    assert isinstance(p.read_all_now(b"absent", b"k"), list)


def test_read_now_of_many_does_not_overtake_a_read_waiting_for_a_delete(p: Partition) -> None:
    p.do(Put(b"short", b"v", expires_ms=TIME_MS + 100))
    p.wait(0.2)
    p.submit(Get(b"short"))
    assert p.read_all_now(b"absent", b"k") is NOT_NOW
    p.acknowledge()
    p.settle()
    assert isinstance(p.read_all_now(b"absent", b"k"), list)


def test_read_now_refuses_keys_of_other_partitions() -> None:
    moving, staying = TokenSpan(0, TOKENS // 2 - 1), TokenSpan(TOKENS // 2, TOKENS - 1)
    (moved,), (kept,) = keys_in(moving, 1, b"m"), keys_in(staying, 1, b"s")
    p = Partition(PartitionConfig(expiry_sweep_s=0, lease_ms=100_000))
    p.loop.create_task(p.leader.start(Founded((moving, staying))))
    p.settle()
    p.acknowledge()
    freeze = p.loop.create_task(p.leader.append_record(Freeze(1, PartitionId("p2"), moving)))
    p.settle()
    p.acknowledge()
    assert p.read_now(moved) is None, "a frozen range can be read"
    p.loop.create_task(p.leader.append_record(Release(1, Position(LedgerId(1), freeze.result().entry), 1)))
    p.settle()
    assert p.read_now(moved) is NOT_NOW, "from the send of the release on"
    assert p.read_now(kept) is None
    assert p.read_all_now(kept, moved) is NOT_NOW
    assert freeze.result() == Position(LedgerId(1), EntryId(1))


def test_read_now_leaves_an_unreadable_engine_to_the_turn(p: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: MemoryEngine, key: bytes) -> bytes:
        raise OSError("a bad block")

    monkeypatch.setattr(MemoryEngine, "get", broken)
    monkeypatch.setattr(MemoryEngine, "multi_get", broken)
    assert p.read_now(b"k") is NOT_NOW
