"""A leader's counts of its namespaces equal its state, to the byte, and writes above a quota are refused."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from kvstore.errors import ConditionFailed, QuotaExceeded, StoreError
from kvstore.namespaces import Book, Namespace, NamespaceTable
from kvstore.namespaces.book import Amount, UsageReport
from kvstore.partition.leading import usage
from kvstore.partition.state.commands import (
    Append,
    Batch,
    Delete,
    DeleteRange,
    Expire,
    Flag,
    Get,
    Increment,
    Op,
    Put,
    RequestId,
)
from kvstore.partition.state.rows import ALL_DATA, key_of_data, record_of
from tests.partition.one_partition import P1, TIME_MS, Partition

CLIENT = bytes(range(16))
PREFIXES = {"a": b"a/", "b": b"b"}


def table(**limits: int) -> NamespaceTable:
    """Make a table of two namespaces, the first with these limits."""
    return NamespaceTable(
        namespaces=(Namespace(name="a", prefix=b"a/", **limits), Namespace(name="b", prefix=b"b", ttl_ms=5_000))
    )


def led(**limits: int) -> tuple[Partition, Book]:
    p, book = Partition(), Book()
    book.take(table(**limits))
    p.leader.usage.join(book)
    p.start()
    count(p)
    return p, book


def count(p: Partition) -> None:
    for _ in range(10_000):
        if p.leader.usage.count_some():
            return
    raise AssertionError("counting does not end")


def in_engine(p: Partition) -> dict[str, Amount]:
    """Count slowly, from the engine."""
    found: dict[str, Amount] = {}
    for row_key, row in p.engine.iterate(*ALL_DATA):
        key = key_of_data(row_key)
        for name, prefix in PREFIXES.items():
            if key.startswith(prefix):
                amount = found.setdefault(name, Amount())
                amount.keys += 1
                amount.bytes += len(key) + len(record_of(row).value)
    return found


def counted(p: Partition) -> dict[str, Amount]:
    return {name: amount for name, amount in p.leader.usage.amounts.items() if amount.keys or amount.bytes}


# ── quotas ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_write_above_the_key_quota_is_refused_with_numbers() -> None:
    p, _ = led(keys_max=2)
    assert p.do(Put(b"a/1", b"x")) == 1
    assert p.do(Put(b"a/2", b"x")) == 2
    refused = p.do(Put(b"a/3", b"x"))
    assert isinstance(refused, QuotaExceeded)
    assert (refused.namespace, refused.quota, refused.used, refused.limit, refused.wanted) == ("a", "keys", 2, 2, 1)
    assert "2 of 2 keys are used" in str(refused)
    assert p.do(Put(b"a/1", b"another")) == 3, "an overwrite adds no key"
    assert p.do(Put(b"c", b"free")) == 4
    assert p.do(Delete(b"a/2")) == 5
    assert p.do(Put(b"a/3", b"x")) == 6


def test_write_above_the_byte_quota_is_refused_and_a_smaller_one_is_not() -> None:
    p, _ = led(bytes_max=20)
    assert p.do(Put(b"a/1", b"x" * 17)) == 1
    for op in (Put(b"a/1", b"x" * 18), Append(b"a/1", b"x"), Put(b"a/2", b"")):
        assert isinstance(p.do(op), QuotaExceeded), op
    assert p.do(Put(b"a/1", b"x" * 10)) == 2
    assert p.do(Append(b"a/1", b"xyz")) == (13, 3)
    assert p.do(Put(b"a/2", b"5")) == 4
    assert isinstance(p.do(Increment(b"a/2", 5)), QuotaExceeded), "10 has one more digit"
    assert p.do(Increment(b"a/2", 1)) == (6, 5)


def test_usage_above_a_lowered_quota_stays_and_can_shrink() -> None:
    p, book = led(keys_max=3)
    p.do(*(Put(b"a/%d" % number, b"x" * 9) for number in range(3)))
    book.take(table(keys_max=1, bytes_max=1))
    assert isinstance(p.do(Put(b"a/9", b"")), QuotaExceeded)
    assert isinstance(p.do(Put(b"a/0", b"x" * 10)), QuotaExceeded)
    assert p.do(Put(b"a/0", b"x" * 8)) == 4
    assert p.do(Expire(b"a/0", 50_000, Flag.RELATIVE_TTL)) is True
    assert p.do(Delete(b"a/1")) == 6
    assert p.do(DeleteRange(b"a/", b"a0")) == 2
    assert counted(p) == {}


def test_entries_in_flight_count_towards_the_quota() -> None:
    p, _ = led(keys_max=2)
    tokens = [*p.submit(Put(b"a/1", b"")), *p.submit(Put(b"a/2", b"")), *p.submit(Put(b"a/3", b""))]
    assert len(p.log.in_flight) == 2
    p.acknowledge(2)
    assert isinstance(p.result(tokens[2]), QuotaExceeded)


def test_grouped_writes_are_refused_from_the_first_that_does_not_fit() -> None:
    p, _ = led(keys_max=3)
    results = p.do(*(Put(b"a/%d" % number, b"") for number in range(6)), Put(b"c", b""))
    assert [isinstance(each, QuotaExceeded) for each in results] == [False] * 3 + [True] * 3 + [False]


def test_batch_is_judged_by_its_total() -> None:
    p, _ = led(keys_max=1)
    p.do(Put(b"a/1", b"x"))
    rename = Batch(b"a/1", (Put(b"a/2", b"x"), Delete(b"a/1")))
    assert p.do(rename) == [2, 3]
    refused = p.do(Batch(b"a/2", (Put(b"a/3", b"x"), Put(b"a/2", b"y"))))
    assert isinstance(refused, QuotaExceeded)
    assert refused.used == 1
    assert p.do(Get(b"a/2")).value == b"x", "all or nothing"
    each = p.do(Batch(b"a/2", (Put(b"a/3", b"x"), Put(b"a/2", b"y")), Flag.INDEPENDENT))
    assert isinstance(each[0], QuotaExceeded)
    assert each[1] == 4
    assert counted(p) == in_engine(p)


def test_undone_batch_does_not_count() -> None:
    p, _ = led(keys_max=5)
    undone = Batch(b"a/1", (Put(b"a/1", b"x"), Put(b"a/2", b"x", flags=Flag.IF_PRESENT)))
    first, second = p.do(undone, Put(b"a/3", b"x"))
    assert isinstance(first, ConditionFailed)
    assert second == 1
    assert counted(p) == in_engine(p) == {"a": Amount(1, 4)}


def test_request_refused_for_a_quota_is_not_remembered() -> None:
    p, _ = led(keys_max=1)
    first, second = RequestId(CLIENT, 1, 1, TIME_MS), RequestId(CLIENT, 2, 1, TIME_MS)
    assert p.do(Put(b"a/1", b"x", request=first)) == 1
    assert isinstance(p.do(Put(b"a/2", b"x", request=second)), QuotaExceeded)
    assert p.do(Put(b"a/1", b"x", request=first)) == 1
    p.do(Delete(b"a/1"))
    assert p.do(Put(b"a/2", b"x", request=second)) == 3


def test_expiry_frees_quota() -> None:
    p, _ = led(keys_max=1)
    p.do(Put(b"a/1", b"x", 1_000, Flag.RELATIVE_TTL))
    assert isinstance(p.do(Put(b"a/2", b"x")), QuotaExceeded)
    p.wait(2)
    assert p.do(Put(b"a/1", b"y", flags=Flag.IF_ABSENT)) == 3
    assert counted(p) == in_engine(p)


def test_failed_condition_is_reported_before_a_quota() -> None:
    p, _ = led(keys_max=1)
    p.do(Put(b"a/1", b"x"))
    assert isinstance(p.do(Put(b"a/2", b"x", flags=Flag.IF_PRESENT)), ConditionFailed)


def test_usage_at_other_leaders_counts() -> None:
    p, book = led(keys_max=10)
    book.take_reports([UsageReport(P1, 0, {"a": Amount(500, 5)}), UsageReport("p2", 1, {"a": Amount(9, 99)})])  # type: ignore[arg-type]
    assert p.do(Put(b"a/1", b"x")) == 1
    refused = p.do(Put(b"a/2", b"x"))
    assert isinstance(refused, QuotaExceeded)
    assert refused.used == 10


# ── a TTL of its own ──────────────────────────────────────────────────────────────────────────────────────────────────


def expiry_of(p: Partition, key: bytes) -> int:
    return int(p.do(Get(key)).expires_ms)


# docs/protocol.md N4
def test_write_without_ttl_gets_that_of_its_namespace() -> None:
    p, _ = led()
    p.do(Put(b"b1", b"x"), Increment(b"b2", 1), Append(b"b3", b"x"), Batch(b"b4", (Put(b"b4", b"x"),)), Put(b"c", b"x"))
    assert [expiry_of(p, b"b%d" % number) - TIME_MS for number in range(1, 5)] == [5_000] * 4
    assert expiry_of(p, b"c") == 0
    p.do(Put(b"b1", b"y", 60_000, Flag.RELATIVE_TTL))
    assert expiry_of(p, b"b1") - TIME_MS == 60_000
    p.do(Put(b"b1", b"z", flags=Flag.KEEP_TTL), Append(b"b1", b"z"))
    assert expiry_of(p, b"b1") - TIME_MS == 60_000
    p.do(Expire(b"b1", 0))
    assert expiry_of(p, b"b1") == 0, "a write that asks for no expiry gets none"
    p.do(Append(b"b1", b"z"))
    assert expiry_of(p, b"b1") == 0
    p.do(Put(b"b5", b"z", flags=Flag.KEEP_TTL))
    assert expiry_of(p, b"b5") - TIME_MS == 5_000
    p.wait(6)
    assert p.do(Get(b"b2")) is None


# ── counting ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_new_leader_uses_the_known_count_until_it_has_counted() -> None:
    p, book = led(keys_max=3)
    p.do(Put(b"a/1", b"x"), Put(b"a/2", b"x"), Put(b"a/3", b"x"))
    p.leader.stop(ConditionFailed(0))
    p.open()
    p.leader.usage.join(book)
    p.start()
    assert not p.leader.usage.is_counted
    assert isinstance(p.do(Put(b"a/4", b"x")), QuotaExceeded)
    book.reported.clear()  # a server that does not know the former leader
    p.leader.stop(ConditionFailed(0))
    book.keep_only([])
    p.open()
    p.leader.usage.join(book)
    p.start()
    assert isinstance(p.do(Put(b"a/4", b"x")), int)
    count(p)
    assert counted(p) == in_engine(p)
    assert isinstance(p.do(Put(b"a/5", b"x")), QuotaExceeded)


# docs/protocol.md N2
def test_admitted_writes_count_from_the_first_one() -> None:
    p, book = Partition(), Book()
    book.take(table(keys_max=2))
    p.leader.usage.join(book)
    book.keep_only([P1])
    p.start()
    results = [p.do(Put(b"a/%d" % number, b"x")) for number in range(4)]
    assert [isinstance(each, QuotaExceeded) for each in results] == [False, False, True, True]


def test_ended_lead_reads_and_keeps_nothing() -> None:
    p, book = led(keys_max=10)
    p.do(Put(b"a/1", b"x"))
    book.take(NamespaceTable(namespaces=(Namespace(name="c", prefix=b"c"),)))
    usage, former = p.leader.usage, p.engine
    assert not usage.is_counted
    p.leader.stop(ConditionFailed(0))
    former.close()
    assert usage.count_some(), "its engine is closed, so nothing is left to count"
    assert book.led == {}


def test_later_namespace_is_counted() -> None:
    p, book = led()
    book.take(NamespaceTable())
    p.do(*(Put(b"a/%d" % number, b"x") for number in range(50)))
    assert counted(p) == {}
    book.take(table(keys_max=10))
    assert not p.leader.usage.is_counted
    count(p)
    assert counted(p) == in_engine(p) == {"a": Amount(50, sum(len(b"a/%d" % number) + 1 for number in range(50)))}
    assert isinstance(p.do(Put(b"a/x", b"")), QuotaExceeded)


def operation(random: Random, number: int) -> Op:
    key = random.choice([b"a/", b"b", b"c"]) + b"%d" % random.randrange(12)
    ttl = random.choice([0, 0, 0, 300, 2_000])
    request = RequestId(CLIENT, number + 1, 1, TIME_MS) if random.random() < 0.3 else None
    match random.randrange(9):
        case 0 | 1 | 2:
            flags = random.choice([0, 0, Flag.IF_ABSENT, Flag.KEEP_TTL, Flag.RETURN_OLD])
            value = bytes(random.randrange(40))
            return Put(key, value, 0 if flags & Flag.KEEP_TTL else ttl, flags | Flag.RELATIVE_TTL, request=request)
        case 3:
            return Put(key, bytes(random.randrange(40)), request=request)
        case 4:
            return Delete(key, request=request)
        case 5:
            return Append(key, bytes(random.randrange(9)), request=request)
        case 6:
            return Expire(key, random.choice([0, 300, 5_000]), Flag.RELATIVE_TTL, request=request)
        case 7 if random.random() < 0.2:
            return DeleteRange(*sorted([key, random.choice([b"a/4", b"b4", b"c"])]))
        case _:
            some = [operation(random, number) for _ in range(random.randint(1, 4))]
            plain = tuple(replace(each, request=None) for each in some if not isinstance(each, (Batch, DeleteRange)))
            return Batch(key, plain or (Put(key, b""),), random.choice([0, Flag.INDEPENDENT]), request)


# docs/protocol.md N1
@pytest.mark.parametrize("seed", range(40))
def test_count_equals_the_state_despite_concurrent_writes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting restarts sometimes, continues in steps of some keys between entries, and entries stay in flight."""
    monkeypatch.setattr(usage, "KEYS_PER_STEP", 3)
    monkeypatch.setattr(usage, "KEYS_PER_READ", 2)
    random = Random(seed)
    p, book = led(keys_max=9, bytes_max=150)
    tokens: list[int] = []
    for number in range(150):
        tokens += p.submit(*(operation(random, 10 * number + each) for each in range(random.randint(1, 5))))
        if random.random() < 0.6:
            p.leader.usage.count_some()
        if p.log.in_flight and random.random() < 0.7:
            p.acknowledge()
        if random.random() < 0.05:
            book.take(NamespaceTable())
            book.take(table(keys_max=9, bytes_max=150))
        if random.random() < 0.2:
            p.wait(0.2)
    while p.log.in_flight:
        p.acknowledge(len(p.log.in_flight))
    results = [p.result(token) for token in tokens]
    refused = sum(isinstance(each, QuotaExceeded) for each in results)
    assert refused > 0, "the quota was never reached"
    assert all(isinstance(each, StoreError) for each in results if isinstance(each, Exception))
    count(p)
    assert counted(p) == in_engine(p)
