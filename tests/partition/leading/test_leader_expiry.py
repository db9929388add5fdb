"""Expired keys: absent for every reader, and deleted even if nobody reads them."""

from typing import Any

import pytest

from kvstore.errors import (
    ConditionFailed,
    StoreError,
)
from kvstore.partition.config import PartitionConfig
from kvstore.partition.leading import queries
from kvstore.partition.leading.serving_ranges import ServingRanges
from kvstore.partition.state import rows
from kvstore.partition.state.commands import (
    Batch,
    Count,
    Delete,
    Expire,
    Flag,
    Get,
    Increment,
    Put,
    Scan,
    ScanTokens,
)
from kvstore.partition.state.entry import CREATE, DELETE, KIND, decode
from kvstore.partition.state.tokens import EVERYTHING, TokenSpan
from tests.partition.one_partition import TIME_MS, Partition
from tests.ring import rings

RELATIVE = Flag.RELATIVE_TTL


@pytest.fixture
def p() -> Partition:
    return Partition().start()


def last_kinds(p: Partition) -> list[int]:
    return [kind & KIND for kind in decode(p.log.acknowledged[-1].payload).kinds]


def test_expired_key_is_absent_and_its_delete_is_logged_first(p: Partition) -> None:
    p.do(Put(b"a", b"1", 300, RELATIVE))
    p.wait(0.299)
    assert p.do(Get(b"a")).value == b"1"
    p.wait(0.001)
    (token,) = p.submit(Get(b"a"))
    assert p.result(token) == "waits"
    assert [kind & KIND for kind in p.in_flight()[0].kinds] == [DELETE]
    p.acknowledge()
    assert p.result(token) is None
    assert p.state.key_count == 0
    assert list(p.engine.iterate(*rows.EVERYTHING))[1:] == []


def test_key_expired_at_record_time_is_absent_at_once(p: Partition) -> None:
    p.do(Put(b"a", b"1", 300, RELATIVE))
    p.wait(0.3)
    p.do(Put(b"b", b"1"))
    (token,) = p.submit(Get(b"a"))
    assert p.result(token) is None


def test_expired_key_stays_absent_at_a_leader_with_a_late_clock(p: Partition) -> None:
    p.do(Put(b"a", b"1", 100, RELATIVE))
    p.wait(0.1)
    assert p.do(Get(b"a")) is None
    p.wall_offset_ms = -10_000
    p.leader.stop(StoreError("test"))
    p.open()
    p.start()
    assert p.do(Get(b"a")) is None
    assert p.do(Put(b"a", b"2", flags=Flag.IF_ABSENT)) == 3


def test_key_found_expired_by_a_refused_batch_stays_absent(p: Partition) -> None:
    p.do(Put(b"a", b"1", 100, RELATIVE))
    p.wait(0.1)
    refused = p.do(Batch(b"b", (Put(b"b", b"1"), Put(b"a", b"2", flags=Flag.IF_PRESENT))))
    assert isinstance(refused, ConditionFailed)
    assert refused.version == 0
    p.wall_offset_ms = -10_000
    p.leader.stop(StoreError("test"))
    p.open()
    p.start()
    assert p.do(Get(b"a"), Get(b"b")) == [None, None]


def test_put_over_an_expired_key_creates_it_again(p: Partition) -> None:
    p.do(Put(b"a", b"1", 300, RELATIVE))
    p.wait(0.3)
    assert p.do(Put(b"a", b"2")) == 3
    assert last_kinds(p) == [DELETE, CREATE]
    assert p.do(Get(b"a"))[:3] == (b"2", 3, 3)
    assert p.state.key_count == 1


@pytest.mark.parametrize(
    "op", [Put(b"a", b"2", flags=Flag.IF_PRESENT), Delete(b"a"), Expire(b"a", 0), Increment(b"a", 0)]
)
def test_operations_treat_an_expired_key_as_absent(p: Partition, op: Any) -> None:
    p.do(Put(b"a", b"1", 300, RELATIVE))
    p.wait(0.3)
    result = p.do(op)
    assert result in (0, False, (0, 3)) or isinstance(result, ConditionFailed)


def test_scan_skips_expired_keys_and_has_their_deletes_logged(p: Partition) -> None:
    p.do(*(Put(b"k%d" % number, b"v", 300 if number % 2 else 0, RELATIVE) for number in range(6)))
    p.wait(0.3)
    page, by_token = p.do(Scan(b"", b"", 10), ScanTokens(0, 10))
    assert [key for key, _ in page[0]] == [b"k0", b"k2", b"k4"]
    assert {key for key, _ in by_token[0]} == {b"k0", b"k2", b"k4"}
    assert p.state.key_count == 3


def test_unread_keys_are_deleted_after_their_expiry() -> None:
    p = Partition(PartitionConfig(expiry_sweep_s=1)).start()
    p.do(*(Put(b"k%d" % number, b"v", 300, RELATIVE) for number in range(3)), Put(b"z", b"v", 9000, RELATIVE))
    assert p.do(Count()) == 4
    p.wait(1.1)
    p.acknowledge(len(p.log.in_flight))
    assert p.do(Count()) == 1


def test_expired_keys_are_deleted_as_fast_as_they_come_under_load() -> None:
    """Otherwise a store whose keys all expire would grow for as long as it is busy."""
    p = Partition(PartitionConfig(expiry_sweep_s=1)).start()
    for begin in range(0, 5000, 500):
        p.do(*(Put(b"%04d" % number, b"v", 100, RELATIVE) for number in range(begin, begin + 500)))
    rounds = 0
    while p.state.key_count > 1 and rounds < 200:
        p.submit(*(Put(b"busy", b"%d" % number) for number in range(20)))
        if p.log.in_flight:
            p.acknowledge()
        p.wait(0.02)
        rounds += 1
    assert p.state.key_count == 1, f"{p.state.key_count} keys are left after {p.loop.time():.1f} s"


def test_expire_changes_removes_and_deletes(p: Partition) -> None:
    p.do(Put(b"a", b"1"))
    assert p.do(Expire(b"a", 300, RELATIVE)) is True
    assert p.do(Get(b"a")).expires_ms == TIME_MS + 300
    assert p.do(Expire(b"a", 0)) is True
    assert p.do(Expire(b"a", 0)) is False
    assert p.do(Get(b"a")).expires_ms == 0
    assert p.do(Expire(b"a", TIME_MS)) is True
    assert p.do(Get(b"a")) is None
    assert p.do(Expire(b"a", 300, RELATIVE)) is False


@pytest.mark.parametrize(
    ("had", "flag", "done"),
    [
        (0, Flag.IF_NO_TTL, True), (500, Flag.IF_NO_TTL, False), (0, Flag.IF_TTL, False), (500, Flag.IF_TTL, True),
        (0, Flag.IF_LONGER, False), (100, Flag.IF_LONGER, True), (500, Flag.IF_LONGER, False),
        (0, Flag.IF_SHORTER, True), (100, Flag.IF_SHORTER, False), (500, Flag.IF_SHORTER, True),
    ],
)  # fmt: skip
def test_expire_conditions_match_redis(p: Partition, had: int, flag: Flag, done: bool) -> None:
    p.do(Put(b"a", b"1", had, RELATIVE))
    assert p.do(Expire(b"a", 300, RELATIVE | flag)) is done


def test_keep_ttl_keeps_it_and_plain_put_does_not(p: Partition) -> None:
    p.do(Put(b"a", b"1", 300, RELATIVE))
    p.do(Put(b"a", b"2", flags=Flag.KEEP_TTL))
    assert p.do(Get(b"a")).expires_ms == TIME_MS + 300
    p.do(Put(b"a", b"3"))
    assert p.do(Get(b"a")).expires_ms == 0
    assert list(p.engine.iterate(*rows.ALL_EXPIRY)) == []


def test_put_past_its_expiry_leaves_nothing(p: Partition) -> None:
    assert p.do(Put(b"a", b"1", TIME_MS)) == 1
    p.do(Put(b"a", b"2"))
    assert p.do(Put(b"a", b"3", TIME_MS - 1)) == 3
    assert (p.do(Get(b"a")), p.state.key_count) == (None, 0)


def test_undeletable_keys_do_not_hide_others_from_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are on their way to or from another partition, and there may be many."""
    monkeypatch.setattr(queries, "OVERDUE_MAX", 4)
    p = Partition(PartitionConfig(expiry_sweep_s=1)).start()
    kept = [b"kept%d" % number for number in range(9)]
    p.do(*(Put(key, b"1", 100 + place, RELATIVE) for place, key in enumerate(kept)))
    p.do(Put(b"goes", b"1", 500, RELATIVE))
    serving_ranges: ServingRanges = p.leader.serving_ranges
    tokens = EVERYTHING
    for key in kept:
        tokens = tokens.without(TokenSpan(rings.key_hash.token_of(key), rings.key_hash.token_of(key)))
    serving_ranges.writable = tokens
    for _ in range(30):
        p.wait(0.1)
        p.acknowledge(len(p.log.in_flight))
    assert p.state.key_count == len(kept)
    serving_ranges.writable = EVERYTHING
    for _ in range(30):
        p.wait(0.1)
        p.acknowledge(len(p.log.in_flight))
    assert p.state.key_count == 0


def begins_of(p: Partition, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Record where searches for expired keys begin, from now on."""
    begins: list[bytes] = []
    iterate = p.engine.iterate

    def noting(begin: bytes, end: bytes) -> Any:
        if begin[:1] == rows.ALL_EXPIRY[0]:
            begins.append(begin)
        return iterate(begin, end)

    monkeypatch.setattr(p.engine, "iterate", noting)
    return begins


def test_sweeps_do_not_step_over_old_deletes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine steps over the remains of each delete, on the event loop."""
    p = Partition(PartitionConfig(expiry_sweep_s=1)).start()
    begins = begins_of(p, monkeypatch)

    def run(seconds: int) -> None:
        for _ in range(10 * seconds):
            p.wait(0.1)
            p.acknowledge(len(p.log.in_flight))

    p.do(Put(b"a", b"1", 100, RELATIVE))
    run(15)
    assert p.state.key_count == 0
    assert begins[-1] > rows.expiry_key(p.date_ms() - 13_000, b"")
    before = len(begins)
    serving_ranges: ServingRanges = p.leader.serving_ranges
    serving_ranges.writable = EVERYTHING.without(TokenSpan(0, 9))
    run(3)
    assert set(begins[before:]) == {rows.ALL_EXPIRY[0]}, "keys that could not be deleted are searched for again"
    serving_ranges.writable = EVERYTHING
    before = len(begins)
    run(3)
    assert begins[before] == rows.ALL_EXPIRY[0], "and the skipped keys"
    assert begins[-1] > rows.ALL_EXPIRY[0]
    before = len(begins)
    run(610)
    assert begins[before:].count(rows.ALL_EXPIRY[0]) == 1, "periodically, in any case"
